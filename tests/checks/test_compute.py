"""check(compute=True), of experts too: what is computed, that it equals an independent computation, and likeness."""

from __future__ import annotations

import itertools
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fp8dist
from fp8dist import BlockScaling, CurrentScaling, DelayedScaling, MXFP8Scaling, NVFP4Scaling, Recipe, RowwiseScaling
from fp8dist.checks import computations
from fp8dist.checks.computations import ComputedContent, casts_and_products, computations_of
from fp8dist.checks.contents import Digester
from fp8dist.checks.known_calls import TOKENS, GroupedProductOf, ProductOf, ends_of
from fp8dist.checks.likeness import likeness, unsteady_settings
from fp8dist_kernels.reference.operands import inverse_scales, operand
from tests.kernels.test_content_digest import digest_in_python, unsigned
from tests.modules.test_foreign_linears import Conv1D
from tests.support.answers import known_bits, known_values, recorded_calls, word
from tests.support.experts import Experts, Mixture, routes
from tests.support.fp8_oracle import E4M3, operands
from tests.support.suite import NIGHTLY

CPU = torch.device("cpu")
OUT, IN, EXPERTS = 48, 32, 4
RECIPES = {
    "delayed": DelayedScaling(),
    "current": CurrentScaling(format="e4m3", power_of_two=True),
    "row": RowwiseScaling(format="hybrid"),
    "block": BlockScaling(power_of_two=True),
    "mx": MXFP8Scaling(scale_rounding="up"),
}


def _results(recipe: Recipe, backend: str) -> dict[str, dict[str, torch.Tensor]]:
    """Return all results of a Linear [48, 32] by the first words of their names."""
    found = casts_and_products((OUT, IN), recipe, torch.bfloat16, torch.float32, True, False, backend)
    content = ComputedContent(found, CPU)
    content.digests(Digester())
    named = [" ".join(key.name.split()[: 3 if key.name.startswith("cast") else 1]) for key in content.keys]
    return {name: {f.name: f.tensor for f in content.fields(i)} for i, name in enumerate(named)}


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        *((name, "reference") for name in RECIPES),
        *(
            pytest.param(name, "triton", marks=pytest.mark.slow if name in ("delayed", "mx") else NIGHTLY)
            for name in RECIPES
        ),
    ],
)
def test_the_casts_are_those_of_an_independent_cast_of_independent_operands(name: str, backend: str) -> None:
    recipe = RECIPES[name]
    x = known_values((TOKENS, IN), torch.bfloat16, 0)
    weight = known_values((OUT, IN), torch.float32, 1)
    grad = known_values((TOKENS, OUT), torch.bfloat16, 2)
    sixty = np.array([[60.0]], np.float32)
    # The weight has outgrown this scale: it is cast with its own amax.
    own = np.array([[448.0]], np.float32) / np.abs(weight).max()
    scales = {"input": sixty, "weight": own, "grad_output": sixty} if name == "delayed" else None
    by: Any = "mx up" if name == "mx" else recipe.by
    expected = operands(x, weight, grad, by, recipe.format, recipe.power_of_two, scales)
    found = _results(recipe, backend)
    (fx, fw), (dg, dw), (wg, wx) = (expected[gemm] for gemm in ("fprop", "dgrad", "wgrad"))
    for cast, rows, columns in (("input", fx, wx), ("weight", fw, dw), ("grad_output", dg, wg)):
        results = found[f"cast of {cast}"]
        for copy, oracle in (("rows", rows), ("columns", columns)):
            assert results[copy].view(torch.uint8).numpy()[:, : oracle.codes.shape[1]].tolist() == oracle.codes.tolist()
            scale = results.get(f"{copy}_inv_scale", results.get("inv_scale"))
            assert scale is not None
            assert scale.float().numpy().reshape(oracle.inv_scale.shape).tolist() == oracle.inv_scale.tolist()
    amaxes = [found[f"cast of {role}"]["amax"].item() for role in ("input", "weight", "grad_output")]
    assert amaxes == [np.abs(tensor).max() for tensor in (x, weight, grad)]


def test_a_plain_program_gets_the_same_product_and_digest() -> None:
    """fprop with one scale per tensor: FP8 bytes, inverse scales and bias from their definitions."""
    (fprop,) = (
        one
        for one in casts_and_products((OUT, IN), DelayedScaling(), torch.float32, torch.float32, True)
        if isinstance(one, ProductOf) and one.gemm == "fprop"
    )
    content = ComputedContent([fprop], CPU)
    (digest,) = content.digests(Digester())
    a, b = (
        torch.from_numpy(E4M3.decoded(np.array(known_bits(shape, torch.float8_e4m3fn, seed), np.uint8)).reshape(shape))
        for shape, seed in (((TOKENS, IN), 3), ((OUT, IN), 4))
    )
    inv_a, inv_b = (
        torch.tensor((119 << 23) | (word(0, seed) >> 16) % 2**23, dtype=torch.int32).view(torch.float32)
        for seed in (5, 6)
    )
    bias = torch.from_numpy(known_values((OUT,), torch.float32, 7))
    expected = (a.float() * inv_a) @ (b.float() * inv_b).t() + bias
    (field,) = content.fields(0)
    assert torch.equal(field.tensor, expected)
    seed = unsigned(content.seeds[0])
    assert unsigned(digest) == digest_in_python(expected.numpy().tobytes(), seed)


HIGH = {
    "no wgrad": RowwiseScaling(high_precision=("wgrad",)),
    "dgrad alone": RowwiseScaling(high_precision=("fprop", "wgrad")),
}
KINDS = ("linear", "autocast", "transposed", "experts", "transposed experts")


OF_LINEARS = {"nvfp4": NVFP4Scaling()}


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *((kind, name) for kind in KINDS for name in (*RECIPES, *HIGH)),
        *((kind, name) for kind in KINDS[:3] for name in OF_LINEARS),
    ],
)
def test_what_is_computed_is_what_a_step_computes(name: str, kind: str) -> None:
    """The same calls of the same ops, with tensors that look the same."""
    inputs = [torch.randn(TOKENS, IN, requires_grad=True)]
    model: nn.Module = Conv1D(OUT, IN) if kind == "transposed" else nn.Linear(IN, OUT)
    if "experts" in kind:
        model = Experts(bias=True, transposed="transposed" in kind)
        inputs = [torch.randn(TOKENS // 2, IN, requires_grad=True), *routes(TOKENS // 2, 2, range(4), 0)]
    model = nn.ModuleList([model])
    fp8dist.prepare(model, {**RECIPES, **HIGH, **OF_LINEARS}[name])
    with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
        with recorded_calls() as of_a_step:
            model[0](*inputs).square().sum().backward()
        with recorded_calls() as known:
            for device, several in computations_of(model).items():
                ComputedContent(several, device).digests(Digester())
    assert known == of_a_step


def _computed(model: nn.Module, **settings: Any) -> list[str]:
    fp8dist.prepare(model, **settings)
    return [one.name(device) for device, several in computations_of(model).items() for one in several]


def test_equal_shapes_are_computed_once() -> None:
    one = _computed(nn.Sequential(nn.Linear(32, 48)))
    assert _computed(nn.Sequential(*[nn.Linear(32, 48) for _ in range(3)])) == one
    assert len(one) == 6
    # Another bias is another product; another format of gradients another cast. The other computations are the same.
    more = _computed(nn.Sequential(nn.Linear(32, 48), nn.Linear(32, 48, bias=False)))
    assert sorted(set(more) - set(one)) == [
        "fprop 256x48x32 e4m3 e4m3 float32, fast accumulation, tensorwise, reference"
    ]
    overrides = {"1": DelayedScaling(format="e4m3", history_len=3)}
    other = _computed(nn.Sequential(nn.Linear(32, 48), nn.Linear(32, 48)), overrides=overrides)
    assert len(other) == 11
    assert _computed(nn.Sequential(nn.Linear(32, 48)), enabled=False) == []


def test_large_shapes_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(computations, "LARGEST", 64)
    assert _computed(Mixture(Experts()))[3].startswith("grouped fprop 256x64x32 of 2 experts")
    names = _computed(nn.Sequential(nn.Linear(512, 48), nn.Linear(128, 48)))
    assert [name.split(",")[0] for name in names] == [
        "cast of input 256x64 float32",
        "cast of weight 48x64 float32",
        "cast of grad_output 256x48 float32",
        "fprop 256x48x64 e4m3 e4m3 float32 with bias",
        "dgrad 256x64x48 e5m2 e4m3 float32",
        "wgrad 48x64x256 e5m2 e4m3 float32",
    ]


def test_names_tell_all_computations_apart() -> None:
    recipes: list[Recipe] = [
        DelayedScaling(),
        DelayedScaling(power_of_two=True),
        CurrentScaling(format="e4m3", fast_accumulation=()),
        RowwiseScaling(high_precision=("wgrad",)),
        BlockScaling(power_of_two=True, high_precision=("dgrad",)),
    ]
    axes = (torch.float32, torch.bfloat16), (False, True), (False, True), ("reference", "triton")
    found = {
        one
        for recipe in recipes
        for dtype, bias, transposed, backend in itertools.product(*axes)
        for how in ({}, {"sideways": True}, {"into": True})
        for one in casts_and_products((48, 32), recipe, dtype, torch.float32, bias, transposed, backend, **how)
    }
    for seed, hadamard in itertools.product((0, 1), (False, True)):  # All backends compute it with one.
        recipe = NVFP4Scaling(seed=seed, hadamard=hadamard)
        found |= {*casts_and_products((48, 32), recipe, torch.float32, torch.float32)}
    assert len({one.name(CPU) for one in found}) == len(found)


def test_a_wgrad_into_a_buffer_is_that_product() -> None:
    how = (OUT, IN), DelayedScaling(), torch.bfloat16, torch.float32
    plain, fused = (casts_and_products(*how, backend="triton", into=into)[-1] for into in (False, True))
    assert plain.name(CPU).replace(" float32,", " float32, into a buffer,") == fused.name(CPU)
    assert torch.equal(plain.prepared(CPU)()[""], fused.prepared(CPU)()[""])


def test_likeness_names_what_bits_depend_on(monkeypatch: pytest.MonkeyPatch) -> None:
    before = likeness(CPU)
    assert likeness(CPU) == before
    assert f"torch {torch.__version__}" in before
    assert "triton 3" in before
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    threads = likeness(CPU)
    assert threads == before.replace("1 threads", "77 threads") != before
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    assert likeness(CPU).replace("CUBLAS_WORKSPACE_CONFIG=:4096:8; ", "") == threads != likeness(CPU)
    found = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    assert likeness(torch.device("cuda", 3)).startswith("NVIDIA H200 9.0, 132 SMs; torch ")

    # As torch recommends: of one backend, and not of all at once.
    monkeypatch.setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32")
    assert "float32 products tf32, mkldnn none" in likeness(CPU)


def _reasons(monkeypatch: pytest.MonkeyPatch, device: torch.device, model: nn.Module, **flags: Any) -> list[str]:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", flags.get("benchmark", False))
    inductor = SimpleNamespace(max_autotune=flags.get("max_autotune", False))
    monkeypatch.setitem(sys.modules, "torch._inductor.config", inductor)
    return [reason.split(" ")[0] for reason in unsteady_settings(device, model)]


def test_what_keeps_ranks_from_being_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, compiled = nn.Linear(2, 2), nn.Linear(2, 2)
    compiled.compile(backend="eager")
    syncs = nn.Sequential(nn.SyncBatchNorm(2))
    both = {"benchmark": True, "max_autotune": True}
    assert _reasons(monkeypatch, CPU, compiled) == []
    assert _reasons(monkeypatch, torch.device("cuda"), plain, **both) == ["torch.backends.cudnn.benchmark=True"]
    assert _reasons(monkeypatch, CPU, compiled, **both) == ["Inductor's"]
    assert _reasons(monkeypatch, CPU, syncs) == ["SyncBatchNorm"]
    assert _reasons(monkeypatch, CPU, syncs.eval()) == []


# Experts ---------------------------------------------------------------------------------------


def test_rows_of_known_answers_leave_experts_empty() -> None:
    ends = [0, *ends_of(8, CPU).tolist()]
    counts = [end - start for start, end in itertools.pairwise(ends)]
    assert [count > 0 for count in counts] == [True, False] * 4
    assert 0 < ends[-1] < TOKENS
    assert len({count % 16 for count in counts}) > 2
    assert ends_of(1, CPU).tolist() == [ends[-1]]


def test_products_are_sums_over_each_experts_rows() -> None:
    """Of rows, with a bias, and over rows: in float64, from the definition of the operands."""
    ends, e4m3 = [0, *ends_of(EXPERTS, CPU).tolist()], ("e4m3", "e4m3")
    spans = list(itertools.pairwise(ends))
    scales = [inverse_scales((EXPERTS,), seed, CPU).double() for seed in (5, 6)]
    how = torch.float32, "tensor", True, False, "reference"
    (found,) = GroupedProductOf("fprop", EXPERTS, OUT, IN, e4m3, *how).prepared(CPU)().values()
    a = operand((TOKENS, IN), torch.float8_e4m3fn, 3, CPU).double()
    b = operand((EXPERTS, OUT, IN), torch.float8_e4m3fn, 4, CPU).double()
    bias = operand((EXPERTS, OUT), torch.float32, 7, CPU).double()
    expected = torch.zeros(TOKENS, OUT, dtype=torch.float64)
    for expert, (start, end) in enumerate(spans):
        product = a[start:end] @ b[expert].T * scales[0][expert] * scales[1][expert]
        expected[start:end] = product + bias[expert]
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)  # Sums of 32 products in float32.
    how = torch.float32, "tensor", False, False, "reference"
    (found,) = GroupedProductOf("wgrad", EXPERTS, OUT, IN, e4m3, *how).prepared(CPU)().values()
    width = (TOKENS + 15 * EXPERTS) // 16 * 16
    a, b = (operand((n, width), torch.float8_e4m3fn, seed, CPU).double() for n, seed in ((OUT, 3), (IN, 4)))
    column = 0
    for expert, (start, end) in enumerate(spans):
        own = slice(column, column + end - start)
        expected = a[:, own] @ b[:, own].T * scales[0][expert] * scales[1][expert]
        torch.testing.assert_close(found[expert].double(), expected, rtol=1e-5, atol=1e-5)
        column += -(-(end - start) // 16) * 16

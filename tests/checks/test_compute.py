"""check(compute=True), of experts too: what is computed, that it equals an independent computation, and likeness."""

from __future__ import annotations

import contextlib
import itertools
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fp8dist
from fp8dist import BlockScaling, CurrentScaling, DelayedScaling, MXFP8Scaling, Recipe, RowwiseScaling
from fp8dist.checks import computations
from fp8dist.checks.computations import ComputedContent, casts_and_products, computations_of
from fp8dist.checks.contents import Digester
from fp8dist.checks.known_calls import TOKENS, GroupedProductOf, ProductOf, ends_of
from fp8dist.checks.likeness import likeness, unsteady_settings
from fp8dist.modules.parts import fp8_parts
from fp8dist_kernels.reference.operands import inverse_scales, operand
from tests.kernels.test_content_digest import digest_in_python, unsigned
from tests.modules.test_foreign_linears import Conv1D
from tests.support.answers import flipping, known_bits, known_values, recorded_calls, word
from tests.support.experts import Experts, Mixture, routes
from tests.support.fp8_oracle import E4M3, operands
from tests.support.logs import captured_log
from tests.support.ranks import on_ranks
from tests.support.training import bits

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


@pytest.mark.parametrize("backend", ["reference", pytest.param("triton", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", RECIPES)
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


@pytest.mark.parametrize("name", ["delayed", "current", "row"])
def test_backends_compute_nearly_the_same_products(name: str) -> None:
    ours, theirs = _results(RECIPES[name], "reference"), _results(RECIPES[name], "torch")
    for gemm in ("fprop", "dgrad", "wgrad"):
        a, b = ours[gemm][""].double(), theirs[gemm][""].double()
        assert bool(a.isfinite().all())
        # Two orders of additions in float32, each rounded once to bfloat16: within a step of it.
        assert (a - b).abs().max() <= 2**-8 * a.abs().max()


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind in ("linear", "transposed", "experts", "transposed experts") for name in RECIPES],
)
def test_what_is_computed_is_what_a_step_computes(name: str, kind: str) -> None:
    """The same calls of the same ops, with tensors that look the same."""
    transposed, inputs = "transposed" in kind, [torch.randn(TOKENS, IN, requires_grad=True)]
    model: nn.Module = nn.Linear(IN, OUT)
    if kind == "transposed":
        model = Conv1D(OUT, IN)
    if "experts" in kind:
        model = Experts(bias=True, transposed=transposed)
        inputs = [torch.randn(TOKENS // 2, IN, requires_grad=True), *routes(TOKENS // 2, 2, range(4), 0)]
    model = nn.ModuleList([model])
    fp8dist.prepare(model, RECIPES[name])
    with recorded_calls() as of_a_step:
        model[0](*inputs).square().sum().backward()
    with recorded_calls() as known:
        for device, several in computations_of(fp8_parts(model)).items():
            ComputedContent(several, device).digests(Digester())
    assert known == of_a_step


def _computed(model: nn.Module, **settings: Any) -> list[str]:
    fp8dist.prepare(model, **settings)
    return [one.name(device) for device, several in computations_of(fp8_parts(model)).items() for one in several]


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


def test_gemms_in_high_precision_are_left_out() -> None:
    recipe = RowwiseScaling(high_precision=("fprop", "wgrad"))
    found = casts_and_products((EXPERTS, OUT, IN), recipe, torch.float32, torch.float32)
    grouped = [one.name(CPU).partition("x")[0].rpartition(" ")[0] for one in found]
    assert grouped == ["grouped cast of weight", "grouped cast of grad_output", "grouped dgrad"]
    names = _computed(nn.Sequential(nn.Linear(32, 48)), recipe=RowwiseScaling(high_precision=("wgrad",)))
    assert [name.split()[0] for name in names] == ["cast", "cast", "cast", "fprop", "dgrad"]
    assert [name.endswith("rows only, torch") for name in names] == [True, False, True, False, False]
    assert _computed(nn.Sequential(nn.Linear(32, 48)), enabled=False) == []


def test_dtypes_are_those_of_autocast_and_of_the_weight() -> None:
    model = nn.Sequential(nn.Linear(32, 48))
    fp8dist.prepare(model)
    with torch.autocast("cpu", torch.bfloat16):
        (found,) = computations_of(fp8_parts(model)).values()
    names = [one.name(CPU) for one in found]
    assert [("bfloat16" in name, "float32" in name) for name in names] == [
        (True, False),  # input
        (False, True),  # weight
        (True, False),  # grad_output
        (True, False),  # fprop
        (True, False),  # dgrad
        (False, True),  # wgrad
    ]


def test_large_shapes_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(computations, "LARGEST", 64)
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
    recipes = [
        recipe
        for format in ("hybrid", "e4m3")
        for power_of_two in (False, True)
        for recipe in (
            DelayedScaling(format=format, power_of_two=power_of_two),  # type: ignore[arg-type]
            DelayedScaling(format=format, power_of_two=power_of_two, margin=1),  # type: ignore[arg-type]
            CurrentScaling(format=format, power_of_two=power_of_two, fast_accumulation=()),  # type: ignore[arg-type]
            RowwiseScaling(format=format, power_of_two=power_of_two, high_precision=("wgrad",)),  # type: ignore[arg-type]
            BlockScaling(format=format, power_of_two=power_of_two, high_precision=("dgrad",)),  # type: ignore[arg-type]
        )
    ]
    found = {
        one
        for recipe in recipes
        for dtype in (torch.float32, torch.bfloat16)
        for bias in (False, True)
        for transposed in (False, True)
        for backend in ("reference", "triton")
        for how in ({}, {"sideways": True}, {"into": True})
        for one in casts_and_products((48, 32), recipe, dtype, torch.float32, bias, transposed, backend, **how)
    }
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


def _grouped_results(name: str, backend: str) -> dict[str, dict[str, Tensor]]:
    found = casts_and_products((EXPERTS, OUT, IN), RECIPES[name], torch.bfloat16, torch.float32, True, False, backend)
    return {one.name(CPU).rpartition(", ")[0]: one.prepared(CPU)() for one in found}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["row", "block", "mx"])
def test_triton_casts_to_the_same_bits_and_multiplies_nearly_the_same(name: str) -> None:
    reference, fused = (_grouped_results(name, backend) for backend in ("reference", "triton"))
    assert reference.keys() == fused.keys()
    for work, results in reference.items():
        for part, expected in results.items():
            if "cast" in work:
                assert bits(fused[work][part]) == bits(expected), (work, part)
            else:
                # Another order of additions, rounded once to bfloat16 or float32: within a step of bfloat16.
                assert (fused[work][part] - expected).abs().max() <= 2**-8 * expected.abs().max()


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


@pytest.mark.parametrize("transposed", [False, True])
def test_a_mixture_has_two_products_of_its_own_shapes(transposed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def names() -> list[str]:
        model = Mixture(Experts(transposed=transposed, bias=True))
        fp8dist.prepare(model)
        (found,) = computations_of(fp8_parts(model)).values()
        return [one.name(CPU).partition(" e4m3")[0].partition(" float32")[0] for one in found]

    up, down = ("4x32x96", "4x48x32") if transposed else ("4x96x32", "4x32x48")
    assert names() == [
        "grouped cast of input 256x32 of 4 experts",
        f"grouped cast of weight {up} of 4 experts",
        "grouped cast of grad_output 256x96 of 4 experts",
        "grouped fprop 256x96x32 of 4 experts",
        "grouped dgrad 256x32x96 of 4 experts e5m2",
        "grouped wgrad 256x96x32 of 4 experts e5m2",
        "grouped cast of input 256x48 of 4 experts",
        f"grouped cast of weight {down} of 4 experts",
        "grouped cast of grad_output 256x32 of 4 experts",
        "grouped fprop 256x32x48 of 4 experts",
        "grouped dgrad 256x48x32 of 4 experts e5m2",
        "grouped wgrad 256x32x48 of 4 experts e5m2",
    ]
    monkeypatch.setattr(computations, "LARGEST", 64)
    assert names()[3] == "grouped fprop 256x64x32 of 2 experts"


@pytest.mark.slow
@on_ranks(3)
def test_a_faulty_rank_is_named() -> None:
    model = Mixture(Experts())
    manager = fp8dist.prepare(model, RECIPES["delayed"], group=dist.group.WORLD).attach()
    found = []
    assert manager.check(parameters=False, compute=True).consistent
    for op, shape in (("matmul_grouped", (TOKENS, 32)), ("quantize_grouped", (4, 96, 32))):
        fault: Any = contextlib.nullcontext()
        if dist.get_rank() == 1:
            fault = flipping(op, shape, 5 * 32, 1)
        with captured_log(), fault:
            report = manager.check(parameters=False, compute=True, policy="warn")
        found += [(f.name.split(" of 4")[0], f.ranks) for f in report.findings]
    assert found == [
        ("grouped fprop 256x96x32", (1,)),
        ("grouped dgrad 256x48x32", (1,)),
        ("grouped cast of weight 4x96x32", (1,)),
    ]
    assert not any("grouped" in text for text in report.skipped)

"""check(compute=True) of experts: what is computed, that it equals plain sums, and that a faulty rank is named."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fp8dist
from fp8dist import BlockScaling, CurrentScaling, DelayedScaling, MXFP8Scaling, RowwiseScaling
from fp8dist.checks import computations
from fp8dist.checks.computations import computations_of, product_computations
from fp8dist.checks.known_calls import TOKENS, GroupedProductOf, ends_of
from fp8dist.modules.parts import fp8_parts
from fp8dist_kernels.reference.operands import inverse_scales, operand
from tests.support.answers import flipping
from tests.support.experts import Experts, Mixture
from tests.support.logs import captured_log
from tests.support.ranks import on_ranks
from tests.support.training import bits

CPU = torch.device("cpu")
EXPERTS, OUT, IN = 4, 48, 32
RECIPES = {
    "delayed": DelayedScaling(),
    "current": CurrentScaling(),
    "row": RowwiseScaling(),
    "block": BlockScaling(power_of_two=True),
    "mx": MXFP8Scaling(),
}


def _results(name: str, backend: str) -> dict[str, dict[str, Tensor]]:
    found = product_computations((EXPERTS, OUT, IN), RECIPES[name], torch.bfloat16, torch.float32, True, False, backend)
    return {one.name(CPU).rpartition(", ")[0]: one.prepared(CPU)() for one in found}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["row", "block", "mx"])
def test_triton_casts_to_the_same_bits_and_multiplies_nearly_the_same(name: str) -> None:
    reference, fused = (_results(name, backend) for backend in ("reference", "triton"))
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


def test_gemms_in_high_precision_are_left_out() -> None:
    recipe = RowwiseScaling(high_precision=("fprop", "wgrad"))
    found = product_computations((EXPERTS, OUT, IN), recipe, torch.float32, torch.float32)
    names = [one.name(CPU) for one in found]
    assert [name.partition("x")[0].rpartition(" ")[0] for name in names] == [
        "grouped cast of weight",
        "grouped cast of grad_output",
        "grouped dgrad",
    ]

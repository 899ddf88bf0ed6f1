"""torch's own check of each custom op: schema, autograd registration, fake tensors, and tracing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from fp8dist_kernels import direct, grouped_ops, ops
from fp8dist_kernels.arrays import StateArrays, UpdateRule
from fp8dist_kernels.reference.rings import RingShape
from tests.support.grouped import ends, slots_of
from tests.support.linear import BACKENDS, E4M3, E5M2, NONE, inputs

pytestmark = pytest.mark.slow

WITHOUT_FP8_COMPARISON = {"test_utils": ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")}
"""test_schema compares arguments with allclose, which does not support FP8."""
SCALING = {"just_in_time": True, "margin": 0, "power_of_two": False}
BOTH = {"rows": True, "columns": True}


def slot(scale: float = 2.0, cold: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    return torch.tensor(scale), torch.tensor(cold), torch.tensor(NONE)


@pytest.mark.parametrize(
    ("dtype", "scale", "cold", "options"),
    [
        (E4M3, 2.0, True, {"record": True, "columns": False}),
        (E5M2, 2.0, False, {"record": False}),
        (E4M3, 1e3, False, {"record": True, "just_in_time": False, "outgrown": 1.25}),
    ],
)
def test_quantize(dtype: torch.dtype, scale: float, cold: bool, options: dict[str, Any]) -> None:
    opcheck(ops.quantize, (inputs(5, 32), *slot(scale, cold), dtype), {**SCALING, **BOTH, **options})


def test_amaxes_scales_and_shares() -> None:
    opcheck(ops.observe, (inputs(5, 32), torch.tensor(NONE)))
    for amax in (torch.tensor(3.0), None):
        opcheck(ops.choose_scale, (amax, *slot(cold=True), E4M3), {"record": True, **SCALING})
    array = torch.full((2, 5), NONE)
    opcheck(ops.measure, (inputs(33, 48), torch.rand(33, 1), E4M3, array[0, 1], array[1, 3]), {"block": [1, 48]})


def test_casts_with_many_scales() -> None:
    given = (inputs(5, 32), E4M3)
    for columns in (False, True):
        keywords = {"power_of_two": False, "rows": True, "columns": columns}
        opcheck(ops.quantize_rowwise, given, keywords, **WITHOUT_FP8_COMPARISON)
        for block in ((1, 128), (128, 128)):
            opcheck(ops.quantize_blocks, given, {"block": block, **keywords}, **WITHOUT_FP8_COMPARISON)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("op", [ops.matmul, ops.matmul_into])
def test_products(op: Any, backend: str) -> None:
    one = torch.tensor(1.0)
    tokens, result = (5, torch.bfloat16) if op is ops.matmul else (16, inputs(16, 16))
    given = (inputs(tokens, 32).to(E5M2), inputs(16, 32).to(E4M3), one, one, result)
    opcheck(op, given, {"fast_accumulation": False, "backend": backend}, **WITHOUT_FP8_COMPARISON)


def test_a_compiled_graph_adds_to_a_buffer() -> None:
    one, total = torch.tensor(1.0), inputs(16, 16)
    a, b = inputs(16, 32).to(E5M2), inputs(16, 32).to(E4M3)

    def added(total: Tensor) -> Tensor:
        ops.matmul_into(a, b, one, one, total, fast_accumulation=False)
        return 2 * total

    expected = total.clone()
    twice = added(expected)
    assert torch.equal(torch.compile(added, fullgraph=True, backend="aot_eager")(total), twice)
    assert torch.equal(total, expected)


def test_launch_and_commit() -> None:
    arrays = list(StateArrays.allocate([448.0] * 3, [464.0] * 3, RingShape(4), torch.device("cpu")))
    opcheck(ops.launch, (arrays, None), {"drop_nonfinite": False})
    rule = UpdateRule(4, 0, False, True, "max")._asdict()
    opcheck(ops.commit, (arrays, torch.zeros(11, dtype=torch.int32), None), rule)


@pytest.mark.long
def test_grouped_ops() -> None:
    x, offsets = inputs(32, 48).bfloat16(), ends((20, 0, 7), "cpu")
    weight = inputs(3 * 32, 48).bfloat16().view(3, 32, 48)
    cast, lines = {"record": True, **SCALING}, {"power_of_two": False, **BOTH}
    for given in ((x, offsets), (weight, None)):
        for rows in (True, False):
            options = {**cast, "rows": rows, "columns": True}
            opcheck(grouped_ops.quantize_grouped, (*given, *slots_of(3, "cpu"), E4M3), options)
    for in_blocks in (True, False):
        opcheck(grouped_ops.quantize_grouped_lines, (x, offsets, E4M3), {"in_blocks": in_blocks, **lines})
    for block in ([1, 128], [128, 128]):
        opcheck(ops.quantize_blocks, (weight, E4M3), {"block": block, **lines})
    rows_of_x, columns, inv = direct.quantize_grouped(x, offsets, *slots_of(3, "cpu"), E4M3, **cast, **BOTH)
    of_w, _, inv_w = direct.quantize_grouped(weight, None, *slots_of(3, "cpu"), E4M3, **cast, **BOTH)
    product: Any = {"kwargs": {"fast_accumulation": False}, **WITHOUT_FP8_COMPARISON}
    opcheck(grouped_ops.matmul_grouped, (rows_of_x, of_w, inv, inv_w, offsets, torch.bfloat16), **product)
    opcheck(grouped_ops.matmul_grouped_columns, (columns, columns, inv, inv, offsets, torch.bfloat16), **product)

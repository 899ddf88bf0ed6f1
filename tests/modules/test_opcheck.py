"""torch's own check of each custom op: schema, autograd registration, fake tensors, and tracing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fp8dist_kernels import ops
from fp8dist_kernels.arrays import StateArrays, UpdateRule
from fp8dist_kernels.reference.rings import RingShape
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
    torch.library.opcheck(ops.quantize, (inputs(5, 32), *slot(scale, cold), dtype), {**SCALING, **BOTH, **options})


def test_amaxes_and_scales() -> None:
    torch.library.opcheck(ops.observe, (inputs(5, 32), torch.tensor(NONE)))
    for amax in (torch.tensor(3.0), None):
        torch.library.opcheck(ops.choose_scale, (amax, *slot(cold=True), E4M3), {"record": True, **SCALING})


def test_casts_with_many_scales() -> None:
    given = (inputs(5, 32), E4M3)
    for columns in (False, True):
        keywords = {"power_of_two": False, "rows": True, "columns": columns}
        torch.library.opcheck(ops.quantize_rowwise, given, keywords, **WITHOUT_FP8_COMPARISON)
        for block in ((1, 128), (128, 128)):
            torch.library.opcheck(ops.quantize_blocks, given, {"block": block, **keywords}, **WITHOUT_FP8_COMPARISON)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("op", [ops.matmul, ops.matmul_into])
def test_products(op: Any, backend: str) -> None:
    one = torch.tensor(1.0)
    tokens, result = (5, torch.bfloat16) if op is ops.matmul else (16, inputs(16, 16))
    given = (inputs(tokens, 32).to(E5M2), inputs(16, 32).to(E4M3), one, one, result)
    torch.library.opcheck(op, given, {"fast_accumulation": False, "backend": backend}, **WITHOUT_FP8_COMPARISON)


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
    torch.library.opcheck(ops.launch, (arrays, None), {"drop_nonfinite": False})
    rule = UpdateRule(4, 0, False, True, "max")._asdict()
    torch.library.opcheck(ops.commit, (arrays, torch.zeros(11, dtype=torch.int32), None), rule)

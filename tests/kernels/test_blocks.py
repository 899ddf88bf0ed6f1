"""Casts with many scales: their layout, those of experts, and how Triton launches them. Their numbers are in
``tests/modules/test_recipe_values.py``."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8dist_kernels.reference import blocks as plain
from fp8dist_kernels.triton import blocks as fused
from tests.support import fp8_oracle
from tests.support.casting import FORMATS, LAYOUTS, assert_same, hard_values, poison
from tests.support.counted import Operations
from tests.support.devices import DEVICE
from tests.support.gemms import assert_operand, numbers

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in .*:RuntimeWarning")  # From the interpreter's numpy.

BLOCKS = (None, (1, 128), (128, 128))
KINDS = pytest.mark.parametrize("block", BLOCKS, ids=str)


def run(kernels: Any, x: Tensor, dtype: torch.dtype, block: Any, **changes: Any) -> tuple[Tensor, ...]:
    options = {"power_of_two": False, "rows": True, "columns": True, **changes}
    if block is None:
        return kernels.quantize_rowwise(x, dtype, **options)
    return kernels.quantize_blocks(x, dtype, block=block, **options)


def compare(x: Tensor, dtype: torch.dtype, block: Any, **options: Any) -> None:
    assert_same(run(fused, x, dtype, block, **options), run(plain, x, dtype, block, **options))


def test_shapes_and_strides() -> None:
    x, copies = torch.ones(130, 272), (((130, 272), (272, 1)), ((272, 144), (144, 1)))
    for block, scales in zip(
        BLOCKS,
        (
            (((130, 1), (1, 1)), ((272, 1), (1, 1))),
            (((130, 3), (1, 130)), ((272, 2), (1, 272))),
            (((2, 3), (3, 1)), ((3, 2), (2, 1))),
        ),
    ):
        shapes = [(tuple(t.shape), t.stride()) for t in run(plain, x, FORMATS[0], block)]
        assert shapes == [copies[0], scales[0], copies[1], scales[1]]


@KINDS
def test_either_copy_alone_and_nothing(block: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch)
    x = hard_values(20, 130).bfloat16()
    both = run(plain, x, FORMATS[1], block)
    for given, (rows, columns) in itertools.product((x, LAYOUTS["transposed"](x)), ((True, False), (False, True))):
        alone = run(plain, given, FORMATS[1], block, rows=rows, columns=columns)
        mine = slice(0, 2) if rows else slice(2, 4)
        assert_same(alone[mine], both[mine])
        assert [tuple(one.shape) for one in alone].count((0,)) == 2
        compare(given, FORMATS[1], block, rows=rows, columns=columns)
    compare(x, FORMATS[1], block, rows=False, columns=False)
    lines = {None: ((0, 1), (130, 1)), (1, 128): ((0, 2), (130, 0)), (128, 128): ((0, 2), (2, 0))}[block]
    shapes = [tuple(one.shape) for one in run(plain, x[:0], FORMATS[1], block)]
    assert shapes == [(0, 130), lines[0], (130, 0), lines[1]]


@pytest.mark.parametrize("experts", [0, 2])
def test_weights_of_experts_under_autocast_and_of_none(experts: int) -> None:
    weight = torch.randn(experts, 130, 48)
    with torch.autocast("cpu", torch.bfloat16):
        made = run(plain, weight, FORMATS[0], (128, 128))
    assert [tuple(t.shape[1:]) for t in made] == [(130, 48), (2, 1), (48, 144), (1, 2)]
    for expert, part in enumerate(weight):
        rows, row_scales, columns, column_scales = (t[expert] for t in made)
        for copy, scales, source in ((rows, row_scales, part), (columns, column_scales, part.t())):
            expected = fp8_oracle.cast(numbers(source), fp8_oracle.E4M3, (128, 128), power_of_two=False)
            assert_operand(copy, scales, expected, f"expert {expert}")
    assert all(len(t) == experts for t in made)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 528), (264, 16), (33, 272)], ids=str)
def test_amaxes_of_rows_in_parts(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one row, of several tiles, and in more parts than usual, as of rows of more than 131,072 elements."""
    poison(monkeypatch)
    monkeypatch.setattr(fused, "_PARTS", 2)
    monkeypatch.setattr(fused, "_PART_ELEMENTS", 128)
    compare(hard_values(*shape).bfloat16(), FORMATS[0], None)


@pytest.mark.parametrize("transposed", [False, True], ids=["contiguous", "transposed"])
def test_numbers_of_launches(transposed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two for rows and columns, one for all experts in blocks."""
    grids: list[tuple[int, ...]] = []

    class Launch:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            grids.append(grid)
            return lambda *_, **__: None

    for name in ("_amax_kernel", "_lines_kernel", "_squares_kernel"):
        monkeypatch.setattr(fused, name, Launch())
    for block, x, count in (
        (None, hard_values(130, 272), 2),
        *((block, torch.empty(2, 130, 48, device=DEVICE), 1) for block in BLOCKS[1:]),
    ):
        grids.clear()
        with Operations() as operations:
            run(fused, x.mT if transposed else x, FORMATS[0], block)
        launching = [op for op in operations.seen if not (op.is_view or op.overloadpacket is torch.ops.aten.empty)]
        assert (len(grids), launching) == (count, [])


@pytest.mark.parametrize("version", [plain, fused], ids=["plain", "fused"])
def test_other_blocks_are_refused(version: Any) -> None:
    with pytest.raises(ValueError, match="blocks of 64x64; expected 1x128 or 128x128"):
        run(version, torch.ones(2, 2, device=DEVICE), FORMATS[0], (64, 64))

"""Triton's casts with many scales against plain torch's, bitwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fp8dist_kernels.reference import blocks as plain
from fp8dist_kernels.triton import blocks as fused
from tests.support.casting import FORMATS, LAYOUTS, assert_same, hard_values, poison
from tests.support.counted import Operations
from tests.support.devices import DEVICE

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in .*:RuntimeWarning")  # From the interpreter's numpy.

BLOCKS = (None, (1, 128), (128, 128))


def run(kernels: Any, x: Tensor, dtype: torch.dtype, block: Any, **changes: Any) -> tuple[Tensor, ...]:
    options = {"power_of_two": False, "rows": True, "columns": True, **changes}
    if block is None:
        return kernels.quantize_rowwise(x, dtype, **options)
    return kernels.quantize_blocks(x, dtype, block=block, **options)


def compare(x: Tensor, dtype: torch.dtype, block: Any, **options: Any) -> None:
    assert_same(run(fused, x, dtype, block, **options), run(plain, x, dtype, block, **options))


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 528), (520, 16), (144, 400)], ids=str)
def test_amaxes_of_rows_in_parts(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one row, of several tiles, and in more parts than usual, as of rows of more than 131,072 elements."""
    poison(monkeypatch)
    monkeypatch.setattr(fused, "_PARTS", 2)
    monkeypatch.setattr(fused, "_PART_ELEMENTS", 128)
    compare(hard_values(*shape).bfloat16(), torch.float8_e4m3fn, None)


@pytest.mark.parametrize("transposed", [False, True], ids=["contiguous", "transposed"])
def test_rows_and_columns_take_two_launches(transposed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x = hard_values(130, 272).bfloat16()
    grids = launches(monkeypatch, run_them=False)
    with Operations() as operations:
        run(fused, x.t() if transposed else x, FORMATS[0], None)
    launching = [op for op in operations.seen if not (op.is_view or op.overloadpacket is torch.ops.aten.empty)]
    assert (len(grids), launching) == (2, [])


@pytest.mark.slow
@pytest.mark.parametrize(("block", "layout"), [*((block, "contiguous") for block in BLOCKS), ((1, 128), "transposed")])
def test_either_copy_alone(block: Any, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch)
    x = LAYOUTS[layout](hard_values(20, 130).bfloat16())
    for rows, columns in ((True, False), (False, True), (False, False)):
        compare(x, torch.float8_e5m2, block, rows=rows, columns=columns)


@pytest.mark.slow
@pytest.mark.parametrize("block", BLOCKS[1:], ids=str)
@pytest.mark.parametrize("transposed", [False, True], ids=["contiguous", "transposed"])
def test_weights_of_experts_are_cast_one_by_one(block: Any, transposed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one launch. Blocks do not cross experts, although 130 rows are no multiple of 128."""
    poison(monkeypatch)
    x = torch.stack([hard_values(130, 48, index) for index in range(2)]).bfloat16()
    x = x.mT.contiguous().mT if transposed else x.repeat_interleave(2, 0)[::2]
    grids = launches(monkeypatch)
    for rows, columns in ((True, True), (False, True)):
        grids.clear()
        together = run(fused, x, FORMATS[0], block, rows=rows, columns=columns)
        assert len(grids) == 1
        for expert, part in enumerate(x):
            alone = run(fused, part, FORMATS[0], block, rows=rows, columns=columns)
            assert_same(tuple(one[expert] if one.ndim > 1 else one for one in together), alone)
        assert_same(together, run(plain, x, FORMATS[0], block, rows=rows, columns=columns))


def launches(monkeypatch: pytest.MonkeyPatch, run_them: bool = True) -> list[tuple[int, ...]]:
    """Return a list that gets the grid of each launch of a cast."""
    grids: list[tuple[int, ...]] = []

    class Counted:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            grids.append(grid)
            return self.kernel[grid] if run_them else lambda *_, **__: None

    for name in ("_amax_kernel", "_lines_kernel", "_squares_kernel"):
        monkeypatch.setattr(fused, name, Counted(getattr(fused, name)))
    return grids


def test_other_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="blocks of 64x64; expected 1x128 or 128x128"):
        run(fused, torch.ones(2, 2, device=DEVICE), torch.float8_e4m3fn, (64, 64))

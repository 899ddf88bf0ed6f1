"""Each op that reads a matrix, in Triton and in plain torch: the same bits, one row per op.

What an op does with its options is in its own file.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8dist_kernels.reference import blocks, casts, grouped_casts, magnitude, shares
from fp8dist_kernels.triton import blocks as fused_blocks
from fp8dist_kernels.triton import casts as fused_casts
from fp8dist_kernels.triton import grouped_casts as fused_grouped_casts
from fp8dist_kernels.triton import magnitude as fused_magnitude
from fp8dist_kernels.triton import shares as fused_shares
from tests.support.casting import DTYPES, FORMATS, LAYOUTS, assert_same, hard_values, poison
from tests.support.devices import DEVICE
from tests.support.grouped import ends, slots_of
from tests.support.suite import NIGHTLY

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in .*:RuntimeWarning")  # From the interpreter's numpy.

SHAPES = ((1, 16), (33, 80), (130, 272), (17, 3), (0, 32))
FAR = (((3, 16), (2**30, 1)), ((260, 16), (2**23, 1)), ((16, 257), (1, 2**23)))
"""Shapes and strides with offsets beyond 32 bits, in a tile and between tiles."""

Run = Callable[[bool, Tensor, torch.dtype, int], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Op:
    """``run(fused, x, dtype, turn)`` returns all that one version writes. ``turn`` chooses among options.

    ``make``: x, like ``hard_values``.
    """

    run: Run
    make: Callable[..., Tensor] = hard_values
    sources: tuple[torch.dtype, ...] = DTYPES


def _cast(fused: bool, x: Tensor, dtype: torch.dtype, turn: int, **more: Any) -> tuple[Tensor, ...]:
    scale, cold, pending = (slot[0] for slot in slots_of(1))
    cold.fill_(turn % 2 == 0)
    options: dict[str, Any] = {
        "record": True, "just_in_time": turn % 4 < 2, "margin": 0, "power_of_two": turn % 3 == 0, "rows": True,
        "columns": True, **more,
    }  # fmt: skip
    return (*(fused_casts if fused else casts).quantize(x, scale, cold, pending, dtype, **options), pending)


def _cast_in_one_launch(fused: bool, x: Tensor, dtype: torch.dtype, turn: int) -> tuple[Tensor, ...]:
    total, scratch = torch.empty(x.shape[1], device=DEVICE), torch.zeros(4, dtype=torch.int32, device=DEVICE)
    options: dict[str, Any] = {"rows": turn % 3 != 1, "columns": turn % 3 != 2, "just_in_time": True, "sums": total}
    made = _cast(fused, x, dtype, 2 * turn, **options, **({"scratch": scratch} if fused else {}))
    assert not scratch.any(), "the next launch needs it as it was"
    return *made, total


def _cast_with_sums(fused: bool, x: Tensor, dtype: torch.dtype, turn: int) -> tuple[Tensor, ...]:
    """The cast takes them or not: it does not of a tensor that is transposed, or without a transposed copy."""
    total = torch.empty(x.shape[1], dtype=(torch.float32, torch.bfloat16)[turn % 2], device=DEVICE)
    made = _cast(fused, x, dtype, turn, sums=total, columns=turn % 2 == 0)
    assert_same((total,), ((fused_casts if fused else casts).add_up(x, total.dtype),))
    return *made, total


def _transposition(fused: bool, x: Tensor, dtype: torch.dtype, turn: int) -> tuple[Tensor, ...]:
    made = (fused_casts if fused else casts).transpose(x.view(dtype))
    assert made.is_contiguous()
    assert made.data_ptr() != x.data_ptr() or not x.numel()
    return (made.view(torch.uint8),)  # NaNs keep their payload.


def _any_bytes(tokens: int, features: int, seed: int = 0, finite: bool = False) -> Tensor:
    return torch.arange(tokens * features, device=DEVICE).mul(37).to(torch.int8).view(tokens, features)


def _lines(block: tuple[int, int] | None) -> Run:
    def run(fused: bool, x: Tensor, dtype: torch.dtype, turn: int) -> tuple[Tensor, ...]:
        options: dict[str, Any] = {"power_of_two": turn % 3 == 0, "rows": True, "columns": True}
        version = fused_blocks if fused else blocks
        if block is None:
            return version.quantize_rowwise(x, dtype, **options)
        return version.quantize_blocks(x, dtype, block=block, **options)

    return run


def _amax(fused: bool, x: Tensor, dtype: torch.dtype, turn: int) -> tuple[Tensor, ...]:
    pending = torch.full((), -1.0, device=DEVICE)
    (fused_magnitude if fused else magnitude).observe(x, pending)
    return (pending,)


def _shares(block: tuple[int, int] | None) -> Run:
    """Of scales from 2**-10 to 2**10, which may be strided."""

    def run(fused: bool, x: Tensor, dtype: torch.dtype, turn: int) -> tuple[Tensor, ...]:
        height, width = block or (1, max(1, x.shape[1]))
        shape = (-(-x.shape[0] // height), -(-x.shape[1] // width)) if height else ()
        inv_scale = torch.exp2(20 * torch.rand(shape, generator=torch.Generator().manual_seed(turn)) - 10).to(DEVICE)
        if inv_scale.ndim == 2:
            inv_scale = LAYOUTS[("contiguous", "transposed", "every second")[turn % 3]](inv_scale)
        found = torch.full((3,), -1.0, device=DEVICE)
        version = fused_shares if fused else shares
        version.measure(x, inv_scale, dtype, found[0], found[2], block=block or (1, x.shape[1]))
        return (found,)

    return run


def _rows_of_three(tokens: int, features: int, seed: int = 0, finite: bool = False) -> Tensor:
    """Return rows for ``_of_three``: a fifth of them belong to no expert, and are NaN."""
    x = hard_values(tokens, features, seed, finite)
    x[tokens - tokens // 5 :] = torch.nan
    return x


def _of_three(x: Tensor) -> Tensor:
    """Return the offsets of three experts, of which one has no rows."""
    mine = len(x) - len(x) // 5
    return ends((mine // 3, 0, mine - mine // 3))


def _grouped(fused: bool, x: Tensor, dtype: torch.dtype, turn: int) -> tuple[Tensor, ...]:
    slots = slots_of(3, apart=1 + turn % 3)
    made = (fused_grouped_casts if fused else grouped_casts).quantize_grouped(
        x, _of_three(x), *slots, dtype, record=True, just_in_time=turn % 2 == 0, margin=turn % 2,
        power_of_two=turn % 3 == 0, rows=True, columns=True,
    )  # fmt: skip
    return *made, slots[2]


def _grouped_lines(in_blocks: bool) -> Run:
    def run(fused: bool, x: Tensor, dtype: torch.dtype, turn: int) -> tuple[Tensor, ...]:
        return (fused_grouped_casts if fused else grouped_casts).quantize_grouped_lines(
            x, _of_three(x), dtype, in_blocks=in_blocks, power_of_two=turn % 3 == 0, rows=turn % 7 != 2,
            columns=turn % 7 not in (2, 5),
        )  # fmt: skip

    return run


OPS = {
    "cast": Op(_cast),
    "cast in one launch": Op(_cast_in_one_launch),
    "cast with sums": Op(_cast_with_sums),
    "transposition": Op(_transposition, _any_bytes, (torch.int8,)),
    "cast, row-wise": Op(_lines(None)),
    "cast, 1x128": Op(_lines((1, 128))),
    "cast, 128x128": Op(_lines((128, 128))),
    "amax": Op(_amax),
    "shares": Op(_shares((0, 0)), sources=(*DTYPES, torch.float64)),
    "shares, row-wise": Op(_shares(None), sources=(*DTYPES, torch.float64)),
    "shares, 1x128": Op(_shares((1, 128)), sources=(*DTYPES, torch.float64)),
    "shares, 128x128": Op(_shares((128, 128)), sources=(*DTYPES, torch.float64)),
    "grouped cast": Op(_grouped, _rows_of_three),
    "grouped cast, row-wise": Op(_grouped_lines(False), _rows_of_three),
    "grouped cast, 1x128": Op(_grouped_lines(True), _rows_of_three),
}


def _compare(op: Op, x: Tensor, dtype: torch.dtype, turn: int) -> None:
    assert_same(op.run(True, x, dtype, turn), op.run(False, x, dtype, turn))


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_triton_has_the_bits_of_its_twin(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch)
    for turn, layout in enumerate(("contiguous", "transposed")):
        _compare(op, LAYOUTS[layout](op.make(33, 48, turn).to(op.sources[0])), FORMATS[turn % 2], turn)


EVERYTHING = [*itertools.product(SHAPES, LAYOUTS)]
IN_TURN = [*zip(itertools.cycle(SHAPES), LAYOUTS)]


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
@pytest.mark.parametrize(
    "cases", [pytest.param(IN_TURN, marks=pytest.mark.slow), pytest.param(EVERYTHING, marks=NIGHTLY)],
    ids=["in turn", "everything"],
)  # fmt: skip
def test_all_shapes_and_strides(op: Op, cases: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Five shapes and eight layouts, with the pairs of dtypes in turn."""
    poison(monkeypatch)
    types = [*itertools.product(op.sources, FORMATS)]
    for index, ((tokens, features), layout) in enumerate(cases):
        turn = index + index // len(LAYOUTS)  # Shift the pairing, so that each layout meets all types.
        source, dtype = types[turn % len(types)]
        x = LAYOUTS[layout](op.make(tokens, features, index, turn % 4 < 2).to(source))
        _compare(op, x, dtype, turn)


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_offsets_beyond_32_bits(op: Op) -> None:
    kind = torch.int8 if torch.int8 in op.sources else torch.float16
    room = torch.empty(17 * 2**27, dtype=kind, device=DEVICE)  # Untouched pages take no CPU memory.
    for turn, (shape, strides) in enumerate(FAR):
        far = room.as_strided(shape, strides)
        far.copy_(op.make(*shape, turn, True))
        near = far.clone()
        assert_same(op.run(True, far, FORMATS[0], turn), op.run(False, near, FORMATS[0], turn))


def test_the_inputs_are_hard() -> None:
    """Values that a cast saturates, flushes and keeps, of both signs; NaN and infinity where they are asked for."""
    for finite in (True, False):
        x = hard_values(33, 80, 1, finite)
        assert bool((x.abs() > 448).any() and ((x != 0) & (x.abs() < 2.0**-10)).any() and (x < 0).any())
        assert bool(x.isfinite().all()) == finite
        assert math.isnan(x.sum()) != finite

"""The amax (largest magnitude) of a tensor in one pass, written straight into a slot."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8dist_kernels.triton.launching import PLANS, ceil_div, ceil_power_of_two, on_device_of
from fp8dist_kernels.triton.tickets import came_last

MOST_PARTS = 1024
"""Most programs of ``partial_amaxes``: more than any GPU runs at a time. Each program of a cast reads all their
amaxes."""

_BLOCK = 8192  # 256 threads, each with four 16-byte loads of bf16 in flight.
_WARPS = 8
_LARGEST_OFFSET = 2**31 - 1


@triton.jit
def magnitude_bits(x):
    """Return |x| in float32 as int32 bits, which have the order of the values: finite < Inf < NaN. The sign is masked
    because a NaN may be negative. ``tl.max`` of floats would drop NaN."""
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def newest(place):
    """Load ``place`` from L2, where atomics run. A multiprocessor's own cache may hold an old value."""
    return tl.load(place, cache_modifier=".cg")


@triton.jit
def grow(place, seen, bits):
    """Set int32 ``place`` to the maximum of itself and ``bits``. ``seen``: its value when the program began. ``place``
    only grows while a kernel runs, so a program whose ``bits`` do not exceed ``seen`` needs no atomic: most do not."""
    tl.atomic_max(place, bits, mask=bits > seen, sem="relaxed")


@triton.jit
def tile_bits(
    x, top, left, rows, columns, row_stride, column_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    """Return int32 [ROWS, COLUMNS]: the magnitude bits of the tile at (top, left), 0 beyond [rows, columns]. A tile
    that is inside is read without masks, so that loads are wide for any row length."""
    row = tl.arange(0, ROWS).to(INDEX)[:, None]
    column = tl.arange(0, COLUMNS).to(INDEX)[None, :]
    start = x + top.to(tl.int64) * row_stride + left.to(tl.int64) * column_stride
    places = start + (row * row_stride + column * column_stride)
    if (top + ROWS <= rows) & (left + COLUMNS <= columns):
        bits = magnitude_bits(tl.load(places))
    else:
        bits = magnitude_bits(tl.load(places, mask=(top + row < rows) & (left + column < columns), other=0.0))
    return bits


@triton.jit
def joint_bits(
    x, scratch, rows, columns, row_stride, column_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    """Return the amax bits of x, which all programs of a kernel measure together: each of them must call this.

    A program takes tiles until none is left, and only then waits for tiles that other programs have taken. These
    programs are running, so no program waits for one that has not begun, however few run at a time. ``scratch``:
    int32[4], 0 before and after the kernel: tiles taken, the amax so far, tiles measured, and a ticket.
    """
    across = tl.cdiv(columns, COLUMNS)
    tiles = tl.cdiv(rows, ROWS) * across
    largest, measured = 0, 0
    tile = tl.atomic_add(scratch, 1, sem="relaxed")
    while tile < tiles:
        top = (tile // across).to(INDEX) * ROWS
        left = (tile % across).to(INDEX) * COLUMNS
        bits = tile_bits(x, top, left, rows, columns, row_stride, column_stride, ROWS, COLUMNS, INDEX)
        largest = tl.maximum(largest, tl.max(tl.max(bits, 1), 0))
        measured += 1
        tile = tl.atomic_add(scratch, 1, sem="relaxed")
    tl.atomic_max(scratch + 1, largest, sem="relaxed")
    tl.atomic_add(scratch + 2, measured, sem="release")
    while tl.atomic_add(scratch + 2, 0, sem="acquire") < tiles:
        pass
    largest = tl.atomic_max(scratch + 1, 0, sem="relaxed")
    if came_last(scratch + 3):
        tl.atomic_xchg(scratch, 0, sem="relaxed")
        tl.atomic_xchg(scratch + 1, 0, sem="relaxed")
        tl.atomic_xchg(scratch + 2, 0, sem="relaxed")
    return largest


@triton.jit(do_not_specialize_on_alignment=["out", "cold"])
def _amax_kernel(
    x,  # [rows, columns], strides as given
    out,  # GROW: int32[1], grows; else int32[programs], each writes its own
    cold,  # bool[1], read IF_COLD: if it is False, x is not read
    rows,
    columns,
    row_stride,
    column_stride,
    GROW: tl.constexpr,
    IF_COLD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INDEX: tl.constexpr,
):
    """Compute the amax bits of x: one maximum (GROW), or one of each program's tiles."""
    across = tl.cdiv(columns, COLUMNS)
    tiles = tl.cdiv(rows, ROWS) * across
    if IF_COLD:
        tiles = tl.where(tl.load(cold), tiles, 0)
    if GROW:
        seen = newest(out)
    largest = 0
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        top = (tile // across).to(INDEX) * ROWS
        left = (tile % across).to(INDEX) * COLUMNS
        bits = tile_bits(x, top, left, rows, columns, row_stride, column_stride, ROWS, COLUMNS, INDEX)
        largest = tl.maximum(largest, tl.max(tl.max(bits, 1), 0))
    if GROW:
        grow(out, seen, largest)
    else:
        tl.store(out + tl.program_id(0), largest)


class Reading(NamedTuple):
    """How ``_amax_kernel`` reads a tensor: as [rows, columns], with its values in any order. One row if memory has no
    gaps. Strides are in elements."""

    rows: int
    columns: int
    row_stride: int
    column_stride: int
    copied: bool
    """True if the tensor has more than two dims that cannot be merged: a contiguous copy is read instead."""
    tiles: int
    tile: tuple[int, int]
    offset_type: Any

    @property
    def lying(self) -> tuple[int, ...]:
        """Rows, columns and both strides, in the argument order of the kernel."""
        return self[:4]


@functools.lru_cache(PLANS)
def reading_of(shape: tuple[int, ...], strides: tuple[int, ...]) -> Reading:
    """Return how to read a tensor of this shape with these strides."""
    sizes: list[int] = []
    steps: list[int] = []
    for stride, size in sorted(zip(strides, shape), reverse=True):
        if size == 1 or stride == 0:  # Repeated values do not change a maximum.
            continue
        if sizes and steps[-1] == size * stride:
            sizes[-1], steps[-1] = sizes[-1] * size, stride
        else:
            sizes.append(size)
            steps.append(stride)
    copied = len(sizes) > 2
    if 0 in shape:
        sizes, steps, copied = [0, 0], [0, 0], False
    elif copied:
        sizes, steps = [math.prod(shape)], [1]
    padding = 2 - len(sizes)
    rows, columns = [1] * padding + sizes
    row_stride, column_stride = [0] * padding + steps
    if rows == 1:
        tile = (1, _BLOCK)
    else:
        wide = min(_BLOCK // 8, max(16, ceil_power_of_two(max(1, columns))))
        tile = (_BLOCK // wide, wide)
    farthest = _BLOCK * max(1, row_stride, column_stride) + max(rows, columns)
    index = tl.int64 if farthest > _LARGEST_OFFSET else tl.int32
    tiles = ceil_div(rows, tile[0]) * ceil_div(columns, tile[1])
    return Reading(rows, columns, row_stride, column_stride, copied, tiles, tile, index)


def observe(x: Tensor, pending: Tensor) -> None:
    """See ``reference.magnitude.observe``. Copies a tensor with more than two dims that cannot be merged."""
    if x.numel():
        reading = reading_of(x.shape, x.stride())
        _launch(x, reading, max(1, reading.tiles), pending.view(torch.int32), None)


def partial_amaxes(x: Tensor, cold: Tensor | None = None) -> Tensor:
    """Return int32[programs]: amax bits of parts of ``x``, for the caller to reduce.

    With ``cold`` (0-d bool), the device reads x only if ``cold`` is True; otherwise the results are 0. Parts, because a
    single maximum would have to be cleared by a launch before this one.
    """
    reading = reading_of(x.shape, x.stride())
    programs = min(MOST_PARTS, max(1, reading.tiles))
    parts = torch.empty(programs, dtype=torch.int32, device=x.device)
    _launch(x, reading, programs, parts, cold, grow=False)
    return parts


def _launch(x: Tensor, reading: Reading, programs: int, out: Tensor, cold: Tensor | None, grow: bool = True) -> None:
    """Launch ``_amax_kernel``. ``cold`` None: read x in any case."""
    if reading.copied:
        x = x.contiguous()
    with on_device_of(x):
        _amax_kernel[(programs,)](
            x,
            out,
            out if cold is None else cold,
            *reading.lying,
            GROW=grow,
            IF_COLD=cold is not None,
            ROWS=reading.tile[0],
            COLUMNS=reading.tile[1],
            INDEX=reading.offset_type,
            num_warps=_WARPS,
        )

"""amax in one pass, written straight into a slot."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8dist_kernels.triton.launching import on_device_of

__all__ = ["MOST_PARTS", "grow", "magnitude_bits", "observe", "partial_amaxes", "tile_bits"]

MOST_PARTS = 1024
"""Most programs of ``partial_amaxes``: more than any GPU runs at a time, and few enough for each cast to read."""

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
    """Set int32 ``place`` to the maximum of itself and ``bits``. ``seen`` was read from it when the program began.
    ``place`` only grows while a kernel runs, so ``seen`` is a lower bound, and most programs need no atomic."""
    tl.atomic_max(place, bits, mask=bits > seen, sem="relaxed")


@triton.jit
def tile_bits(
    x, top, left, rows, columns, row_stride, column_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    """Return int32 [ROWS, COLUMNS]: magnitudes from (top, left) on. Whole tiles are read without masks, so that loads
    are wide for any row length."""
    row = tl.arange(0, ROWS).to(INDEX)[:, None]
    column = tl.arange(0, COLUMNS).to(INDEX)[None, :]
    start = x + top.to(tl.int64) * row_stride + left.to(tl.int64) * column_stride
    places = start + (row * row_stride + column * column_stride)
    if (top + ROWS <= rows) & (left + COLUMNS <= columns):
        bits = magnitude_bits(tl.load(places))
    else:
        bits = magnitude_bits(tl.load(places, mask=(top + row < rows) & (left + column < columns), other=0.0))
    return bits


@triton.jit(do_not_specialize_on_alignment=["out", "cold"])
def _amax_kernel(
    x,  # [rows, columns], strides as given
    out,  # GROW: int32[1], grows; else int32[programs], each writes its own
    cold,  # IF_COLD: bool[1]: x is read only if it is set
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


def observe(x: Tensor, pending: Tensor) -> None:
    """See ``reference.magnitude.observe``. Copies a tensor with more than two dims that cannot be merged."""
    if x.numel():
        _launch(in_rows(x), pending.view(torch.int32), None, grow=True)


def partial_amaxes(x: Tensor, cold: Tensor | None = None) -> Tensor:
    """Return int32[programs]: amax bits of parts of ``x``, for the caller to reduce.

    With ``cold`` (0-d bool), x is read only if the device finds it set; otherwise the parts are 0. A single maximum
    would need a launch of its own to clear it.
    """
    lying = in_rows(x)
    parts = torch.empty(min(MOST_PARTS, max(1, _tiles(lying))), dtype=torch.int32, device=x.device)
    _launch(lying, parts, cold, grow=False)
    return parts


def in_rows(x: Tensor) -> Tensor:
    """Return the values of ``x`` as [rows, columns], in any order, repeated or not. One row if memory has no gaps."""
    if x.numel() == 0:
        return x.new_empty(0, 0)
    sizes: list[int] = []
    strides: list[int] = []
    for stride, size in sorted(zip(x.stride(), x.shape), reverse=True):
        if size == 1 or stride == 0:  # Repeated values do not change a maximum.
            continue
        if sizes and strides[-1] == size * stride:
            sizes[-1], strides[-1] = sizes[-1] * size, stride
        else:
            sizes.append(size)
            strides.append(stride)
    if len(sizes) > 2:
        return x.contiguous().view(1, -1)
    padding = 2 - len(sizes)
    return x.as_strided([1] * padding + sizes, [0] * padding + strides)


def _tile(lying: Tensor) -> tuple[int, int]:
    columns = min(_BLOCK if lying.shape[0] == 1 else _BLOCK // 8, max(16, triton.next_power_of_2(lying.shape[1])))
    return (1, _BLOCK) if lying.shape[0] == 1 else (_BLOCK // columns, columns)


def _tiles(lying: Tensor) -> int:
    rows, columns = _tile(lying)
    return int(triton.cdiv(lying.shape[0], rows) * triton.cdiv(lying.shape[1], columns))


def _launch(lying: Tensor, out: Tensor, cold: Tensor | None, grow: bool) -> None:
    rows, columns = _tile(lying)
    farthest = _BLOCK * max(1, *lying.stride()) + max(lying.shape)
    with on_device_of(lying):
        _amax_kernel[(max(1, _tiles(lying)) if grow else out.numel(),)](
            lying,
            out,
            out if cold is None else cold,
            *lying.shape,
            *lying.stride(),
            GROW=grow,
            IF_COLD=cold is not None,
            ROWS=rows,
            COLUMNS=columns,
            INDEX=tl.int64 if farthest > _LARGEST_OFFSET else tl.int32,
            num_warps=_WARPS,
        )

"""Counts the shares of elements that a cast saturates or flushes to zero, in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8dist_kernels.reference import magnitude
from fp8dist_kernels.reference.shares import limits, require_scales
from fp8dist_kernels.triton.launching import ceil_div, on_device_of
from fp8dist_kernels.triton.magnitude import magnitude_bits, tile_bits
from fp8dist_kernels.triton.strips import Page
from fp8dist_kernels.triton.tickets import came_last

_ROWS, _COLUMNS = 64, 128  # A tile lies inside one 128 x 128 block, also if x is transposed.
_WARPS = 8
_MOST_PROGRAMS = 1024  # More than any GPU runs at a time. Limited, because all programs add to the same three words.

_INFINITY = tl.constexpr(magnitude.INFINITY_BITS)


@triton.jit
def _places(start, stride, SIDE: tl.constexpr, TILE: tl.constexpr):
    """Return the offsets of a tile's scales along one dim, int64: [TILE] if there are several, else [1]. ``start``: the
    tile's first row or column. SIDE: rows or columns per scale; 0: all."""
    if SIDE == 0:
        place = tl.zeros((1,), tl.int64)
    elif SIDE < TILE:
        place = (start + tl.arange(0, TILE)) // SIDE
    else:
        place = tl.zeros((1,), tl.int64) + start // SIDE
    return place.to(tl.int64) * stride


@triton.jit
def _add_share(place, count, numel):
    """Set ``place``, float32 as int32, to the maximum of itself and count / numel. Bits of positive floats are ordered
    like their values."""
    share = tl.div_rn(count.to(tl.float32), numel.to(tl.float32))
    tl.atomic_max(place, share.to(tl.int32, bitcast=True), sem="relaxed")


# Slots have any address in their arena: compile no variants for 16-byte alignment.
@triton.jit(
    do_not_specialize=["numel"], do_not_specialize_on_alignment=["inv_scale", "saturated", "underflow", "scratch"]
)
def _shares_kernel(
    x,  # [height, width], strides as given
    inv_scale,  # float32 [height / DOWN, width / ACROSS], strides as given
    saturated,  # int32[1], grows
    underflow,  # int32[1], grows
    scratch,  # int64[3]: both counts and a ticket, 0 before and after
    height,
    width,
    row_stride,
    column_stride,
    scale_row_stride,
    scale_column_stride,
    numel,
    MOST: tl.constexpr,  # As ``limits`` returns it, before it is multiplied by the inverse scale.
    LEAST: tl.constexpr,  # Likewise.
    DOWN: tl.constexpr,  # Rows of a block: 1 or 32, or a multiple of ROWS, or 0 for all of them.
    ACROSS: tl.constexpr,  # Likewise.
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INDEX: tl.constexpr,
):
    """See ``reference.shares.measure``: running maxima of two shares. A program counts in every n-th tile."""
    across = tl.cdiv(width, COLUMNS)
    cut_off, lost = 0, 0
    for tile in range(tl.program_id(0), tl.cdiv(height, ROWS) * across, tl.num_programs(0)):
        top = (tile // across).to(INDEX) * ROWS
        left = (tile % across).to(INDEX) * COLUMNS
        bits = tile_bits(x, top, left, height, width, row_stride, column_stride, ROWS, COLUMNS, INDEX)
        down = _places(top, scale_row_stride, DOWN, ROWS)[:, None]
        right = _places(left, scale_column_stride, ACROSS, COLUMNS)[None, :]
        inside = (top + tl.arange(0, down.shape[0])[:, None] < height) & (
            left + tl.arange(0, right.shape[1])[None, :] < width
        )
        scale = tl.load(inv_scale + (down + right), mask=inside, other=1.0)
        most, least = magnitude_bits(scale * MOST), magnitude_bits(scale * LEAST)
        least = tl.where(least <= _INFINITY, least, 0)  # Nothing is below a NaN limit.
        finite = bits < _INFINITY
        cut_off += tl.sum(tl.sum(((bits > most) & finite).to(tl.int32), 1), 0)
        lost += tl.sum(tl.sum(((bits > 0) & (bits <= least) & finite).to(tl.int32), 1), 0)
    tl.atomic_add(scratch, cut_off, mask=cut_off > 0, sem="relaxed")
    tl.atomic_add(scratch + 1, lost, mask=lost > 0, sem="relaxed")
    if came_last(scratch + 2):
        _add_share(saturated, tl.atomic_xchg(scratch, 0, sem="relaxed"), numel)
        _add_share(underflow, tl.atomic_xchg(scratch + 1, 0, sem="relaxed"), numel)


def measure(
    x: Tensor,
    inv_scale: Tensor,
    dtype: torch.dtype,
    saturated: Tensor,
    underflow: Tensor,
    *,
    block: tuple[int, int],
) -> None:
    """See ``reference.shares.measure``."""
    if x.numel() == 0:
        return
    require_scales(x, inv_scale, block)
    page = Page.of(x)
    sides = tuple(0 if side >= size else side for side, size in zip(block, x.shape))
    strides = inv_scale.stride() if inv_scale.ndim == 2 else (0, 0)
    if page.on_its_side:
        sides, strides = sides[::-1], strides[::-1]
    programs = min(_MOST_PROGRAMS, ceil_div(page.height, _ROWS) * ceil_div(page.width, _COLUMNS))
    most, least = limits(dtype)
    with on_device_of(x):
        _shares_kernel[(programs,)](
            x,
            inv_scale,
            saturated.view(torch.int32),
            underflow.view(torch.int32),
            torch.zeros(3, dtype=torch.int64, device=x.device),
            *page.lying[:4],
            *strides,
            x.numel(),
            MOST=most,
            LEAST=least,
            DOWN=sides[0],
            ACROSS=sides[1],
            ROWS=_ROWS,
            COLUMNS=_COLUMNS,
            INDEX=page.offset_type(_ROWS, _COLUMNS),
            num_warps=_WARPS,
        )

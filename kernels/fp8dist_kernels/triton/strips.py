"""Tiles of a matrix that are read once and written twice: as they lie in memory (straight) and transposed (flipped).

A tile of [tall, wide] is held as four strips of [tall / 4, wide]: rows 0, 4, 8, …, then rows 1, 5, 9, …, and so on. A
thread then holds four consecutive rows of some columns, and the transposition in shared memory moves words instead of
bytes.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from fp8dist_kernels.reference.casts import padded
from fp8dist_kernels.triton.launching import PLANS, ceil_div

_LARGEST_OFFSET = 2**31 - 1


class Page(NamedTuple):
    """A matrix [height, width] as kernels read it: [tokens, features], or its transpose if only the tokens are
    contiguous. The first six fields are arguments of the kernels, in their order. Strides and widths are in elements.
    """

    height: int
    width: int
    row_stride: int
    column_stride: int
    straight_width: int
    """Row length of the straight copy, including the padding of tokens."""
    flipped_width: int
    """Row length of the flipped copy, likewise."""
    on_its_side: bool
    """True if height and width are features and tokens, not tokens and features."""

    @classmethod
    def of(cls, x: Tensor) -> Page:
        """Return the page of [tokens, features], any strides. If it is on its side, the straight copy is the transposed
        copy of x, and the flipped copy is the row-major one."""
        return page_of(x.shape, x.stride())

    @property
    def lying(self) -> tuple[int, ...]:
        """Height, width, both strides, and the widths of both copies."""
        return self[:6]

    def sides(self, of_rows: Tensor, of_columns: Tensor) -> tuple[Tensor, Tensor]:
        """Return (tensor of the straight copy, tensor of the flipped copy). ``of_rows`` belongs to the row-major copy,
        ``of_columns`` to the transposed one."""
        return (of_columns, of_rows) if self.on_its_side else (of_rows, of_columns)

    def tiles(self, tall: int, wide: int) -> int:
        """Return the number of tiles that cover the page; 1 for an empty page."""
        return max(1, ceil_div(self.straight_width, wide) * ceil_div(self.flipped_width, tall))

    def offset_type(self, tall: int, wide: int) -> Any:
        """Return the integer type for row and column numbers and for offsets within a tile. The offset of the tile
        itself is always int64."""
        widest = max(self.straight_width, self.flipped_width)
        farthest = (tall + wide) * max(self.row_stride, self.column_stride, widest) + widest
        return tl.int64 if farthest > _LARGEST_OFFSET else tl.int32


@functools.lru_cache(PLANS)
def page_of(shape: tuple[int, int], strides: tuple[int, int]) -> Page:
    """Return the page of a matrix [tokens, features] with these strides."""
    (tokens, features), (down, across) = shape, strides
    if down == 1 and across != 1:
        return Page(features, tokens, across, down, padded(tokens), features, True)
    return Page(tokens, features, down, across, features, padded(tokens), False)


@triton.jit
def load_strips(
    x, top, left, height, width, row_stride, column_stride, TALL: tl.constexpr, WIDE: tl.constexpr, INDEX: tl.constexpr
):
    """Load the four strips of the tile at (top, left), with zeros beyond [height, width]."""
    row = tl.arange(0, TALL // 4).to(INDEX)[:, None] * 4
    column = tl.arange(0, WIDE).to(INDEX)[None, :]
    start = x + top.to(tl.int64) * row_stride + left.to(tl.int64) * column_stride
    # Row by row: twice a stride may overflow 32 bits where the stride itself does not.
    first = start + (row * row_stride + column * column_stride)
    second = first + row_stride
    third = second + row_stride
    inside = left + column < width
    a = tl.load(first, mask=(top + row < height) & inside, other=0.0)
    b = tl.load(second, mask=(top + row + 1 < height) & inside, other=0.0)
    c = tl.load(third, mask=(top + row + 2 < height) & inside, other=0.0)
    d = tl.load(third + row_stride, mask=(top + row + 3 < height) & inside, other=0.0)
    return a, b, c, d


@triton.jit
def scaled(x, scale):
    """Return ``x * scale`` in float32, NaN where ``x`` is Inf. ``scale`` > 0. The conversion to FP8 then saturates
    finite values.

    The hardware's conversion also saturates Inf, so Inf must become NaN here: ``x * 0 + scale`` is exactly ``scale``
    for finite x, and NaN otherwise. This costs one instruction and keeps the sign of zero.
    """
    x = x.to(tl.float32)
    return x * tl.fma(x, tl.zeros_like(x), tl.zeros_like(x) + scale)


@triton.jit
def store_straight(
    out, a, b, c, d, top, left, height, out_width, TALL: tl.constexpr, WIDE: tl.constexpr, INDEX: tl.constexpr
):
    """Store four float32 strips as contiguous FP8 [height, out_width]."""
    fp8: tl.constexpr = out.dtype.element_ty
    row = tl.arange(0, TALL // 4).to(INDEX)[:, None] * 4
    column = tl.arange(0, WIDE).to(INDEX)[None, :]
    first = out + (top.to(tl.int64) * out_width + left) + (row * out_width + column)
    second = first + out_width
    third = second + out_width
    inside = left + column < out_width
    tl.store(first, a.to(fp8), mask=(top + row < height) & inside)
    tl.store(second, b.to(fp8), mask=(top + row + 1 < height) & inside)
    tl.store(third, c.to(fp8), mask=(top + row + 2 < height) & inside)
    tl.store(third + out_width, d.to(fp8), mask=(top + row + 3 < height) & inside)


@triton.jit
def store_flipped(
    out, a, b, c, d, top, left, width, length, out_width, TALL: tl.constexpr, WIDE: tl.constexpr, INDEX: tl.constexpr
):
    """Store four float32 strips, transposed, as FP8 [width, length], in rows of ``out_width``."""
    # [row / 4, column, bit 1 of the row, bit 0 of the row]. Converting here packs four rows into one word. To share the
    # conversions with ``store_straight`` would save 16 of 32 per thread, but cost 16 more byte permutations (Hopper).
    fp8 = tl.join(tl.join(a, c), tl.join(b, d)).to(out.dtype.element_ty)
    row = tl.arange(0, WIDE).to(INDEX)[:, None]
    column = tl.arange(0, TALL).to(INDEX)[None, :]
    places = out + (left.to(tl.int64) * out_width + top) + (row * out_width + column)
    tl.store(
        places,
        tl.reshape(tl.permute(fp8, (1, 0, 2, 3)), (WIDE, TALL)),
        mask=(left + row < width) & (top + column < length),
    )

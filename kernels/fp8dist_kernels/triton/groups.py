"""Lets each program find the group (the rows of one expert) and the tile that it works on. See ``reference.groups``.

The host does not know how many tiles a group has. So a grid has a program for each tile that could exist, and each
program sums the sizes of all groups to find its own. Tiles after those of the last group belong to the tail: rows of no
expert, and columns of the transposed copy that no group takes. The group index of these tiles is the number of groups.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fp8dist_kernels.reference import casts
from fp8dist_kernels.triton.launching import ceil_div

_ALIGNMENT = tl.constexpr(casts.TOKEN_ALIGNMENT)


def tiles_bound(length: int, groups: int, tile: int) -> int:
    """Return a number of tiles that suffices for all groups and for the tail.

    ``length``: the number of tokens, or its ``columns_bound`` if the tail includes unused columns of the transposed
    copy. ``groups``: the number of groups that may have rows. ``tile``: rows of a tile.
    """
    # A tile has a multiple of 16 rows, so n rows take at most (padded(n) + tile - 16) / tile tiles. The tail has at
    # most 15 rows more than the transposed copy has unused columns.
    return ceil_div(length, tile) + groups + 1


@triton.jit
def larger(a, b):
    """Return the maximum: the function that ``tl.associative_scan`` needs for running maxima."""
    return tl.maximum(a, b)


@triton.jit
def _sizes(offsets, groups, length, GROUPS: tl.constexpr):
    """Return the indices below GROUPS, a power of two, and the number of rows of each group; 0 from ``groups`` on.
    Offsets are cut as by ``reference.groups.cut``, to ``length`` rows."""
    group = tl.arange(0, GROUPS)
    ends = tl.load(offsets + group, mask=group < groups, other=0)
    starts = tl.load(offsets + group - 1, mask=(group > 0) & (group < groups), other=0)
    starts = tl.associative_scan(tl.minimum(starts, length), 0, larger)  # The first is 0.
    return group, tl.maximum(tl.minimum(ends, length) - starts, 0)


@triton.jit
def find_group(offsets, groups, index, length, TILE: tl.constexpr, GROUPS: tl.constexpr):
    """Return, for the tile with this index: its group and its index among the group's tiles; then of the group: its
    first row, its number of rows, its first column in the transposed copy, and the number of tiles of all groups before
    it. ``length``: the number of rows of the tensor. TILE: rows of a tile."""
    each, sizes = _sizes(offsets, groups, length, GROUPS)
    tiles = (sizes + TILE - 1) // TILE
    passed = tl.cumsum(tiles, 0) <= index
    group = tl.minimum(tl.sum(passed.to(tl.int32), 0), groups)
    before = each < group
    first = tl.sum(tl.where(before, tiles, 0), 0)
    start = tl.sum(tl.where(before, sizes, 0), 0)
    rows = tl.sum(tl.where(each == group, sizes, 0), 0)
    column = tl.sum(tl.where(before, (sizes + _ALIGNMENT - 1) // _ALIGNMENT, 0), 0) * _ALIGNMENT
    return group, index - first, start, rows, column, first


@triton.jit
def columns_of(
    offsets, groups, group, length, blocks,
    BLOCK: tl.constexpr, GROUPS: tl.constexpr, ALIGNMENT: tl.constexpr,
):  # fmt: skip
    """Return a group's first column in the transposed copy, its number of rows, and the number of blocks of BLOCK
    tokens in the groups before it. Each group begins at a multiple of ALIGNMENT.

    ``length``, ``blocks``: the number of columns and of blocks of the copy, which limit the rows of a group. A group
    that ends beyond the tokens, whose number is not known here, was cut by the cast: its further columns are zeros.
    """
    each, sizes = _sizes(offsets, groups, length, GROUPS)
    before = each < group
    column = tl.sum(tl.where(before, (sizes + ALIGNMENT - 1) // ALIGNMENT, 0), 0) * ALIGNMENT
    block = tl.sum(tl.where(before, (sizes + BLOCK - 1) // BLOCK, 0), 0)
    rows = tl.sum(tl.where(each == group, sizes, 0), 0)
    return column, tl.maximum(tl.minimum(rows, tl.minimum(length - column, (blocks - block) * BLOCK)), 0), block

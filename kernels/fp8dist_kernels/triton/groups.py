"""Groups on the device: which expert's rows a program has. See ``reference.groups``.

The host does not know how many tiles a group has. So a grid has a program for each tile that could exist, and each
program sums the sizes of all groups to find its own. Tiles after those of the last group belong to the tail: rows of no
expert, and room of the transposed copy that no group takes. The tail's group is the number of groups.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fp8dist_kernels.reference import casts
from fp8dist_kernels.triton.launching import ceil_div

__all__ = ["columns_of", "find_group", "larger", "tiles_bound"]

_ALIGNMENT = tl.constexpr(casts.TOKEN_ALIGNMENT)


def tiles_bound(length: int, groups: int, tile: int) -> int:
    """Return a number of tiles that suffices for all groups and for the tail.

    ``length``: the tokens, or ``columns_bound`` of them if the tail covers the rest of the transposed copy, too.
    ``groups``: those that may have rows.
    """
    # A group of n rows takes at most (padded(n) + tile - 16) / tile tiles, and the tail has at most 15 rows more than
    # the rest of the transposed copy.
    return ceil_div(length, tile) + groups + 1


@triton.jit
def larger(a, b):
    """Combine two numbers of a running maximum."""
    return tl.maximum(a, b)


@triton.jit
def _sizes(offsets, groups, length, GROUPS: tl.constexpr):
    """Return the indices below GROUPS, a power of two, and the sizes of these groups; 0 where there is none. Offsets
    are cut as by ``reference.groups.cut``."""
    group = tl.arange(0, GROUPS)
    ends = tl.load(offsets + group, mask=group < groups, other=0)
    starts = tl.load(offsets + group - 1, mask=(group > 0) & (group < groups), other=0)
    starts = tl.associative_scan(tl.minimum(starts, length), 0, larger)  # The first is 0.
    return group, tl.maximum(tl.minimum(ends, length) - starts, 0)


@triton.jit
def find_group(offsets, groups, index, length, TILE: tl.constexpr, GROUPS: tl.constexpr):
    """Return, for the tile with this index: its group; its place among the group's tiles; the group's first row, its
    number of rows, its first column in the transposed copy, and the number of tiles before it. ``length``: the rows
    that there are."""
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
def columns_of(offsets, groups, group, length, blocks, BLOCK: tl.constexpr, GROUPS: tl.constexpr):
    """Return a group's first column in the transposed copy, its number of rows, and the blocks of BLOCK tokens of the
    groups before it. ``length``, ``blocks``: the columns and blocks that there are. A group ends there at the latest:
    the cast has cut it, and columns after its rows are zeros."""
    each, sizes = _sizes(offsets, groups, length, GROUPS)
    before = each < group
    column = tl.sum(tl.where(before, (sizes + _ALIGNMENT - 1) // _ALIGNMENT, 0), 0) * _ALIGNMENT
    block = tl.sum(tl.where(before, (sizes + BLOCK - 1) // BLOCK, 0), 0)
    rows = tl.sum(tl.where(each == group, sizes, 0), 0)
    return column, tl.maximum(tl.minimum(rows, tl.minimum(length - column, (blocks - block) * BLOCK)), 0), block

"""Groups: the rows of a matrix, sorted by expert. Places of each group in the copies that a cast makes, and the sizes
of these copies.

``offsets`` is int32[E] on the device of the rows: the ends of the groups, never decreasing, the last at most the number
of rows. Group ``e`` is the rows from ``offsets[e - 1]`` (0 for the first) up to ``offsets[e]``; it may be empty. Rows
from ``offsets[-1]`` on belong to no group: their memory may be uninitialised. No kernel reads them. Outputs of a cast
or a product are 0 there, and their inverse scales are 1.

Offsets that decrease or exceed the number of rows are wrong. The plain-torch versions raise ValueError for them; the
Triton kernels cannot raise, and use ``cut(offsets)``.

The host does not know the offsets' values. So the shapes of results depend on the numbers of rows and groups only, and
have room for the worst case.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8dist_kernels import BLOCK
from fp8dist_kernels.reference.casts import TOKEN_ALIGNMENT


def columns_bound(tokens: Any, groups: Any, multiple: int = TOKEN_ALIGNMENT) -> Any:
    """Return the row length of the transposed copy, in which each group starts at a multiple of 16 (of 32 for MX).

    At most ``tokens + 15 * groups``, and ``padded(tokens)`` for one group. May be symbolic, as its arguments.
    """
    return (tokens + (multiple - 1) * groups) // multiple * multiple


def blocks_bound(tokens: Any, groups: Any) -> Any:
    """Return the largest number of blocks of 128 tokens that the groups can need. Each group starts a new block."""
    return (tokens + (BLOCK - 1) * groups) // BLOCK


def require_groups(offsets: Tensor, device: torch.device) -> None:
    """Raise ValueError unless dtype, shape and device of ``offsets`` are right. Does not read their values."""
    if offsets.dtype != torch.int32 or offsets.ndim != 1 or len(offsets) == 0 or not offsets.is_contiguous():
        raise ValueError(f"offsets must be contiguous int32 [experts], got {offsets.dtype} {tuple(offsets.shape)}")
    if offsets.device != device:
        raise ValueError(f"offsets must be on {device}, as the rows are; they are on {offsets.device}")


def cut(offsets: Tensor, tokens: int) -> Tensor:
    """Return ``offsets`` that never decrease and never exceed ``tokens``, the number of rows: each end is at least the
    largest before it, so a group that would end before it starts is empty. Does not read the device."""
    return offsets.clamp(0, tokens).cummax(0).values


def rows_of(
    offsets: Tensor, tokens: int | None = None, multiple: int = TOKEN_ALIGNMENT
) -> list[tuple[slice, slice, slice]]:
    """Return, for each group: its rows, its columns in the transposed copy without padding, and its blocks of 128
    tokens. Waits for the device, so only the plain-torch versions use it. ``multiple``: as in ``columns_bound``.

    Raises:
        ValueError: ``offsets`` decrease, or exceed ``tokens``, the number of rows.
    """
    found, start, column, block = [], 0, 0, 0
    for end in offsets.tolist():
        count = end - start
        if count < 0 or (tokens is not None and end > tokens):
            raise ValueError(f"offsets must not decrease, nor exceed the number of rows: {end} after {start}")
        blocks = -(-count // BLOCK)
        found.append((slice(start, end), slice(column, column + count), slice(block, block + blocks)))
        start, column, block = end, column + -(-count // multiple) * multiple, block + blocks
    return found

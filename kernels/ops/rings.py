"""Per-slot ring buffers of amaxes, with a window maximum that does not read the whole window.

A ring of length H is cut into about sqrt(H) blocks, and the maximum of each block is kept. Writing
one entry re-reads one block and all block maxima: about 2·sqrt(H) numbers a slot instead of H. At
100,000 slots and H = 1024 that is 26 MB a step instead of 410 MB.

Slots roll on their own: one that did not run keeps its cursor.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["RingShape", "ordered_window", "write_and_reduce"]


class RingShape:
    """How a ring of ``length`` entries is laid out: ``blocks`` × ``block`` >= ``length``.

    Places beyond ``length`` are never written and hold 0, which no maximum of amaxes notices.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self.block = math.isqrt(length - 1) + 1
        self.blocks = -(-length // self.block)
        self.padded = self.block * self.blocks


def write_and_reduce(
    history: Tensor,
    block_max: Tensor,
    cursor: Tensor,
    row_start: Tensor,
    block_start: Tensor,
    shape: RingShape,
    amax: Tensor,
    taken: Tensor,
) -> Tensor:
    """Write ``amax`` where ``taken``, advance those cursors, return the window maxima.

    Args:
        history: float32[n, shape.padded], changed in place.
        block_max: float32[n, shape.blocks], changed in place.
        cursor: int64[n], the place to be written next, changed in place.
        row_start: int64[n], ``arange(n) * shape.padded``.
        block_start: int64[n], ``arange(n) * shape.blocks``.
        amax: float32[n].
        taken: bool[n].

    Returns:
        float32[n]: maximum of each slot's window, the new entry included.
    """
    flat, flat_max = history.view(-1), block_max.view(-1)
    place = row_start + cursor
    flat.index_copy_(0, place, torch.where(taken, amax, flat.index_select(0, place)))
    block = block_start + torch.div(cursor, shape.block, rounding_mode="floor")
    rows = history.view(-1, shape.block).index_select(0, block)
    flat_max.index_copy_(0, block, rows.amax(1))
    cursor.add_(taken)
    cursor.masked_fill_(cursor == shape.length, 0)
    return block_max.amax(1)


def ordered_window(history: Tensor, cursor: Tensor, length: int) -> Tensor:
    """float32[n, length]: each slot's window, oldest first, newest last (zeros while unfilled)."""
    steps = torch.arange(length, device=history.device)
    return history.gather(1, (cursor[:, None] + steps) % length)

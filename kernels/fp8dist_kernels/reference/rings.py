"""Per-slot ring buffers of amaxes, with a window maximum that does not read the whole window.

A ring of length H is split into about sqrt(H) blocks, and the maximum of each block is stored. Writing one entry reads
one block and all block maxima: about 2·sqrt(H) numbers per slot instead of H. At 100,000 slots and H = 1024 this is 26
MB per step instead of 410 MB.

Each slot advances on its own: it writes next at ``count % H``, where ``count`` is the number of entries it has taken.
So a slot that did not run keeps its position, and no cursor is stored.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


class RingShape:
    """Layout of rings of ``length`` entries: ``blocks`` × ``block`` >= ``length``.

    Entries beyond ``length`` are never written. They stay 0, which does not affect a maximum of amaxes.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self.block = math.isqrt(length - 1) + 1
        self.blocks = -(-length // self.block)
        self.padded = self.block * self.blocks


def write(
    history: Tensor,
    block_max: Tensor,
    count: Tensor,
    row_start: Tensor,
    shape: RingShape,
    amax: Tensor,
    taken: Tensor,
) -> Tensor:
    """Write ``amax`` where ``taken``, and recompute the maxima of the written blocks.

    Args:
        history: float32[n, shape.padded], changed in place.
        block_max: float32[n, shape.blocks], changed in place.
        count: int64[n], entries taken before this one. The caller increments it.
        row_start: int64[n], ``arange(n) * shape.padded``.
        amax: float32[n].
        taken: bool[n].

    Returns:
        float32[n]: the maximum of each window, new entry included.
    """
    entries = history.view(-1)
    place = torch.remainder(count, shape.length).add_(row_start)
    entries.index_copy_(0, place, torch.where(taken, amax, entries.index_select(0, place)))
    block = place.div_(shape.block, rounding_mode="floor")  # Rows are whole blocks long.
    blocks = history.view(-1, shape.block).index_select(0, block)
    block_max.view(-1).index_copy_(0, block, blocks.amax(1))
    return block_max.amax(1)


def ordered_window(history: Tensor, count: Tensor, shape: RingShape) -> Tensor:
    """Return each slot's window, float32[n, length], oldest first (zeros while unfilled)."""
    return history.gather(1, _columns(count, shape))


def write_window(history: Tensor, block_max: Tensor, count: Tensor, shape: RingShape, rows: Tensor) -> None:
    """Replace whole windows by ``rows`` (float32[n, length], oldest first), at the positions that ``count`` gives."""
    history.scatter_(1, _columns(count, shape), rows)
    torch.amax(history.view(-1, shape.blocks, shape.block), 2, out=block_max)


def _columns(count: Tensor, shape: RingShape) -> Tensor:
    steps = torch.arange(shape.length, device=count.device)
    return (count[:, None] + steps).remainder(shape.length)

"""Per-slot ring buffers of amaxes, with a window maximum that does not read the whole window.

A ring of length H is cut into about sqrt(H) blocks, and the maximum of each block is kept. Writing
one entry reads one block and all block maxima: about 2·sqrt(H) numbers a slot instead of H. At
100,000 slots and H = 1024 that is 26 MB a step instead of 410 MB.

Slots roll on their own. The place that is written next follows from how many entries a slot has taken:
``count % H``. So one that did not run stays where it is, and there is no cursor to keep.

All that does not depend on the new entries is read by ``look_ahead``, which can run while the collective
that brings them is in flight; ``write`` is short.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["LookAhead", "RingShape", "look_ahead", "ordered_window", "write", "write_window"]


class RingShape:
    """How rings of ``length`` entries are laid out: ``blocks`` × ``block`` >= ``length``.

    Places beyond ``length`` are never written and hold 0, which no maximum of amaxes notices.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self.block = math.isqrt(length - 1) + 1
        self.blocks = -(-length // self.block)
        self.padded = self.block * self.blocks


class LookAhead(NamedTuple):
    """What a write needs to know of n rings; each a tensor of n.

    ``place`` and ``block`` are flat indices of the entry to be replaced and of its block; ``*_old`` what
    is there; ``*_rest`` the maxima of the block and of the window without the entry to be replaced.
    """

    place: Tensor
    place_old: Tensor
    block: Tensor
    block_old: Tensor
    block_rest: Tensor
    window_rest: Tensor


def look_ahead(history: Tensor, block_max: Tensor, count: Tensor, shape: RingShape) -> LookAhead:
    """Read what the next write needs.

    Args:
        history: float32[n, shape.padded].
        block_max: float32[n, shape.blocks].
        count: int64[n], entries taken so far.
    """
    slots = torch.arange(len(count), device=count.device)
    column = count.remainder(shape.length)
    block_column = column.div(shape.block, rounding_mode="floor")
    place = slots * shape.padded + column
    block = slots * shape.blocks + block_column
    entries = history.view(-1, shape.block).index_select(0, block)
    entries.scatter_(1, (column - block_column * shape.block)[:, None], 0.0)
    block_rest = entries.amax(1)
    window_rest = block_max.scatter(1, block_column[:, None], block_rest[:, None]).amax(1)
    return LookAhead(
        place,
        history.view(-1).index_select(0, place),
        block,
        block_max.view(-1).index_select(0, block),
        block_rest,
        window_rest,
    )


def write(history: Tensor, block_max: Tensor, ahead: LookAhead, amax: Tensor, taken: Tensor) -> Tensor:
    """Write ``amax`` (float32[n]) where ``taken`` (bool[n]). Counting the entries is the caller's.

    Returns:
        float32[n]: the window maxima, new entry included; meaningless where not ``taken``.
    """
    history.view(-1).index_copy_(0, ahead.place, torch.where(taken, amax, ahead.place_old))
    block = torch.where(taken, torch.maximum(ahead.block_rest, amax), ahead.block_old)
    block_max.view(-1).index_copy_(0, ahead.block, block)
    return torch.maximum(ahead.window_rest, amax)


def ordered_window(history: Tensor, count: Tensor, shape: RingShape) -> Tensor:
    """float32[n, length]: each slot's window, oldest first, newest last (zeros while unfilled)."""
    return history.gather(1, _columns(count, shape))


def write_window(history: Tensor, block_max: Tensor, count: Tensor, shape: RingShape, rows: Tensor) -> None:
    """Replace whole windows by ``rows`` (float32[n, length], oldest first), for these counts."""
    history.scatter_(1, _columns(count, shape), rows)
    torch.amax(history.view(-1, shape.blocks, shape.block), 2, out=block_max)


def _columns(count: Tensor, shape: RingShape) -> Tensor:
    steps = torch.arange(shape.length, device=count.device)
    return (count[:, None] + steps).remainder(shape.length)

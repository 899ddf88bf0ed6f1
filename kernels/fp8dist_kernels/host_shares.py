"""Shares of saturated and flushed elements on a CPU: ``reference/shares.py`` in numpy, for a tensor with one scale.

It reads the tensor once, in pieces that fit a core's cache, and takes a sixth of the time of the torch operations.
``reference/shares.py`` says what is right, and tests compare all bits.
"""

from __future__ import annotations

import math
import struct

import numpy as np
import torch
from torch import Tensor

from fp8dist_kernels.reference.magnitude import INFINITY_BITS
from fp8dist_kernels.reference.shares import limits, require_scales
from fp8dist_kernels.scaling import FLOAT32_MAX

__all__ = ["measure"]

PIECE = 1 << 16
"""Elements that are counted at once."""


def measure(
    x: Tensor,
    inv_scale: Tensor,
    dtype: torch.dtype,
    saturated: Tensor,
    underflow: Tensor,
    *,
    block: tuple[int, int],
) -> None:
    """See ``reference.shares.measure``. ``block`` is (0, 0): one scale."""
    if x.numel() == 0:
        return
    require_scales(x, inv_scale, block)
    each = inv_scale.item()
    most, least = (_bits(each * limit) for limit in limits(dtype))  # Exact in float64, and rounded once.
    rows = x.detach().float()  # Of a transposed tensor, the memory's order: a count has none.
    rows = rows if rows.is_contiguous() or not rows.t().is_contiguous() else rows.t()
    counts = _count(rows.contiguous(), most, least)
    for place, count in zip((saturated, underflow), counts):
        share = float(np.float32(count) / np.float32(x.numel()))
        if share > place.item():
            place.fill_(share)


def _bits(limit: float) -> int | None:
    """Return the float32 bits of a limit for finite magnitudes; None if it is NaN, which no number exceeds or meets."""
    return None if math.isnan(limit) else int(struct.unpack("i", struct.pack("f", min(limit, FLOAT32_MAX)))[0])


def _count(x: Tensor, most: int | None, least: int | None) -> tuple[int, int]:
    """Return how many finite elements have magnitudes above ``most``, and above 0 and at most ``least``."""
    bits = x.view(-1).view(torch.int32)
    # Not x.numpy(): FSDP2 frees a weight by resizing its memory, which torch refuses once numpy has seen it.
    scratch = torch.empty(min(PIECE, bits.numel()), dtype=torch.int32, device="cpu")
    magnitudes = scratch.numpy().view(np.uint32)
    found = np.empty(magnitudes.size, dtype=np.bool_)
    above = below = 0
    for start in range(0, bits.numel(), PIECE):
        part = bits[start : start + PIECE]
        torch.bitwise_and(part, 0x7FFFFFFF, out=scratch[: part.numel()])
        piece = magnitudes[: part.numel()]
        if most is not None and piece.max() > most:
            above += np.count_nonzero((piece > np.uint32(most)) & (piece < np.uint32(INFINITY_BITS)))
        if least is not None:  # 0 becomes the largest number.
            np.subtract(piece, np.uint32(1), out=piece)
            below += np.count_nonzero(np.less(piece, np.uint32(least), out=found[: piece.size]))
    return int(above), int(below)

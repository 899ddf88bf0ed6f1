"""Shares of saturated and flushed elements on a CPU: ``reference/shares.py`` in numpy, for a tensor with one scale.

The tensor is read once, in pieces that fit a core's cache, in a sixth of the time of the torch operations.
``reference/shares.py`` defines the results; tests compare all bits.
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

PIECE = 1 << 16
"""Elements that are counted at once: 256 KiB of float32."""


def measure(
    x: Tensor,
    inv_scale: Tensor,
    dtype: torch.dtype,
    saturated: Tensor,
    underflow: Tensor,
    *,
    block: tuple[int, int],
) -> None:
    """Record the shares of ``x`` in ``saturated`` and ``underflow``: see ``reference.shares.measure``. ``block`` must
    be (0, 0), which means one scale for the tensor."""
    if x.numel() == 0:
        return
    require_scales(x, inv_scale, block)
    each = inv_scale.item()
    most, least = (_bits(each * limit) for limit in limits(dtype))  # Exact in float64, and rounded once.
    rows = x.detach().float()
    # A count does not depend on the order, so a transposed tensor is read as it lies, without a copy.
    rows = rows if rows.is_contiguous() or not rows.t().is_contiguous() else rows.t()
    counts = _count(rows.contiguous(), most, least)
    for place, count in zip((saturated, underflow), counts):
        share = float(np.float32(count) / np.float32(x.numel()))  # In float32, as the reference divides.
        if share > place.item():
            place.fill_(share)


def _bits(limit: float) -> int | None:
    """Return the float32 bits of ``limit``, or of the largest float32 if that is less. None for NaN: nothing counts."""
    return None if math.isnan(limit) else int(struct.unpack("i", struct.pack("f", min(limit, FLOAT32_MAX)))[0])


def _count(x: Tensor, most: int | None, least: int | None) -> tuple[int, int]:
    """Return two counts of finite elements of ``x``, contiguous float32: |x| > ``most``, and 0 < |x| <= ``least``. Both
    limits are float32 bits; None counts nothing."""
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
        if least is not None:  # Minus 1, a zero wraps to the largest uint32: it does not count.
            np.subtract(piece, np.uint32(1), out=piece)
            below += np.count_nonzero(np.less(piece, np.uint32(least), out=found[: piece.size]))
    return int(above), int(below)

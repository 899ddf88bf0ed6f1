"""The expert of each row, and each expert's share of elements that a cast saturates or flushes to zero. The host never
waits for the device."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8dist_kernels.reference.magnitude import DID_NOT_RUN_BITS
from fp8dist_kernels.reference.shares import limits


def expert_of_rows(tokens: int, offsets: Tensor) -> Tensor:
    """Return int64[tokens]: the expert of each row, E for rows without one (see ``groups.py``). Does not wait for the
    device."""
    return torch.bucketize(torch.arange(tokens, device=offsets.device), offsets, right=True)


def measure_grouped(
    x: Tensor, offsets: Tensor | None, inv_scale: Tensor, dtype: torch.dtype, saturated: Tensor, underflow: Tensor
) -> None:
    """Record for each expert the shares of elements that a cast saturates and flushes to zero, as running maxima. See
    ``shares.measure`` for what counts. An expert without elements records nothing.

    Args:
        x: [tokens, features], sorted by expert, with ``offsets``; or a weight [E, n, k] without.
        offsets: int32[E], see ``groups``.
        inv_scale: float32 of the cast, in a shape that broadcasts to ``x``.
        saturated, underflow: float32[E], may be views. -1: not measured yet.
    """
    experts = len(saturated)
    if x.numel() == 0:
        return
    magnitude = x.float().abs()
    finite = magnitude < torch.inf
    most, least = limits(dtype)
    if offsets is None:
        rows = torch.full((experts,), x.shape[1], dtype=torch.int64, device=x.device)
    else:
        rows = torch.diff(offsets.long(), prepend=offsets.new_zeros(1, dtype=torch.int64))
    elements = (rows * x.shape[-1]).float()
    for place, counted in (
        (saturated, (magnitude > inv_scale * most) & finite),
        (underflow, (magnitude > 0) & (magnitude <= inv_scale * least) & finite),
    ):
        by_row = counted.sum(-1)
        if offsets is None:
            count = by_row.sum(-1)
        else:  # The extra element takes the rows of no expert.
            count = torch.zeros(experts + 1, dtype=torch.int64, device=x.device)
            count = count.scatter_add_(0, expert_of_rows(len(x), offsets), by_row)[:experts]
        share = (count.float() / elements).view(torch.int32)
        bits = place.view(torch.int32)
        bits.copy_(torch.maximum(bits, torch.where(rows > 0, share, DID_NOT_RUN_BITS)))

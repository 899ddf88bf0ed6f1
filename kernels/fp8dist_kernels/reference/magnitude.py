"""amax: the largest magnitude of a tensor, as integer bits, so that an integer max keeps NaN and Inf."""

from __future__ import annotations

import torch
from torch import Tensor

DID_NOT_RUN = -1.0
"""Value of ``pending`` for a slot that saw no tensor. As int32 it is negative, so any recorded amax (bits >= 0) wins an
integer max against it."""

DID_NOT_RUN_BITS = -0x40800000
"""``DID_NOT_RUN`` as int32."""

INFINITY_BITS = 0x7F800000
"""Bits of float32 +Inf. Finite amaxes are below, NaN is above."""

_MAGNITUDE = 0x7FFFFFFF


def amax_bits(x: Tensor) -> Tensor:
    """Return max |x| in float32, as int32 bits. NaN wins over Inf, Inf over finite values.

    The sign bit is masked, because a NaN can be negative and would then lose an integer max.

    Returns:
        0-d int32 on ``x``'s device; the bits of ``DID_NOT_RUN`` for an empty ``x``.
    """
    if x.numel() == 0:
        return torch.full((), DID_NOT_RUN_BITS, dtype=torch.int32, device=x.device)
    low, high = torch.aminmax(x)
    return torch.maximum(high, -low).float().view(torch.int32) & _MAGNITUDE


def record_amax(bits: Tensor, pending: Tensor) -> None:
    """Set ``pending`` (0-d float32, a view of a slot) to the maximum of itself and ``bits`` (0-d int32)."""
    place = pending.view(torch.int32)
    torch.maximum(place, bits, out=place)


def observe(x: Tensor, pending: Tensor) -> None:
    """Set ``pending`` (0-d float32) to the maximum of itself and the amax of ``x`` (any shape and strides)."""
    record_amax(amax_bits(x), pending)

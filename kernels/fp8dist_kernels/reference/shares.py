"""Shares of elements that a cast saturates or flushes to zero."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8dist_kernels import MX_BLOCK
from fp8dist_kernels.formats import FORMATS
from fp8dist_kernels.reference.blocks import BLOCK_SHAPES, blocks_along
from fp8dist_kernels.reference.magnitude import record_amax

WHOLE = (0, 0)
"""The ``block`` of a tensor with a single scale."""


def measure(
    x: Tensor,
    inv_scale: Tensor,
    dtype: torch.dtype,
    saturated: Tensor,
    underflow: Tensor,
    *,
    block: tuple[int, int],
) -> None:
    """Record the shares of ``x`` that a cast with these scales saturates and flushes to zero, as running maxima.

    A share is a count divided by ``x.numel()``, both in float32. Finite elements count if their magnitude is

    - above ``rounds_to_max * inv_scale``: saturated, and not only rounded to the format's largest number;
    - above 0, and at most half of the format's smallest number times ``inv_scale``: flushed to zero.

    ``x`` is read as float32, and the limits are float32 products: if the second one underflows to 0, nothing counts as
    flushed. The cast itself multiplies by the scale, so it may treat an element within a rounding error of a limit
    differently. An empty ``x`` changes nothing.

    Args:
        x: [tokens, features], any float dtype, any strides.
        inv_scale: float32, any strides: one element, or one for each block of ``x``.
        dtype: the dtype of the cast: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        saturated, underflow: 0-d float32, may be views. -1: not measured yet.
        block: (0, 0) for one scale; (1, features), (1, 128), (128, 128) or (1, 32) for scales of the row-major copies
            of ``quantize_rowwise``, ``quantize_blocks`` and ``quantize_mx``.

    Raises:
        ValueError: any other block, or ``inv_scale`` of another shape or dtype.
    """
    if x.numel() == 0:
        return
    require_scales(x, inv_scale, block)
    tokens, features = x.shape
    if block == WHOLE:
        each = inv_scale.reshape(())
    else:
        each = inv_scale.repeat_interleave(block[0], 0)[:tokens].repeat_interleave(block[1], 1)[:, :features]
    most, least = limits(dtype)
    magnitude = x.float().abs()
    finite = magnitude < torch.inf
    # A tensor, because CUDA divides by a Python number as a multiplication with its reciprocal.
    numel = torch.full((), x.numel(), dtype=torch.float32, device=x.device)
    for place, counted in (
        (saturated, (magnitude > each * most) & finite),
        (underflow, (magnitude > 0) & (magnitude <= each * least) & finite),
    ):
        record_amax((counted.sum().float() / numel).view(torch.int32), place)


def limits(dtype: torch.dtype) -> tuple[float, float]:
    """Return (the largest number that rounds to the format's maximum, the largest that rounds to zero)."""
    # Not cached: Dynamo, which traces grouped casts, warns of functions that are.
    rounds_to_max = next(one.rounds_to_max for one in FORMATS.values() if one.dtype == dtype)
    info = torch.finfo(dtype)
    return rounds_to_max, info.smallest_normal * info.eps / 2


def require_scales(x: Tensor, inv_scale: Tensor, block: tuple[int, int]) -> None:
    """Raise ValueError unless ``block`` is supported and ``inv_scale`` fits it. ``x`` must not be empty."""
    tokens, features = x.shape
    if block not in (WHOLE, (1, features), *BLOCK_SHAPES, (1, MX_BLOCK)):
        raise ValueError(
            f"blocks of {block[0]}x{block[1]}; expected 0x0 (one scale), 1x{features}, 1x128, 128x128 or 1x{MX_BLOCK}"
        )
    if block == WHOLE:
        expected: tuple[int, ...] = ()
        fits = inv_scale.numel() == 1
    else:
        expected = (blocks_along(tokens, block[0]), blocks_along(features, block[1]))
        fits = inv_scale.shape == expected
    if not fits or inv_scale.dtype != torch.float32:
        raise ValueError(
            f"inverse scales are {inv_scale.dtype} {tuple(inv_scale.shape)}; expected float32 {expected} for "
            f"{(tokens, features)} in blocks of {block[0]}x{block[1]}"
        )

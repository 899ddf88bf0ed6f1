"""The scale formula. Pure functions on tensors: no state, no communication."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["FLOAT32_MAX", "amax_behind_scale", "round_down_to_power_of_two", "scale_from_amax"]

FLOAT32_MAX = torch.finfo(torch.float32).max
_SMALLEST_NORMAL = torch.finfo(torch.float32).tiny


def scale_from_amax(
    amax: Tensor,
    previous: Tensor,
    fp8_max: Tensor,
    margin: int,
    power_of_two: bool,
    where: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The scale to cast with, from the largest magnitude seen.

    ``(fp8_max / amax) / 2**margin`` in float32, each division IEEE; an infinite result becomes
    float32's maximum; ``amax`` of 0, Inf or NaN keeps ``previous``. These are TransformerEngine's
    numbers (``_default_sf_compute`` in its ``pytorch/quantization.py``), but for results below float32's
    smallest normal, which become that, so that 1 / scale is finite. Elementwise; any shape.

    Args:
        amax: float32, >= 0 or NaN.
        previous: float32, broadcastable to ``amax``: kept where ``amax`` gives no scale.
        fp8_max: float32 tensor, the format's largest finite value. A tensor, because
            ``python_float / tensor`` is computed by torch as a reciprocal and a multiplication,
            which rounds twice.
        margin: the scale is divided by ``2**margin``. May be negative.
        power_of_two: round the scale down to a power of two.
        where: bool: keep ``previous`` elsewhere.
        out: written and returned; may be ``previous``.
    """
    scale = torch.div(fp8_max, amax)
    if margin:
        scale /= 2.0**margin
    scale.clamp_(_SMALLEST_NORMAL, FLOAT32_MAX)
    if power_of_two:
        scale = round_down_to_power_of_two(scale)
    usable = (amax > 0).bitwise_and_(amax < torch.inf)
    if where is not None:
        usable.bitwise_and_(where)
    return torch.where(usable, scale, previous, out=out)


def amax_behind_scale(scale: Tensor, fp8_max: Tensor, margin: int) -> Tensor:
    """The amax that ``scale`` was made from, as far as it tells: a power of two was rounded down. float32, elementwise.

    Args:
        margin: that of the recipe that made it.
    """
    return (fp8_max / 2.0**margin / scale).clamp(max=FLOAT32_MAX)


def round_down_to_power_of_two(x: Tensor) -> Tensor:
    """The largest power of two that is <= x, for positive normal float32 x: its exponent bits alone."""
    return (x.view(torch.int32) & 0x7F800000).view(torch.float32)

"""The scale formula. Pure functions on tensors: no state, no communication."""

from __future__ import annotations

import torch
from torch import Tensor

FLOAT32_MAX = torch.finfo(torch.float32).max
SMALLEST_NORMAL = torch.finfo(torch.float32).tiny


def scale_from_amax(
    amax: Tensor,
    previous: Tensor,
    fp8_max: Tensor,
    margin: int,
    power_of_two: bool,
    where: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return the scale to cast with, given the largest magnitude.

    It is ``(fp8_max / amax) / 2**margin`` in float32, with IEEE divisions. An infinite result becomes float32's
    maximum. Where ``amax`` is 0, Inf or NaN, the result is ``previous``. The results equal TransformerEngine's
    (``_default_sf_compute`` in its ``pytorch/quantization.py``), except that results below float32's smallest normal
    number become that number, so that 1 / scale is finite. Elementwise; any shape.

    Args:
        amax: float32, >= 0 or NaN.
        previous: float32, broadcastable to ``amax``: kept where ``amax`` gives no scale.
        fp8_max: float32 tensor, the format's largest finite value. A tensor, because torch computes
            ``python_float / tensor`` as a reciprocal and a multiplication, which rounds twice.
        margin: the scale is divided by ``2**margin``. May be negative.
        power_of_two: round the scale down to a power of two.
        where: bool: keep ``previous`` where False.
        out: tensor for the result; may be ``previous``.
    """
    scale = torch.div(fp8_max, amax)
    if margin:
        scale /= 2.0**margin
    scale.clamp_(SMALLEST_NORMAL, FLOAT32_MAX)
    if power_of_two:
        scale = round_down_to_power_of_two(scale)
    usable = (amax > 0).bitwise_and_(amax < torch.inf)
    if where is not None:
        usable.bitwise_and_(where)
    return torch.where(usable, scale, previous, out=out)


def amax_behind_scale(scale: Tensor, fp8_max: Tensor) -> Tensor:
    """Return the amax from which ``scale`` was computed, with margin 0. Approximate for power-of-two scales, which were
    rounded down. Elementwise, float32."""
    return (fp8_max / scale).clamp(max=FLOAT32_MAX)


def round_down_to_power_of_two(x: Tensor) -> Tensor:
    """Return the largest power of two that is <= x, for positive normal float32 x: its exponent bits alone."""
    return (x.view(torch.int32) & 0x7F800000).view(torch.float32)

"""The scale formula on the device, bit for bit equal to ``fp8dist_kernels.scaling``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_FLOAT32_MAX = tl.constexpr(torch.finfo(torch.float32).max)
_SMALLEST_NORMAL = tl.constexpr(torch.finfo(torch.float32).tiny)
_INFINITY_BITS = tl.constexpr(0x7F800000)


@triton.jit
def scale_from_amax(amax, previous, fp8_max, margin: tl.constexpr, power_of_two: tl.constexpr):
    """See ``fp8dist_kernels.scaling.scale_from_amax``; elementwise, any shape.

    Uses comparisons and selects instead of ``min`` and ``max``, because no instruction that propagates NaN may stand
    near a transposed FP8 store (triton issue 11111). The selects need not handle NaN: where ``amax`` is 0, Inf or NaN,
    the result is ``previous``.

    Args:
        amax: float32, >= 0 or NaN.
        previous: float32, broadcastable to ``amax``.
        fp8_max: the format's largest finite value, a number or float32.
        margin: an integer, known at compile time.
        power_of_two: round down to a power of two.
    """
    usable = (amax > 0) & (amax.to(tl.int32, bitcast=True) < _INFINITY_BITS)
    limit = tl.zeros_like(amax) + fp8_max
    scale = tl.div_rn(limit, tl.where(usable, amax, limit))
    if margin != 0:
        scale = tl.div_rn(scale, tl.zeros_like(amax) + 2.0**margin)
    scale = tl.where(scale < _SMALLEST_NORMAL, _SMALLEST_NORMAL, scale)
    scale = tl.where(scale > _FLOAT32_MAX, _FLOAT32_MAX, scale)
    if power_of_two:
        scale = (scale.to(tl.int32, bitcast=True) & _INFINITY_BITS).to(tl.float32, bitcast=True)
    return tl.where(usable, scale, previous)


@triton.jit
def inverse(scale):
    """Return 1 / scale with IEEE division, as ``torch.reciprocal`` computes it on a CPU."""
    return tl.div_rn(tl.zeros_like(scale) + 1.0, scale)

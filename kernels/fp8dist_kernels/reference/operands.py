"""Operands of known answers: pseudo-random tensors that are the same on every device.

Element ``i`` (in row-major order) of the tensor with a given seed is made of the 64-bit word ``w = mix((i + 1 + (seed
<< 40)) * GOLDEN)``, SplitMix64 in wrapping arithmetic. Its bits are put together as integers, so nothing is rounded and
torch's generators stay as they are::

    kind       w mod 64  exponent field
    zero       0         0, and the mantissa is 0
    subnormal  1         0
    small      2, 3      bias - 24 + (w >> 8) mod 16, at least 1
    large      4         bias + 4 + (w >> 8) mod 8, at most the format's largest; only in rows 15, 31, 47, …
    ordinary   others    bias - 3 + (w >> 8) mod 4

The sign is bit 6 of ``w``, the mantissa comes from bit 16 on. Small values become subnormal or zero in a cast to FP8,
large ones saturate. Large values are in few rows, because they hide the others in a sum. There is no Inf and no NaN.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from fp8dist_kernels.reference.digest import GOLDEN, mix

_EXPONENT_BITS: Mapping[torch.dtype, int] = MappingProxyType(
    {
        torch.float64: 11,
        torch.float32: 8,
        torch.bfloat16: 8,
        torch.float16: 5,
        torch.float8_e5m2: 5,
        torch.float8_e4m3fn: 4,
    }
)
_BITS: Mapping[int, torch.dtype] = MappingProxyType({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64})
_AT_ONCE = 1 << 20
"""Elements that are made together: the 64-bit words take little memory."""


def operand(shape: Sequence[int], dtype: torch.dtype, seed: int, device: torch.device) -> Tensor:
    """Return the operand of this shape and seed: finite values of any float dtype, FP8 included. Local."""
    exponent_bits = _EXPONENT_BITS[dtype]
    width = 8 * dtype.itemsize
    mantissa_bits = width - 1 - exponent_bits
    bias = (1 << (exponent_bits - 1)) - 1
    e4m3 = dtype == torch.float8_e4m3fn  # No infinities: the largest exponent has numbers, too.
    largest = (1 << exponent_bits) - 2 + e4m3
    made = torch.empty(math.prod(shape), dtype=_BITS[dtype.itemsize], device=device)
    for part, place, words in _words(made.numel(), seed, device):
        kind, drawn = words & 63, words >> 8
        tall = (place // shape[-1]) % 16 == 15
        exponent = bias - 3 + (drawn & 3)
        exponent = torch.where((kind == 4) & tall, (bias + 4 + (drawn & 7)).clamp(max=largest), exponent)
        exponent = torch.where((kind == 2) | (kind == 3), (bias - 24 + (drawn & 15)).clamp(min=1), exponent)
        exponent = torch.where(kind < 2, 0, exponent)
        mantissa = (words >> 16) & ((1 << mantissa_bits) - 1)
        if e4m3:
            mantissa = torch.where(exponent == largest, mantissa.clamp(max=6), mantissa)  # 7 would be NaN.
        mantissa = torch.where(kind == 0, 0, mantissa)
        sign = ((words >> 6) & 1) << (width - 1)
        made[part] = ((exponent << mantissa_bits) | mantissa) - sign
    return made.view(dtype).view(tuple(shape))


def inverse_scales(shape: Sequence[int], seed: int, device: torch.device) -> Tensor:
    """Return float32 in [2**-8, 2**-7) with all bits of the mantissa. Local."""
    made = torch.empty(math.prod(shape), dtype=torch.int32, device=device)
    for part, _, words in _words(made.numel(), seed, device):
        made[part] = (119 << 23) | ((words >> 16) & 0x7FFFFF)
    return made.view(torch.float32).view(tuple(shape))


def integers(shape: Sequence[int], dtype: torch.dtype, seed: int, device: torch.device) -> Tensor:
    """Return integers from -2 to 2. Sums of up to 4,096 of their products are exact in any order, in 14 bits. Local."""
    made = torch.empty(math.prod(shape), dtype=torch.float32, device=device)
    for part, _, words in _words(made.numel(), seed, device):
        made[part] = ((words >> 16) & 0xFFFF) % 5 - 2
    return made.to(dtype).view(tuple(shape))


def _words(count: int, seed: int, device: torch.device) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Iterate over (part, the places in it, their words), int64, of all elements in order."""
    for start in range(0, count, _AT_ONCE):
        end = min(start + _AT_ONCE, count)
        place = torch.arange(start, end, device=device)
        yield slice(start, end), place, mix((place + 1 + (seed << 40)) * GOLDEN)

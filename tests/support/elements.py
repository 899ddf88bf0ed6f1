"""Numbers as bytes: values, distances and bit flips, written from the formats' definitions alone.

Shares no code with the library and uses none of torch's conversions: FP8 as in Micikevicius et al., "FP8 formats for
deep learning" (2022), and for the fnuz kinds Noune et al., "8-bit numerical formats for deep neural networks" (2022).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

_STRUCT: Mapping[torch.dtype, str] = MappingProxyType(
    {
        torch.float64: "<d",
        torch.float32: "<f",
        torch.float16: "<e",
        torch.int8: "<b",
        torch.uint8: "<B",
        torch.int16: "<h",
        torch.uint16: "<H",
        torch.int32: "<i",
        torch.uint32: "<I",
        torch.int64: "<q",
        torch.uint64: "<Q",
        torch.bool: "<?",
    }
)


def _small_float(bits: int, exponent_bits: int, mantissa_bits: int, bias: int) -> float:
    """Decode sign, exponent and mantissa. Finite values only."""
    sign = -1.0 if bits >> (exponent_bits + mantissa_bits) else 1.0
    exponent = (bits >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissa = (bits & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    if exponent == 0:
        return sign * math.ldexp(mantissa, 1 - bias)
    return sign * math.ldexp(1 + mantissa, exponent - bias)


def _e4m3fn(bits: int) -> float:
    return math.nan if bits & 0x7F == 0x7F else _small_float(bits, 4, 3, 7)


def _e5m2(bits: int) -> float:
    if bits & 0x7C == 0x7C:
        return math.nan if bits & 3 else math.copysign(math.inf, -1.0 if bits >> 7 else 1.0)
    return _small_float(bits, 5, 2, 15)


def _e4m3fnuz(bits: int) -> float:
    return math.nan if bits == 0x80 else _small_float(bits, 4, 3, 8)


def _e5m2fnuz(bits: int) -> float:
    return math.nan if bits == 0x80 else _small_float(bits, 5, 2, 16)


def _e8m0fnu(bits: int) -> float:
    return math.nan if bits == 0xFF else math.ldexp(1.0, bits - 127)


def _bfloat16(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits << 16))[0]


_DECODERS: Mapping[torch.dtype, Callable[[int], float]] = MappingProxyType(
    {
        torch.float8_e4m3fn: _e4m3fn,
        torch.float8_e5m2: _e5m2,
        torch.float8_e4m3fnuz: _e4m3fnuz,
        torch.float8_e5m2fnuz: _e5m2fnuz,
        torch.float8_e8m0fnu: _e8m0fnu,
        torch.bfloat16: _bfloat16,
    }
)


def raw(tensor: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor: uint8[nbytes], a view."""
    assert tensor.is_contiguous()
    return tensor.detach().reshape(-1).view(torch.uint8)


def flip(tensor: Tensor, bit: int) -> None:
    """Flip a bit of a contiguous tensor in place. The same call flips it back."""
    raw(tensor)[bit // 8] ^= 1 << (bit % 8)


def element(tensor: Tensor, place: int) -> bytes:
    """Return the bytes of one element of a contiguous tensor."""
    size = tensor.dtype.itemsize
    return bytes(raw(tensor)[place * size : (place + 1) * size].tolist())


def value_of(data: bytes, dtype: torch.dtype) -> Any:
    """Return the number that these bytes encode."""
    if dtype in _DECODERS:
        return _DECODERS[dtype](int.from_bytes(data, "little"))
    if dtype is torch.complex64:
        return complex(*struct.unpack("<2f", data))
    if dtype is torch.complex128:
        return complex(*struct.unpack("<2d", data))
    return struct.unpack(_STRUCT[dtype], data)[0]


def same_value(a: Any, b: Any) -> bool:
    """True if two values are equal: NaN equals NaN, and 0.0 differs from -0.0."""
    return type(a) is type(b) and repr(a) == repr(b)


@cache
def _ladder(dtype: torch.dtype) -> Mapping[float, int]:
    """Return all numbers of an 8-bit format in order, each with its index. +0 and -0 share an index."""
    values = {value_of(bytes([i]), dtype) for i in range(256)}
    return {v: i for i, v in enumerate(sorted(v for v in values if not math.isnan(v)))}


def ulp_between(a: bytes, b: bytes, dtype: torch.dtype) -> int | None:
    """Return the number of representable steps between two numbers; None if not defined.

    8-bit formats count on the list of all their numbers, wider formats by magnitude bits.
    """
    if dtype is torch.bool or dtype.is_complex:
        return None
    x, y = value_of(a, dtype), value_of(b, dtype)
    if not dtype.is_floating_point:
        return abs(x - y)
    if math.isnan(x) or math.isnan(y):
        return None
    if dtype.itemsize == 1:
        return abs(_ladder(dtype)[x] - _ladder(dtype)[y])
    top = 1 << (8 * dtype.itemsize - 1)
    m, n = (int.from_bytes(d, "little") % top for d in (a, b))
    return abs(m - n) if math.copysign(1, x) == math.copysign(1, y) else m + n

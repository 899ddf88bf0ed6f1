"""Numbers modulo the prime ``P``: residues of Python numbers and of tensors, powers, and exact products.

A residue is an integer in [0, P), stored in float32 or float64. ``-inf`` stands beside the residues: it is what masks
add to scores, and its weight in a softmax is zero.
"""

from __future__ import annotations

import functools
import math
import struct
import zlib
from fractions import Fraction

import torch
from torch import Tensor

from fp8dist.errors import ConfigurationError

P = 1_045_799
"""The largest prime below 2**20 with P % 8 == 7 for which 2, 3, 5, 7, 11 and 13 have square roots: sums of 16 residues
are exact in float32, and ``1/sqrt(head_dim)`` has a value whose square is ``1/head_dim``."""

GENERATOR = 17
"""Its powers are all residues but zero."""

ROOT = (P + 1) // 4
"""``x ** ROOT`` is a square root of ``x``, or of ``-x`` where ``x`` has none."""

CHUNK = 2**14
"""Length of sums of products. With residues in [-P/2, P/2] they stay below 2**53, where float64 is exact."""

MASKED = -1e30
"""Numbers up to this one are minus infinity."""


@functools.lru_cache(4096)
def residue_of(number: float) -> float:
    """Return the residue of a Python number; ``-inf`` if it is a mask's.

    A float stands for the simplest number that rounds to it: a fraction (``1/n`` with ``n`` up to 2**25), a decimal
    literal of up to 8 digits, or a root or fourth root of a fraction. Other floats get a residue from their bits: the
    same on each rank, but then products of such numbers are not the residues of the products.

    Raises:
        ConfigurationError: ``nan``, plus infinity, or a denominator that is divisible by ``P``.
    """
    if isinstance(number, int) or (number.is_integer() and abs(number) < 2**53):
        return int(number) % P
    if math.isnan(number) or number >= -MASKED:
        raise ConfigurationError(f"exact arithmetic cannot compute with {number}.")
    if number <= MASKED:
        return -math.inf
    sign = -1 if number < 0 else 1
    for roots in range(3):
        fraction = _simple(abs(number), 2**roots)
        if fraction is not None:
            if fraction.denominator % P == 0:
                raise ConfigurationError(
                    f"exact arithmetic cannot compute with {number}, whose denominator {P} divides."
                )
            value = fraction.numerator * pow(fraction.denominator, -1, P)
            return sign * pow(value, ROOT**roots, P) % P
    return sign * _between(zlib.crc32(struct.pack("<d", abs(number)))) % P


def _simple(number: float, power: int) -> Fraction | None:
    """Return the simple fraction that ``number ** power`` is, but for rounding to float64 or to float32."""
    exact = Fraction(number) ** power
    narrow = struct.unpack("f", struct.pack("f", number))[0] == number if number < 1e30 else False
    if power == 1:
        text = f"{number:.6g}" if narrow else repr(number)
        if len(text.partition("e")[0].replace(".", "").strip("0")) <= 8 and _near(Fraction(text), exact, narrow):
            return Fraction(text)
    found = exact.limit_denominator(2**11 if narrow else 2**25)
    small = found.numerator * found.denominator <= (2**16 if narrow else 2**32)
    return found if small and _near(found, exact, narrow) else None


def _near(fraction: Fraction, exact: Fraction, narrow: bool) -> bool:
    return abs(fraction - exact) <= exact * Fraction(1, 2 ** (22 if narrow else 49))


def _between(number: int) -> int:
    """Return a residue that is neither zero, one nor minus one."""
    return number % (P - 3) + 2


def residues(values: Tensor, weights: bool = False) -> Tensor:
    """Return the residues of a float tensor, in float64, element by element.

    Integers are their own residues, and masks become ``-inf``. Other values get a residue from their bits in float32,
    that of ``-x`` being minus that of ``x``. So each shard of a tensor becomes the shard of its residues. ``weights``:
    0, 1 and -1 get such a residue too, because zeros would stop gradients. A second call changes nothing. Infinity
    and ``nan`` become ``nan``.
    """
    wide = values.double()
    bits = values.float().abs().view(torch.int32).long()
    for factor, shift in ((0x9E3779B1, 15), (0x85EBCA77, 13)):
        bits = bits * factor & 0xFFFFFFFF
        bits = bits ^ bits >> shift
    kept = (wide == wide.floor()) & (wide.abs() < 2**53)
    if weights:
        kept &= wide.abs() > 1
    hashed = (bits % (P - 3) + 2).double()
    found = torch.where(kept, reduced(wide), torch.where(wide < 0, P - hashed, hashed))
    return torch.where(wide.abs() < -MASKED, found, torch.where(wide <= MASKED, -math.inf, math.nan))


def reduced(values: Tensor) -> Tensor:
    """Return integers below 2**53 modulo ``P``. ``-inf`` stays."""
    return torch.remainder(values, P)


def are_residues(values: Tensor) -> bool:
    """Return True if all elements of a float64 tensor are integers in [0, P)."""
    if not values.numel():
        return True
    low, high = values.aminmax()
    return bool(low >= 0) and bool(high < P) and bool((values == values.floor()).all())


def product(left: Tensor, right: Tensor) -> Tensor:
    """Return the exact matrix product modulo ``P`` of float64 tensors, as ``torch.matmul``."""
    left, right = (x - torch.round(x / P) * P for x in (left, right))
    size = left.shape[-1]
    if size <= CHUNK:
        return reduced(left @ right)
    contracted = max(right.dim() - 2, 0)
    starts = range(0, size, CHUNK)
    widths = [min(CHUNK, size - start) for start in starts]
    parts = [
        reduced(left.narrow(-1, start, width) @ right.narrow(contracted, start, width))
        for start, width in zip(starts, widths)
    ]
    return reduced(sum(parts[1:], parts[0]))


@functools.cache
def _tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return (logs, powers) of the generator: ``powers[k]`` is ``GENERATOR ** k``, and ``logs`` its inverse."""
    powers = torch.ones(1, dtype=torch.int64)
    while len(powers) < P - 1:
        powers = torch.cat([powers, powers * pow(GENERATOR, len(powers), P) % P])
    powers = powers[: P - 1]
    logs = torch.zeros(P, dtype=torch.int64)
    logs[powers] = torch.arange(P - 1)
    return logs.to(device), powers.double().to(device)


def power(values: Tensor, exponent: Fraction) -> Tensor:
    """Return ``values ** exponent`` modulo ``P``, for exponents whose denominator is a power of two. ``0 ** -1`` is 0.
    What is no integer gives ``nan``.

    Raises:
        ConfigurationError: another denominator.
    """
    numerator, denominator = exponent.numerator, exponent.denominator
    if denominator & (denominator - 1):
        raise ConfigurationError(f"exact arithmetic cannot compute with powers of {exponent}.")
    if not numerator:
        return torch.ones_like(values)
    numerator *= pow(ROOT, denominator.bit_length() - 1, P - 1)
    logs, powers = _tables(values.device)
    values = reduced(values)
    index = torch.where(values == values.floor(), values, 0.0).long()
    found = powers[torch.remainder(logs[index] * (numerator % (P - 1)), P - 1)]
    return torch.where(index == 0, torch.where(values == 0, 0.0, math.nan), found)


def inverse(values: Tensor) -> Tensor:
    """Return what gives 1 when multiplied by ``values``; 0 for 0."""
    return power(values, Fraction(-1))


def inverse_of(count: int) -> int:
    """Return the inverse of an int; 0 for multiples of ``P``."""
    return pow(count, -1, P) if count % P else 0

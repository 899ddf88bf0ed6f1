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

ROOT = (P + 1) // 4
"""``x ** ROOT`` is a square root of ``x``, or of ``-x`` where ``x`` has none."""

CHUNK = 2**14
"""Length of sums of products. With residues in [-P/2, P/2] they stay below 2**53, where float64 is exact."""

MASKED = -1e9
"""Numbers up to this one are minus infinity."""

FILLED = -1e4
"""Numbers up to this one are minus infinity where they are filled in, or multiply a mask of ones and zeros."""

_INFINITE = 1e30
"""Numbers from this one on are refused."""


@functools.lru_cache(2**18)
def residue_of(number: float) -> float:
    """Return the residue of a Python number; ``-inf`` if it is a mask's.

    A float stands for the simplest number that rounds to it (``fraction_of``), or for the root or fourth root of a
    fraction. Other floats get a residue from their bits in float32: the same on each rank, but then products of such
    numbers are not the residues of the products.

    Raises:
        ConfigurationError: ``nan``, plus infinity, or a denominator that is divisible by ``P``.
    """
    if isinstance(number, int) or (MASKED < number < 2**53 and number.is_integer()):
        return int(number) % P
    if math.isnan(number) or number >= _INFINITE:
        raise ConfigurationError(f"exact arithmetic cannot compute with {number}.")
    if number <= MASKED:
        return -math.inf
    sign = -1 if number < 0 else 1
    for roots in range(3):
        fraction = fraction_of(abs(number), 2**roots)
        if fraction is not None:
            if fraction.denominator % P == 0:
                raise ConfigurationError(
                    f"exact arithmetic cannot compute with {number}, whose denominator {P} divides."
                )
            value = fraction.numerator * pow(fraction.denominator, -1, P)
            return sign * pow(value, ROOT**roots, P) % P
    return sign * (zlib.crc32(struct.pack("<f", abs(number))) % (P - 3) + 2) % P  # Neither 0, 1 nor -1.


def fraction_of(number: float, power: int = 1) -> Fraction | None:
    """Return the simple fraction that ``number ** power`` is, but for rounding; None if there is none.

    ``number``: positive. If float32 holds it, it may have been rounded to float32: then the fraction a/b has a product
    a b of at most 2**16, otherwise of at most 2**32. At most one such fraction is so near. Else it is what the number
    is exactly, if it has few bits, or a decimal of up to 5 or 8 digits.
    """
    narrow = struct.unpack("f", struct.pack("f", number))[0] == number
    most, precision, bits, digits = (2**16, 22, 14, 5) if narrow else (2**32, 49, 43, 8)
    exact = Fraction(number)
    found = _convergent(exact**power, most, precision)
    if found is not None or power > 1:
        return found
    if exact.numerator < 2**bits:
        return exact
    text = f"{number:.{digits}g}"
    return Fraction(text) if _near(*Fraction(text).as_integer_ratio(), exact, precision) else None


def _convergent(exact: Fraction, most: int, precision: int) -> Fraction | None:
    """Return the first convergent of the continued fraction that is near: a fraction a/b that is nearer than 1/(2 b**2)
    is one (Legendre)."""
    above, below = exact.as_integer_ratio()
    a, b, a_before, b_before = 1, 0, 0, 1
    while below:
        quotient, rest = divmod(above, below)
        above, below = below, rest
        a, b, a_before, b_before = quotient * a + a_before, quotient * b + b_before, a, b
        if a * b > most:
            return None
        if a and _near(a, b, exact, precision):
            return Fraction(a, b)
    return None


def _near(a: int, b: int, exact: Fraction, precision: int) -> bool:
    """True if a/b differs from ``exact`` by at most 2**-precision of it."""
    return abs(a * exact.denominator - exact.numerator * b) << precision <= exact.numerator * b


def residues(values: Tensor, weights: bool = False) -> Tensor:
    """Return the residues of a float tensor, in float64, element by element: that of ``residue_of``.

    So each shard of a tensor becomes the shard of its residues. ``weights``: all but integers get a residue from their
    bits in float32, that of ``-x`` being minus that of ``x``. So do 0, 1 and -1, because zeros would stop gradients. A
    second call changes nothing. Infinity and ``nan`` become ``nan``.
    """
    wide = values.double()
    masked, kept = wide <= MASKED, (wide == wide.floor()) & (wide.abs() < 2**53)
    found = torch.where(kept, reduced(wide), math.nan)
    if weights:
        bits = values.float().abs().view(torch.int32).long()
        for factor, shift in ((0x9E3779B1, 15), (0x85EBCA77, 13)):
            bits = bits * factor & 0xFFFFFFFF
            bits = bits ^ bits >> shift
        hashed = (bits % (P - 3) + 2).double()
        kept &= wide.abs() > 1
        found = torch.where(kept, found, torch.where(wide < 0, P - hashed, hashed))
    elif (others := ~kept & ~masked & (wide < _INFINITE)).any():
        distinct, places = wide[others].unique(return_inverse=True)
        found[others] = torch.tensor(list(map(residue_of, distinct.tolist()))).to(found)[places]
    return torch.where(masked, -math.inf, torch.where(wide < _INFINITE, found, math.nan))


def reduced(values: Tensor) -> Tensor:
    """Return integers below 2**53 modulo ``P``, and ``nan`` for ``-inf``."""
    return torch.remainder(values, P)


def are_residues(values: Tensor) -> bool:
    """Return True if all elements of a float64 tensor are integers in [0, P)."""
    if not values.numel():
        return True
    low, high = values.aminmax()
    return bool(low >= 0) and bool(high < P) and bool((values == values.floor()).all())


def canonical(values: Tensor) -> Tensor:
    """Return a float64 tensor as it is if its elements are residues, else their residues."""
    return values if are_residues(values) else residues(values)


def product(left: Tensor, right: Tensor) -> Tensor:
    """Return the exact matrix product modulo ``P`` of float64 tensors, as ``torch.matmul``."""
    left, right = (x - torch.round(x / P) * P for x in (left, right))
    size, contracted = left.shape[-1], max(right.dim() - 2, 0)
    parts = [
        reduced(left.narrow(-1, start, width) @ right.narrow(contracted, start, width))
        for start in range(0, max(size, 1), CHUNK)
        for width in [min(CHUNK, size - start)]
    ]
    return reduced(sum(parts[1:], parts[0]))


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
    square = torch.where(values == values.floor(), reduced(values), math.nan)
    found, left = torch.ones_like(square), numerator % (P - 1) or P - 1  # As the powers of all but zero repeat.
    while left:
        found = reduced(found * square) if left % 2 else found
        square, left = reduced(square * square), left // 2
    return found


def inverse(values: Tensor) -> Tensor:
    """Return what gives 1 when multiplied by ``values``; 0 for 0."""
    return power(values, Fraction(-1))


def inverse_of(count: int) -> int:
    """Return the inverse of an int; 0 for multiples of ``P``."""
    return pow(count, -1, P) if count % P else 0

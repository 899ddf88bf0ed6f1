"""Linear systems modulo P: which coefficients make one tensor out of others, and which fraction a residue is."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor

from fp8dist.exact.field import P

_SPARE = 2
"""Equations that a system needs beyond its unknowns. By chance, so many hold once in P**2 systems."""

_LARGEST = P // 128
"""Largest product of numerator and denominator that a residue shows as a fraction. One residue in ten has such a
fraction by chance."""


def small_fraction(residue: int) -> Fraction | None:
    """Return the fraction a/b with this residue that has the smallest |a| b, at most 8170; None if there is none.

    Euclid's algorithm on P and the residue yields the candidates (Monagan, "Maximal quotient rational reconstruction",
    2004).
    """
    above, below, of_above, of_below = P, residue % P, 0, 1
    best = Fraction(below)
    while below:
        quotient = above // below
        above, below, of_above, of_below = below, above - quotient * below, of_below, of_above - quotient * of_below
        if abs(above * of_above) < abs(best.numerator * best.denominator):
            best = Fraction(above, of_above)
    return best if abs(best.numerator * best.denominator) <= _LARGEST else None


def fraction_text(residue: int) -> str:
    """Return a coefficient as text: "5/6", "1", or "the residue 123456" for what is no small fraction."""
    fraction = small_fraction(residue)
    return f"the residue {residue % P}" if fraction is None else str(fraction)


def factor_text(residue: int) -> str:
    """Return "2/1 of the reference", with what ``fraction_text`` shows."""
    text = fraction_text(residue)
    return f"{text if '/' in text or ' ' in text else f'{text}/1'} of the reference"


def combined(coefficients: Sequence[int], tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of coefficient times tensor: canonical residues, int64, in the shape of the tensors."""
    total = torch.zeros_like(tensors[0])
    for coefficient, tensor in zip(coefficients, tensors, strict=True):
        total = (total + coefficient % P * tensor) % P
    return total


def solve(tensors: Sequence[Tensor], target: Tensor) -> list[int] | None:
    """Return the coefficients, canonical residues, with which the sum of the tensors is ``target``.

    None if there are none, or several, or if the tensors are too small to prove them. A tensor of zeros gets the
    coefficient 1, because any would do.

    Args:
        tensors, target: canonical residues, int64, all of one shape.
    """
    used = [index for index, tensor in enumerate(tensors) if tensor.any()]
    rows = torch.stack([tensors[index].flatten() for index in used] + [target.flatten()], dim=1)
    rows = rows[rows.any(dim=1)]
    if not used or len(rows) < len(used) + _SPARE:
        return None
    for column in range(len(used)):
        candidates = rows[column:, column].nonzero()
        if not len(candidates):
            return None
        pivot = column + int(candidates[0])
        rows[[column, pivot]] = rows[[pivot, column]]
        rows[column] = rows[column] * pow(int(rows[column, column]), -1, P) % P
        factors = rows[:, column].clone()
        factors[column] = 0
        rows = (rows - factors[:, None] * rows[column]) % P
    if rows[len(used) :].any():
        return None
    found = dict(zip(used, rows[: len(used), -1].tolist(), strict=True))
    return [found.get(index, 1) for index in range(len(tensors))]

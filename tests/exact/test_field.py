"""Residues of numbers and of tensors, powers, and exact products, against Python's integers."""

from __future__ import annotations

import math
import struct
from fractions import Fraction

import pytest
import torch

from fp8dist.errors import ConfigurationError
from fp8dist.exact import field
from fp8dist.exact.field import P, fraction_of, power, product, residue_of, residues


def fraction(numerator: int, denominator: int) -> int:
    return numerator * pow(denominator, -1, P) % P


def test_the_prime_is_prime_and_has_the_roots_that_scales_need() -> None:
    assert all(P % divisor for divisor in range(2, math.isqrt(P) + 1))
    assert 16 * P < 2**24
    for number in (2, 3, 5, 7, 11, 13):
        assert pow(number, field.ROOT, P) ** 2 % P == number


SIMPLEST = {
    7: 7,
    -1: P - 1,
    2.0**40: pow(2, 40, P),
    0.1: fraction(1, 10),
    1 - 0.9: fraction(1, 10),
    1 / 3 * 100: fraction(100, 3),
    -5 / 6: P - fraction(5, 6),
    1 / (2**25 - 39): fraction(1, 2**25 - 39),
    1e-8: fraction(1, 10**8),
    9.999999747378752e-06: fraction(1, 10**5),
    0.3333333432674408: fraction(1, 3),
    0.044715: fraction(44715, 10**6),
    -3.4e38: -math.inf,
}


def test_a_float_stands_for_the_simplest_number_that_rounds_to_it() -> None:
    """Also for what was rounded twice, and for numbers that come from float32."""
    assert {number: residue_of(number) for number in SIMPLEST} == SIMPLEST
    for text in ["3/8192", "16383/16384", "1/131072", "8/9", "2/21", "851/500"]:
        exact = Fraction(text)
        assert fraction_of(float(exact)) == fraction_of(torch.tensor(float(exact)).item()) == exact


@pytest.mark.slow
def test_the_inverse_of_each_count_is_recovered() -> None:
    """Of up to 65,536 tokens, from float64 and from float32."""
    for count in range(2, 2**16 + 1):
        for number in (1 / count, struct.unpack("f", struct.pack("f", 1 / count))[0]):
            assert fraction_of(number) == Fraction(1, count)


def test_roots_of_head_sizes_multiply_as_numbers_do() -> None:
    """Attention scales by 1/sqrt(d), or q and k by its root."""
    for size in [2, 7, 8, 48, 96, 128]:
        assert residue_of(size**-0.5) ** 2 * size % P == 1
        assert residue_of(size**-0.25) ** 2 % P == residue_of(size**-0.5)
        assert residue_of(math.sqrt(size)) * residue_of(size**-0.5) % P == 1


def test_other_numbers_get_a_residue_from_their_bits_and_some_are_refused() -> None:
    assert residue_of(math.pi) == residue_of(math.pi) != residue_of(math.e)
    assert residue_of(-math.pi) == P - residue_of(math.pi)
    for number in (math.nan, math.inf, 1e31, 1 / P):
        with pytest.raises(ConfigurationError, match="cannot compute with"):
            residue_of(number)


def test_residues_of_a_tensor_are_found_element_by_element() -> None:
    values = torch.randn(6, 5)
    found = residues(values)
    assert field.are_residues(found)
    assert len(found.unique()) == 30
    assert torch.equal(residues(values[2:4, 1:]), found[2:4, 1:])
    assert torch.equal(residues(found.float()), found)
    assert torch.equal(residues(values.double()), found)


def test_integers_and_masks_stay_except_zeros_of_weights() -> None:
    values = torch.tensor([0.0, -0.0, 1.0, -1.0, 5.0, -1e9, -math.inf, math.nan])
    assert residues(values)[:7].tolist() == [0, 0, 1, P - 1, 5, -math.inf, -math.inf]
    assert residues(values)[7].isnan()
    weights = residues(values[:5], weights=True)
    assert weights[0] == weights[1]
    assert not set(weights[:4].tolist()) & {0, 1, P - 1}
    assert weights[4] == 5
    assert torch.equal(residues(weights, weights=True), weights)


def test_powers_are_pythons() -> None:
    values = torch.randint(0, P, (50,))
    for exponent in [Fraction(3), Fraction(-1), Fraction(0), Fraction(-1, 2), Fraction(3, 2)]:
        whole = exponent.numerator * (field.ROOT if exponent.denominator == 2 else 1)
        expected = [pow(int(value), whole % (P - 1), P) for value in values]
        assert power(values.double(), exponent).tolist() == expected
    found = power(torch.tensor([0.0, 0.5, math.nan], dtype=torch.float64), Fraction(-1))
    assert found[0] == 0
    assert found[1:].isnan().all()
    with pytest.raises(ConfigurationError, match="powers of 1/3"):
        power(found, Fraction(1, 3))


@pytest.mark.parametrize("size", [5, 2 * field.CHUNK + 3])
def test_products_are_exact_at_any_length(size: int) -> None:
    """The largest residues in absolute value, and sums that have not been reduced yet."""
    left = torch.randint(0, P, (2, 3, size))
    left[0] = P // 2
    right = torch.randint(0, 16 * P, (2, size, 2))
    found = product(left.double(), right.double())
    assert torch.equal(found.long(), (left.unsqueeze(-1) * (right % P).unsqueeze(1) % P).sum(2) % P)

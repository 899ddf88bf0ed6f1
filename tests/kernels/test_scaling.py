"""The scale formula, bit for bit against the oracle's (TransformerEngine's numbers)."""

from __future__ import annotations

import itertools
import math
import random
import struct

import pytest
import torch

from fp8dist_kernels.formats import E4M3, E5M2, Format
from fp8dist_kernels.scaling import FLOAT32_MAX, scale_from_amax
from tests.support import oracle
from tests.support.states import bits

FORMATS = pytest.mark.parametrize("format", [E4M3, E5M2], ids=lambda f: f.name)
POWERS = pytest.mark.parametrize("power_of_two", [False, True])

SPECIAL = [
    *(0, 1, 2, 0x007FFFFF, 0x00800000, 0x00800001, 0x04000000),  # 0, subnormal numbers, the smallest normal ones.
    *(0x05800000, 0x05E00000, 0x05E00001, 0x05DFFFFF),  # 448 / amax just overflows somewhere here.
    *(0x09600000, 0x09600001, 0x095FFFFF),  # The same for 57344.
    *(0x2D2FEBFF, 0x3F7FFFFF, 0x3F800000, 0x3F800001, 0x40400000),  # 1e-11; around 1; 3.
    *(0x43E00000, 0x43E00001, 0x47600000, 0x7F000000, 0x7F7FFFFF),  # 448, 57344, the largest.
    *(0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF),  # Inf, NaN.
]


def _tensor(words: list[int]) -> torch.Tensor:
    return torch.frombuffer(bytearray(struct.pack(f"<{len(words)}I", *words)), dtype=torch.float32)


def _scales(words: list[int], format: Format, margin: int, power_of_two: bool, previous: float) -> list[int]:
    amax = _tensor(words)
    limit = torch.full_like(amax, format.max)
    scales: list[int] = bits(scale_from_amax(amax, torch.full_like(amax, previous), limit, margin, power_of_two))
    return scales


def _expected(words: list[int], format: Format, margin: int, power_of_two: bool, previous: float) -> list[int]:
    fp8_max = oracle.FP8_MAX[format.name]
    return [oracle.bits_of(oracle.scale_for(oracle.of_bits(w), previous, fp8_max, margin, power_of_two)) for w in words]


def test_formats() -> None:
    """The oracle's largest OCP FP8 values are those of torch's dtypes."""
    for format in (E4M3, E5M2):
        assert format.max == oracle.FP8_MAX[format.name] == torch.finfo(format.dtype).max
    assert FLOAT32_MAX == oracle.FLOAT32_MAX


@FORMATS
@POWERS
def test_amaxes(format: Format, power_of_two: bool) -> None:
    """Special ones, and 4,500 over all exponents. A reciprocal with a multiplication is off by one bit for many of
    them."""
    rng = random.Random(power_of_two)
    for margin, previous in itertools.product(range(-2, 4), map(oracle.float32, (1.0, 0.1, 3e38))):
        words = [*SPECIAL, *(rng.randrange(0x7F800000) for _ in range(250))]
        arguments = (words, format, margin, power_of_two, previous)
        assert _scales(*arguments) == _expected(*arguments), margin
    for margin in (-64, 64):  # No scale may become 0: its inverse would be Inf.
        scales = _scales([1, 0x00800000, 0x3F800000, 0x7F7FFFFF], format, margin, power_of_two, 1.0)
        assert all(0x00800000 <= scale < 0x7F800000 for scale in scales)
        assert scales[-1] <= _scales([0x7F7FFFFF], format, margin, False, 1.0)[0]


def test_zero_dimensional_and_short_inputs() -> None:
    """Vectorised and scalar code paths of torch give the same bits."""
    for lanes in (1, 3, 8, 33):
        words = [0x3F123456 + 7919 * i for i in range(lanes)]
        expected = _expected(words, E5M2, 1, False, 1.0)
        assert _scales(words, E5M2, 1, False, 1.0) == expected
        for word, scale in zip(words, expected):
            amax = _tensor([word])[0]
            assert bits(scale_from_amax(amax, torch.ones(()), torch.tensor(E5M2.max), 1, False)) == scale


def test_where_keeps_the_previous_scale() -> None:
    amax, previous = torch.tensor([2.0, 2.0, math.nan, 0.0]), torch.tensor([5.0, 6.0, 7.0, 8.0])
    where = torch.tensor([True, False, True, True])
    scale = scale_from_amax(amax, previous, torch.full((4,), 448.0), 0, False, where)
    assert scale.tolist() == [224.0, 6.0, 7.0, 8.0]
    assert amax[:2].tolist() == [2.0, 2.0]
    assert previous.tolist() == [5.0, 6.0, 7.0, 8.0]

"""The scale formula, bit for bit against the oracle's (TransformerEngine's numbers)."""

from __future__ import annotations

import itertools
import math
import random
import struct

import pytest
import torch

from fp8dist_kernels.formats import E4M3, E5M2, Format
from fp8dist_kernels.scaling import FLOAT32_MAX, round_down_to_power_of_two, scale_from_amax
from tests.support import oracle
from tests.support.states import bits

FORMATS = pytest.mark.parametrize("format", [E4M3, E5M2], ids=lambda f: f.name)
MARGINS = range(-2, 4)
POWERS = pytest.mark.parametrize("power_of_two", [False, True])

SPECIAL = [
    0x00000000,  # 0
    0x00000001,  # smallest subnormal
    0x00000002,
    0x007FFFFF,  # largest subnormal
    0x00800000,  # smallest normal
    0x00800001,
    0x04000000,
    0x05800000,  # 448 / amax just overflows somewhere here
    0x05E00000,
    0x05E00001,
    0x05DFFFFF,
    0x09600000,  # the same for 57344
    0x09600001,
    0x095FFFFF,
    0x2D2FEBFF,  # 1e-11
    0x3F7FFFFF,
    0x3F800000,  # 1
    0x3F800001,
    0x40400000,  # 3
    0x43E00000,  # 448
    0x43E00001,
    0x47600000,  # 57344
    0x7F000000,
    0x7F7FFFFF,  # FLT_MAX
    0x7F800000,  # Inf
    0x7F800001,  # NaN
    0x7FC00000,
    0x7FFFFFFF,
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
def test_special_amaxes(format: Format, power_of_two: bool) -> None:
    for margin, previous in itertools.product(MARGINS, (1.0, 0.1, 3e38)):
        previous = oracle.float32(previous)
        arguments = (SPECIAL, format, margin, power_of_two, previous)
        assert _scales(*arguments) == _expected(*arguments)


@FORMATS
@POWERS
def test_random_amaxes(format: Format, power_of_two: bool) -> None:
    """12,000 amaxes over all exponents. A reciprocal with a multiplication is off by one bit for many of them."""
    rng = random.Random(power_of_two)
    for margin in MARGINS:
        words = [rng.randrange(0x7F800000) for _ in range(2000)]
        arguments = (words, format, margin, power_of_two, 1.0)
        assert _scales(*arguments) == _expected(*arguments), margin


def test_the_shortcut_would_be_seen() -> None:
    """On these inputs, 448 * (1 / amax), which ``float / tensor`` computes, gives other bits."""
    rng = random.Random(0)
    words = [rng.randrange(0x3F000000, 0x41000000) for _ in range(1000)]
    shortcut = bits(_tensor(words).reciprocal() * 448.0)
    assert sum(a != b for a, b in zip(shortcut, _expected(words, E4M3, 0, False, 1.0))) > 100


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


def test_round_down_to_power_of_two() -> None:
    """The ends and the inside of every normal exponent. A scale is never subnormal."""
    words = [e << 23 | m for e in range(1, 255) for m in (0, 1, 0x400000, 0x7FFFFF)]
    expected = [oracle.bits_of(math.ldexp(0.5, math.frexp(oracle.of_bits(w))[1])) for w in words]
    assert bits(round_down_to_power_of_two(_tensor(words))) == expected


@FORMATS
@pytest.mark.parametrize("margin", [-64, 64])
@POWERS
def test_extreme_margins_give_usable_scales(format: Format, margin: int, power_of_two: bool) -> None:
    """With margins from -64 to 64, no scale may become 0: its inverse would be Inf."""
    scales = _tensor(
        [w & 0xFFFFFFFF for w in _scales([1, 0x00800000, 0x3F800000, 0x7F7FFFFF], format, margin, power_of_two, 1.0)]
    )
    assert bool((scales > 0).all()), scales
    assert bool(scales.isfinite().all()), scales
    if power_of_two:
        exact = _tensor([w & 0xFFFFFFFF for w in _scales([0x7F7FFFFF], format, margin, False, 1.0)])
        assert scales[-1] <= exact[0]

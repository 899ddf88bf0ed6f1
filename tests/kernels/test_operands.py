"""Operands of known answers: they equal their definition in Python's integers, on every device and in any parts."""

from __future__ import annotations

import pytest
import torch

from fp8dist_kernels.reference import operands
from fp8dist_kernels.reference.operands import integers, inverse_scales, operand
from tests.support.answers import FIELDS, known_bits, word

CPU = torch.device("cpu")
_FP8 = (torch.float8_e4m3fn,)
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def _bits(tensor: torch.Tensor) -> list[int]:
    size = tensor.dtype.itemsize
    return [bits % 256**size for bits in tensor.reshape(-1).view(WORDS[size]).tolist()]


@pytest.mark.parametrize("dtype", FIELDS)
def test_they_equal_their_definition(dtype: torch.dtype) -> None:
    for shape, seed in (((48, 16), 0), ((16, 40), 5), ((7,), 1)):
        assert _bits(operand(shape, dtype, seed, CPU)) == known_bits(shape, dtype, seed)


@pytest.mark.parametrize("dtype", FIELDS)
def test_they_hold_all_kinds_of_values_and_no_nan(dtype: torch.dtype) -> None:
    x = operand((64, 256), dtype, 2, CPU).double().abs()
    assert bool(x.isfinite().all())
    info = torch.finfo(dtype)
    assert bool((x == 0).any())
    assert bool(((x > 0) & (x < info.smallest_normal)).any())
    rows = (x >= 16).any(1).nonzero().flatten()
    assert len(rows) > 0
    assert set((rows % 16).tolist()) == {15}
    assert 0.85 < ((x >= 0.125) & (x < 2)).double().mean() < 0.96


def test_they_are_made_in_parts_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = [operand((16, 9), torch.bfloat16, 3, CPU), inverse_scales((5, 3), 4, CPU), integers((4, 9), *_FP8, 1, CPU)]
    monkeypatch.setattr(operands, "_AT_ONCE", 7)
    parts = [operand((16, 9), torch.bfloat16, 3, CPU), inverse_scales((5, 3), 4, CPU), integers((4, 9), *_FP8, 1, CPU)]
    for a, b in zip(whole, parts):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_scales_are_positive_and_integers_small() -> None:
    scales = inverse_scales((3, 5), 6, CPU)
    assert _bits(scales) == [(119 << 23) | (word(i, 6) >> 16) % 2**23 for i in range(15)]
    assert bool(((scales >= 2**-8) & (scales < 2**-7)).all())
    small = integers((8, 8), torch.float8_e5m2, 7, CPU)
    assert small.float().flatten().tolist() == [(word(i, 7) >> 16) % 2**16 % 5 - 2 for i in range(64)]


def test_torchs_generators_stay_as_they_are() -> None:
    before = torch.get_rng_state()
    operand((16, 16), torch.bfloat16, 0, CPU)
    assert torch.equal(torch.get_rng_state(), before)

"""Operands of known answers: they equal their definition in Python's integers, on every device and in any parts."""

from __future__ import annotations

import pytest
import torch

from fp8dist_kernels.reference import operands
from fp8dist_kernels.reference.operands import integers, inverse_scales, operand
from tests.support.answers import FIELDS, known_bits, word

CPU = torch.device("cpu")
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def _bits(tensor: torch.Tensor) -> list[int]:
    size = tensor.dtype.itemsize
    return [bits % 256**size for bits in tensor.reshape(-1).view(WORDS[size]).tolist()]


@pytest.mark.parametrize("dtype", FIELDS)
def test_they_equal_their_definition(dtype: torch.dtype) -> None:
    """And hold all kinds of values, but no NaN."""
    for shape, seed in (((48, 16), 0), ((16, 40), 5), ((7,), 1)):
        assert _bits(operand(shape, dtype, seed, CPU)) == known_bits(shape, dtype, seed)
    x = operand((64, 256), dtype, 2, CPU).double().abs()
    assert bool(x.isfinite().all())
    assert bool((x == 0).any())
    assert bool(((x > 0) & (x < torch.finfo(dtype).smallest_normal)).any())
    rows = (x >= 16).any(1).nonzero().flatten()
    assert set((rows % 16).tolist()) == {15}
    assert 0.85 < ((x >= 0.125) & (x < 2)).double().mean() < 0.96


def test_scales_and_integers_in_parts_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's generators stay as they are."""
    before, whole = torch.get_rng_state(), operand((16, 9), torch.bfloat16, 3, CPU)
    for at_once in (operands._AT_ONCE, 7):
        monkeypatch.setattr(operands, "_AT_ONCE", at_once)
        assert torch.equal(operand((16, 9), torch.bfloat16, 3, CPU), whole)
        scales = inverse_scales((3, 5), 6, CPU)
        assert _bits(scales) == [(119 << 23) | (word(i, 6) >> 16) % 2**23 for i in range(15)]
        small = integers((8, 8), torch.float8_e5m2, 7, CPU)
        assert small.float().flatten().tolist() == [(word(i, 7) >> 16) % 2**16 % 5 - 2 for i in range(64)]
    assert torch.equal(torch.get_rng_state(), before)

"""A position-keyed, order-free digest of int64 words.

Each word is mixed with a key that depends on its place, and the mixed words are summed with
wrap-around. The sum is the same in any order of summation; moving, swapping or equally flipping
words changes it. The mixer is the xorshift-multiply finaliser of SplitMix64 (Steele, Lea, Flood,
"Fast splittable pseudorandom number generators", OOPSLA 2014).
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["digest_words", "position_keys"]

_GOLDEN = -0x61C8864680B583EB  # 0x9E3779B97F4A7C15 as int64
_MULTIPLIER_1 = -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9
_MULTIPLIER_2 = -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB


def position_keys(count: int, device: torch.device) -> Tensor:
    """int64[count]: a different odd-multiple key for each place."""
    return (torch.arange(count, dtype=torch.int64, device=device) + 1) * _GOLDEN


def digest_words(words: Tensor, keys: Tensor) -> Tensor:
    """0-d int64 digest of ``words`` (int64[n]) under ``keys`` (int64[n])."""
    mixed = torch.bitwise_xor(words, keys)
    mixed = mixed.bitwise_xor_(_shift_right(mixed, 30)).mul_(_MULTIPLIER_1)
    mixed = mixed.bitwise_xor_(_shift_right(mixed, 27)).mul_(_MULTIPLIER_2)
    return mixed.bitwise_xor_(_shift_right(mixed, 31)).sum()


def _shift_right(x: Tensor, by: int) -> Tensor:
    """Logical right shift; torch's own is arithmetic on int64."""
    return (x >> by).bitwise_and_((1 << (64 - by)) - 1)

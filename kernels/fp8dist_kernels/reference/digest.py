"""A position-keyed digest of 32-bit words: multilinear hashing.

``sum(key[i] * word[i]) mod 2**64``, with a fixed pseudo-random odd 64-bit key for each position (the multilinear family
of Lemire and Kaser, "Strongly universal string hashing is fast", 2014). A change of one word always changes the digest:
the key is odd and the difference is below 2**32. A swap of two words, or equal bit flips at two positions, is missed
with a probability of about 2**-32 over the choice of keys. The sum wraps and does not depend on the order.
"""

from __future__ import annotations

import torch
from torch import Tensor

GOLDEN = -0x61C8864680B583EB  # 0x9E3779B97F4A7C15 as int64
_MULTIPLIER_1 = -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9
_MULTIPLIER_2 = -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB


def position_keys(count: int, device: torch.device) -> Tensor:
    """Return int64[count] odd keys: SplitMix64 (Steele, Lea, Flood, OOPSLA 2014) of the position, lowest bit set."""
    return mix((torch.arange(count, dtype=torch.int64, device=device) + 1) * GOLDEN) | 1


def mix(x: Tensor) -> Tensor:
    """Apply the finaliser of SplitMix64: a bijection of int64 that spreads each input bit over all bits."""
    x = (x ^ _shift_right(x, 30)) * _MULTIPLIER_1
    x = (x ^ _shift_right(x, 27)) * _MULTIPLIER_2
    return x ^ _shift_right(x, 31)


def digest_words(words: Tensor, keys: Tensor, out: Tensor) -> None:
    """Write the digest of ``words`` (int32[n]) under ``keys`` (int64[n]) to ``out`` (int64[1])."""
    torch.sum(words * keys, dim=0, keepdim=True, out=out)


def _shift_right(x: Tensor, by: int) -> Tensor:
    """Logical right shift. torch's ``>>`` is arithmetic on int64."""
    return (x >> by) & ((1 << (64 - by)) - 1)

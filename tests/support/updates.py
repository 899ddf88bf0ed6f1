"""Random states of an arena, and amaxes of a step, for tests of launches and commits."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from fp8dist_kernels.arrays import StateArrays, UpdateRule
from fp8dist_kernels.reference.magnitude import DID_NOT_RUN_BITS, INFINITY_BITS
from fp8dist_kernels.reference.rings import RingShape

RULE = UpdateRule(4, 0, False, True, "max")
BITS = (
    *(0, 1, 0x007FFFFF, 0x00800000, 0x3F800000, 0x43E00000, 0x43E80000, 0x43E80001, 0x7F7FFFFF),
    *(INFINITY_BITS, 0x7F800001, 0x7FC00000, 0x7FFFFFFF, DID_NOT_RUN_BITS, DID_NOT_RUN_BITS),
)
"""Amaxes: zero, subnormals, around what saturates at scale 1, the largest, Inf, NaNs with payloads, and did not run."""


def random_amaxes(rng: random.Random, n: int) -> Tensor:
    """Return the bits of amaxes, int32[n]."""
    numbers = (rng.choice(BITS) if rng.random() < 0.4 else rng.randrange(INFINITY_BITS) for _ in range(n))
    return torch.tensor(list(numbers), dtype=torch.int32)


def random_arrays(rng: random.Random, n: int, length: int, shards: int = 0) -> StateArrays:
    """Return a random state of slots of both formats, with positions all over the rings. The first are sharded."""
    formats = [rng.choice([(448.0, 464.0), (57344.0, 61440.0)]) for _ in range(n)]
    ring = RingShape(length)
    arrays = StateArrays.allocate([f[0] for f in formats], [f[1] for f in formats], ring, torch.device("cpu"))
    if shards:
        arrays = arrays.with_shards(range(shards), [rng.choices(range(shards, n), k=3) for _ in range(shards)])
    arrays.history[:, :length] = torch.rand(n, length) * 2.0 ** torch.randint(-120, 120, (n, 1))
    torch.amax(arrays.history.view(n, ring.blocks, ring.block), 2, out=arrays.block_max)
    arrays.amax.copy_(arrays.history[:, 0])
    arrays.cold.copy_(torch.rand(n) < 0.3)
    arrays.counters[0] = torch.randint(0, 5 * length, (n,))
    arrays.counters[1:] = torch.randint(0, 1 << 40, (2, n))
    arrays.scales.copy_(torch.rand(2, n) * 2.0 ** torch.randint(-100, 100, (2, n)))
    arrays.words.copy_(torch.tensor([0x12345678, 40, 5, 6]))
    return arrays


def assert_equal(mine: StateArrays, theirs: StateArrays) -> None:
    """Compare all fields bitwise."""
    for name, a, b in zip(StateArrays._fields, mine, theirs):
        a, b = a.cpu().contiguous(), b.cpu().contiguous()
        same = a.view(torch.uint8).equal(b.view(torch.uint8)) if a.numel() else a.shape == b.shape
        assert same, (name, a, b)

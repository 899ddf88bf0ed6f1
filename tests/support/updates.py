"""Random states of an arena, amaxes of a step, and two versions that must stay equal: for launches and commits."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fp8dist_kernels import host
from fp8dist_kernels.arrays import StateArrays, UpdateRule
from fp8dist_kernels.header import HEADER, WORDS
from fp8dist_kernels.reference import update
from fp8dist_kernels.reference.magnitude import DID_NOT_RUN_BITS, INFINITY_BITS
from fp8dist_kernels.reference.rings import RingShape
from tests.support.devices import DEVICE

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


class BothVersions:
    """The same state twice: one copy is updated by plain torch on the CPU, one by ``version``: "numpy" or "triton", on
    the device. Both must stay equal."""

    def __init__(self, version: str, arrays: StateArrays) -> None:
        self.numpy = version == "numpy"
        self.device = "cpu" if self.numpy else DEVICE
        self.plain = arrays
        self.arrays = StateArrays(*(tensor.clone().to(self.device) for tensor in arrays))
        self.views: Any = host.HostArrays(self.arrays) if self.numpy else self.arrays

    def _call(self, name: str, *args: Any) -> Any:
        # Imported here because decorating a kernel reads TRITON_INTERPRET.
        from fp8dist_kernels.triton import update as fused

        args = tuple(arg.to(self.device) if isinstance(arg, Tensor) else arg for arg in args)
        # The support for Triton's interpreter has switched numpy's warnings off.
        with np.errstate(all="raise" if self.numpy else "ignore"):
            return getattr(host if self.numpy else fused, name)(self.views, *args)

    def launch(self, amaxes: Tensor, shards: Tensor, hold: Tensor | None = None, drop: bool = False) -> None:
        for arrays in (self.plain, self.arrays):
            arrays.pending.copy_(amaxes.view(torch.float32))
            arrays.shards.copy_(shards.view(torch.float32))
            arrays.send.fill_(77)
        update.launch(self.plain, hold, drop)
        self._call("launch", hold, drop)
        assert_equal(self.arrays, self.plain)
        assert not self.arrays.scratch.any(), "it must be clean for the next launch"

    def commit(self, rule: UpdateRule, reduced: Tensor, hold: Tensor | None = None) -> list[bool]:
        expected = update.commit(self.plain, rule, reduced, hold)
        if self.numpy:  # With lanes of a fallback behind the message.
            reduced = torch.cat([reduced, random_amaxes(random.Random(1), 7)])
        found = self._call("commit", rule, reduced, hold)
        assert (found.dtype, found.tolist()) == (torch.bool, expected.tolist())
        assert_equal(self.arrays, self.plain)
        return found.tolist()

    def step(self, rule: UpdateRule, rng: random.Random, wrong: int | None = None, hold: Tensor | None = None) -> None:
        """Launch and commit. ``wrong``: the word of the header in which the ranks differ."""
        n, m = len(self.plain.pending), len(self.plain.shards)
        self.launch(random_amaxes(rng, n), random_amaxes(rng, m), hold, rng.random() < 0.5)
        reduced = self.plain.send.clone()
        reduced[HEADER:] = torch.maximum(reduced[HEADER:], random_amaxes(rng, n))
        if wrong is not None:
            reduced[wrong] += 1
        outcome = self.commit(rule, reduced, hold)
        assert outcome[:WORDS] == [wrong is not None and wrong % WORDS == word for word in range(WORDS)]

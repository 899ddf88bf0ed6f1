"""The FP8 state of n slots as flat arrays, and the rule by which a step updates them.

A *slot* is the state of one FP8 tensor. A *launch* moves the amaxes recorded since the last one (``pending``) into the
message that ranks all-reduce; a *commit* puts the result into the history and computes new scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fp8dist_kernels.header import HEADER, WORDS
from fp8dist_kernels.reference.digest import position_keys
from fp8dist_kernels.reference.magnitude import DID_NOT_RUN
from fp8dist_kernels.reference.rings import RingShape

TAKEN, NONFINITE, SATURATED = range(3)
"""Rows of ``counters`` and ``flags``."""


class UpdateRule(NamedTuple):
    """How a commit computes scales from amaxes."""

    length: int  # How many of the last amaxes a scale depends on.
    margin: int
    power_of_two: bool
    just_in_time: bool  # True: cold slots are cast with their own amax.
    algorithm: Literal["max", "most_recent", "none"]  # "none": the caller derives the scales.


class StateArrays(NamedTuple):
    """Tensors on one device. Arrays that a step changes come first, then constants.

    ============= ================ ==========================================================
    pending       float32[n]       amax since the last launch; -1: did not run on this rank
    send          int32[8 + n]     header | bits of pending; reduced in place
    scales        float32[2, n]    scale and inv_scale; start at 1
    sent          float32[2, n]    copy of scales at the last launch
    history       float32[n, P]    rings of ``rule.length`` entries (see ``rings``)
    block_max     float32[n, B]    the maximum of each block of a ring
    amax          float32[n]       the newest amax in the history
    cold          bool[n]          no positive finite amax committed yet
    counters      int64[3, n]      amaxes taken, non-finite amaxes, amaxes beyond the scale in use
    words         int32[4]         header words; one of them is the step counter
    flags         bool[3, n]       the counters that the last commit incremented
    shards        float32[m]       amaxes of this rank's parts of m sharded weights
    scratch       int64[4]         accumulators of a kernel's programs; 0 between launches
    unpolled      int32[8]         totals since the last poll: outcomes of commits in CUDA graphs, and collectives
    fp8_max       float32[n]       the format's largest finite value
    rounds_to_max float32[n]       the largest value that rounds to ``fp8_max``; larger values saturate
    keys          int64[2n]        position keys of the scale digest
    row_start     int64[n]         start of a slot's ring in the flattened history
    shard_slots   int64[m]         indices of the sharded weights' slots
    shard_users   int64[m, w]      indices of the input slots that show if a weight was used
    shard_of      int32[n]         a slot's index into ``shards``; -1: not sharded
    ============= ================ ==========================================================
    """

    pending: Tensor
    send: Tensor
    scales: Tensor
    sent: Tensor
    history: Tensor
    block_max: Tensor
    amax: Tensor
    cold: Tensor
    counters: Tensor
    words: Tensor
    flags: Tensor
    shards: Tensor
    scratch: Tensor
    unpolled: Tensor
    fp8_max: Tensor
    rounds_to_max: Tensor
    keys: Tensor
    row_start: Tensor
    shard_slots: Tensor
    shard_users: Tensor
    shard_of: Tensor

    @staticmethod
    def allocate(
        fp8_max: Sequence[float], rounds_to_max: Sequence[float], ring: RingShape, device: torch.device
    ) -> StateArrays:
        """Return the initial state of n slots. No weight is sharded.

        Args:
            fp8_max, rounds_to_max: the limits of each slot's format; see the table above.
            ring: shape of the history of each slot.
        """
        n = len(fp8_max)

        def full(*shape: int, value: float, dtype: torch.dtype) -> Tensor:
            return torch.full(shape, value, dtype=dtype, device=device)

        return StateArrays(
            pending=full(n, value=DID_NOT_RUN, dtype=torch.float32),
            send=full(HEADER + n, value=0, dtype=torch.int32),
            scales=full(2, n, value=1, dtype=torch.float32),
            sent=full(2, n, value=1, dtype=torch.float32),
            history=full(n, ring.padded, value=0, dtype=torch.float32),
            block_max=full(n, ring.blocks, value=0, dtype=torch.float32),
            amax=full(n, value=0, dtype=torch.float32),
            cold=full(n, value=True, dtype=torch.bool),
            counters=full(3, n, value=0, dtype=torch.int64),
            words=full(WORDS, value=0, dtype=torch.int32),
            flags=full(3, n, value=False, dtype=torch.bool),
            shards=full(0, value=0, dtype=torch.float32),
            scratch=full(4, value=0, dtype=torch.int64),
            unpolled=full(8, value=0, dtype=torch.int32),
            fp8_max=torch.tensor(fp8_max, dtype=torch.float32, device=device),
            rounds_to_max=torch.tensor(rounds_to_max, dtype=torch.float32, device=device),
            keys=position_keys(2 * n, device),
            row_start=torch.arange(n, device=device) * ring.padded,
            shard_slots=full(0, value=0, dtype=torch.int64),
            shard_users=full(0, 1, value=0, dtype=torch.int64),
            shard_of=full(n, value=-1, dtype=torch.int32),
        )

    def with_shards(self, slots: Sequence[int], users: Sequence[Sequence[int]]) -> StateArrays:
        """Return the same arrays, set up for sharded weights.

        Args:
            slots: the indices of the sharded weights' slots.
            users: for each of these weights, the indices of the input slots of all modules that multiply with it. All
                of equal length: repeat an index to fill up.
        """
        device = self.pending.device
        places = torch.tensor(slots, dtype=torch.int64, device=device)
        shard_of = torch.full_like(self.shard_of, -1)
        shard_of[places] = torch.arange(len(slots), dtype=torch.int32, device=device)
        return self._replace(
            shards=torch.full((len(slots),), DID_NOT_RUN, dtype=torch.float32, device=device),
            shard_slots=places,
            shard_users=torch.tensor(users, dtype=torch.int64, device=device) if slots else self.shard_users,
            shard_of=shard_of,
        )

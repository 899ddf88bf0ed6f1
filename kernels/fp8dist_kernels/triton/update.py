"""``launch`` and ``commit`` of a whole arena, one kernel each. ``StateArrays`` in ``arrays.py`` describes the arrays.

Each program takes some slots. Totals over all slots (the scale digest, and the numbers of non-finite and of saturated
slots) are summed in elements 0 and 2 of ``scratch`` by integer additions, whose order does not matter. Element 1 is the
ticket that finds the last program, which writes the totals out and resets ``scratch`` to 0. Comments give shapes for n
slots, of which m are of sharded weights.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8dist_kernels import header
from fp8dist_kernels.arrays import StateArrays, UpdateRule
from fp8dist_kernels.reference import magnitude
from fp8dist_kernels.reference.rings import RingShape
from fp8dist_kernels.reference.update import OUTCOME
from fp8dist_kernels.triton.launching import ceil_div, ceil_power_of_two, on_device_of
from fp8dist_kernels.triton.scaling import inverse, scale_from_amax
from fp8dist_kernels.triton.tickets import came_last

_SLOTS = 256
"""Slots per program of ``launch``, and at most of ``commit``."""

_TILE = 2048
"""Ring entries that a program of ``commit`` holds at a time: its slots times the length of a block, or times the number
of blocks."""

_HEADER = tl.constexpr(header.HEADER)
_WORDS = tl.constexpr(header.WORDS)
_WORD_STEP = tl.constexpr(header.WORD_STEP)
_WORD_SCALE_LOW = tl.constexpr(header.WORD_SCALE_LOW)
_DID_NOT_RUN = tl.constexpr(magnitude.DID_NOT_RUN_BITS)
_INFINITY = tl.constexpr(magnitude.INFINITY_BITS)


@triton.jit
def _launch_kernel(
    words,  # int32[4]
    scales,  # int32[2n]
    sent,  # int32[2n]
    keys,  # int64[2n]
    pending,  # int32[n]
    send,  # int32[8 + n]
    shards,  # int32[m]
    shard_of,  # int32[n]
    hold,  # any dtype, one element
    scratch,  # int64[4]
    slots,
    HOLD: tl.constexpr,
    DROP_NONFINITE: tl.constexpr,
    SHARDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """See ``reference.update.launch``. A program handles BLOCK slots."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = place < slots
    scale = tl.load(scales + place, mask=mask, other=0)
    inv_scale = tl.load(scales + slots + place, mask=mask, other=0)
    tl.store(sent + place, scale, mask=mask)
    tl.store(sent + slots + place, inv_scale, mask=mask)
    digest = scale.to(tl.int64) * tl.load(keys + place, mask=mask, other=0)
    digest += inv_scale.to(tl.int64) * tl.load(keys + slots + place, mask=mask, other=0)

    bits = tl.load(pending + place, mask=mask, other=0)
    if SHARDED:
        shard = tl.load(shard_of + place, mask=mask, other=-1)
        bits = tl.where(shard >= 0, tl.load(shards + shard, mask=mask & (shard >= 0), other=0), bits)
    left = tl.full((BLOCK,), _DID_NOT_RUN, tl.int32)  # Stays in ``pending``: under ``hold``, what is not sent.
    if HOLD:
        held = tl.load(hold + tl.zeros((BLOCK,), tl.int32)) != 0
        keep = held & (bits < _INFINITY) if DROP_NONFINITE else held
        left = tl.maximum(left, tl.where(keep, bits, left))
        bits = tl.where(held, _DID_NOT_RUN, bits)
    tl.store(send + _HEADER + place, bits, mask=mask)
    tl.store(pending + place, left, mask=mask)

    tl.atomic_add(scratch, tl.sum(digest, 0), sem="relaxed")
    if came_last(scratch + 1):
        total = tl.atomic_xchg(scratch, 0, sem="relaxed")
        low, high = total.to(tl.int32), (total >> 32).to(tl.int32)
        tl.store(words + _WORD_SCALE_LOW, low)
        tl.store(words + _WORD_SCALE_LOW + 1, high)
        for i in tl.static_range(_WORD_SCALE_LOW):
            word = tl.load(words + i)
            tl.store(send + i, word)
            tl.store(send + _WORDS + i, ~word)
        tl.store(send + _WORD_SCALE_LOW, low)
        tl.store(send + _WORD_SCALE_LOW + 1, high)
        tl.store(send + _WORDS + _WORD_SCALE_LOW, ~low)
        tl.store(send + _WORDS + _WORD_SCALE_LOW + 1, ~high)


@triton.jit
def _agrees(reduced, word: tl.constexpr):
    """True if all ranks sent the same word."""
    return tl.load(reduced + word) == ~tl.load(reduced + _WORDS + word)


@triton.jit
def _reduced_bits(reduced, shard_of, shard_users, place, mask, users, SHARDED: tl.constexpr):
    """Return the amax bits of the slots ``place``. A sharded weight's amax counts only if a module that uses the weight
    ran on some rank: otherwise the result is DID_NOT_RUN."""
    bits = tl.load(reduced + _HEADER + place, mask=mask, other=_DID_NOT_RUN)
    if SHARDED:
        shard = tl.load(shard_of + place, mask=mask, other=-1)
        sharded = shard >= 0
        ran = tl.full(place.shape, _DID_NOT_RUN, tl.int32)
        for user in range(users):
            slot = tl.load(shard_users + shard.to(tl.int64) * users + user, mask=sharded, other=0)
            ran = tl.maximum(ran, tl.load(reduced + _HEADER + slot, mask=sharded, other=_DID_NOT_RUN))
        bits = tl.where(sharded & (ran < 0), _DID_NOT_RUN, bits)
    return bits


@triton.jit
def _window_max(
    history, block_max, place, mask, count, bits, taken, length,
    RING_BLOCK: tl.constexpr, RING_BLOCKS: tl.constexpr, RING_BLOCK_2: tl.constexpr, RING_BLOCKS_2: tl.constexpr,
):  # fmt: skip
    """Write one entry (``bits``, where ``taken``) of each ring, and its block's maximum. Return the maxima of the
    windows, int32 bits.

    Entries are compared as integers, because none is negative. The new entry is taken from registers: the store to
    memory may not be visible yet.
    """
    row = place.to(tl.int64) * (RING_BLOCK * RING_BLOCKS)
    entry = (count % length).to(tl.int32)
    tl.store(history + row + entry, bits, mask=mask & taken)
    block = entry // RING_BLOCK
    inside = tl.arange(0, RING_BLOCK_2)[None, :]
    there = mask[:, None] & (inside < RING_BLOCK)
    start = row + block * RING_BLOCK
    entries = tl.load(history + start[:, None] + inside, mask=there, other=0)
    is_new = taken[:, None] & (inside == (entry - block * RING_BLOCK)[:, None])
    largest = tl.max(tl.where(is_new, bits[:, None], entries), 1)
    maxima_row = place.to(tl.int64) * RING_BLOCKS
    tl.store(block_max + maxima_row + block, largest, mask=mask)
    blocks = tl.arange(0, RING_BLOCKS_2)[None, :]
    maxima = tl.load(block_max + maxima_row[:, None] + blocks, mask=mask[:, None] & (blocks < RING_BLOCKS), other=0)
    return tl.max(tl.where(blocks == block[:, None], largest[:, None], maxima), 1)


@triton.jit
def _commit_kernel(
    reduced,  # int32[8 + n]
    hold,  # any dtype, one element
    scales,  # float32[2n]
    history,  # int32[n, RING_BLOCKS * RING_BLOCK]
    block_max,  # int32[n, RING_BLOCKS]
    amax,  # float32[n]
    cold,  # uint8[n]
    counters,  # int64[3n]
    words,  # int32[4]
    flags,  # uint8[3n]
    shard_of,  # int32[n]
    shard_users,  # int64[m, users]
    fp8_max,  # float32[n]
    rounds_to_max,  # float32[n]
    scratch,  # int64[4]
    outcome,  # uint8[7]
    slots,
    length,
    users,
    HOLD: tl.constexpr,
    SHARDED: tl.constexpr,
    JUST_IN_TIME: tl.constexpr,
    ALGORITHM: tl.constexpr,
    MARGIN: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    RING_BLOCK: tl.constexpr,
    RING_BLOCKS: tl.constexpr,
    RING_BLOCK_2: tl.constexpr,
    RING_BLOCKS_2: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """See ``reference.update.commit``. A program handles BLOCK slots."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = place < slots
    trusted = _agrees(reduced, 0) & _agrees(reduced, 1)
    step = 1
    if HOLD:
        proceeds = tl.load(hold) == 0
        trusted = trusted & proceeds
        step = proceeds.to(tl.int32)
    bits = _reduced_bits(reduced, shard_of, shard_users, place, mask, users, SHARDED)
    bits = tl.where(trusted, bits, _DID_NOT_RUN)
    nonfinite = bits >= _INFINITY
    taken = (bits >= 0) & ~nonfinite
    new = bits.to(tl.float32, bitcast=True)

    scale = tl.load(scales + place, mask=mask, other=1.0)
    was_cold = tl.load(cold + place, mask=mask, other=1) != 0
    # A tensor cast just in time, as that of a cold slot, cannot exceed its own scale.
    beyond = new * scale > tl.load(rounds_to_max + place, mask=mask, other=0.0)
    saturated = beyond & taken & ~was_cold if JUST_IN_TIME else beyond & taken
    count = tl.load(counters + place, mask=mask, other=0)
    window_max = _window_max(
        history,
        block_max,
        place,
        mask,
        count,
        bits,
        taken,
        length,
        RING_BLOCK,
        RING_BLOCKS,
        RING_BLOCK_2,
        RING_BLOCKS_2,
    )
    tl.store(counters + place, count + taken, mask=mask)
    tl.store(flags + place, taken, mask=mask)
    tl.store(counters + slots + place, tl.load(counters + slots + place, mask=mask, other=0) + nonfinite, mask=mask)
    tl.store(flags + slots + place, nonfinite, mask=mask)
    total = tl.load(counters + 2 * slots + place, mask=mask, other=0)
    tl.store(counters + 2 * slots + place, total + saturated, mask=mask)
    tl.store(flags + 2 * slots + place, saturated, mask=mask)

    newest = tl.where(taken, new, tl.load(amax + place, mask=mask, other=0.0))
    tl.store(amax + place, newest, mask=mask)
    tl.store(cold + place, was_cold & (newest <= 0), mask=mask)
    if ALGORITHM != "none":
        largest = window_max.to(tl.float32, bitcast=True) if ALGORITHM == "max" else newest
        limit = tl.load(fp8_max + place, mask=mask, other=1.0)
        scale = tl.where(taken, scale_from_amax(largest, scale, limit, MARGIN, POWER_OF_TWO), scale)
        tl.store(scales + place, scale, mask=mask)
        tl.store(scales + slots + place, inverse(scale), mask=mask)

    tl.atomic_add(scratch, tl.sum(nonfinite.to(tl.int64), 0), sem="relaxed")
    if SHARDED:
        shard = tl.load(shard_of + place, mask=mask, other=-1)
        tl.atomic_add(scratch + 2, tl.sum((saturated & (shard >= 0)).to(tl.int64), 0), sem="relaxed")
    if came_last(scratch + 1):
        for word in tl.static_range(_WORDS):
            tl.store(outcome + word, ~_agrees(reduced, word))
        tl.store(outcome + _WORDS, tl.atomic_xchg(scratch, 0, sem="relaxed") != 0)
        tl.store(outcome + _WORDS + 1, tl.atomic_xchg(scratch + 2, 0, sem="relaxed") != 0)
        tl.store(outcome + _WORDS + 2, 1)
        tl.store(words + _WORD_STEP, tl.load(words + _WORD_STEP) + step)


def launch(arrays: StateArrays, hold: Tensor | None, drop_nonfinite: bool) -> None:
    """See ``reference.update.launch``. Raises ValueError unless ``hold`` is None or one element on the same device."""
    slots = len(arrays.pending)
    hold = _one_on(arrays.pending.device, hold)
    with on_device_of(arrays.pending):
        _launch_kernel[(max(1, ceil_div(slots, _SLOTS)),)](
            arrays.words,
            arrays.scales.view(torch.int32),
            arrays.sent.view(torch.int32),
            arrays.keys,
            arrays.pending.view(torch.int32),
            arrays.send,
            arrays.shards.view(torch.int32),
            arrays.shard_of,
            arrays.words if hold is None else hold,
            arrays.scratch,
            slots,
            HOLD=hold is not None,
            DROP_NONFINITE=drop_nonfinite,
            SHARDED=len(arrays.shards) > 0,
            BLOCK=_SLOTS,
            num_warps=4,
        )


def commit(arrays: StateArrays, rule: UpdateRule, reduced: Tensor, hold: Tensor | None) -> Tensor:
    """See ``reference.update.commit``. Raises ValueError for ``hold`` as in ``launch``, and for a message that is not
    contiguous or of another shape."""
    slots = len(arrays.pending)
    hold = _one_on(arrays.pending.device, hold)
    if reduced.shape != arrays.send.shape or not reduced.is_contiguous():
        raise ValueError(
            f"expected a contiguous message of shape {tuple(arrays.send.shape)}, got {tuple(reduced.shape)}"
        )
    ring = RingShape(rule.length)
    longest = max(ceil_power_of_two(ring.block), ceil_power_of_two(ring.blocks))
    block = max(1, min(_SLOTS, _TILE // longest))
    outcome = torch.empty(OUTCOME, dtype=torch.bool, device=reduced.device)
    with on_device_of(reduced):
        _commit_kernel[(max(1, ceil_div(slots, block)),)](
            reduced,
            reduced if hold is None else hold,
            arrays.scales,
            arrays.history.view(torch.int32),
            arrays.block_max.view(torch.int32),
            arrays.amax,
            arrays.cold.view(torch.uint8),
            arrays.counters,
            arrays.words,
            arrays.flags.view(torch.uint8),
            arrays.shard_of,
            arrays.shard_users,
            arrays.fp8_max,
            arrays.rounds_to_max,
            arrays.scratch,
            outcome.view(torch.uint8),
            slots,
            rule.length,
            arrays.shard_users.shape[1],
            HOLD=hold is not None,
            SHARDED=len(arrays.shards) > 0,
            JUST_IN_TIME=rule.just_in_time,
            ALGORITHM=rule.algorithm,
            MARGIN=rule.margin,
            POWER_OF_TWO=rule.power_of_two,
            RING_BLOCK=ring.block,
            RING_BLOCKS=ring.blocks,
            RING_BLOCK_2=ceil_power_of_two(ring.block),
            RING_BLOCKS_2=ceil_power_of_two(ring.blocks),
            BLOCK=block,
            num_warps=4,
        )
    return outcome


def _one_on(device: torch.device, hold: Tensor | None) -> Tensor | None:
    """Return ``hold``. Raise ValueError if it is not one element on ``device``: a kernel would read a wrong address."""
    if hold is not None and (hold.numel() != 1 or hold.device != device):
        raise ValueError(f"hold must be one element on {device}, got {hold.numel()} on {hold.device}")
    return hold

"""Launch and commit in Triton, bitwise against the plain versions (other tests compare those with an oracle)."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8dist_kernels.arrays import StateArrays, UpdateRule
from fp8dist_kernels.header import HEADER, WORDS
from fp8dist_kernels.reference import update
from fp8dist_kernels.reference.magnitude import DID_NOT_RUN_BITS
from fp8dist_kernels.reference.rings import RingShape
from fp8dist_kernels.triton import update as fused
from tests.support.devices import DEVICE
from tests.support.oracle import FP8_MAX, ROUNDS_TO_MAX, Rules, SlotOracle, bits_of, of_bits

SPECIAL = [
    0,
    1,
    0x007FFFFF,
    0x00800000,
    0x3F800000,
    0x43E00000,
    0x43E00001,
    0x7F7FFFFF,
    0x7F800000,
    0x7F800001,
    0x7FFFFFFF,
]
RULE = UpdateRule(4, 0, False, True, "max")


def _amax_bits(rng: random.Random) -> int:
    kind = rng.random()
    if kind < 0.25:
        return DID_NOT_RUN_BITS
    return rng.choice(SPECIAL) if kind < 0.5 else rng.randrange(0x7F800000)


def _words(rng: random.Random, n: int) -> Tensor:
    return torch.tensor([_amax_bits(rng) for _ in range(n)], dtype=torch.int32)


def _arrays(n: int, length: int, shards: int = 0, seed: int = 0) -> StateArrays:
    """Return ``n`` slots of both formats. The first ``shards`` are sharded weights with one to three users each."""
    rng = random.Random(seed)
    formats = [FP8_MAX[name] for name in ("e4m3", "e5m2")]
    arrays = StateArrays.allocate(
        [formats[i % 2] for i in range(n)], [(464.0, 61440.0)[i % 2] for i in range(n)], RingShape(length),
        torch.device("cpu"),
    )  # fmt: skip
    arrays.words.copy_(torch.tensor([0x12345678, 40, 0, 0]))
    if shards:
        arrays = arrays.with_shards(
            range(shards), [[rng.randrange(shards, n) for _ in range(3)] for _ in range(shards)]
        )
        arrays.shards.copy_(_words(rng, shards).view(torch.float32))
    return arrays


def _there(arrays: StateArrays) -> StateArrays:
    """Return a copy on the device under test."""
    return StateArrays(*(tensor.clone().to(DEVICE) for tensor in arrays))


def _assert_equal(mine: StateArrays, theirs: StateArrays) -> None:
    for name, a, b in zip(StateArrays._fields, mine, theirs):
        a, b = a.cpu().contiguous(), b.cpu().contiguous()
        same = a.view(torch.uint8).equal(b.view(torch.uint8)) if a.numel() else a.shape == b.shape
        assert same, (name, a, b)


def _message(arrays: StateArrays, rng: random.Random, wrong: int | None = None) -> Tensor:
    """Return the result of a collective: amaxes of other ranks, and a differing header word if ``wrong`` is given."""
    reduced = arrays.send.clone()
    reduced[HEADER:] = torch.maximum(reduced[HEADER:], _words(rng, len(arrays.pending)))
    if wrong is not None:
        reduced[wrong] += 1
    return reduced


@pytest.mark.parametrize("n", [1, 2, 256, 700])
def test_launch(n: int) -> None:
    for shards, hold, drop in (
        (0, None, False),
        (1, None, True),
        (1, 0.0, False),
        (0, 0.0, True),
        (0, 1.0, False),
        (1, 1.0, True),
    ):
        rng = random.Random(n)
        plain = _arrays(n, 4, min(shards, n - 1))
        plain.pending.copy_(_words(rng, n).view(torch.float32))
        plain.scales.copy_(torch.rand(2, n) * 1e5)
        plain.send.fill_(77)
        there = _there(plain)
        held = None if hold is None else torch.tensor([hold])
        update.launch(plain, held, drop)
        fused.launch(there, None if held is None else held.to(DEVICE), drop)
        _assert_equal(there, plain)
        assert not there.scratch.any(), "scratch must be clean for the next launch"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "margin", "power_of_two", "just_in_time"),
    [
        ("max", -2, False, False),
        ("max", 0, True, True),
        ("max", 3, True, False),
        ("most_recent", -2, True, True),
        ("most_recent", 0, False, False),
        ("most_recent", 3, False, True),
        ("none", -2, True, False),
        ("none", 0, False, True),
    ],
)
def test_commits_of_many_steps(algorithm: Any, margin: int, power_of_two: bool, just_in_time: bool) -> None:
    """Eight steps with all kinds of amaxes. The windows wrap around."""
    rng = random.Random(margin)
    n, rule = 37, UpdateRule(5, margin, power_of_two, just_in_time, algorithm)
    plain = _arrays(n, rule.length)
    there = _there(plain)
    for _ in range(8):
        plain.pending.copy_(_words(rng, n).view(torch.float32))
        there.pending.copy_(plain.pending)
        update.launch(plain, None, False)
        fused.launch(there, None, False)
        reduced = _message(plain, rng)
        expected = update.commit(plain, rule, reduced, None)
        outcome = fused.commit(there, rule, reduced.to(DEVICE), None)
        assert outcome.tolist() == expected.tolist()
        _assert_equal(there, plain)


def test_window_lengths() -> None:
    """Rings of several shapes, with positions before, at and after the end of the window."""
    for length in (1, 2, 7, 16, 100, 5000):
        rng = random.Random(length)
        rule = RULE._replace(length=length)
        plain = _arrays(9, length)
        plain.counters[0] = torch.tensor([0, 1, length - 1, length, length + 1, 2 * length, 3, 5, 2**40])
        plain.history.copy_(torch.rand_like(plain.history))
        plain.history[:, length:] = 0
        torch.amax(plain.history.view(9, plain.block_max.shape[1], -1), 2, out=plain.block_max)
        update.launch(plain, None, False)
        there = _there(plain)
        for _ in range(3):
            reduced = _message(plain, rng)
            reduced[:HEADER] = plain.send[:HEADER]
            assert (
                fused.commit(there, rule, reduced.to(DEVICE), None).tolist()
                == update.commit(plain, rule, reduced, None).tolist()
            )
            _assert_equal(there, plain)


def test_what_is_not_trusted_is_not_taken() -> None:
    for wrong, hold in [
        *((wrong, None) for wrong in (None, *range(2 * WORDS))),
        *itertools.product((None, 1, 2), (0.0, 1.0)),
    ]:
        plain = _arrays(20, 4, seed=3)
        update.launch(plain, None, False)
        there = _there(plain)
        reduced = _message(plain, random.Random(1), wrong)
        held = None if hold is None else torch.tensor([hold])
        before = plain.history.clone()
        expected = update.commit(plain, RULE, reduced, held)
        outcome = fused.commit(there, RULE, reduced.to(DEVICE), None if held is None else held.to(DEVICE))
        assert outcome.tolist() == expected.tolist()
        assert outcome[:WORDS].tolist() == [wrong is not None and wrong % WORDS == word for word in range(WORDS)]
        refused = hold == 1.0 or (wrong is not None and wrong % WORDS < 2)
        assert plain.history.equal(before) == refused
        assert int(there.words[1]) == 40 + (hold != 1.0)
        _assert_equal(there, plain)


@pytest.mark.slow
@pytest.mark.parametrize("n", [12, 300])
def test_sharded_weights_count_where_a_user_ran(n: int) -> None:
    rng = random.Random(n)
    plain = _arrays(n, 4, shards=3, seed=n)
    there = _there(plain)
    alarms = set()
    for _ in range(10):
        plain.scales.fill_(rng.choice([1e-30, 1.0, 1e30]))
        there.scales.copy_(plain.scales)
        update.launch(plain, None, False)
        fused.launch(there, None, False)
        reduced = _message(plain, rng)
        expected = update.commit(plain, RULE, reduced, None)
        outcome = fused.commit(there, RULE, reduced.to(DEVICE), None)
        assert outcome.tolist() == expected.tolist()
        alarms.add(bool(outcome[-2]))
        _assert_equal(there, plain)
    assert alarms == {False, True}


def test_commits_against_the_oracle() -> None:
    """Compare with the oracle, too. The first step has scale 1 and amaxes at the saturation limit."""
    rng = random.Random(5)
    rules = Rules(history_len=3, margin=1, warmup="unit")
    slots = [SlotOracle(FP8_MAX["e4m3" if i % 2 == 0 else "e5m2"], rules) for i in range(16)]
    arrays = _there(_arrays(16, 3))
    for step in range(10):
        words = [word if word < 0 else min(word, 0x7FC00000) for word in (_amax_bits(rng) for _ in range(16))]
        if step == 0:
            words = [bits_of(ROUNDS_TO_MAX[slot.fp8_max]) + i // 8 for i, slot in enumerate(slots)]
        arrays.pending.copy_(torch.tensor(words, dtype=torch.int32).view(torch.float32))
        fused.launch(arrays, None, False)
        fused.commit(arrays, RULE._replace(length=3, margin=1, just_in_time=False), arrays.send, None)
        for slot, word in zip(slots, words):
            slot.commit(None if word < 0 else of_bits(word))
        assert arrays.scales[0].view(torch.int32).tolist() == [bits_of(slot.scale) for slot in slots]
        assert arrays.cold.tolist() == [slot.cold for slot in slots]
        assert arrays.counters.tolist() == [
            [slot.commits for slot in slots],
            [slot.nonfinite for slot in slots],
            [slot.saturated for slot in slots],
        ]


def test_an_arena_without_slots() -> None:
    plain = _arrays(0, 4)
    there = _there(plain)
    update.launch(plain, None, False)
    fused.launch(there, None, False)
    expected = update.commit(plain, RULE, plain.send.clone(), None)
    assert fused.commit(there, RULE, there.send.clone(), None).tolist() == expected.tolist()
    _assert_equal(there, plain)


def test_what_a_kernel_would_read_beyond_is_refused() -> None:
    for hold in (torch.zeros(2), torch.zeros(0)):
        arrays = _there(_arrays(5, 4))
        with pytest.raises(ValueError, match="one element"):
            fused.launch(arrays, hold.to(DEVICE), False)
        with pytest.raises(ValueError, match="contiguous message of shape"):
            fused.commit(arrays, RULE, arrays.send[:-1], None)
        with pytest.raises(ValueError, match="contiguous message of shape"):
            fused.commit(arrays, RULE, torch.zeros(2 * len(arrays.send), dtype=torch.int32, device=DEVICE)[::2], None)

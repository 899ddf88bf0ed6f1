"""Launch and commit in numpy and in Triton, bitwise against plain torch: random states, several steps in a row."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch

from fp8dist_kernels.arrays import StateArrays, UpdateRule
from fp8dist_kernels.header import WORD_STEP, WORDS
from fp8dist_kernels.reference.magnitude import DID_NOT_RUN_BITS, INFINITY_BITS
from fp8dist_kernels.reference.rings import RingShape
from fp8dist_kernels.triton import update as fused
from tests.support.devices import DEVICE
from tests.support.oracle import FP8_MAX, ROUNDS_TO_MAX, Rules, SlotOracle, bits_of, of_bits
from tests.support.suite import crossed
from tests.support.updates import RULE, BothVersions, random_amaxes, random_arrays

VERSIONS = pytest.mark.parametrize("version", ["numpy", "triton"])
RULES = [*itertools.product((-200, -2, 0, 3, 200), (False, True), (False, True))]


@VERSIONS
@crossed(length=[1, 2, 16, 1000, 1024], algorithm=["max", "most_recent", "none"])
def test_rules(version: str, algorithm: Any, length: int) -> None:
    """Every rule with some of the lengths, with and without sharded weights. Margins reach scales that overflow and
    underflow. Positions are all over the rings."""
    torch.manual_seed(length)
    turn, stride = 7 * length + 3 * len(algorithm), 3 if version == "numpy" else 5  # Odd: each flag has both values.
    for margin, power_of_two, just_in_time in RULES[turn % stride :: stride]:
        rng = random.Random(margin)
        both = BothVersions(version, random_arrays(rng, 31, length, shards=rng.choice([0, 3])))
        for _ in range(4):
            both.step(UpdateRule(length, margin, power_of_two, just_in_time, algorithm), rng)


@pytest.mark.slow
@VERSIONS
@pytest.mark.parametrize("shards", [0, 5])
def test_holds_and_differences(version: str, shards: int) -> None:
    """What ranks disagree about, and what a loss scaler holds back, on its own and together, in one row of steps."""
    torch.manual_seed(shards)
    rng = random.Random(shards)
    both = BothVersions(version, random_arrays(rng, 40, 4, shards))
    holds: list[Any] = [None, 0.0, [1.0]]
    holds += [1.0, -0.0, torch.nan, [0.0], [2.0], True] if version == "numpy" else []
    for wrong, value in itertools.product((None, *range(2 * WORDS)), holds):
        history, step = both.plain.history.clone(), int(both.plain.words[WORD_STEP])
        both.step(RULE, rng, wrong, None if value is None else torch.tensor(value))
        held = value == [1.0]
        if value in (None, 0.0) or held:
            assert both.plain.history.equal(history) == (held or (wrong is not None and wrong % WORDS < 2))
            assert int(both.plain.words[WORD_STEP]) == step + (not held)


@VERSIONS
def test_states_of_all_kinds(version: str) -> None:
    for n in (0, 1, 2, 672):
        torch.manual_seed(n)
        rng = random.Random(n)
        both = BothVersions(version, random_arrays(rng, n, 16))
        for hold in (None, torch.tensor(1.0), None):
            both.step(RULE._replace(length=16), rng, hold=hold)
    # Most slots did not run, on no rank: any user of a sharded weight may be the only one that ran.
    both = BothVersions(version, random_arrays(rng, 60, 4, 20))
    for _ in range(10):
        amaxes = torch.where(torch.rand(60) < 0.8, DID_NOT_RUN_BITS, random_amaxes(rng, 60))
        both.launch(amaxes, random_amaxes(rng, 20))
        both.commit(RULE, both.plain.send.clone())
    # The step counter and the sum of the digest wrap.
    both = BothVersions(version, random_arrays(rng, 5, 4))
    for arrays in (both.plain, both.arrays):
        arrays.words[1] = 2**31 - 1
        arrays.scales.view(torch.int32).fill_(2**31 - 1)
    both.step(RULE, rng)
    assert both.arrays.words[1] == -(2**31)


def test_damaged_maxima_are_made_good() -> None:
    """A commit takes the maxima of blocks from their entries."""
    both = BothVersions("numpy", random_arrays(random.Random(0), 9, 16))
    for arrays in (both.plain, both.arrays):
        arrays.block_max.fill_(3e38)
    for _ in range(20):
        both.step(RULE._replace(length=16), random.Random(0))
    assert not (both.arrays.block_max == 3e38).all()


@VERSIONS
def test_alarms(version: str) -> None:
    """A non-finite amax and a sharded weight beyond its scale, each alone. Other slots beyond their scales alarm no
    one."""
    beyond = torch.full((6,), 0x7F000000, dtype=torch.int32)
    inside, infinite = torch.full_like(beyond, 1), torch.full_like(beyond, INFINITY_BITS)
    for shards, amaxes, alarms in (
        (0, inside, [False, False]),
        (0, beyond, [False, False]),
        (2, beyond, [False, True]),
        (2, infinite, [True, False]),
    ):
        arrays = random_arrays(random.Random(0), 6, 4, shards)
        arrays.scales.fill_(1e20)
        both = BothVersions(version, arrays)
        both.launch(amaxes, amaxes[:shards])
        outcome = both.commit(RULE._replace(just_in_time=False), both.plain.send.clone())
        assert outcome == [False] * WORDS + alarms + [True]


@VERSIONS
def test_commits_against_the_oracle(version: str) -> None:
    """Compare with the oracle, too. The first step has scale 1 and amaxes at the saturation limit."""
    rng = random.Random(5)
    rules = Rules(history_len=3, margin=1, warmup="unit")
    formats = [FP8_MAX["e4m3" if i % 2 == 0 else "e5m2"] for i in range(16)]
    slots = [SlotOracle(limit, rules) for limit in formats]
    limits = [ROUNDS_TO_MAX[limit] for limit in formats]
    both = BothVersions(version, StateArrays.allocate(formats, limits, RingShape(3), torch.device("cpu")))
    for step in range(10):
        words = [word if word < 0 else min(word, 0x7FC00000) for word in random_amaxes(rng, 16).tolist()]
        if step == 0:
            words = [bits_of(limit) + i // 8 for i, limit in enumerate(limits)]
        both.launch(torch.tensor(words, dtype=torch.int32), torch.zeros(0))
        both.commit(RULE._replace(length=3, margin=1, just_in_time=False), both.plain.send.clone())
        for slot, word in zip(slots, words):
            slot.commit(None if word < 0 else of_bits(word))
        assert both.arrays.scales[0].view(torch.int32).tolist() == [bits_of(slot.scale) for slot in slots]
        assert both.arrays.cold.tolist() == [slot.cold for slot in slots]
        counted = [[slot.commits for slot in slots], [slot.nonfinite for slot in slots]]
        assert both.arrays.counters.tolist() == [*counted, [slot.saturated for slot in slots]]


def test_what_a_kernel_would_read_beyond_is_refused() -> None:
    arrays = BothVersions("triton", random_arrays(random.Random(0), 5, 4)).arrays
    for size in (0, 2):
        with pytest.raises(ValueError, match="one element"):
            fused.launch(arrays, torch.zeros(size, device=DEVICE), False)
    strided = torch.zeros(2 * len(arrays.send), dtype=torch.int32, device=DEVICE)[::2]
    for message in (arrays.send[:-1], strided):
        with pytest.raises(ValueError, match="contiguous message of shape"):
            fused.commit(arrays, RULE, message, None)

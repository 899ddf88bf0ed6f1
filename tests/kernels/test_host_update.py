"""Launch and commit in numpy, bitwise against plain torch: random states, several steps in a row."""

from __future__ import annotations

import copy
import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from fp8dist import DelayedScaling
from fp8dist.state.arena import Arena
from fp8dist.state.slots import Slot, SlotSpec
from fp8dist_kernels import direct, host
from fp8dist_kernels.arrays import StateArrays, UpdateRule
from fp8dist_kernels.formats import E4M3
from fp8dist_kernels.header import HEADER, WORDS
from fp8dist_kernels.reference import update
from fp8dist_kernels.reference.magnitude import DID_NOT_RUN_BITS, INFINITY_BITS
from fp8dist_kernels.reference.rings import RingShape

RULE = UpdateRule(4, 0, False, True, "max")
BITS = [0, 1, 0x007FFFFF, 0x00800000, 0x3F800000, 0x43E00000, 0x43E80000, 0x43E80001, 0x7F7FFFFF]
BITS += [INFINITY_BITS, 0x7F800001, 0x7FC00000, 0x7FFFFFFF, DID_NOT_RUN_BITS, DID_NOT_RUN_BITS]
"""Amaxes: zero, subnormals, around what saturates at scale 1, the largest, Inf, NaNs with payloads, and did not run."""


def _amaxes(rng: random.Random, n: int) -> Tensor:
    numbers = (rng.choice(BITS) if rng.random() < 0.4 else rng.randrange(INFINITY_BITS) for _ in range(n))
    return torch.tensor(list(numbers), dtype=torch.int32)


def _arrays(rng: random.Random, n: int, length: int, shards: int = 0) -> StateArrays:
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


def _copied(arrays: StateArrays) -> StateArrays:
    return StateArrays(*(tensor.clone() for tensor in arrays))


def _assert_equal(mine: StateArrays, theirs: StateArrays) -> None:
    for name, a, b in zip(StateArrays._fields, mine, theirs):
        same = a.contiguous().view(torch.uint8).equal(b.contiguous().view(torch.uint8)) if a.numel() else True
        assert same, (name, a, b)


class _Both:
    """The same state twice: one copy is updated by torch, one by numpy. Both must stay equal."""

    def __init__(self, arrays: StateArrays) -> None:
        self.plain, self.arrays = arrays, _copied(arrays)
        self.views = host.HostArrays(self.arrays)

    def launch(self, amaxes: Tensor, shards: Tensor, hold: Tensor | None = None, drop: bool = False) -> None:
        for arrays in (self.plain, self.arrays):
            arrays.pending.copy_(amaxes.view(torch.float32))
            arrays.shards.copy_(shards.view(torch.float32))
            arrays.send.fill_(77)
        update.launch(self.plain, hold, drop)
        with np.errstate(all="raise"):  # The support for Triton's interpreter has switched numpy's warnings off.
            host.launch(self.views, hold, drop)
        _assert_equal(self.arrays, self.plain)

    def commit(self, rule: UpdateRule, reduced: Tensor, hold: Tensor | None = None) -> list[bool]:
        expected = update.commit(self.plain, rule, reduced, hold)
        longer = torch.cat([reduced, _amaxes(random.Random(1), 7)])  # With lanes of a fallback behind the message.
        with np.errstate(all="raise"):
            found = host.commit(self.views, rule, longer, hold)
        assert (found.dtype, found.tolist()) == (torch.bool, expected.tolist())
        _assert_equal(self.arrays, self.plain)
        return found.tolist()

    def step(self, rule: UpdateRule, rng: random.Random, wrong: int | None = None, hold: Tensor | None = None) -> None:
        n, m = len(self.plain.pending), len(self.plain.shards)
        self.launch(_amaxes(rng, n), _amaxes(rng, m), hold, rng.random() < 0.5)
        reduced = self.plain.send.clone()
        reduced[HEADER:] = torch.maximum(reduced[HEADER:], _amaxes(rng, n))
        if wrong is not None:
            reduced[wrong] += 1
        outcome = self.commit(rule, reduced, hold)
        assert outcome[:WORDS] == [wrong is not None and wrong % WORDS == word for word in range(WORDS)]


@pytest.mark.parametrize("length", [1, 2, 16, 1000, 1024])
@pytest.mark.parametrize("algorithm", ["max", "most_recent", "none"])
def test_rules(algorithm: Any, length: int) -> None:
    """Every rule, with and without sharded weights. Margins reach scales that overflow and underflow."""
    torch.manual_seed(length)
    for margin, power_of_two, just_in_time in itertools.product((-200, -2, 0, 3, 200), (False, True), (False, True)):
        rng = random.Random(margin)
        both = _Both(_arrays(rng, 31, length, shards=rng.choice([0, 3])))
        for _ in range(4):
            both.step(UpdateRule(length, margin, power_of_two, just_in_time, algorithm), rng)


@pytest.mark.parametrize("shards", [0, 1, 5])
def test_holds_and_differences(shards: int) -> None:
    """What ranks disagree about, and what a loss scaler holds back, on its own and together, in one row of steps."""
    torch.manual_seed(shards)
    rng = random.Random(shards)
    both = _Both(_arrays(rng, 40, 4, shards))
    holds = [None, *(torch.tensor(hold) for hold in (0.0, 1.0, -0.0, torch.nan, [0.0], [2.0], True))]
    for wrong, hold in itertools.product((None, *range(2 * WORDS)), holds):
        both.step(RULE, rng, wrong, hold)


def test_sharded_weights_count_where_a_user_ran() -> None:
    """Most slots did not run, on no rank: any of a weight's users may be the only one that ran."""
    rng = random.Random(0)
    both = _Both(_arrays(rng, 60, 4, 20))
    for _ in range(10):
        amaxes = torch.where(torch.rand(60) < 0.8, DID_NOT_RUN_BITS, _amaxes(rng, 60))
        both.launch(amaxes, _amaxes(rng, 20))
        both.commit(RULE, both.plain.send.clone())


@pytest.mark.parametrize("n", [0, 1, 2, 672])
def test_numbers_of_slots(n: int) -> None:
    torch.manual_seed(n)
    rng = random.Random(n)
    both = _Both(_arrays(rng, n, 16))
    for hold in (None, torch.tensor(1.0), None):
        both.step(RULE._replace(length=16), rng, hold=hold)


def test_alarms() -> None:
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
        arrays = _arrays(random.Random(0), 6, 4, shards)
        arrays.scales.fill_(1e20)
        both = _Both(arrays)
        both.launch(amaxes, amaxes[:shards])
        outcome = both.commit(RULE._replace(just_in_time=False), both.plain.send.clone())
        assert outcome == [False] * WORDS + alarms + [True]


def test_counters_wrap() -> None:
    """The step counter, and the sum of the digest."""
    both = _Both(_arrays(random.Random(0), 5, 4))
    for arrays in (both.plain, both.arrays):
        arrays.words[1] = 2**31 - 1
        arrays.scales.view(torch.int32).fill_(2**31 - 1)
    both.step(RULE, random.Random(0))
    assert both.arrays.words[1] == -(2**31)


def test_damaged_maxima_are_made_good() -> None:
    """A commit takes the maxima of blocks from their entries."""
    both = _Both(_arrays(random.Random(0), 9, 16))
    for arrays in (both.plain, both.arrays):
        arrays.block_max.fill_(3e38)
    for _ in range(20):
        both.step(RULE._replace(length=16), random.Random(0))
    assert not (both.arrays.block_max == 3e38).all()


# Which version runs ------------------------------------------------------------------------------------


def _runs_numpy(arrays: StateArrays, backend: str = "auto") -> bool:
    """Return if ``StateUpdates`` runs numpy for a launch and a commit. Both run it or neither."""
    before = host.launch, host.commit
    calls: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "launch", lambda *args: (calls.append("launch"), before[0](*args))[1])
        patch.setattr(host, "commit", lambda *args: (calls.append("commit"), before[1](*args))[1])
        updates = direct.StateUpdates(arrays, RULE, backend)
        updates.launch(None, False)
        assert updates.commit(arrays.send, None).shape == (update.OUTCOME,)
    assert calls in ([], ["launch", "commit"])
    return bool(calls)


def test_which_version_runs() -> None:
    arrays = StateArrays.allocate([448.0] * 3, [464.0] * 3, RingShape(4), torch.device("cpu"))
    assert {name: _runs_numpy(arrays, name) for name in ("auto", "torch", "reference")} == {
        "auto": True,
        "torch": True,
        "reference": False,
    }
    with FakeTensorMode() as mode:
        fake = StateArrays(*map(mode.from_tensor, arrays))
        assert not _runs_numpy(fake)


def test_modes_see_the_ops() -> None:
    """A dispatch mode sees one op per call. What runs inside gives the same bits as numpy."""

    class Seen(TorchDispatchMode):
        names: tuple[str, ...] = ()

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names += (str(func),)
            return func(*args, **(kwargs or {}))

    arrays = _arrays(random.Random(0), 6, 4)
    twin = _copied(arrays)
    updates = direct.StateUpdates(arrays, RULE, "auto")
    with Seen() as seen:
        updates.launch(None, False)
        outcome = updates.commit(arrays.send, None)
    assert [name for name in seen.names if "fp8dist" in name] == ["fp8dist.launch.default", "fp8dist.commit.default"]
    updates = direct.StateUpdates(twin, RULE, "auto")
    updates.launch(None, False)
    assert updates.commit(twin.send, None).equal(outcome)
    _assert_equal(twin, arrays)


def test_an_arena_that_is_rebuilt_or_copied_has_its_own_views() -> None:
    """Slots that are registered, weights that become sharded and copies: all have new arrays."""
    recipe = DelayedScaling(history_len=4)
    specs = [SlotSpec(Slot(name, role), E4M3) for name in "ab" for role in ("input", "weight")]
    arena = Arena(specs[:2], recipe).extended(specs[2:])
    arena.hold_shards({1: [0]})
    twin = copy.deepcopy(arena)
    plain = Arena(specs, recipe, "reference")
    plain.hold_shards({1: [0]})
    for each in (arena, plain):
        each.pending.fill_(3.0)
        each.shards.fill_(5.0)
        each.launch()
        each.commit(each.message)
    assert arena.amax.tolist() == [3.0, 5.0, 3.0, 3.0]
    _assert_equal(arena.arrays, plain.arrays)
    assert not twin.amax.any()
    twin.pending.fill_(2.0)
    twin.launch()
    twin.commit(twin.message)
    assert twin.amax.tolist() == [2.0] * 4
    _assert_equal(arena.arrays, plain.arrays)

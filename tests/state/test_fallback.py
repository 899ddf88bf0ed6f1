"""Fallback: modules whose tensors do not fit FP8 go to high precision and back, on all ranks at the same step."""

from __future__ import annotations

import copy
import random
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import fp8dist
from fp8dist import BlockScaling, CurrentScaling, DelayedScaling, Event, Fallback, MXFP8Scaling, Recipe
from fp8dist.errors import ConfigurationError
from fp8dist.modules.grouped_slots import slot_names
from fp8dist.state.precision import Precision, Precisions
from fp8dist.state.recipe import GEMMS
from tests.support.collectives import counted_collectives
from tests.support.logs import captured_log
from tests.support.ranks import on_ranks
from tests.support.training import SmallJob, batch, make_net, parameter_bits, state_bits, unwrapped

ALL = ("fprop", "dgrad", "wgrad")
MODULES = ("first", "branch", "last")


class Job(SmallJob):
    """A net that trains on this rank; ``hurt`` changes the input of ``branch`` at given steps."""

    def __init__(self, recipe: Recipe, fallback: Fallback, **options: Any) -> None:
        super().__init__(
            recipe, wrap=unwrapped, optimizer=partial(torch.optim.SGD, lr=0.02), fallback=fallback, **options
        )
        self.events: list[Event] = []
        self.manager.on_event(self.events.append)
        self.done = 0
        self.hurt: dict[int, Any] = {}
        self.net.branch.register_forward_pre_hook(self._hurt)

    def _hurt(self, module: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        how = self.hurt.get(self.done + 1)
        return None if how is None else (how(args[0].clone()), *args[1:])

    def train(self, rank: int = 0) -> tuple[str, ...]:
        """Train a step, always on the same batch, so no amax grows much. Return the modules in high precision."""
        high = tuple(name for name in MODULES if self.manager.slot(name, "input").high_precision == ALL)
        self.backward(0, rank)
        self.done += 1
        self.optimizer.step()
        self.optimizer.zero_grad()
        return high


def outlier(x: Tensor) -> Tensor:
    """Two elements far beyond the scale: they saturate."""
    x[0, :2] = 1e4
    return x


def infinite(x: Tensor) -> Tensor:
    x[0, 0] = torch.inf
    return x


def faint(x: Tensor) -> Tensor:
    """All elements but one are far below the largest."""
    x *= 1e-6
    x[0, 0] = 10.0
    return x


RECIPES = [DelayedScaling(history_len=4), CurrentScaling(), BlockScaling(), MXFP8Scaling()]


def test_a_share_at_the_limit_is_none_beyond_it() -> None:
    """2 of 8 x 48 elements; the limit is this share in float32."""
    share = (torch.tensor(2.0) / torch.tensor(8.0 * 48)).item()
    for limit, falls in ((share, False), (share * (1 - 1e-6), True)):
        job = Job(DelayedScaling(history_len=4), Fallback(steps=3, saturated=limit))
        job.hurt[4] = outlier
        with captured_log():
            for _ in range(4):
                job.train()
        assert (job.manager.slot("branch", "input").high_precision == ALL) == falls


@pytest.mark.parametrize("recipe", RECIPES[1:], ids=lambda recipe: type(recipe).__name__)
def test_a_nonfinite_amax(recipe: Recipe) -> None:
    """Inf spreads to every tensor computed from it, and all affected modules fall back. ``test_whole_job.py`` has
    delayed scaling."""
    job = Job(recipe, Fallback(steps=2))
    job.hurt[3] = infinite
    with captured_log():
        for _ in range(2):
            job.train()
        weights = copy.deepcopy(job.net.state_dict())
        job.train()
        job.net.load_state_dict(weights)  # Like a loop that undoes a bad step.
        high = [job.train() for _ in range(3)]
    assert "branch" in high[0]
    assert high[0] == high[1]
    assert high[2] == ()


def test_a_resume_in_the_middle_of_a_fallback_is_bitwise() -> None:
    """Under next_step a fallback follows one step after its cause; a save in between keeps it."""
    recipe = DelayedScaling(history_len=4, update="next_step")
    unbroken, resumed = (Job(recipe, Fallback(steps=2, saturated=0.004)) for _ in range(2))
    unbroken.hurt[3] = outlier
    high = [(), ("branch",), ("branch",), (), ()]
    with captured_log():
        for _ in range(3):
            unbroken.train()
        resumed.net.load_state_dict(copy.deepcopy(unbroken.net.state_dict()))
        resumed.manager.load_state_dict(unbroken.manager.state_dict())
        resumed.done = 3
        assert [resumed.train() for _ in range(5)] == [unbroken.train() for _ in range(5)] == high
    assert [e.step for e in resumed.events if e.kind == "fallback"] == [3]
    assert parameter_bits(resumed.net) == parameter_bits(unbroken.net)
    assert state_bits(resumed.manager) == state_bits(unbroken.manager)


@pytest.mark.parametrize("how", ["placed", "register"])
def test_a_cause_that_is_loaded_before_the_state_is_placed_is_kept(how: str) -> None:
    recipe, fallback = DelayedScaling(history_len=4, update="next_step"), Fallback(steps=2)
    job = Job(recipe, fallback)
    job.hurt[1] = infinite
    with captured_log():
        job.train()
    net = make_net()
    manager = fp8dist.prepare(net, recipe, fallback=fallback)
    manager.load_state_dict(job.manager.state_dict())
    (sync,) = manager._syncs
    if how == "placed":
        sync.arena.place(torch.device("cpu", 0))  # As on a GPU: another device than before.
    else:
        manager.register("another", "input", "e4m3")
    tripped = {slot.fqn for slot, place in sync.arena.index.items() if sync.arena.tripped[place]}
    assert "branch" in tripped


def test_a_fallback_ends_no_longer_override() -> None:
    job = Job(DelayedScaling(history_len=4), Fallback(steps=2, saturated=0.004))
    job.manager.set_precision("branch", "high", gemms=("dgrad",), steps=7)
    job.hurt[3] = outlier
    high = []
    with captured_log():
        for _ in range(9):
            high.append(job.manager.slot("branch", "input").high_precision)
            job.train()
    assert high == [("dgrad",)] * 3 + [ALL] * 2 + [("dgrad",)] * 2 + [()] * 2


def test_without_a_policy_nothing_is_measured() -> None:
    job = Job(DelayedScaling(history_len=4), Fallback(steps=2))  # Non-finite amaxes cost nothing.
    for _ in range(2):
        job.train()
    (sync,) = job.manager._syncs
    assert sync.arena.message.numel() == 8 + len(job.manager.slots)


def test_what_is_loaded_does_not_fall_back_for_what_was_before() -> None:
    """A loop returns to a checkpoint before the last sync's result is read."""
    job = Job(DelayedScaling(history_len=4, update="next_step"), Fallback(steps=2))
    job.train()
    weights, state = copy.deepcopy(job.net.state_dict()), job.manager.state_dict()
    job.hurt[2] = infinite
    job.train()
    assert job.manager.steps == 2  # Committed.
    job.net.load_state_dict(weights)
    job.manager.load_state_dict(state)
    assert [job.train() for _ in range(3)] == [()] * 3


def test_mistakes() -> None:
    for arguments, says in (
        ({"steps": 0}, "steps must be an integer"),
        ({"steps": True}, "steps must be an integer"),
        ({"nonfinite": 1}, "nonfinite must be True or False"),
        ({"saturated": 1.5}, "saturated must be a share"),
        ({"underflow": -0.1}, "underflow must be a share"),
        ({"underflow": float("nan")}, "underflow must be a share"),
        ({"underflow": True}, "underflow must be a share"),
        ({"nonfinite": False}, "it would never trigger"),
    ):
        with pytest.raises(ConfigurationError, match=says):
            Fallback(**arguments)  # type: ignore[arg-type]


def test_a_policy_leaves_current_scaling_without_scales_to_exceed() -> None:
    job = Job(CurrentScaling(), Fallback(steps=2))
    for factor in (1, 10, 1000):
        job.hurt[job.done + 1] = lambda x, factor=factor: x * factor
        job.train()
    assert job.manager.metrics()["fp8/saturated_amaxes"] == 0
    assert {job.manager.slot(*slot).scale.item() for slot in job.manager.slots} == {1.0}


LATE = DelayedScaling(history_len=64, update="next_step")


@pytest.mark.parametrize(
    ("recipe", "how"), [(RECIPES[0], outlier), (LATE, outlier), (RECIPES[0], faint), (RECIPES[1], faint)]
)
@on_ranks(2)
def test_an_outlier_on_one_rank_sends_the_module_back_on_all(recipe: Recipe, how: Any) -> None:
    """The switch happens at the same step, ends after K, and uses the sync's one collective: two more words per slot.
    Under next_step the next boundary reads what a sync proved, on all ranks: a step later."""
    rank, late = dist.get_rank(), recipe == LATE
    job = Job(recipe, Fallback(2, nonfinite=False, saturated=0.004, underflow=0.2))
    if rank == 1:
        job.hurt[3] = how
    with captured_log() as log, counted_collectives() as calls:
        high = [job.train(rank) for _ in range(7)]
    assert high == [()] * (3 + late) + [("branch",)] * 2 + [()] * (2 - late)
    (event,) = job.events
    assert (event.kind, event.step) == ("fallback", 3)
    assert ("branch", "input") in event.slots
    assert {slot.fqn for slot in event.slots} == {"branch"}
    # Otherwise the outlier would stay the maximum of a long window, and all other values would underflow.
    assert job.manager.slot("branch", "input").amax_history.max() < 100
    assert job.manager.metrics()["fp8/fallbacks"] == 1
    assert calls.sizes == [4 * (8 + 3 * 9)] * 7
    said = "fp8dist: step 3: 1 module(s) go to high precision for 2 steps, 'branch' first (branch:"
    assert [text.startswith(said) for _, text in log] == [True] * (rank == 0)  # One rank logs it.


@on_ranks(2)
def test_an_expert_that_one_rank_has_falls_back_alone() -> None:
    """``branch`` is an expert that only this rank has, so its fallback does not affect the other rank."""
    rank = dist.get_rank()
    own = [dist.new_group([r]) for r in range(2)][rank]
    job = Job(DelayedScaling(history_len=4), Fallback(steps=2), group=dist.group.WORLD, groups={"branch": own})
    high = []
    with captured_log():
        for step in range(6):
            if step == 2 and rank == 1:
                job.manager.slot("branch", "input").record(torch.tensor([torch.nan]))
            high.append(job.train(rank))
    assert high == ([()] * 3 + [("branch",)] * 2 + [()] if rank == 1 else [()] * 6)


@pytest.mark.parametrize("update", ["same_step", "next_step"])
@on_ranks(2)
def test_ranks_that_had_no_data_fall_back_with_the_others(update: Any) -> None:
    """Rank 0 has data for two more steps, and an outlier in the last one."""
    rank = dist.get_rank()
    net = make_net()
    recipe = DelayedScaling(history_len=4, update=update)
    manager = fp8dist.prepare(net, recipe, group=dist.group.WORLD, fallback=Fallback(steps=2))
    ddp = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-30)  # Changes nothing; a step with 0 would not count.
    manager.attach(ddp, optimizer=optimizer)

    def step(index: int) -> None:
        x, y = batch(rank, index)
        (ddp(x) - y).square().mean().backward()
        optimizer.step()

    high: list[tuple[str, ...]] = []
    with captured_log():
        with Join([ddp, manager]):
            for index in range(4 if rank == 0 else 2):
                if index == 3:
                    manager.slot("branch", "input").record(torch.tensor([torch.nan]))
                step(index)
        for index in range(4):
            high.append(manager.slot("branch", "input").high_precision)
            step(index)
    assert high == [ALL, ALL, (), ()]


def made() -> Precisions:
    each = [Precision(slots, ()) for slots in slot_names("experts.down", 4)]
    return Precisions({f"experts.down.{number}": precision for number, precision in enumerate(each)})


class _Plain(Precision):
    def count_down(self) -> bool:
        return False


@pytest.mark.parametrize("seed", range(6))
def test_counting_down_equals_an_end_step_of_each_expert(seed: int) -> None:
    """Over random changes, long enough to see the last observed steps."""
    ours, theirs = made(), made()
    for precision in theirs.by_fqn.values():
        precision.__class__ = _Plain
    draw = random.Random(seed)
    for _ in range(120):
        if draw.random() < 0.15:
            fqns = draw.sample(sorted(ours.by_fqn), 2)
            gemms = tuple(gemm for gemm in GEMMS if draw.random() < 0.6) or GEMMS
            how: tuple[Any, ...] = gemms, draw.random() < 0.7, draw.choice([None, 1, 3, 17, 18, 30])
            assert ours.change(fqns, *how) == theirs.change(fqns, *how)
        if draw.random() < 0.03:
            assert ours.restore(theirs.describe()) == theirs.restore(theirs.describe())
        assert ours.end_step() == theirs.end_step()
        assert ours.describe() == theirs.describe()
        for fqn, precision in ours.by_fqn.items():
            for name in ("high", "observing", "recorded"):
                assert getattr(precision, name) == getattr(theirs.by_fqn[fqn], name)
        assert ours.version == theirs.version

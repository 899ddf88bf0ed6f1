"""Fallback: modules whose tensors do not fit FP8 go to high precision and back, on all ranks at the same step."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import fp8dist
from fp8dist import BlockScaling, CurrentScaling, DelayedScaling, Event, Fallback, MXFP8Scaling, Recipe, StateManager
from fp8dist.errors import ConfigurationError, ManifestMismatchError
from fp8dist.modules.grouped_slots import slot_names
from fp8dist.state.precision import OBSERVED_STEPS, Precision, Precisions
from fp8dist.state.recipe import GEMMS
from tests.support.collectives import counted_collectives
from tests.support.logs import captured_log
from tests.support.ranks import on_ranks
from tests.support.training import batch, make_net, parameter_bits, state_bits

ALL = ("fprop", "dgrad", "wgrad")
MODULES = ("first", "branch", "last")


class Job:
    """A net that trains on this rank; ``hurt`` changes the input of ``branch`` at given steps."""

    def __init__(self, recipe: Recipe, fallback: Fallback, group: Any = None, **options: Any) -> None:
        self.net = make_net()
        self.manager: StateManager = fp8dist.prepare(self.net, recipe, group=group, fallback=fallback, **options)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.02)
        self.manager.attach(optimizer=self.optimizer)
        self.events: list[Event] = []
        self.manager.on_event(self.events.append)
        self.done = 0
        self.hurt: dict[int, Any] = {}
        self.net.branch.register_forward_pre_hook(self._hurt)

    def _hurt(self, module: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        how = self.hurt.get(self.done + 1)
        return None if how is None else (how(args[0].clone()), *args[1:])

    def step(self, rank: int = 0) -> tuple[str, ...]:
        """Train a step. Return the modules that were in high precision in it."""
        self.before = {name: self.manager.slot(name, "input").high_precision for name in MODULES}
        x, y = batch(rank, 0)  # Always the same batch, so no amax grows much.
        (self.net(x) - y).square().mean().backward()
        self.done += 1
        self.optimizer.step()
        self.optimizer.zero_grad()
        return tuple(name for name in MODULES if self.before[name] == ALL)


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
                job.step()
        assert (job.manager.slot("branch", "input").high_precision == ALL) == falls


@pytest.mark.parametrize("recipe", RECIPES[:2], ids=lambda recipe: type(recipe).__name__)
def test_underflow(recipe: Recipe) -> None:
    job = Job(recipe, Fallback(steps=2, nonfinite=False, underflow=0.2))
    job.hurt[3] = faint
    with captured_log():
        high = [job.step() for _ in range(7)]
    assert high == [()] * 3 + [("branch",)] * 2 + [()] * 2


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)
def test_a_nonfinite_amax(recipe: Recipe) -> None:
    """Inf spreads to every tensor computed from it, and all affected modules fall back."""
    job = Job(recipe, Fallback(steps=2))
    job.hurt[3] = infinite
    with captured_log():
        for _ in range(2):
            job.step()
        weights = copy.deepcopy(job.net.state_dict())
        job.step()
        job.net.load_state_dict(weights)  # Like a loop that undoes a bad step.
        high = [job.step() for _ in range(3)]
    assert "branch" in high[0]
    assert high[0] == high[1]
    assert high[2] == ()


@pytest.mark.parametrize(
    ("high_for", "hurt", "high", "fell"),
    [
        (0, (3, 4), [False, True, True, True, False], [3, 4]),  # Trouble that goes on starts the steps anew.
        (6, (3,), [True] * 4 + [False] * 2, []),  # Who is in high precision for longer stays as long,
        (None, (3,), [True] * 6, []),  # and who is for good stays.
    ],
)
def test_trouble_in_high_precision(high_for: int | None, hurt: Any, high: list[bool], fell: list[int]) -> None:
    """There tensors are still observed, so a non-finite amax still counts."""
    job = Job(DelayedScaling(history_len=4), Fallback(steps=2))
    if high_for != 0:
        job.manager.set_precision("*", "high", steps=high_for)
    job.hurt.update(dict.fromkeys(hurt, infinite))
    with captured_log():
        for _ in range(2):
            job.step()
        weights, found = copy.deepcopy(job.net.state_dict()), []
        for _ in high:
            found.append("branch" in job.step())
            job.net.load_state_dict(weights)  # Like a loop that undoes a bad step.
    assert found == high
    assert [e.step for e in job.events if e.kind == "fallback"] == fell


@pytest.mark.parametrize("update", ["same_step", "next_step"])
def test_who_comes_back_does_not_remember_the_outlier(update: Any) -> None:
    """Otherwise the outlier would stay the maximum of a long window, and all other values would underflow."""
    job = Job(DelayedScaling(history_len=64, update=update), Fallback(steps=3, underflow=0.2))
    job.hurt[4] = lambda x: outlier(x) + 1e8 * (x == 1e4)  # This cast saturates; later casts would underflow.
    with captured_log():
        high = [job.step() for _ in range(14)]
    fell = next(step for step, modules in enumerate(high) if modules)
    steps = 3 if update == "same_step" else 4  # The step already in progress had the same outlier.
    assert high[fell : fell + steps] == [("branch",)] * steps
    assert not any(high[fell + steps :])
    assert job.manager.slot("branch", "input").amax_history.max() < 100


def test_both_users_of_a_tied_weight() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))
    net[1].weight = net[0].weight
    manager = fp8dist.prepare(net, DelayedScaling(history_len=2), fallback=Fallback(steps=2))
    manager.attach()
    net(torch.ones(4, 16)).sum().backward()
    with torch.no_grad():
        net[0].weight[0, 0] = torch.nan
    with captured_log():
        net(torch.ones(4, 16)).sum().backward()
        manager.step()
    assert manager.slot("0", "input").high_precision == manager.slot("1", "input").high_precision == ALL


@pytest.mark.parametrize("update", ["same_step", "next_step"])
def test_a_saturated_share_beyond_the_limit(update: Any) -> None:
    """Under next_step the next boundary reads what a sync proved, on all ranks: a step later."""
    job = Job(DelayedScaling(history_len=4, update=update), Fallback(steps=3, saturated=0.004))
    job.hurt[4] = outlier
    with captured_log() as log:
        high = [job.step() for _ in range(10)]
    before = 4 if update == "same_step" else 5
    assert high == [()] * before + [("branch",)] * 3 + [()] * (7 - before)
    (event,) = (e for e in job.events if e.kind == "fallback")
    assert event.step == 4
    assert ("branch", "input") in event.slots
    assert {slot.fqn for slot in event.slots} == {"branch"}
    assert job.manager.metrics()["fp8/fallbacks"] == 1
    (text,) = [text for _, text in log]
    assert text.startswith("fp8dist: step 4: 1 module(s) go to high precision for 3 steps, 'branch' first (branch:")


@pytest.mark.parametrize(
    ("update", "fallback", "saved_after", "high"),
    [
        ("same_step", 4, 5, [("branch",)] * 2 + [()] * 3),
        # A fallback follows one step after its cause; a save in between keeps it.
        ("next_step", 2, 3, [(), ("branch",), ("branch",), (), ()]),
    ],
)
def test_a_resume_in_the_middle_of_a_fallback_is_bitwise(
    update: Any, fallback: int, saved_after: int, high: list[Any]
) -> None:
    recipe, policy = DelayedScaling(history_len=4, update=update), Fallback(steps=fallback, saturated=0.004)
    unbroken, resumed = Job(recipe, policy), Job(recipe, policy)
    unbroken.hurt[3] = outlier
    with captured_log():
        for _ in range(saved_after):
            unbroken.step()
        resumed.net.load_state_dict(copy.deepcopy(unbroken.net.state_dict()))
        resumed.manager.load_state_dict(unbroken.manager.state_dict())
        resumed.done = saved_after
        assert [resumed.step() for _ in range(5)] == [unbroken.step() for _ in range(5)] == high
    assert [e.step for e in resumed.events if e.kind == "fallback"] == ([3] if update == "next_step" else [])
    assert parameter_bits(resumed.net) == parameter_bits(unbroken.net)
    assert state_bits(resumed.manager) == state_bits(unbroken.manager)


def test_without_a_policy_nothing_is_measured() -> None:
    job = Job(DelayedScaling(history_len=4), Fallback(steps=2))  # Non-finite amaxes cost nothing.
    for _ in range(2):
        job.step()
    (sync,) = job.manager._syncs
    assert sync.arena.message.numel() == 8 + len(job.manager.slots)


def test_what_is_loaded_does_not_fall_back_for_what_was_before() -> None:
    """A loop returns to a checkpoint before the last sync's result is read."""
    job = Job(DelayedScaling(history_len=4, update="next_step"), Fallback(steps=2))
    job.step()
    weights, state = copy.deepcopy(job.net.state_dict()), job.manager.state_dict()
    job.hurt[2] = infinite
    job.step()
    assert job.manager.steps == 2  # Committed.
    job.net.load_state_dict(weights)
    job.manager.load_state_dict(state)
    assert [job.step() for _ in range(3)] == [()] * 3


def test_a_policy_leaves_current_scaling_without_scales_to_exceed() -> None:
    job = Job(CurrentScaling(), Fallback(steps=2))
    for factor in (1, 10, 100):
        job.hurt[job.done + 1] = lambda x, factor=factor: x * factor
        job.step()
    assert job.manager.metrics()["fp8/saturated_amaxes"] == 0
    assert {job.manager.slot(*slot).scale.item() for slot in job.manager.slots} == {1.0}


def test_mistakes() -> None:
    cases = [
        ({"steps": 0}, "steps must be an integer"),
        ({"steps": True}, "steps must be an integer"),
        ({"nonfinite": 1}, "nonfinite must be True or False"),
        ({"saturated": 1.5}, "saturated must be a share"),
        ({"underflow": -0.1}, "underflow must be a share"),
        ({"underflow": float("nan")}, "underflow must be a share"),
        ({"underflow": True}, "underflow must be a share"),
        ({"nonfinite": False}, "it would never trigger"),
    ]
    for arguments, says in cases:
        with pytest.raises(ConfigurationError, match=says):
            Fallback(**arguments)
        with pytest.raises(ConfigurationError, match="fallback must be a Fallback"):
            fp8dist.prepare(make_net(), fallback=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("recipe", RECIPES[:2], ids=lambda recipe: type(recipe).__name__)
@on_ranks(2)
def test_an_outlier_on_one_rank_sends_the_module_back_on_all(recipe: Recipe) -> None:
    """The switch happens at the same step, ends after K, and uses the sync's one collective: two more words per
    slot."""
    rank = dist.get_rank()
    job = Job(recipe, Fallback(steps=2, saturated=0.004, underflow=0.2), group=dist.group.WORLD)
    if rank == 1:
        job.hurt[3] = outlier if recipe.delayed else faint
    with captured_log() as log, counted_collectives() as calls:
        high = [job.step(rank) for _ in range(7)]
    assert high == [()] * 3 + [("branch",)] * 2 + [()] * 2
    assert [(e.kind, e.step) for e in job.events] == [("fallback", 3)]
    assert calls.sizes == [4 * (8 + 3 * 9)] * 7
    assert len(log) == (rank == 0)  # One rank logs it.


@on_ranks(2)
def test_ranks_with_other_limits_are_told() -> None:
    net = make_net()  # A manager does not keep its model.
    manager = fp8dist.prepare(net, group=dist.group.WORLD, fallback=Fallback(steps=10 + dist.get_rank()))
    with pytest.raises(ManifestMismatchError, match=r"(?s)settings\.fallback.*'steps': 10"):
        manager.attach()


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
            high.append(job.step(rank))
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


# Precisions of experts -------------------------------------------------------------------------------


def made() -> Precisions:
    each = [Precision(slots, ()) for slots in slot_names("experts.down", 4)]
    return Precisions({f"experts.down.{number}": precision for number, precision in enumerate(each)})


class _Plain(Precision):
    def count_down(self) -> bool:
        return False


@pytest.mark.parametrize("seed", range(20))
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
            other = theirs.by_fqn[fqn]
            assert (precision.high, precision.observing, precision.recorded) == (
                other.high,
                other.observing,
                other.recorded,
            )
        assert ours.version == theirs.version


def test_only_steps_that_change_something_visit_each_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 92,160 slots, a visit of all of them took 0.4 s."""
    precisions, visits = made(), []
    end_step = Precision.end_step
    monkeypatch.setattr(Precision, "end_step", lambda self: (visits.append(self), end_step(self))[1])
    precisions.change(precisions.by_fqn, GEMMS, True, 50)
    per_step = []
    for _ in range(52):
        visits.clear()
        precisions.end_step()
        per_step.append(len(visits))
    begin, observed = 50 - OBSERVED_STEPS - 1, 50 - 1
    assert [step for step, count in enumerate(per_step) if count] == [0, begin, begin + 1, observed]
    assert not any(precision.high for precision in precisions.by_fqn.values())

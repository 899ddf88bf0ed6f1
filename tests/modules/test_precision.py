"""set_precision: modules and GEMMs in high precision, temporarily or permanently."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

import fp8dist
from fp8dist import CurrentScaling, DelayedScaling, Recipe, StateManager
from fp8dist.errors import CheckpointError, ConfigurationError
from fp8dist.state import storage
from fp8dist.state.precision import OBSERVED_STEPS
from tests.support.collectives import counted_collectives
from tests.support.logs import captured_log
from tests.support.ranks import on_ranks
from tests.support.training import batch, bits, histories, make_net, parameter_bits, state_bits

ALL = ("fprop", "dgrad", "wgrad")


DELAYED = DelayedScaling(history_len=4)


class Run:
    """A net in training and its manager. ``recipe`` None: a plain net."""

    def __init__(self, recipe: Recipe | None = DELAYED, steps: int = 0, **options: Any) -> None:
        self.net = make_net()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9)
        self.done = 0
        if recipe is not None:
            self.fp8: StateManager = fp8dist.prepare(self.net, recipe, **options)
            self.fp8.attach(optimizer=self.optimizer)
        self.steps(steps)

    def steps(self, count: int) -> list[float]:
        losses = []
        for _ in range(count):
            x, y = batch(0, self.done)
            loss = (self.net(x) - y).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.done += 1
            losses.append(loss.item())
        return losses

    def high(self, fqn: str = "first") -> tuple[str, ...]:
        return self.fp8.slot(fqn, "input").high_precision

    def resume(self, saved: Run) -> None:
        for part in ("net", "optimizer", "fp8"):
            getattr(self, part).load_state_dict(copy.deepcopy(getattr(saved, part).state_dict()))
        self.done = saved.done


@pytest.mark.parametrize("recipe", [DELAYED, CurrentScaling()])
def test_high_precision_is_nn_linear_bitwise_and_for_some_steps_ends_by_itself(recipe: Recipe) -> None:
    run, plain = Run(recipe), Run(None)
    assert run.fp8.set_precision("*", "high", steps=3) == ("branch", "first", "last")
    run.fp8.set_precision("*", "high", steps=1)  # No change: they stay so for longer.
    for step in range(3):
        assert run.high() == ALL, step
        assert run.steps(1) == plain.steps(1)
    assert parameter_bits(run.net) == parameter_bits(plain.net)
    assert run.high() == ()
    assert bits(run.net(batch(0, 9)[0])) != bits(plain.net(batch(0, 9)[0]))
    assert run.fp8.metrics()["fp8/high_precision_modules"] == 0
    run.fp8.set_precision("*", "high")
    run.steps(1)  # Commits what the last forward has recorded.
    before = histories(run.fp8)
    run.steps(1)
    assert histories(run.fp8) == before  # Nothing is recorded: the switch is final.


def test_who_comes_back_has_scales() -> None:
    """Scales are as if the module had stayed in FP8: its last steps in high precision record amaxes."""
    steps = OBSERVED_STEPS + 5
    run = Run(DelayedScaling(history_len=64))
    run.fp8.set_precision("*", "high", steps=steps)
    seen = [run.fp8.metrics()["fp8/cold_slots"]]
    for _ in range(steps):
        run.steps(1)
        seen.append(run.fp8.metrics()["fp8/cold_slots"])
    slots = len(run.fp8.slots)
    weights = sum(slot.role == "weight" for slot in run.fp8.slots)
    assert seen[:6] == [slots - weights] * 6  # Weights got their scales at attach.
    assert seen[6:] == [0] * OBSERVED_STEPS
    taken = [sum(entry > 0 for entry in window) for window in histories(run.fp8).values()]
    assert taken == [OBSERVED_STEPS] * slots


def test_who_comes_back_unseen_is_cold_and_says_so() -> None:
    run = Run(steps=2)
    run.fp8.set_precision("branch", "high")
    run.steps(1)
    before = {slot: run.fp8.slot(*slot).scale.item() for slot in run.fp8.slots}
    with captured_log() as log:
        run.fp8.set_precision("branch", "fp8")
    assert [text.startswith("fp8dist: 3 slots have no scale yet") for _, text in log] == [True]
    for slot in run.fp8.slots:
        assert (run.fp8.slot(*slot).scale.item() == 1.0) == (slot.fqn == "branch"), slot
        assert before[slot] != 1.0
        assert any(run.fp8.slot(*slot).amax_history) == (slot.fqn != "branch")
    run.steps(1)
    assert run.fp8.metrics()["fp8/cold_slots"] == 0


def test_a_change_for_good_leaves_one_for_a_while_as_long_as_it_was() -> None:
    """FP8 from step 4 on, but dgrad never, in either order of the calls."""
    for first in (True, False):
        run = Run()
        if first:
            run.fp8.set_precision("*", "high", gemms=("dgrad",))
        run.fp8.set_precision("*", "high", steps=3)
        if not first:
            run.fp8.set_precision("*", "high", gemms=("dgrad",))
        high = []
        for _ in range(5):
            high.append(run.high())
            run.steps(1)
        assert high == [ALL] * 3 + [("dgrad",)] * 2
    run.fp8.set_precision("*", "high", steps=3)
    run.fp8.set_precision("*", "fp8")
    assert run.high() == ()
    run.steps(1)
    assert run.high() == ()


def test_overrides_of_single_gemms_end_each_at_its_own_time_and_resume_bitwise() -> None:
    """A shorter one ends no longer one, and a longer one does not prolong a shorter one."""
    run, resumed = Run(), Run()
    run.fp8.set_precision("last", "high", gemms=("wgrad",))
    run.fp8.set_precision("first", "high", gemms=("dgrad",), steps=5)
    run.steps(1)
    run.fp8.set_precision("first", "high", gemms=("wgrad",), steps=2)
    run.fp8.set_precision("first", "high", gemms=("fprop",), steps=OBSERVED_STEPS + 2)
    resumed.resume(run)
    outcomes = []
    for each in (run, resumed):
        high, losses = [], []
        for _ in range(OBSERVED_STEPS + 3):
            high.append(each.high())
            losses += each.steps(1)
            assert each.high("last") == ("wgrad",)
        assert high == [ALL] * 2 + [("fprop", "dgrad")] * 2 + [("fprop",)] * (OBSERVED_STEPS - 2) + [()]
        outcomes.append((losses, state_bits(each.fp8)))
    assert outcomes[0] == outcomes[1]


def test_a_recipes_own_gemms_can_be_taken_back() -> None:
    run = Run(DelayedScaling(high_precision=("wgrad", "dgrad")))
    assert run.high() == ("dgrad", "wgrad")
    run.fp8.set_precision("first", "fp8", gemms=("wgrad",), steps=1)
    assert run.high() == ("dgrad",)
    run.steps(1)
    assert run.high() == ("dgrad", "wgrad")


def test_a_change_counts_at_once_in_training_and_evaluation() -> None:
    """It comes in the middle of a step, between two microbatches: no cast of a weight is used past it. Right back in
    FP8, no slot is cold."""
    run = Run(steps=1)
    before = state_bits(run.fp8)
    x, _ = batch(0, 5)
    plain = make_net()
    plain.load_state_dict(run.net.state_dict())
    for training in (True, False):
        run.net.train(training)
        first = bits(run.net(x))
        run.fp8.set_precision("*", "high")
        assert bits(run.net(x)) == bits(plain(x)) != first
        with captured_log() as log:
            run.fp8.set_precision("*", "fp8")
        assert bits(run.net(x)) == first
        assert log == []
    assert state_bits(run.fp8) == before


def test_a_weight_of_another_dtype_than_the_input() -> None:
    """FP8 supports it, so a fallback must too: y and dx in the input's dtype, dW in the weight's."""
    for dtype in (torch.float32, torch.bfloat16):
        net = nn.Linear(32, 16).to(torch.bfloat16 if dtype == torch.float32 else torch.float32)
        manager = fp8dist.prepare(net, DelayedScaling(history_len=4)).attach()
        x = torch.randn(8, 32, dtype=dtype, requires_grad=True)
        expected = nn.functional.linear(x.float(), net.weight.float(), net.bias.float())
        for precision in ("fp8", "high"):
            manager.set_precision("*", precision)
            y = net(x)
            assert y.dtype == dtype
            y.sum().backward()
            assert net.weight.grad is not None
            assert net.weight.grad.dtype == net.weight.dtype
        assert torch.allclose(y.float(), expected, rtol=0.02, atol=0.02)


def test_mistakes_are_told_and_change_nothing() -> None:
    cases = [
        (("nothing.*", "high"), "no FP8Linear matches 'nothing.*'"),
        (("*", "bf16"), 'precision must be "high" or "fp8"'),
        (("*", "high", ("forward",)), "gemms must be a tuple of fprop, dgrad, wgrad"),
        (("*", "high", ALL, 0), "steps must be None or a number of optimizer steps from 1"),
        (("*", "high", ALL, 2.5), "steps must be None or a number of optimizer steps from 1"),
    ]
    for arguments, says in cases:
        run = Run(DelayedScaling())
        with pytest.raises(ConfigurationError, match=says.replace("*", r"\*").replace(".", r"\.")):
            run.fp8.set_precision(*arguments)
        assert run.high() == ()
        with pytest.raises(ConfigurationError, match="there is no slot none:input"):
            run.fp8.slot("none", "input")


def test_a_damaged_precision_is_refused() -> None:
    cases = [
        {"lasting": ["forward"], "passing": None, "left": 0, "unseen": []},
        {"lasting": [], "passing": ["fprop"], "left": 0, "unseen": []},
        {"lasting": [], "passing": None, "left": 3, "unseen": []},
        {"lasting": [], "passing": ["fprop"], "left": {"fprop": 3, "dgrad": 0}, "unseen": []},
        {"lasting": [], "passing": ["fprop"], "left": {"forward": 3}, "unseen": []},
        {"lasting": [], "passing": ["fprop"], "left": math.inf, "unseen": []},
        {"lasting": [], "passing": None, "left": 0, "unseen": ["output"]},
        {"lasting": []},
        "high",
    ]
    for wrong in cases:
        run = Run(steps=1)
        state, info = storage.from_bytes(run.fp8.state_dict()["shared"], "state")
        before = state_bits(run.fp8)
        with pytest.raises(CheckpointError, match="malformed precision of first"):
            run.fp8.load_state_dict({"shared": storage.to_bytes({**state, "precision": {"first": wrong}}, info)})
        assert state_bits(run.fp8) == before
        assert run.high() == ()


def test_a_load_of_other_modules_leaves_the_rest_alone() -> None:
    saved, run = Run(skip=("first",)), Run()
    saved.fp8.set_precision("last", "high")
    run.fp8.set_precision("first", "high", steps=3)
    with captured_log():
        run.fp8.load_state_dict(saved.fp8.state_dict(), strict=False)
    assert [run.high(fqn) for fqn in ("first", "branch", "last")] == [ALL, (), ALL]


@pytest.mark.parametrize("how", ["as it is", "calibrated", "high first", "new", "loaded"])
def test_going_on_from_high_precision_without_calibration_warns_once(how: str) -> None:
    run = Run(None, steps=0 if how == "new" else 2)
    run.fp8 = fp8dist.prepare(run.net, DELAYED)
    with captured_log() as log:
        run.fp8.attach(optimizer=run.optimizer)
        if how == "calibrated":
            with run.fp8.calibrate():
                run.net(batch(0, 0)[0]).sum().backward()
        elif how == "high first":
            run.fp8.set_precision("*", "high", steps=2)
        elif how == "loaded":
            run.fp8.load_state_dict(Run(steps=1).fp8.state_dict())
        run.steps(4)
    assert ["6 of 9 slots had no amax in the first step" in text for _, text in log] == [True] * (how == "as it is")


@pytest.mark.parametrize("steps", [0, 2])
def test_scales_that_a_run_without_fp8_has_loaded_are_cold_after_its_first_step(steps: int) -> None:
    """No amax follows its weights. Scales from before would cut off what has grown there."""
    off, resumed = Run(enabled=False), Run()
    off.resume(Run(steps=3))
    off.steps(steps)
    resumed.resume(off)
    assert resumed.fp8.metrics()["fp8/cold_slots"] == (len(resumed.fp8.slots) if steps else 0)
    assert resumed.fp8.steps == 3


def test_a_resume_by_a_recipe_with_other_gemms_follows_that_recipe() -> None:
    """The checkpoint has only changes: a module that was high by recipe continues in FP8 under a recipe without it."""
    before = Run(DelayedScaling(history_len=4, high_precision=ALL))
    before.steps(3)
    resumed = Run()
    resumed.steps(1)
    resumed.fp8.load_state_dict(before.fp8.state_dict())
    assert resumed.high() == ()
    assert resumed.fp8.metrics()["fp8/cold_slots"] == len(resumed.fp8.slots)
    before.fp8.set_precision("*", "fp8", steps=2)
    resumed = Run(DelayedScaling(history_len=4, high_precision=("dgrad",)))
    resumed.fp8.load_state_dict(before.fp8.state_dict())
    assert resumed.high() == ()
    resumed.steps(2)
    assert resumed.high() == ("dgrad",)


def test_slots_that_nobody_casts_are_not_called_cold_after_a_resume() -> None:
    """Only dgrad and wgrad would cast gradients."""
    saved, resumed = (Run(DelayedScaling(history_len=4, high_precision=("dgrad", "wgrad"))) for _ in range(2))
    saved.steps(2)
    resumed.optimizer.load_state_dict(copy.deepcopy(saved.optimizer.state_dict()))
    resumed.fp8.attach(optimizer=resumed.optimizer)
    resumed.fp8.load_state_dict(saved.fp8.state_dict())
    with captured_log() as log:
        resumed.steps(1)
    assert log == []


@on_ranks(2)
def test_ranks_that_do_the_same_agree_at_no_cost() -> None:
    """A rank that alone changes a precision is in ``tests/parallel/test_ddp.py``."""
    run = Run(group=torch.distributed.group.WORLD)
    with counted_collectives() as calls:
        for step, high in enumerate([(), (), ALL, ALL, ()]):
            if step == 2:
                run.fp8.set_precision("branch", "high", steps=2)
            assert run.high("branch") == high
            run.steps(1)
    assert len(calls.names) == 5


def test_a_tied_weight_that_no_user_has_seen_comes_back_cold() -> None:
    net = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    net[1].weight = net[0].weight
    manager = fp8dist.prepare(net, DelayedScaling(history_len=4)).attach()

    def step() -> None:
        net(torch.ones(16, 16)).sum().backward()
        manager.step()

    for alone in (True, False):
        step()
        manager.set_precision("0" if alone else "*", "high")
        step()
        with captured_log():
            manager.set_precision("0", "fp8")
        scale = manager.slot("0", "weight").scale.item()
        assert (scale == 1.0) == (not alone)
        with captured_log():
            manager.set_precision("*", "fp8")
        assert manager.slot("0", "weight").scale.item() == scale

"""set_precision: modules and GEMMs in high precision, temporarily or permanently."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8dist
from fp8dist import CurrentScaling, DelayedScaling, Recipe, StateManager
from fp8dist.errors import CheckpointError, ConfigurationError
from fp8dist.state import storage
from fp8dist.state.precision import OBSERVED_STEPS
from tests.support.collectives import counted_collectives
from tests.support.logs import captured_log
from tests.support.ranks import RankPool
from tests.support.training import Net, batch, bits, histories, make_net, parameter_bits, state_bits

ALL = ("fprop", "dgrad", "wgrad")


class Run:
    """A net in training and its manager, or a plain net."""

    def __init__(self, recipe: Recipe | None = None, **options: Any) -> None:
        self.net = make_net()
        self.manager: StateManager | None = None
        if recipe is not None:
            self.manager = fp8dist.prepare(self.net, recipe, **options)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9)
        if self.manager is not None:
            self.manager.attach(optimizer=self.optimizer)
        self.done = 0

    @property
    def fp8(self) -> StateManager:
        assert self.manager is not None
        return self.manager

    def step(self, net: nn.Module | None = None) -> float:
        x, y = batch(0, self.done)
        loss = ((self.net if net is None else net)(x) - y).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.done += 1
        return loss.item()


def test_all_in_high_precision_is_nn_linear_bitwise() -> None:
    plain, run = Run(), Run(DelayedScaling())
    assert run.fp8.set_precision("*", "high") == ("branch", "first", "last")
    assert [run.step() for _ in range(4)] == [plain.step() for _ in range(4)]
    assert parameter_bits(run.net) == parameter_bits(plain.net)
    assert not any(any(window) for window in histories(run.fp8).values())  # Nothing is recorded: the switch is final.


@pytest.mark.parametrize("recipe", [DelayedScaling(history_len=4), CurrentScaling()])
def test_high_precision_for_some_steps_ends_by_itself(recipe: Recipe) -> None:
    run, plain = Run(recipe), Run()
    run.fp8.set_precision("*", "high", steps=3)
    for step in range(3):
        assert run.fp8.slot("first", "input").high_precision == ALL, step
        assert run.step() == plain.step()
    assert run.fp8.slot("first", "input").high_precision == ()
    assert bits(run.net(batch(0, 9)[0])) != bits(plain.net(batch(0, 9)[0]))
    assert run.fp8.metrics()["fp8/high_precision_modules"] == 0


def test_who_comes_back_has_scales() -> None:
    """Scales are as if the module had stayed in FP8: its last steps in high precision record amaxes."""
    steps = OBSERVED_STEPS + 5
    run = Run(DelayedScaling(history_len=64))
    run.fp8.set_precision("*", "high", steps=steps)
    seen = [run.fp8.metrics()["fp8/cold_slots"]]
    for _ in range(steps):
        run.step()
        seen.append(run.fp8.metrics()["fp8/cold_slots"])
    slots = len(run.fp8.slots)
    weights = sum(slot.role == "weight" for slot in run.fp8.slots)
    assert seen[:6] == [slots - weights] * 6  # Weights got their scales at attach.
    assert seen[6:] == [0] * OBSERVED_STEPS
    taken = [sum(entry > 0 for entry in window) for window in histories(run.fp8).values()]
    assert taken == [OBSERVED_STEPS] * slots


def test_who_comes_back_unseen_is_cold_and_says_so() -> None:
    run = Run(DelayedScaling(history_len=4))
    for _ in range(2):
        run.step()
    run.fp8.set_precision("branch", "high")
    run.step()
    before = {slot: run.fp8.slot(*slot).scale.item() for slot in run.fp8.slots}
    with captured_log() as log:
        run.fp8.set_precision("branch", "fp8")
    assert [text.startswith("fp8dist: 3 slots have no scale yet") for _, text in log] == [True]
    for slot in run.fp8.slots:
        assert (run.fp8.slot(*slot).scale.item() == 1.0) == (slot.fqn == "branch"), slot
        assert before[slot] != 1.0
        assert any(run.fp8.slot(*slot).amax_history) == (slot.fqn != "branch")
    run.step()
    assert run.fp8.metrics()["fp8/cold_slots"] == 0


def test_right_back_nothing_is_cold() -> None:
    run = Run(DelayedScaling(history_len=4))
    run.step()
    before = state_bits(run.fp8)
    with captured_log() as log:
        run.fp8.set_precision("*", "high")
        run.fp8.set_precision("*", "fp8")
    assert log == []
    assert state_bits(run.fp8) == before


def test_a_change_for_good_leaves_one_for_a_while_as_long_as_it_was() -> None:
    """FP8 from step 4 on, but dgrad never, in either order of the calls."""
    for first in (True, False):
        run = Run(DelayedScaling(history_len=4))
        if first:
            run.fp8.set_precision("*", "high", gemms=("dgrad",))
        run.fp8.set_precision("*", "high", steps=3)
        if not first:
            run.fp8.set_precision("*", "high", gemms=("dgrad",))
        high = []
        for _ in range(5):
            high.append(run.fp8.slot("first", "input").high_precision)
            run.step()
        assert high == [ALL] * 3 + [("dgrad",)] * 2
    run.fp8.set_precision("*", "high", steps=3)
    run.fp8.set_precision("*", "fp8")
    assert run.fp8.slot("first", "input").high_precision == ()
    run.step()
    assert run.fp8.slot("first", "input").high_precision == ()


def test_a_recipes_own_gemms_can_be_taken_back() -> None:
    run = Run(DelayedScaling(high_precision=("wgrad", "dgrad")))
    assert run.fp8.slot("first", "input").high_precision == ("dgrad", "wgrad")
    run.fp8.set_precision("first", "fp8", gemms=("wgrad",), steps=1)
    assert run.fp8.slot("first", "input").high_precision == ("dgrad",)
    run.step()
    assert run.fp8.slot("first", "input").high_precision == ("dgrad", "wgrad")


def test_a_change_counts_at_once_in_training_and_evaluation() -> None:
    """It comes in the middle of a step, between two microbatches: no cast of a weight is used past it."""
    run = Run(DelayedScaling(history_len=4))
    run.step()
    x, _ = batch(0, 5)
    plain = make_net()
    plain.load_state_dict(run.net.state_dict())
    for training in (True, False):
        run.net.train(training)
        first = bits(run.net(x))
        run.fp8.set_precision("*", "high")
        assert bits(run.net(x)) == bits(plain(x)) != first
        run.fp8.set_precision("*", "fp8")
        assert bits(run.net(x)) == first


def test_a_weight_of_another_dtype_than_the_input() -> None:
    """FP8 supports it, so a fallback must too: y and dx in the input's dtype, dW in the weight's."""
    for dtype in (torch.float32, torch.bfloat16):
        net = nn.Linear(32, 16).to(torch.bfloat16 if dtype == torch.float32 else torch.float32)
        manager = fp8dist.prepare(net, DelayedScaling(history_len=4)).attach()
        x = torch.randn(8, 32, dtype=dtype, requires_grad=True)
        expected = nn.functional.linear(x.float(), net.weight.float(), net.bias.float())
        for precision in ("fp8", "high"):
            manager.set_precision("*", precision)  # type: ignore[arg-type]
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
        assert run.fp8.slot("first", "input").high_precision == ()
        with pytest.raises(ConfigurationError, match="there is no slot none:input"):
            run.fp8.slot("none", "input")


def test_what_is_left_is_saved_and_resumes_bitwise() -> None:
    unbroken = Run(DelayedScaling(history_len=4))
    unbroken.fp8.set_precision("first", "high", steps=5)
    unbroken.fp8.set_precision("last", "high", gemms=("wgrad",))
    for _ in range(3):
        unbroken.step()
    resumed = Run(DelayedScaling(history_len=4))
    resumed.net.load_state_dict(copy.deepcopy(unbroken.net.state_dict()))
    resumed.optimizer.load_state_dict(copy.deepcopy(unbroken.optimizer.state_dict()))
    resumed.fp8.load_state_dict(unbroken.fp8.state_dict())
    resumed.done = 3
    assert resumed.fp8.slot("first", "input").high_precision == ALL
    assert resumed.fp8.slot("last", "input").high_precision == ("wgrad",)
    assert [resumed.step() for _ in range(5)] == [unbroken.step() for _ in range(5)]
    assert resumed.fp8.slot("first", "input").high_precision == ()
    assert state_bits(resumed.fp8) == state_bits(unbroken.fp8)


def test_a_damaged_precision_is_refused() -> None:
    cases = [
        {"lasting": ["forward"], "passing": None, "left": 0, "unseen": []},
        {"lasting": [], "passing": ["fprop"], "left": 0, "unseen": []},
        {"lasting": [], "passing": None, "left": 3, "unseen": []},
        {"lasting": [], "passing": None, "left": 0, "unseen": ["output"]},
        {"lasting": []},
        "high",
    ]
    for wrong in cases:
        run = Run(DelayedScaling(history_len=4))
        run.step()
        state, info = storage.from_bytes(run.fp8.state_dict()["shared"], "state")
        before = state_bits(run.fp8)
        with pytest.raises(CheckpointError, match="malformed precision of first"):
            run.fp8.load_state_dict({"shared": storage.to_bytes({**state, "precision": {"first": wrong}}, info)})
        assert state_bits(run.fp8) == before
        assert run.fp8.slot("first", "input").high_precision == ()


def test_a_load_of_other_modules_leaves_the_rest_alone() -> None:
    saved, run = Run(DelayedScaling(history_len=4), skip=("first",)), Run(DelayedScaling(history_len=4))
    saved.fp8.set_precision("last", "high")
    run.fp8.set_precision("first", "high", steps=3)
    with captured_log():
        run.fp8.load_state_dict(saved.fp8.state_dict(), strict=False)
    assert [run.fp8.slot(fqn, "input").high_precision for fqn in ("first", "branch", "last")] == [ALL, (), ALL]


def test_going_on_from_high_precision_without_calibration_warns_once() -> None:
    run = Run(None)
    for _ in range(2):
        run.step()
    run.manager = fp8dist.prepare(run.net, DelayedScaling(history_len=4))
    run.fp8.attach(optimizer=run.optimizer)
    with captured_log() as log:
        run.step()
        run.step()
    (text,) = [text for _, text in log]
    assert "6 of 9 slots had no amax in the first step" in text


@pytest.mark.parametrize("how", ["calibrated", "high first", "new", "loaded"])
def test_no_such_warning(how: str) -> None:
    run = Run(None)
    if how != "new":
        run.step()
    run.manager = fp8dist.prepare(run.net, DelayedScaling(history_len=4))
    with captured_log() as log:
        run.fp8.attach(optimizer=run.optimizer)
        if how == "calibrated":
            with run.fp8.calibrate():
                run.net(batch(0, 0)[0]).sum().backward()
        elif how == "high first":
            run.fp8.set_precision("*", "high", steps=2)
        elif how == "loaded":
            other = Run(DelayedScaling(history_len=4))
            other.step()
            run.fp8.load_state_dict(other.fp8.state_dict())
        for _ in range(4):
            run.step()
    assert log == []


def test_a_step_costs_no_python_per_module_while_nothing_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(DelayedScaling(high_precision=("dgrad",)))
    for _ in range(2):
        run.step()
    run.fp8.set_precision("branch", "high")
    run.step()
    called: list[object] = []
    original = fp8dist.state.precision.Precision.end_step
    end_step = "fp8dist.state.precision.Precision.end_step"
    monkeypatch.setattr(end_step, lambda self: called.append(self) or original(self))
    run.step()
    assert called == []
    run.fp8.set_precision("branch", "fp8", steps=2)
    run.step()
    assert len(called) == 1


def test_a_resume_by_a_recipe_with_other_gemms_follows_that_recipe() -> None:
    """The checkpoint has only changes: a module that was high by recipe continues in FP8 under a recipe without it."""
    before = Run(DelayedScaling(history_len=4, high_precision=ALL))
    for _ in range(3):
        before.step()
    resumed = Run(DelayedScaling(history_len=4))
    resumed.step()
    resumed.fp8.load_state_dict(before.fp8.state_dict())
    assert resumed.fp8.slot("first", "input").high_precision == ()
    assert resumed.fp8.metrics()["fp8/cold_slots"] == len(resumed.fp8.slots)
    before.fp8.set_precision("*", "fp8", steps=2)
    resumed = Run(DelayedScaling(history_len=4, high_precision=("dgrad",)))
    resumed.fp8.load_state_dict(before.fp8.state_dict())
    assert resumed.fp8.slot("first", "input").high_precision == ()
    for _ in range(2):
        resumed.step()
    assert resumed.fp8.slot("first", "input").high_precision == ("dgrad",)


def test_slots_that_nobody_casts_are_not_called_cold_after_a_resume() -> None:
    """Only dgrad and wgrad would cast gradients."""
    runs = [Run(DelayedScaling(history_len=4, high_precision=("dgrad", "wgrad"))) for _ in range(2)]
    for _ in range(2):
        runs[0].step()
    resumed = runs[1]
    resumed.optimizer.load_state_dict(copy.deepcopy(runs[0].optimizer.state_dict()))
    resumed.fp8.attach(optimizer=resumed.optimizer)
    resumed.fp8.load_state_dict(runs[0].fp8.state_dict())
    with captured_log() as log:
        resumed.step()
    assert log == []


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
        assert (manager.slot("0", "weight").scale.item() == 1.0) == (not alone)
        scale = manager.slot("0", "weight").scale.item()
        with captured_log():
            manager.set_precision("*", "fp8")
        assert manager.slot("0", "weight").scale.item() == scale


def _trained(alone: bool) -> tuple[list[tuple[str, ...]], str, int]:
    """Rank 1 does not call set_precision, if ``alone``."""
    rank = torch.distributed.get_rank()
    net = make_net()
    manager = fp8dist.prepare(net, DelayedScaling(history_len=4), group=torch.distributed.group.WORLD)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    manager.attach(optimizer=optimizer)
    high, error = [], ""
    with captured_log(), counted_collectives() as calls:
        for step in range(5):
            if step == 2 and (rank == 0 or not alone):
                manager.set_precision("branch", "high", steps=2)
            _loss(net, rank, step).backward()
            high.append(manager.slot("branch", "input").high_precision)
            try:
                optimizer.step()
            except fp8dist.DivergenceError as caught:
                error = str(caught)
                break
            optimizer.zero_grad()
    return high, error, len(calls.names)


def _loss(net: Net, rank: int, step: int) -> Tensor:
    x, y = batch(rank, step)
    loss: Tensor = (net(x) - y).square().mean()
    return loss


def test_a_rank_that_forgets_is_found_at_the_next_sync(two_ranks: RankPool) -> None:
    (first, told, _), (second, told_as_well, _) = two_ranks.run(_trained, True)
    assert len(first) == len(second) == 3
    assert "manifest" in told
    assert "manifest" in told_as_well


def test_ranks_that_do_the_same_agree_at_no_cost(two_ranks: RankPool) -> None:
    outcomes = two_ranks.run(_trained, False)
    assert outcomes == [([(), (), ALL, ALL, ()], "", 5)] * 2

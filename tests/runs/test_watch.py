"""watch(): statistics of the slots on all ranks, every n steps, in one collective: who held a maximum, which experts
had tokens, and scales that jump."""

from __future__ import annotations

import contextlib
import functools
import math
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fp8dist
from fp8dist import (
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    Event,
    Fallback,
    MXFP8Scaling,
    Observation,
    Recipe,
    RowwiseScaling,
    SlotStatistics,
    StateManager,
)
from fp8dist.errors import ConfigurationError, ManifestMismatchError
from fp8dist.runs.exporters.slots import headroom
from fp8dist.state.arena_sync import ArenaSync
from fp8dist.state.expert_loads import ExpertLoad, idle_numbers
from tests.support.collectives import counted_collectives
from tests.support.experts import Experts, Mixture, routes, rows
from tests.support.logs import captured_log
from tests.support.parallel import mesh_of, same_on_all_ranks
from tests.support.ranks import on_ranks
from tests.support.training import Net, batch, make_net, state_bits

SLOTS = 9
DELAYED = DelayedScaling(history_len=8)


def attached(
    recipe: Recipe = DELAYED, every: int | None = 3, net: nn.Module | None = None, watch: Any = None, **prepared: Any
) -> tuple[Any, StateManager, torch.optim.Optimizer, list[Observation]]:
    """Return a net, its manager, its optimizer, and what a watch will observe. ``watch``: its other arguments."""
    seen: list[Observation] = []
    net = make_net() if net is None else net
    manager = fp8dist.prepare(net, recipe, **prepared)
    if every is not None:
        fp8dist.watch(manager, every, observer=seen.append, **(watch or {}))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    manager.attach(optimizer=optimizer)
    return net, manager, optimizer, seen


def train(net: nn.Module, optimizer: Any, *steps: int, rank: int = 0, factor: float = 1.0) -> None:
    for step in steps:
        x, y = batch(rank, step)
        (net(factor * x) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def trained(recipe: Recipe = DELAYED, rank: int = 0, **options: Any) -> tuple[list[Observation], StateManager, Any]:
    """Train six steps with a watch every third step."""
    net, manager, optimizer, seen = attached(recipe, **options)
    train(net, optimizer, *range(6), rank=rank)
    return seen, manager, net


def slot_of(one: Observation, name: str = "first:input") -> SlotStatistics:
    return next(slot for slot in one.slots if str(slot.slot) == name)


@pytest.mark.parametrize(
    "recipe",
    [DELAYED, CurrentScaling(), RowwiseScaling(), BlockScaling(), MXFP8Scaling(scale_rounding="up")],
    ids=lambda recipe: type(recipe).__name__,
)
def test_every_third_step_all_slots(recipe: Recipe) -> None:
    """A scale of current scaling makes the amax the largest value: no doubling is left, up to the scale's rounding."""
    seen, manager, _ = trained(recipe)
    assert ([one.step for one in seen], manager.steps) == ([3, 6], 6)
    assert all([slot.slot for slot in one.slots] == list(manager.slots) for one in seen)
    for slot in [*seen[0].slots, *seen[1].slots]:
        assert slot.amax_rank is None
        assert slot.amax is not None
        assert slot.amax > 0
        assert slot.underflow is not None
        assert 0 <= slot.underflow <= 1
        if recipe is DELAYED:
            assert slot.saturated is not None
            assert 0 <= slot.saturated <= 1
            continue
        assert slot.saturated == 0
        if recipe.by == "tensor":
            largest = 57344.0 if slot.slot.role == "grad_output" else 448.0
            assert slot.fp8_max == largest
            assert slot.scale == (torch.tensor(largest) / torch.tensor(slot.amax)).item()
            assert headroom(slot) == pytest.approx(0, abs=2**-22)
        else:
            assert math.isnan(slot.scale)  # Each row or block has a scale of its own.
    if recipe is DELAYED:
        assert [slot.amax for slot in seen[1].slots] == [manager.slot(*slot).amax.item() for slot in manager.slots]


def test_scales_are_those_that_the_step_used_and_shares_those_of_its_casts() -> None:
    """Compare with an independent count on the tensors."""
    net, manager, optimizer, seen = attached()
    inputs: list[Tensor] = []
    net.branch.register_forward_pre_hook(lambda m, args: inputs.append(args[0].detach().clone()))
    train(net, optimizer, 0, 0)
    scale = manager.slot("branch", "input").scale.item()
    train(net, optimizer, 4, factor=3.0)  # The third input exceeds the range of its scale.
    slot = slot_of(seen[0], "branch:input")
    scaled = inputs[2].double().abs() * scale
    assert slot.scale == scale
    assert slot.saturated == pytest.approx((scaled > 464).double().mean().item(), abs=1e-7)
    assert slot.underflow == pytest.approx(((scaled > 0) & (scaled <= 2**-10)).double().mean().item(), abs=1e-7)
    assert slot.saturated


def test_shares_of_nvfp4() -> None:
    """Rows too small for a block's scale are flushed, and do not saturate. A microbatch without tokens has no share."""
    seen: list[Any] = []
    linear = nn.Linear(64, 64)
    manager = fp8dist.prepare(linear, fp8dist.NVFP4Scaling())
    fp8dist.watch(manager, every=1, observer=seen.append)
    manager.attach()
    x = torch.ones(32, 64)
    x[1:] = 1e-7
    for tokens in (x, x[:0]):
        linear(tokens).sum().backward()
    manager.step()
    slot = slot_of(seen[0], ":input")
    assert (slot.saturated, slot.underflow) == (0, 31 / 32)


@pytest.mark.parametrize("update", ["same_step", "next_step"])
def test_watching_changes_no_number_and_steps_between_measure_nothing(update: Any) -> None:
    recipe = DelayedScaling(history_len=8, update=update)
    (net, watched, optimizer, _), (other, plain, of_other, _) = attached(recipe), attached(recipe, every=None)
    measured = []
    for step in range(4):
        with torch.profiler.profile() as profile:
            train(net, optimizer, step)
        measured.append(sum(event.name == "fp8dist::measure" for event in profile.events()))
    train(other, of_other, *range(4))
    assert measured == [0, 0, SLOTS, 0]
    assert state_bits(watched) == state_bits(plain)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), other.parameters()))


def test_what_a_calibration_sees_is_not_of_the_step_that_is_watched_nor_counted() -> None:
    """The step count of the state may differ from the run's: one more after a calibration, fewer if FP8 starts late."""
    amaxes = []
    for calibrates in (False, True):
        net, manager, optimizer, seen = attached(every=1, watch={"resume_after": 100})
        if calibrates:
            with manager.calibrate():
                net(100 * batch(0, 0)[0]).mean().backward()
        train(net, optimizer, 0, 1)
        assert [one.step for one in seen] == [101, 102]
        amaxes.append(slot_of(seen[0]).amax)
    assert amaxes[0] == amaxes[1]


def test_a_jump_is_logged_once() -> None:
    net, manager, optimizer, _ = attached(DelayedScaling(history_len=1), every=1, watch={"jump": 8})
    events: list[Event] = []
    manager.on_event(events.append)
    optimizer.param_groups[0]["lr"] = 1e-30  # Changes no weight; with lr=0 the step would not count.
    with captured_log() as log:
        for step in range(6):
            train(net, optimizer, 0, factor=100 if step == 2 else 1)
    steps = [event.step for event in events if event.kind == "jump"]
    assert steps == [4, 5]  # Step 4 casts with the scale that step 3 computes.
    assert {slot.fqn for slot in events[0].slots} >= {"first"}
    assert len(log) == 2


def test_each_of_two_watches_has_its_steps() -> None:
    """The second has an alarm, an observer, and a step to count from, which is that of both."""
    alone, _, _ = trained()
    net, seen, events = make_net(), (list[Observation](), list[Observation]()), list[Event]()
    manager = fp8dist.prepare(net, DELAYED)
    manager.on_event(events.append)
    fp8dist.watch(manager, 3, observer=seen[0].append)
    fp8dist.watch(manager, 2, jump=1.0001, resume_after=0, observer=seen[1].append)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    manager.attach(optimizer=optimizer)
    train(net, optimizer, *range(6))
    assert repr(seen[0]) == repr(alone)
    assert repr(seen[1][-1].slots) == repr(alone[-1].slots)
    assert [one.step for one in seen[1]] == [2, 4, 6]
    jumps = [event for event in events if event.kind == "jump"]
    assert {event.step for event in jumps} <= {4, 6}
    assert all(len(set(event.slots)) == len(event.slots) > 0 for event in jumps)
    assert jumps


@pytest.mark.filterwarnings(r"ignore:fp8dist.watch.path=…. is now fp8dist.Recorder:FutureWarning")
def test_mistakes_and_the_old_path(tmp_path: Path) -> None:
    """Lines of the file: tests/runs/test_monitor.py."""
    net = make_net()
    manager = fp8dist.prepare(net)
    first, second = tmp_path / "s", tmp_path / "t"
    fp8dist.watch(manager, 3, first, resume_after=4)
    (outputs,) = (weakref.ref(one) for one in manager._cycle.measurement.watch.observers if hasattr(one, "path"))  # type: ignore[union-attr]
    first.write_text("kept")
    calls: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        *(((every,), {}, "every must be a number of steps from 1") for every in (0, True, 2.5)),
        ((3, first), {"jump": 0.5}, "jump must be a factor"),
        ((5, first), {}, "an earlier watch writes there"),
        ((5, second), {"resume_after": 3}, "continues after step 4: give both the same step"),
    ]
    for arguments, named, message in calls:
        with pytest.raises(ConfigurationError, match=message):
            fp8dist.watch(manager, *arguments, **named)
    assert first.read_text() == "kept"
    assert not second.exists()
    manager.attach()
    with pytest.raises(ConfigurationError, match=r"before attach\(\)"):
        fp8dist.watch(manager, 3)
    fp8dist.restore(net)
    assert outputs() is None  # Its file is closed.


@pytest.mark.filterwarnings(r"ignore:fp8dist.watch.path=…. is now fp8dist.Recorder:FutureWarning")
def test_a_resume_goes_on_in_the_same_file_of_the_old_path(tmp_path: Path) -> None:
    whole, part = tmp_path / "whole", tmp_path / "part"
    saved: dict[str, Any] = {}
    for path, first, last in ((whole, 0, 9), (part, 0, 5), (part, 5, 9)):
        net = make_net()
        manager = fp8dist.prepare(net, DELAYED)
        fp8dist.watch(manager, 3, path, resume_after=first or None)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        manager.attach(optimizer=optimizer)
        if first:
            net.load_state_dict(saved["net"])
            manager.load_state_dict(saved["fp8"])
        train(net, optimizer, *range(first, last))
        saved = {"net": net.state_dict(), "fp8": manager.state_dict()}
        fp8dist.restore(net)
    assert part.read_text() == whole.read_text() != ""


@pytest.mark.parametrize(("kind", "ranks"), [("fallback", True), ("current", False), ("three", True), ("three", False)])
@on_ranks(2)
def test_one_collective_for_the_whole_model(kind: str, ranks: bool) -> None:
    """It has the largest amax over ranks and the rank that had it. A fallback reads the same shares. Of delayed scaling
    alone: test_recorder.py."""
    prepared: dict[str, Any] = {
        "three": {"overrides": {"first": BlockScaling(), "last": CurrentScaling()}},
        "fallback": {"fallback": Fallback(steps=2, saturated=1.0)},
    }.get(kind, {})
    recipe: Recipe = CurrentScaling() if kind == "current" else DELAYED
    group, rank = dist.group.WORLD, dist.get_rank()
    with counted_collectives() as calls:
        seen, _, _ = trained(recipe, rank, watch={"ranks": ranks}, group=group, **prepared)
    alone, _, _ = trained(recipe, rank, group=group, amax_sync=False, **prepared)
    own: list[Any] = [None] * 2
    dist.all_gather_object(own, [slot.amax for slot in alone[1].slots])
    for line, here, there in zip(seen[1].slots, *own, strict=True):
        assert (line.amax_rank is not None) == ranks
        assert line.saturated is not None
        if kind == "current":  # Scales are local, so the group does not change the training.
            assert line.amax == max(here, there)
    assert [line.slot for line in seen[1].slots] == [line.slot for line in alone[1].slots]
    same_on_all_ranks(calls.sizes)
    if kind == "fallback":
        return
    size = 8 * (3 * SLOTS + 2 * 2) if ranks else 4 * 3 * SLOTS  # With ranks, also two times of each rank.
    compared, *sizes = calls.sizes  # What the ranks start with.
    assert compared <= 128
    assert sizes.count(size) == 2
    # The other collectives: weight amaxes at attach, and the syncs of delayed scaling, which three of the slots have.
    assert sorted(one for one in sizes if one != size) == ([4 * 3] + [4 * (8 + 3)] * 6 if kind == "three" else [])


@on_ranks(2)
def test_two_watches_share_the_collective_of_a_step_and_a_rank_without_one_is_named() -> None:
    manager = fp8dist.prepare(net := make_net(), CurrentScaling(), group=dist.group.WORLD)
    for every in (3, 2):
        fp8dist.watch(manager, every)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    manager.attach(optimizer=optimizer)
    with counted_collectives() as calls:
        train(net, optimizer, *range(6), rank=dist.get_rank())
    assert calls.sizes == [4 * 3 * SLOTS] * 4
    with pytest.raises(ManifestMismatchError, match=r"settings\.watch"):
        attached(every=3 if dist.get_rank() == 0 else None, group=dist.group.WORLD)


MICROBATCHES = 4
STEP, MICROBATCH = 2, 2
"""Where the tests plant a value."""
OUTLIER = 1e4


class Recomputing(Net):
    """Recomputes two of its modules in the backward, as one checkpoint or as two."""

    reentrant = False

    def forward(self, x: Tensor, skip: bool = False) -> Tensor:
        recomputed: Callable[..., Tensor] = functools.partial(checkpoint, use_reentrant=self.reentrant)
        h = recomputed(self.branch, torch.relu(self.first(x)))
        return recomputed(self.last, h)


class Reentrant(Recomputing):
    """The same with reentrant checkpoints, whose backwards are autograd tasks of their own."""

    reentrant = True


class Whole(Net):
    """Recomputes everything, so that no forward before the backward records."""

    def forward(self, x: Tensor, skip: bool = False) -> Tensor:
        return checkpoint(super().forward, x.requires_grad_(), use_reentrant=True)


class CalledTwice(Net):
    """Calls a module twice."""

    def forward(self, x: Tensor, skip: bool = False) -> Tensor:
        return super().forward(x) + super().forward(x.flip(0))


KINDS = (Recomputing, Reentrant, Whole, CalledTwice)


def planted(rank: int, step: int, microbatch: int, value: float, on: int) -> tuple[Tensor, Tensor]:
    """Return a batch, with ``value`` in one place of it on one rank, in one microbatch."""
    x, y = batch(rank, 10 * step + microbatch)
    if (rank, step, microbatch) == (on, STEP, MICROBATCH):
        x[3, 5] = value
    return x, y


def train_planted(manager: StateManager, module: Any, value: float, rank: int = 0, on: int = 0) -> None:
    """Run three steps with a value planted in the second."""
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    manager.attach(module, optimizer=optimizer)
    for step in range(1, 4):
        for microbatch in range(MICROBATCHES):
            x, y = planted(rank, step, microbatch, value, on)
            if isinstance(module, DistributedDataParallel):
                module.require_backward_grad_sync = microbatch == MICROBATCHES - 1
            (module(x) - y).square().mean().backward()
        for parameter in module.parameters():
            parameter.grad = None if parameter.grad is None else parameter.grad.nan_to_num(0, 0, 0)
        optimizer.step()
        optimizer.zero_grad()


def prepared(kind: type[Net] = Net, **options: Any) -> tuple[Net, StateManager, list[Observation]]:
    net, seen = make_net(), list[Observation]()
    net.__class__ = kind
    manager = fp8dist.prepare(net, DELAYED, **options)
    fp8dist.watch(manager, 1, observer=seen.append, ranks=True)
    return net, manager, seen


@pytest.mark.parametrize(
    ("kind", "value"),
    [*((Net, value) for value in (OUTLIER, math.nan, -math.inf)), *((kind, math.nan) for kind in KINDS)],
)
def test_a_planted_value_has_its_microbatch(kind: type[Net], value: float) -> None:
    net, manager, seen = prepared(kind)
    train_planted(manager, net, value)
    slot = slot_of(seen[STEP - 1])
    assert (slot.amax_rank, slot.amax_microbatch) == (0, MICROBATCH)
    assert repr(slot.amax) == repr(abs(value))
    assert slot.saturated_microbatch == (MICROBATCH if value == OUTLIER else 0)
    assert slot_of(seen[STEP - 1], "first:weight").amax_microbatch == 0  # The same in each: the first counts.
    for step in (1, 3):  # Another step starts at 0 again.
        amaxes = [planted(0, step, i, 0.0, -1)[0].abs().max().item() for i in range(MICROBATCHES)]
        slot = slot_of(seen[step - 1])
        assert (slot.amax, slot.amax_microbatch) == (max(amaxes), amaxes.index(max(amaxes)))


@pytest.mark.slow
@pytest.mark.parametrize(("wrapper", "value"), [("ddp", OUTLIER), ("ddp with the hook", math.nan), ("fsdp2", math.nan)])
@on_ranks(2)
def test_rank_and_microbatch_under_a_wrapper(wrapper: str, value: float) -> None:
    rank, mesh, sharded = dist.get_rank(), mesh_of((2,), ("dp",)), wrapper == "fsdp2"
    net, manager, seen = prepared(Recomputing if sharded else Net, group=mesh, fp8_all_gather=sharded)
    module: Any = fully_shard(net, mesh=mesh) if sharded else DistributedDataParallel(net)
    if wrapper == "ddp with the hook":
        module.register_comm_hook(None, fp8dist.ddp.comm_hook(manager))
    train_planted(manager, module, value, rank, on=1)
    slot = slot_of(seen[STEP - 1])
    assert (slot.amax_rank, slot.amax_microbatch, repr(slot.amax)) == (1, MICROBATCH, repr(value))


def watched(step: Callable[[Any], None], **options: Any) -> SlotStatistics:
    """Run one watched step, and return what was observed of the first module's input."""
    net, _, optimizer, seen = attached(every=1, watch={"ranks": True}, **options)
    step(net)
    optimizer.step()
    return slot_of(seen[0])


@on_ranks(2)
def test_of_equals_the_lowest_rank_and_its_first_microbatch() -> None:
    def step(net: Net) -> None:
        for factor in (1, 2, 2) if dist.get_rank() == 0 else (2, 2, 2):
            net(factor * batch(0, 0)[0]).sum().backward()

    slot = watched(step, group=dist.group.WORLD)
    assert (slot.amax_rank, slot.amax_microbatch) == (0, 1)


def evaluating(net: Net) -> None:
    """Evaluations between do not count."""
    for factor in (1, 2):
        net(factor * batch(0, 0)[0]).sum().backward()
        with torch.no_grad():
            net(batch(0, 0)[0])
        net.eval()
        net(100 * batch(0, 0)[0])
        net.train()


def pipeline(net: Net) -> None:
    """Forwards ahead of their backwards cannot be distinguished."""
    for output in [net(factor * batch(0, 0)[0]) for factor in (1, 2)]:
        output.sum().backward()


def forward_only(net: Net) -> None:
    net(batch(0, 0)[0])


def many_microbatches(net: Net) -> None:
    for factor in range(1, 6):
        net(factor * batch(0, 0)[0]).sum().backward()


@pytest.mark.parametrize(
    ("step", "expected"), [(evaluating, 1), (pipeline, None), (forward_only, None), (many_microbatches, None)]
)
def test_microbatches_that_can_be_distinguished(
    step: Callable[[Any], None], expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if step is many_microbatches:  # More than fit.
        monkeypatch.setattr("fp8dist.state.watch._FOR_MICROBATCH", 2)
        monkeypatch.setattr("fp8dist.state.watch._UNKNOWN", 3)
    assert watched(step).amax_microbatch == expected


@pytest.mark.slow
@pytest.mark.xdist_group("compiled watches")  # So that one process imports Dynamo.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo's own call.
def test_compiled_forwards_have_no_microbatch_and_compile_no_more() -> None:
    net, _, optimizer, seen = attached(every=2, net=nn.Sequential(nn.Linear(32, 16)), watch={"ranks": True})
    compiled = torch.compile(net, backend="aot_eager")
    for step in range(6):  # Compiled for both kinds of steps, cold and hot.
        with torch._dynamo.config.patch(error_on_recompile=step >= 4):
            train(compiled, optimizer, step)
    found = {(slot.amax_rank, slot.amax_microbatch) for one in seen for slot in one.slots}
    assert (len(seen), found) == (3, {(0, None)})


AMONG = {1: (0, 1, 2), 2: (0, 1, 2), 3: (0, 1), 4: (0, 1), 5: (0, 1), 6: (0, 1, 2), 7: (0, 1), 8: (0, 1), 9: (1, 2)}
"""The experts that have tokens in each step. Expert 3 never has one."""

TOKENS = 12


def trained_experts(
    recipe: Recipe = DELAYED,
    rank: int = 0,
    microbatches: int = 1,
    recomputes: bool = False,
    compiles: bool = False,
    every: int = 1,
    high: str = "",
    steps: int | None = None,
    **prepared: Any,
) -> list[Observation]:
    """Train a mixture of four experts over the steps of AMONG; return what the watch observed."""
    dtype = torch.bfloat16 if compiles else torch.float32  # torch compiles grouped_mm in bfloat16 only.
    model, manager, optimizer, seen = attached(recipe, every, Mixture(Experts()).to(dtype), **prepared)
    if high:
        manager.set_precision(high, "high", steps=steps)
    call = torch.compile(model, fullgraph=True, backend="aot_eager") if compiles else model
    for step, among in AMONG.items():
        for microbatch in range(microbatches):
            seed = 100 * rank + 10 * microbatch + step
            index, weights = routes(TOKENS, 2, among, seed)
            inputs = rows(TOKENS, 32, seed).to(dtype).requires_grad_(), index, weights.to(dtype)
            out = checkpoint(model, *inputs, use_reentrant=False) if recomputes else call(*inputs)
            out.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return seen


def expected_tokens(step: int, ranks: Iterable[int] = (0,), microbatches: int = 1) -> list[int]:
    """Count the routes."""
    counts = torch.zeros(4, dtype=torch.int64)
    for rank in ranks:
        for microbatch in range(microbatches):
            index, _ = routes(TOKENS, 2, AMONG[step], 100 * rank + 10 * microbatch + step)
            counts += torch.bincount(index.flatten(), minlength=4)
    return counts.tolist()


@pytest.mark.parametrize(
    ("recipe", "microbatches", "recomputes"),
    [(DELAYED, 3, False), (DELAYED, 1, True), (CurrentScaling(), 3, False), (CurrentScaling(), 1, True)],
    ids=str,
)
def test_tokens_are_those_of_all_backwards(recipe: Recipe, microbatches: int, recomputes: bool) -> None:
    for one in trained_experts(recipe, microbatches=microbatches, recomputes=recomputes):
        (load,) = one.experts  # Both products have the same tokens.
        assert (load.module, load.tokens) == ("experts", expected_tokens(one.step, microbatches=microbatches))


@pytest.mark.long
@pytest.mark.xdist_group("compiled watches")  # So that one process imports Dynamo.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo does it itself.
def test_compiled_experts_count_alike() -> None:
    seen = trained_experts(compiles=True, every=3)
    assert [(one.step, one.experts[0].tokens) for one in seen] == [(step, expected_tokens(step)) for step in (3, 6, 9)]


def test_idle_experts_and_ages_observed_in_each_step() -> None:
    high = trained_experts(CurrentScaling(), overrides={"experts*": "high"})
    assert all(one.experts == () for one in high)  # Not idle.
    seen = trained_experts()
    idle = [0, 0, 1, 2, 3, 0, 1, 2, 0]
    # The age says which earlier steps have not renewed the scale: one less than the idle steps, or all before now.
    ages = [0, 0, 0, 1, 2, 3, 0, 1, 2]
    for step, one in enumerate(seen, 1):
        (load,) = one.experts
        assert load.tokens == expected_tokens(step)
        assert load.idle[1:] == [0, idle[step - 1], step]
        assert load.age == [0, 0, ages[step - 1], step - 1]
        assert {slot.age for slot in one.slots if slot.slot.fqn == "experts.gate_up.2"} == {ages[step - 1]}


@pytest.mark.parametrize(
    ("options", "idle"),
    [
        ({}, [[0, 0, 1, 4], [0, 0, 1, 8]]),  # In truth expert 2 was idle for 2 steps, both times.
        ({"recipe": CurrentScaling()}, [[0, 0, 1, 1], [0, 0, 5, 5]]),  # Of observed steps alone.
        # Gradients in high precision are not recorded, so the counters do not have the steps between.
        ({"high": "*.2"}, [[0, 0, 1, 4], [0, 0, 1, 8]]),
        ({"high": "*.2", "steps": 2}, [[0, 0, 1, 4], [0, 0, 1, 8]]),
    ],
)
def test_idle_steps_between_observations_are_a_lower_bound(options: dict[str, Any], idle: list[list[int]]) -> None:
    seen = trained_experts(every=4, **options)
    assert [one.step for one in seen] == [4, 8]
    assert [one.experts[0].idle for one in seen] == idle
    if "recipe" in options:
        assert {one.experts[0].age for one in seen} == {slot.age for one in seen for slot in one.slots} == {None}


@pytest.mark.parametrize(
    ("recipe", "every", "idle"),
    [(DELAYED, 1, 2), (DELAYED, 4, 2), (CurrentScaling(), 1, 1), (CurrentScaling(), 4, 1)],
    ids=str,
)
def test_an_expert_is_not_idle_in_steps_in_high_precision(recipe: Recipe, every: int, idle: int) -> None:
    model, manager, optimizer, seen = attached(recipe, every, Mixture(Experts()))
    for step in range(1, 13):
        index, weights = routes(TOKENS, 2, (0, 1, 2) if step in (4, 12) else (0, 1, 2, 3), step)
        with manager.no_fp8() if 4 < step < 12 else contextlib.nullcontext():
            model(rows(TOKENS, 32, step).requires_grad_(), index, weights).square().mean().backward()
        optimizer.step()
    assert [one.experts[0].idle[3] for one in seen if one.step in (4, 12)] == [1, idle]


def test_an_expert_was_not_idle_before_the_state_of_another_recipe_was_loaded() -> None:
    saved = {}
    for recipe in (CurrentScaling(), DELAYED):
        model, manager, optimizer, seen = attached(recipe, 1, Mixture(Experts()))
        if saved:
            manager.load_state_dict(saved, convert=True)
        for step in range(3):
            index, weights = routes(TOKENS, 2, (0, 1) if saved else (0, 1, 2, 3), step)
            model(rows(TOKENS, 32, step).requires_grad_(), index, weights).square().mean().backward()
            optimizer.step()
        saved = manager.state_dict()
    assert [(one.step, one.experts[0].idle[2:]) for one in seen] == [(4, [1, 1]), (5, [2, 2]), (6, [3, 3])]


@pytest.mark.slow
@pytest.mark.parametrize(("synced", "apart"), [(True, False), (False, False), (True, True)])
@on_ranks(2)
def test_tokens_are_sums_over_the_ranks_that_share_the_state(synced: bool, apart: bool) -> None:
    """``apart``: the mixture's products have groups of their own, but it is reported once."""
    rank = dist.get_rank()
    groups = {"experts.gate_up": dist.new_group([rank], use_local_synchronization=True)} if apart else None
    seen = trained_experts(rank=rank, every=3, group=dist.group.WORLD, amax_sync=synced, groups=groups)
    loads = [load for one in seen for load in one.experts]
    assert [load.module for load in loads] == ["experts"] * 3
    if not apart:
        ranks = range(2) if synced else [rank]
        expected = [(len(ranks), expected_tokens(step, ranks)) for step in (3, 6, 9)]
        assert [(load.ranks, load.tokens) for load in loads] == expected


@pytest.mark.parametrize("recipe", [DelayedScaling(), CurrentScaling(), RowwiseScaling(), BlockScaling()], ids=str)
def test_a_rank_without_tokens_is_observed(recipe: Recipe) -> None:
    model, _, optimizer, seen = attached(recipe, 1, Mixture(Experts()))
    index, weights = routes(TOKENS, 2, (0, 1), 0)
    x = rows(TOKENS, 32, 0)
    for part in (slice(0, 0), slice(None)):  # A batch that is empty, and one that is not.
        model(x[part].requires_grad_(), index[part], weights[part]).sum().backward()
    optimizer.step()
    assert seen[0].experts[0].tokens == [TOKENS, TOKENS, 0, 0]
    loads = [ExpertLoad("a", [0, 3], [7, 0], [6, 0]), ExpertLoad("b", [0, 0], [2, 1], None)]
    assert idle_numbers(loads) == {"idle_experts": 3, "longest_idle_steps": 7}
    assert idle_numbers([]) == {}


def test_an_interrupted_step_ends_no_later_one() -> None:
    """Ctrl-C where the next step begins to be measured, in a notebook that goes on."""
    net = make_net()
    manager = fp8dist.prepare(net)
    seen: list[int] = []
    fp8dist.watch(manager, 2, observer=lambda one: seen.append(one.step))
    manager.attach()
    for step in range(1, 6):
        net(batch(0, step)[0]).square().mean().backward()
        if step == 1:
            with mock.patch.object(ArenaSync, "watch", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
                manager.step()
        else:
            manager.step()
    assert seen == [4]

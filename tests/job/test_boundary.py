"""Step boundaries: one optimizer or several, re-created optimizers, GradScaler, Accelerate's wrapper."""

from __future__ import annotations

import copy
import gc
import logging
import math
import os
import pickle
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fp8dist
from fp8dist import DelayedScaling
from fp8dist.errors import ConfigurationError
from fp8dist.modules.loop_monitor import FIRST_LOOK
from tests.support.collectives import counted_collectives
from tests.support.ranks import RankPool, on_ranks
from tests.support.training import (
    Amaxes,
    AmaxRecorder,
    SlotName,
    batch,
    expected_histories,
    fp8_count,
    histories,
    make_net,
    parameter_bits,
    state_bits,
)

HISTORY = 8


def _two_optimizers() -> tuple[list[int], int, dict[str, bytes]]:
    net = make_net()
    manager = fp8dist.prepare(net, DelayedScaling(history_len=HISTORY), group=dist.group.WORLD)
    ddp = DistributedDataParallel(net)
    weights = [p for p in net.parameters() if p.ndim == 2]
    biases = [p for p in net.parameters() if p.ndim == 1]
    first, last = torch.optim.SGD(weights, lr=0.05), torch.optim.AdamW(biases, lr=0.01)
    manager.attach(ddp, optimizer=[first, last])
    counts = []
    for step in range(3):
        x, y = batch(dist.get_rank(), step)
        nn.functional.mse_loss(ddp(x), y).backward()
        with counted_collectives() as calls:
            first.step()
            counts.append(fp8_count(calls, manager))
            last.step()
            counts.append(fp8_count(calls, manager))
        first.zero_grad()
        last.zero_grad()
    return counts, manager.steps, state_bits(manager)


@pytest.mark.slow
def test_with_several_optimizers_the_last_ones_step_is_the_boundary(two_ranks: RankPool) -> None:
    (counts, steps, state), (_, _, other) = two_ranks.run(_two_optimizers)
    assert counts == [0, 1] * 3
    assert steps == 3
    assert state == other


def test_a_weight_cast_does_not_outlive_the_first_of_two_optimizers() -> None:
    """The weights change between the two steps: a forward there must cast them again."""
    net = make_net()
    manager = fp8dist.prepare(net, DelayedScaling(history_len=HISTORY))
    first = torch.optim.SGD([p for p in net.parameters() if p.ndim == 2], lr=1.0, fused=True)
    last = torch.optim.SGD([p for p in net.parameters() if p.ndim == 1], lr=0.1)
    manager.attach(net, optimizer=[first, last])
    x, _ = batch(0, 0)
    net(x).sum().backward()
    first.step()
    between = net(x)
    manager._job.reuse_casts = False
    assert torch.equal(net(x), between)


@pytest.mark.slow
@on_ranks(2)
def test_reattach_moves_the_boundary_to_the_new_optimizer() -> None:
    net = make_net()
    manager = fp8dist.prepare(net, DelayedScaling(history_len=HISTORY), group=dist.group.WORLD)
    ddp = DistributedDataParallel(net)
    old = torch.optim.SGD(ddp.parameters(), lr=0.05)
    manager.attach(ddp, optimizer=old)
    counts = []

    def step(optimizer: torch.optim.Optimizer) -> None:
        x, y = batch(dist.get_rank(), len(counts))
        nn.functional.mse_loss(ddp(x), y).backward()
        with counted_collectives() as calls:
            optimizer.step()
        optimizer.zero_grad()
        counts.append(fp8_count(calls, manager))

    step(old)
    new = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    manager.attach(ddp, optimizer=new)
    step(new)
    step(old)  # This optimizer has no hook any more.
    step(new)
    assert (counts, manager.steps) == ([1, 1, 0, 1], 3)


def _manual_boundary(attach_optimizer: bool) -> tuple[list[int], int, dict[str, bytes]]:
    net = make_net()
    manager = fp8dist.prepare(net, DelayedScaling(history_len=HISTORY), group=dist.group.WORLD)
    ddp = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    if attach_optimizer:
        manager.attach(ddp, optimizer=optimizer, boundary="manual")
    else:
        manager.attach(ddp)
    counts = []
    for step in range(3):
        x, y = batch(dist.get_rank(), step)
        nn.functional.mse_loss(ddp(x), y).backward()
        with counted_collectives() as calls:
            optimizer.step()
            counts.append(fp8_count(calls, manager))
            manager.step()
            counts.append(fp8_count(calls, manager))
        optimizer.zero_grad()
    return counts, manager.steps, state_bits(manager)


def test_manual_boundary(two_ranks: RankPool) -> None:
    with_optimizer = two_ranks.run(_manual_boundary, True)
    without = two_ranks.run(_manual_boundary, False)
    for counts, steps, state in [*with_optimizer, *without]:
        assert counts == [0, 1] * 3
        assert steps == 3
        assert state == with_optimizer[0][2]


def test_bad_attach_arguments_are_refused() -> None:
    net = make_net()
    manager = fp8dist.prepare(net)
    with pytest.raises(ConfigurationError, match="boundary must be"):
        manager.attach(boundary="never")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="no optimizer in it"):
        manager.attach(optimizer=[])
    with pytest.raises(ConfigurationError, match="was not prepared"):
        manager.attach(make_net())


def _backwards_warnings(update: str, caplog: pytest.LogCaptureFixture, steps: int) -> list[str]:
    """Return the warnings of a loop that updates weights without an optimizer and never calls manager.step()."""
    net = nn.Linear(16, 16, bias=False)
    fp8dist.prepare(net).attach(net)
    x = torch.ones(1, 16)
    with caplog.at_level(logging.WARNING, "fp8dist"):
        caplog.clear()
        for _ in range(steps):
            net(x).sum().backward()
            with torch.no_grad():
                if update == "in place":
                    net.weight.mul_(0.99)
                elif update == ".data":
                    net.weight.data.mul_(0.99)
    return [record.getMessage() for record in caplog.records]


@pytest.mark.slow
def test_one_warning_when_weights_change_without_a_boundary(caplog: pytest.LogCaptureFixture) -> None:
    assert _backwards_warnings("in place", caplog, 2) == []  # Maybe an optimizer's, whose boundary follows.
    (text,) = _backwards_warnings("in place", caplog, 80)
    assert "manager.step()" in text
    assert _backwards_warnings(".data", caplog, FIRST_LOOK - 1) == []
    (text,) = _backwards_warnings(".data", caplog, 2 * FIRST_LOOK + 1)
    assert "manager.step()" in text
    assert _backwards_warnings("none", caplog, 300) == []  # 300 microbatches.


@dataclass(frozen=True)
class Scaled:
    """A run with a loss scaler, in which one rank's loss is infinite once."""

    optimizer: str
    give_scaler: bool
    hook: bool = False
    update: str = "same_step"
    inf_at: int = 2
    steps: int = 5


@dataclass
class ScaledOutcome:
    steps: list[int]
    histories: list[dict[SlotName, list[float]]]
    nonfinite: list[float]
    parameters: dict[str, bytes]
    state: dict[str, bytes]
    amaxes: list[Amaxes]
    skipped: list[bool]


def _make_optimizer(kind: str, parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(parameters, lr=0.01, foreach=False)
    if kind == "sgd-fused":
        return torch.optim.SGD(parameters, lr=0.01, fused=True)
    assert kind == "adamw-fused"
    return torch.optim.AdamW(parameters, lr=0.01, fused=True)


def _train_scaled(job: Scaled) -> ScaledOutcome:
    rank = dist.get_rank()
    net = make_net()
    recipe = DelayedScaling(history_len=HISTORY, update=job.update)  # type: ignore[arg-type]
    manager = fp8dist.prepare(net, recipe, group=dist.group.WORLD)
    ddp = DistributedDataParallel(net)
    optimizer = _make_optimizer(job.optimizer, ddp.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    manager.attach(ddp, optimizer=optimizer, scaler=scaler if job.give_scaler else None)
    if job.hook:
        ddp.register_comm_hook(None, fp8dist.ddp.comm_hook(manager))
    recorder = AmaxRecorder(net)
    outcome = ScaledOutcome([], [], [], {}, {}, [], [])
    for step in range(job.steps):
        before = parameter_bits(net)
        x, y = batch(rank, step)
        loss = nn.functional.mse_loss(ddp(x), y)
        if step == job.inf_at and rank == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        recorder.end_step()
        outcome.skipped.append(parameter_bits(net) == before)
        outcome.steps.append(manager.steps)
        outcome.histories.append(histories(manager))
        outcome.nonfinite.append(manager.metrics()["fp8/nonfinite_amaxes"])
    outcome.parameters, outcome.state = parameter_bits(net), state_bits(manager)
    outcome.amaxes = recorder.steps
    return outcome


SCALED = [
    pytest.param(Scaled(optimizer, True, hook, update), id=f"{optimizer}{', comm_hook' * hook}, {update}")
    for optimizer, hook, update in (
        ("sgd", False, "next_step"),
        ("sgd", True, "same_step"),
        ("sgd-fused", True, "same_step"),
        ("adamw-fused", False, "next_step"),
    )
]


@pytest.mark.slow
@pytest.mark.parametrize("job", SCALED)
def test_a_skipped_step_is_no_boundary(two_ranks: RankPool, job: Scaled) -> None:
    first, second = two_ranks.run(_train_scaled, job)
    assert first.skipped == second.skipped == [False, False, True, False, False]
    for outcome in (first, second):
        assert outcome.steps == [1, 2, 2, 3, 4]
        assert outcome.histories[2] == outcome.histories[1]
    assert first.state == second.state
    assert first.parameters == second.parameters
    # Finite amaxes of the skipped step count for the next one; non-finite amaxes are dropped.
    outcomes = [first, second]
    windows = outcomes[0].histories[-1]
    assert [outcome.nonfinite for outcome in outcomes] == [[0.0] * job.steps] * 2
    skipped = [outcome.amaxes[job.inf_at] for outcome in outcomes]
    merged = []
    for outcome in outcomes:
        # A comm hook has already merged the ranks' amaxes, so the slot is dropped on all ranks.
        seen = skipped if job.hook else [outcome.amaxes[job.inf_at]]
        steps = [dict(amaxes) for i, amaxes in enumerate(outcome.amaxes) if i != job.inf_at]
        after = steps[job.inf_at]
        for slot in after:
            amax = max(amaxes[slot] if math.isfinite(amaxes[slot]) else math.inf for amaxes in seen)
            if math.isfinite(amax):
                after[slot] = max(after[slot], amax)
        merged.append(steps)
    assert windows == expected_histories(list(windows), merged, HISTORY)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "adamw-fused"])
def test_a_scaler_that_attach_was_not_given_is_found(two_ranks: RankPool, optimizer: str) -> None:
    for found, given in zip(
        two_ranks.run(_train_scaled, Scaled(optimizer, give_scaler=False)),
        two_ranks.run(_train_scaled, Scaled(optimizer, give_scaler=True)),
    ):
        assert (found.steps, found.histories, found.nonfinite) == (given.steps, given.histories, [0.0] * 5)
        assert (found.parameters, found.state) == (given.parameters, given.state)
    for outcome in two_ranks.run(_train_scaled, Scaled(optimizer, give_scaler=False, inf_at=0)):
        assert outcome.steps == [0, 1, 2, 3, 4]  # An unfused optimizer is first seen after the skipped step.
        assert outcome.nonfinite == [0.0] * 5


def test_attach_leaves_the_scaler_as_it_was_after_detach() -> None:
    net = make_net()
    manager = fp8dist.prepare(net)
    scaler = torch.amp.GradScaler("cpu")
    manager.attach(net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), scaler=scaler)
    assert "step" in vars(scaler)
    manager.detach()
    assert "step" not in vars(scaler)


def _train_with_accelerate(accumulate: int) -> tuple[list[int], int, dict[str, bytes], dict[str, bytes], Any, Any]:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    try:
        os.environ.setdefault("MASTER_ADDR", "localhost")
        os.environ.setdefault("MASTER_PORT", "0")  # Accelerate requires it, although the process group exists.
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
        net = make_net()
        manager = fp8dist.prepare(net, DelayedScaling(history_len=HISTORY), group=dist.group.WORLD)
        ddp, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.05))
        assert isinstance(ddp, DistributedDataParallel)
        manager.attach(ddp, optimizer=optimizer)
        recorder = AmaxRecorder(net)
        counts = []
        for index in range(3 * accumulate):
            with counted_collectives() as calls, accelerator.accumulate(ddp):
                x, y = batch(dist.get_rank(), index)
                accelerator.backward(nn.functional.mse_loss(ddp(x), y))
                optimizer.step()
                optimizer.zero_grad()
            counts.append(fp8_count(calls, manager))
            if accelerator.sync_gradients:
                recorder.end_step()
        return counts, manager.steps, state_bits(manager), parameter_bits(net), histories(manager), recorder.steps
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


@pytest.mark.parametrize("accumulate", [3])
@pytest.mark.slow
def test_accelerate(two_ranks: RankPool, accumulate: int) -> None:
    first, second = two_ranks.run(_train_with_accelerate, accumulate)
    counts, steps, state, parameters, windows, amaxes = first
    assert counts == ([0] * (accumulate - 1) + [1]) * 3
    assert steps == 3
    assert (state, parameters) == (second[2], second[3])
    assert windows == expected_histories(list(windows), [amaxes, second[5]], HISTORY)


def test_a_watched_scaler_pickles_copies_and_keeps_nothing() -> None:
    net = make_net()
    manager = fp8dist.prepare(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    manager.attach(net, optimizer=optimizer, scaler=scaler)
    for made in (pickle.loads(pickle.dumps(scaler)), copy.deepcopy(scaler)):
        loss = nn.functional.mse_loss(net(batch(0, 0)[0]), batch(0, 0)[1])
        made.scale(loss).backward()
        made.step(optimizer)
        made.update()
        optimizer.zero_grad()
    assert manager.steps == 2
    cycle = weakref.ref(manager._cycle)
    gc.disable()
    try:
        del manager, net, optimizer, loss
        assert cycle() is None
    finally:
        gc.enable()
    assert scaler.is_enabled()

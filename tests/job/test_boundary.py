"""Step boundaries: several optimizers, GradScaler, weights that change without one."""

from __future__ import annotations

import copy
import gc
import logging
import math
import pickle
import weakref
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, AdamW

import fp8dist
from fp8dist import DelayedScaling
from fp8dist.modules.loop_monitor import FIRST_LOOK
from fp8dist.state.arena_sync import Phase
from tests.support.ranks import RankPool
from tests.support.training import (
    Amaxes,
    AmaxRecorder,
    SlotName,
    SmallJob,
    batch,
    expected_histories,
    histories,
    make_net,
    parameter_bits,
    state_bits,
)

HISTORY = 8


def test_a_weight_cast_does_not_outlive_the_first_of_two_optimizers() -> None:
    """The weights change between the two steps: a forward there must cast them again."""
    net = make_net()
    manager = fp8dist.prepare(net, DelayedScaling(history_len=HISTORY))
    first = SGD([p for p in net.parameters() if p.ndim == 2], lr=1.0, fused=True)
    last = SGD([p for p in net.parameters() if p.ndim == 1], lr=0.1)
    manager.attach(net, optimizer=[first, last])
    x, _ = batch(0, 0)
    net(x).sum().backward()
    first.step()
    between = net(x)
    manager._job.reuse_casts = False
    assert torch.equal(net(x), between)


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
    assert _backwards_warnings(".data", caplog, FIRST_LOOK - 1) == []
    assert _backwards_warnings("none", caplog, 2 * FIRST_LOOK + 1) == []  # Microbatches.
    for update, steps in (("in place", 5), (".data", 2 * FIRST_LOOK + 1)):
        (text,) = _backwards_warnings(update, caplog, steps)
        assert "manager.step()" in text


@dataclass(frozen=True)
class Scaled:
    """A run with a loss scaler, in which one rank's loss is infinite once."""

    optimizer: str
    give_scaler: bool = True
    hook: bool = False
    inf_at: int = 2
    update: str = "next_step"


@dataclass
class Outcome:
    """What a rank saw: after each step, and at the end."""

    steps: list[int] = field(default_factory=list)
    histories: dict[SlotName, list[float]] = field(default_factory=dict)
    nonfinite: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    end: tuple[Any, ...] = ()
    amaxes: list[Amaxes] = field(default_factory=list)


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda parameters: SGD(parameters, lr=0.01, foreach=False),
    "sgd-fused": lambda parameters: SGD(parameters, lr=0.01, fused=True),
    "adamw-fused": lambda parameters: AdamW(parameters, lr=0.01, fused=True),
}


def _train_scaled(run: Scaled) -> Outcome:
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    recipe = DelayedScaling(history_len=HISTORY, update=run.update)  # type: ignore[arg-type]
    given = {"scaler": scaler} if run.give_scaler else {}
    job = SmallJob(recipe, optimizer=OPTIMIZERS[run.optimizer], attach=given)
    if run.hook:
        job.called.register_comm_hook(None, fp8dist.ddp.comm_hook(job.manager))
    recorder, outcome = AmaxRecorder(job.net), Outcome()
    for step in range(5):
        before = parameter_bits(job.net)
        x, y = batch(dist.get_rank(), step)
        loss = nn.functional.mse_loss(job.called(x), y)
        if step == run.inf_at and dist.get_rank() == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(job.optimizer)
        scaler.update()
        job.optimizer.zero_grad()
        recorder.end_step()
        outcome.skipped.append(parameter_bits(job.net) == before)
        outcome.steps.append(job.manager.steps)
        outcome.nonfinite.append(job.manager.metrics()["fp8/nonfinite_amaxes"])
    outcome.histories = histories(job.manager)
    outcome.end = parameter_bits(job.net), state_bits(job.manager)
    outcome.amaxes = recorder.steps
    return outcome


@pytest.mark.slow
@pytest.mark.parametrize(
    "run",
    [
        Scaled("sgd"),
        Scaled("sgd", hook=True, update="same_step"),
        Scaled("sgd-fused", hook=True),
        # A scaler that attach was not given is found. An unfused optimizer is first seen after a first step is skipped.
        *(Scaled(optimizer, give_scaler=False, inf_at=at) for optimizer in ("sgd", "adamw-fused") for at in (0, 2)),
    ],
    ids=str,
)
def test_a_skipped_step_is_no_boundary(two_ranks: RankPool, run: Scaled) -> None:
    outcomes = two_ranks.run(_train_scaled, run)
    for outcome in outcomes:
        assert outcome.skipped == [step == run.inf_at for step in range(5)]
        assert outcome.steps == [step + (step < run.inf_at) for step in range(5)]
        assert outcome.nonfinite == [0.0] * 5
        assert outcome.end == outcomes[0].end
    # Finite amaxes of the skipped step count for the next one; non-finite amaxes are dropped.
    skipped = [outcome.amaxes[run.inf_at] for outcome in outcomes]
    merged = []
    for outcome in outcomes:
        # A comm hook has already merged the ranks' amaxes, so the slot is dropped on all ranks.
        seen = skipped if run.hook else [outcome.amaxes[run.inf_at]]
        steps = [dict(amaxes) for i, amaxes in enumerate(outcome.amaxes) if i != run.inf_at]
        after = steps[run.inf_at]
        for slot in after:
            amax = max(amaxes[slot] if math.isfinite(amaxes[slot]) else math.inf for amaxes in seen)
            if math.isfinite(amax):
                after[slot] = max(after[slot], amax)
        merged.append(steps)
    windows = outcomes[0].histories
    assert windows == expected_histories(list(windows), merged, HISTORY)


@pytest.mark.parametrize("fused", [(False, True), (True, False), (True, True)])
def test_a_step_counts_if_the_scaler_skips_one_of_two_optimizers_but_not_both(fused: tuple[bool, bool]) -> None:
    net, scaler = make_net(), torch.amp.GradScaler("cpu", init_scale=256.0)
    manager = fp8dist.prepare(net, DelayedScaling(history_len=HISTORY))
    halves = list(net.branch.parameters()), [*net.first.parameters(), *net.last.parameters()]
    optimizers = [SGD(half, lr=0.01, fused=each) for half, each in zip(halves, fused)]
    manager.attach(optimizer=optimizers, scaler=scaler)
    steps, amaxes = [], []
    for bad in ((), (0,), (1,), (0, 1)):
        x, y = batch(0, 0)
        scaler.scale(nn.functional.mse_loss(net(x), y)).backward()
        for index in bad:
            halves[index][0].grad.fill_(torch.inf)
        for optimizer in optimizers:
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()
        steps.append(manager.steps)
        amaxes.append(manager.slot("first", "input").amax_history.count_nonzero().item())
    assert steps == amaxes == [1, 2, 3, 3]


@pytest.mark.parametrize("left_out", ["by the scaler", "by its learning rate", "by that, with a closure"])
def test_a_compiled_forward_finds_the_scales_of_a_step_that_leaves_the_last_optimizer_out(left_out: str) -> None:
    """It cannot commit them itself, as an eager one does."""
    net, skips = make_net(), left_out == "by the scaler"
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=skips)
    manager = fp8dist.prepare(net, DelayedScaling(history_len=HISTORY, update="next_step"))
    optimizers = SGD(net.first.parameters(), lr=0.01), SGD(net.last.parameters(), lr=0.01 if skips else 0.0)
    manager.attach(optimizer=optimizers, **({"scaler": scaler} if skips else {}))
    manager._job.compiled = True
    x, y = batch(0, 0)
    scaler.scale(nn.functional.mse_loss(net(x), y)).backward()
    net.last.weight.grad.fill_(torch.inf)
    scaler.step(optimizers[0])
    if left_out.endswith("closure"):
        optimizers[1].step(lambda: torch.zeros(()))
    else:
        scaler.step(optimizers[1])
    assert [sync.phase for sync in manager._syncs] == [Phase.IDLE]
    assert manager.steps == 1


def test_a_watched_scaler_pickles_copies_and_keeps_nothing() -> None:
    net = make_net()
    manager = fp8dist.prepare(net)
    optimizer = SGD(net.parameters(), lr=0.1)
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

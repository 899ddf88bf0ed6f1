"""Correct programs are silent and accurate: schedulers, accumulation, closures, GradScaler, torch.compile, recipes.

Silent: no exception, no log record from WARNING up, no Python warning. Accurate: each forward is within 8 % of float32
with the same weights, steps match the optimizer's, and results are bitwise those of the equivalent program, if there is
one. ``quiet_*.py`` has more programs.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.optim.optimizer import Optimizer
from torch.utils.checkpoint import checkpoint

from fp8dist import BlockScaling, CurrentScaling, DelayedScaling, RowwiseScaling
from tests.support.quiet import (
    HISTORY,
    STEPS,
    Trial,
    attached,
    batch,
    done,
    mlp,
    off,
    plain_forward,
    plain_run,
    state_is_right,
    take,
    weight_bits,
)
from tests.support.scenarios import Scenarios

SCENARIOS = Scenarios()
program, variants, cases = SCENARIOS.program, SCENARIOS.variants, SCENARIOS.cases


# Schedulers, accumulation, closures --------------------------------------------------------------

SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "OneCycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.02, total_steps=STEPS + 1),
    "Linear": lambda o: torch.optim.lr_scheduler.LinearLR(o, start_factor=0.1, total_iters=4),
}


@variants(name=["OneCycle", "Linear"])
def scheduler(name: str) -> None:
    trial, optimizer = attached()
    schedule = SCHEDULERS[name](optimizer)
    trial.train(optimizer, STEPS, after=schedule.step)
    trial.right(STEPS)


@variants(zeros=["the first", "two in the middle", "the last"])
def scheduler_that_passes_zero(zeros: str) -> None:
    """A step with lr 0 changes nothing: it is not a boundary, and its amaxes count for the next step."""
    where = {"the first": (0,), "two in the middle": (2, 3), "the last": (STEPS - 1,)}[zeros]
    trial, optimizer = attached()
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0 if step in where else 1.0)
    trial.train(optimizer, STEPS, after=schedule.step)
    trial.right(STEPS - len(where))


@variants(microbatches=[8, 100])
def accumulation(microbatches: int) -> None:
    trial, optimizer = attached(judged=microbatches < 100)
    for step in range(3):
        for micro in range(microbatches):
            trial.backward(step * microbatches + micro, times=1 / microbatches)
        take(optimizer)
    trial.errors.append(off(trial.net(batch(0)[0]), plain_forward(trial, batch(0)[0])))
    trial.right(3)


@program
def evaluation_amid_accumulation() -> None:
    """An evaluation changes nothing."""
    trial, other = Trial(), Trial()
    for each in (trial, other):
        optimizer = each.adamw()
        each.manager.attach(optimizer=optimizer)
        for index in range(3 * STEPS):
            each.backward(index)
            if each is trial:
                each.net.eval()
                each.evaluate()
                each.net.train()
            if index % 3 == 2:
                take(optimizer)
    trial.right(STEPS)
    assert trial.bits() == done(other).bits()


@program
def two_losses_for_one_step() -> None:
    trial, optimizer = attached()
    for index in range(STEPS):
        x, y = batch(index)
        output = trial.net(x)
        nn.functional.mse_loss(output, y).backward(retain_graph=True)
        output.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    trial.right(STEPS)


@program
def steps_that_the_loop_leaves_out() -> None:
    """The loop skips steps with a bad loss. Their amaxes count for the next step."""
    trial, optimizer = attached()
    for index in range(STEPS):
        trial.backward(index)
        if index not in (1, 2):
            optimizer.step()
        optimizer.zero_grad()
    trial.right(STEPS - 2)


@program
def gradients_are_clipped() -> None:
    trial, optimizer = attached()
    for index in range(STEPS):
        trial.backward(index)
        nn.utils.clip_grad_norm_(trial.net.parameters(), 0.1)
        take(optimizer)
    trial.right(STEPS)


@variants(write=["clamp_", "noise", ".data"])
def weights_written_after_each_step(write: str) -> None:
    """Clipping, pruning or noise, after the step and before the next forward."""
    trial, optimizer = attached()
    generator = torch.Generator().manual_seed(1)
    masks = [torch.rand(p.shape, generator=generator) > 0.2 for p in trial.parameters()]
    for index in range(STEPS):
        trial.train(optimizer, 1, start=index)
        with torch.no_grad():
            for p, mask in zip(trial.parameters(), masks):
                if write == "clamp_":
                    p.clamp_(-0.15, 0.15)
                elif write == "mask":
                    p.mul_(mask)
                elif write == "noise":
                    p.add_(torch.randn(p.shape, generator=generator), alpha=0.01)
                else:
                    p.data.clamp_(-0.15, 0.15)
    trial.right(STEPS)


@program
def layer_begun_anew() -> None:
    """A reinitialised layer's weights exceed the old scale, so they are cast just in time."""
    trial, optimizer = attached(make=lambda trial: trial.adamw(0.001))
    trial.train(optimizer, 3)
    with torch.no_grad():
        trial.net[2].weight.mul_(16)  # The last layer: its output is not cast.
    trial.train(optimizer, 3, start=3)
    trial.right(6)


@variants(line_search=["strong_wolfe"])
def lbfgs(line_search: str | None) -> None:
    """LBFGS moves the weights between calls of the closure, and back."""
    trial = Trial()
    optimizer = torch.optim.LBFGS(trial.net.parameters(), lr=0.3, max_iter=4, line_search_fn=line_search)
    trial.manager.attach(optimizer=optimizer)

    def closure(index: int) -> Tensor:
        optimizer.zero_grad()
        return trial.backward(index)

    for index in range(STEPS):
        optimizer.step(partial(closure, index))
    trial.right(STEPS)


@variants(kind=[AdamW], named=[False, True])
def closures(kind: type[Optimizer], named: bool) -> None:
    """Bitwise equal to the loop without closures."""
    trial = Trial()
    optimizer = kind(trial.net.parameters(), lr=0.01)  # type: ignore[call-arg]
    trial.manager.attach(optimizer=optimizer)
    for index in range(STEPS):
        closure = partial(trial.backward, index)
        optimizer.step(closure=closure) if named else optimizer.step(closure)
        optimizer.zero_grad()
    trial.right(STEPS)
    assert trial.bits() == done(plain_run(STEPS, lambda p: kind(p, lr=0.01))).bits()  # type: ignore[call-arg]


@variants(when=["before", "after"], given=["optimizer", "nothing"])
def manager_step(when: str, given: str) -> None:
    """Bitwise equal to the optimizer's step as the boundary."""
    trial = Trial()
    optimizer = trial.adamw()
    trial.manager.attach(optimizer=optimizer if given == "optimizer" else None, boundary="manual")
    for index in range(STEPS):
        trial.backward(index)
        if when == "before":
            trial.manager.step()
        optimizer.step()
        if when == "after":
            trial.manager.step()
        optimizer.zero_grad()
    trial.right(STEPS)
    assert trial.bits() == done(plain_run(STEPS)).bits()


@program
def manager_step_without_attach() -> None:
    trial = Trial()
    optimizer = trial.adamw()
    trial.train(optimizer, STEPS, after=trial.manager.step)
    trial.right(STEPS)


# GradScaler --------------------------------------------------------------------------------------

SCALED: dict[str, Callable[[Any], Optimizer]] = {
    "unfused": lambda p: SGD(p, lr=0.1, foreach=False),
    "foreach": lambda p: AdamW(p, lr=0.01, foreach=True),
    "fused": lambda p: AdamW(p, lr=0.01, fused=True),
}


@cases(
    {"kind": "unfused", "update": "same_step", "unscale": True},
    {"kind": "unfused", "update": "next_step", "unscale": False},
    {"kind": "fused", "update": "same_step", "unscale": False},
    {"kind": "fused", "update": "next_step", "unscale": True},
    {"kind": "foreach", "update": "next_step", "unscale": True},
)
def gradscaler_skips(kind: str, update: str, unscale: bool) -> None:
    """GradScaler skips steps 2 and 3: they do not count, and leave no infinite amaxes."""
    trial = Trial(recipe=DelayedScaling(history_len=HISTORY, update=update))  # type: ignore[arg-type]
    optimizer = SCALED[kind](trial.net.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=True)
    trial.manager.attach(optimizer=optimizer, scaler=scaler)
    for index in range(STEPS):
        x, y = batch(index)
        loss = nn.functional.mse_loss(trial.net(x), y)
        scaler.scale(loss * (math.inf if index in (2, 3) else 1.0)).backward()
        if unscale:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(trial.net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    trial.right(STEPS - 2)


@variants(kind=["unfused", "fused"])
def gradscaler_with_two_optimizers(kind: str) -> None:
    trial = Trial()
    optimizers = [SCALED[kind](layer.parameters()) for layer in (trial.net[0], trial.net[2])]
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=True)
    trial.manager.attach(optimizer=optimizers, scaler=scaler)
    for index in range(STEPS):
        x, y = batch(index)
        loss = nn.functional.mse_loss(trial.net(x), y)
        scaler.scale(loss * (math.inf if index == 2 else 1.0)).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad()
    trial.right(STEPS - 1)


@variants(kind=["unfused", "fused"], infinite=["the first's", "the last's"])
def gradscaler_skips_one_of_two_optimizers(kind: str, infinite: str) -> None:
    """GradScaler checks each optimizer's gradients separately; the other optimizer takes its step."""
    trial = Trial()
    layers = [trial.net[0], trial.net[2]]
    optimizers = [SCALED[kind](layer.parameters()) for layer in layers]
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=True)
    trial.manager.attach(optimizer=optimizers, scaler=scaler)
    for index in range(STEPS):
        x, y = batch(index)
        scaler.scale(nn.functional.mse_loss(trial.net(x), y)).backward()
        if index == 2:
            layers[0 if infinite == "the first's" else 1].bias.grad.fill_(math.inf)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad()
    assert STEPS - 1 <= trial.manager.steps <= STEPS
    trial.right(trial.manager.steps)


@cases({"kind": "unfused", "skipped": 2}, {"kind": "fused", "skipped": 2}, {"kind": "foreach", "skipped": 0})
def gradscaler_not_passed(kind: str, skipped: int) -> None:
    """The scaler is detected at its first unskipped step. Infinite amaxes from before are dropped with that step's."""
    trial = Trial()
    optimizer = SCALED[kind](trial.net.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=True)
    trial.manager.attach(optimizer=optimizer)
    for index in range(STEPS):
        x, y = batch(index)
        loss = nn.functional.mse_loss(trial.net(x), y)
        scaler.scale(loss * (math.inf if index == skipped else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    trial.right(STEPS - 1, lambda fqn, role: role != "grad_output" or skipped > 0)


@variants(passed=[True, False])
def gradscaler_disabled(passed: bool) -> None:
    trial = Trial()
    optimizer = trial.adamw()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    trial.manager.attach(optimizer=optimizer, scaler=scaler if passed else None)
    for index in range(STEPS):
        x, y = batch(index)
        scaler.scale(nn.functional.mse_loss(trial.net(x), y)).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    trial.right(STEPS)
    assert trial.bits() == done(plain_run(STEPS)).bits()


# Compiled, checkpointed, accelerated -------------------------------------------------------------


@cases({"update": "same_step", "whole": True}, {"update": "next_step", "whole": False})
def compiled(update: str, whole: bool) -> None:
    trial = Trial(recipe=DelayedScaling(history_len=HISTORY, update=update), judged=False)  # type: ignore[arg-type]
    forward: Any = torch.compile(trial.net, backend="aot_eager", fullgraph=whole)
    optimizer = trial.adamw()
    trial.manager.attach(forward if not whole else None, optimizer=optimizer)
    for index in range(STEPS):
        x, y = batch(index)
        output = forward(x)
        trial.errors.append(off(output, plain_forward(trial, x)))
        nn.functional.mse_loss(output, y).backward()
        take(optimizer)
    trial.accurate()
    state_is_right(trial.manager, STEPS)


class Checkpointed(nn.Module):
    """A block with activation checkpointing."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        torch.manual_seed(0)
        self.head, self.block, self.tail = nn.Linear(32, 64), mlp(64, 64, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = self.head(x)
        if self.how and torch.is_grad_enabled():
            return self.tail(h + checkpoint(self.block, h, use_reentrant=self.how == "reentrant"))
        return self.tail(h + self.block(h))


@variants(how=["reentrant", "not reentrant"])
def activation_checkpointing(how: str) -> None:
    trial = plain_run(STEPS, net=Checkpointed(how))
    trial.right(STEPS)
    assert trial.bits() == done(plain_run(STEPS, net=Checkpointed(""))).bits()


@variants(accumulate=[2])
def accelerate_prepared(accumulate: int) -> None:
    """Bitwise equal to the loop without Accelerate."""
    pytest.importorskip("accelerate")
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    try:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
        trial, other = Trial(), Trial()
        plain = other.adamw()
        net, optimizer = accelerator.prepare(trial.net, trial.adamw())
        schedule = accelerator.prepare(torch.optim.lr_scheduler.ConstantLR(optimizer.optimizer, factor=1.0))
        trial.manager.attach(net, optimizer=optimizer)
        other.manager.attach(optimizer=plain)
        for index in range(accumulate * STEPS):
            with accelerator.accumulate(net):
                x, y = batch(index)
                accelerator.backward(nn.functional.mse_loss(net(x), y))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            other.backward(index, times=1 / accumulate)
            if index % accumulate == accumulate - 1:
                take(plain)
        trial.right(STEPS)
        assert trial.bits() == done(other).bits()
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


@program
def calibrated_then_trained() -> None:
    trial, optimizer = attached()
    with trial.manager.calibrate():
        for index in range(4):
            trial.backward(index)
    optimizer.zero_grad()
    assert trial.manager.metrics()["fp8/cold_slots"] == 0
    before = trial.manager.steps
    trial.train(optimizer, STEPS)
    trial.evaluate()
    trial.accurate()
    assert trial.manager.steps == before + STEPS


@variants(how=["set_precision", "no_fp8", "fp8 starts later"])
def high_precision_meanwhile(how: str) -> None:
    trial, optimizer = attached()
    if how == "fp8 starts later":
        trial.manager.set_precision("*", "high", steps=2)
    for index in range(STEPS):
        if how == "no_fp8" and index in (2, 3):
            with trial.manager.no_fp8():
                trial.train(optimizer, 1, start=index)
            continue
        if how == "set_precision" and index == 2:
            trial.manager.set_precision("*", "high", steps=2)
        trial.train(optimizer, 1, start=index)
    trial.right(STEPS, lambda fqn, role: False)


@program
def high_precision_before_attach() -> None:
    """The first phase trains without FP8. ``attach`` comes with the second, and uses the weights of that time."""
    trial = Trial()
    optimizer = SGD(trial.net.parameters(), lr=0.1)
    with trial.manager.no_fp8():
        trial.train(optimizer, 3)
    fresh = trial.adamw()
    trial.manager.attach(optimizer=fresh)
    trial.train(fresh, STEPS, start=4)  # The next batch would exceed scales of the one with the smallest amaxes.
    trial.right(STEPS)


class Tied(nn.Module):
    """Two Linears that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.again, self.last = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 16)
        self.again.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.again(torch.relu(self.first(x)))))


@program
def tied_weights() -> None:
    plain_run(STEPS, net=Tied()).accurate()


# Without a job, or without FP8 -------------------------------------------------------------------

RECIPES = {"current": CurrentScaling, "rowwise": RowwiseScaling, "block": BlockScaling}


@variants(recipe=list(RECIPES), attached=[True])
def other_recipes(recipe: str, attached: bool) -> None:
    trial = Trial(recipe=RECIPES[recipe]())
    optimizer = trial.adamw()
    if attached:
        trial.manager.attach(optimizer=optimizer)
    trial.train(optimizer, STEPS)
    trial.right(STEPS if attached else 0)


@cases(*({"recipe": recipe, "attached": recipe == "current"} for recipe in ["delayed", *RECIPES]))
def inference_only(recipe: str, attached: bool) -> None:
    trial = Trial(recipe={"delayed": DelayedScaling, **RECIPES}[recipe]())
    if attached:
        trial.manager.attach()
    trial.net.eval()
    for index in range(4):
        with torch.inference_mode():
            trial.net(batch(index)[0])
        with torch.no_grad():
            trial.net(batch(index)[0])
        trial.net(batch(index)[0])
    trial.right(0)


def _mistakes(trial: Trial, optimizer: Optimizer) -> None:
    """Calls that raise or warn when FP8 is on."""
    trial.backward(0)
    optimizer.step()
    optimizer.step()
    other = SGD(trial.net.parameters(), lr=0.1)
    trial.backward(1)
    trial.backward(2)
    other.step()
    other.step()
    with torch.no_grad():
        trial.net[0].weight.mul_(100)
    trial.backward(3)
    optimizer.zero_grad()


@variants(mistakes=[True], boundary=["optimizer", "manual"])
def switched_off(mistakes: bool, boundary: str) -> None:
    """FP8DIST_ENABLED=0: bitwise equal to plain torch, and nothing raises."""
    with mock.patch.dict(os.environ, {"FP8DIST_ENABLED": "0"}):
        trial = Trial()
        optimizer = trial.adamw()
        trial.manager.attach(optimizer=optimizer, boundary=boundary)  # type: ignore[arg-type]
        plain = mlp()
        expected = AdamW(plain.parameters(), lr=0.01)
        for index in range(STEPS):
            trial.train(optimizer, 1, start=index)
            trial.train(expected, 1, start=index, net=plain)
            if boundary == "manual":
                trial.manager.step()
                if mistakes:
                    trial.manager.step()
        assert weight_bits(trial.net) == weight_bits(plain)
        if mistakes:
            _mistakes(trial, optimizer)
        else:
            trial.accurate()
            assert max(trial.errors) == 0


class Duck:
    """Steps like an optimizer, but is not a torch Optimizer."""

    def __init__(self, net: nn.Module) -> None:
        self.net = net

    @torch.no_grad()
    def step(self) -> None:
        for p in self.net.parameters():
            p.sub_(p.grad, alpha=0.1)  # type: ignore[arg-type]

    def zero_grad(self) -> None:
        self.net.zero_grad()


@program
def switched_off_with_an_optimizer_that_cannot_be_hooked() -> None:
    with mock.patch.dict(os.environ, {"FP8DIST_ENABLED": "0"}):
        trial = Trial()
        optimizer = Duck(trial.net)
        trial.manager.attach(optimizer=optimizer)
        trial.train(optimizer, STEPS)
        trial.accurate()


@program
def loop_of_its_own() -> None:
    """A loop without an optimizer."""
    trial = Trial()
    trial.manager.attach()
    for index in range(STEPS):
        trial.train(Duck(trial.net), 1, start=index)
        trial.manager.step()
    trial.right(STEPS)


@program
def slots_of_foreign_modules() -> None:
    """Amaxes of foreign modules are recorded by hand and enter the history at each boundary."""
    trial = Trial()
    trial.manager.register("extra", "input", "e4m3")
    optimizer = trial.adamw()
    trial.manager.attach(optimizer=optimizer)
    expected = []
    for index in range(STEPS):
        x, _ = batch(index)
        trial.manager.slot("extra", "input").record(x)
        expected.append(float(x.abs().max()))
        trial.train(optimizer, 1, start=index)
    trial.right(STEPS)
    assert trial.manager.slot("extra", "input").amax_history.tolist()[-STEPS:] == expected

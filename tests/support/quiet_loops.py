"""Correct programs are silent and accurate: training loops, GradScaler, compiled nets, recipes. See ``quiet.py``."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.optimizer import Optimizer

from fp8dist import BlockScaling, CurrentScaling, DelayedScaling, MXFP8Scaling, RowwiseScaling
from tests.support.quiet import (
    HISTORY,
    PLAIN,
    STEPS,
    Loop,
    Trial,
    batch,
    boundary,
    microbatches,
    mlp,
    nothing,
    state_is_right,
    take,
    take_all,
    weight_bits,
)
from tests.support.scenarios import Scenarios

SCENARIOS = Scenarios()


def zero_at(*steps: int) -> Callable[[Optimizer], LambdaLR]:
    """A step with lr 0 changes nothing: it is not a boundary, and its amaxes count for the next step."""
    return lambda optimizer: LambdaLR(optimizer, lambda step: 0.0 if step in steps else 1.0)


def evaluating_between(trial: Trial, index: int) -> None:
    """Accumulate over three microbatches, with an evaluation after each, which changes nothing."""
    for micro in range(3):
        trial.backward(3 * index + micro, 1 / 3)
        trial.net.eval()
        trial.evaluate()
        trial.net.train()


def two_losses(trial: Trial, index: int) -> None:
    x, y = batch(index)
    output = trial.net(x)
    nn.functional.mse_loss(output, y).backward(retain_graph=True)
    output.square().mean().backward()


def zero_in_place(trial: Trial, index: int) -> None:
    trial.optimizer.step()
    trial.optimizer.zero_grad(set_to_none=False)


def leave_out_two(trial: Trial, index: int) -> None:
    """Skip steps with a bad loss. Their amaxes count for the next step."""
    if index not in (1, 2):
        trial.optimizer.step()
    trial.optimizer.zero_grad()


@torch.no_grad()
def clamp(trial: Trial, index: int) -> None:
    for p in trial.parameters():
        p.clamp_(-0.15, 0.15)


def clamp_data(trial: Trial, index: int) -> None:
    for p in trial.parameters():
        p.data.clamp_(-0.15, 0.15)


def in_closure(trial: Trial, index: int) -> None:
    """Every second one is passed by name."""
    closure = partial(trial.backward, index)
    trial.optimizer.step(closure=closure) if index % 2 else trial.optimizer.step(closure)
    trial.optimizer.zero_grad()


def in_lbfgs(trial: Trial, index: int) -> None:
    """LBFGS moves the weights between calls of the closure, and back."""

    def closure() -> Tensor:
        trial.optimizer.zero_grad()
        return trial.backward(index)

    trial.optimizer.step(closure)


def boundary_before(trial: Trial, index: int) -> None:
    trial.manager.step()
    take_all(trial, index)


def attach_by_hand(trial: Trial) -> None:
    trial.attach(*trial.optimizers, boundary="manual")


class Duck:
    """Steps like an optimizer, but is not a torch Optimizer."""

    def __init__(self, trial: Trial) -> None:
        self.net = trial.net

    @torch.no_grad()
    def step(self) -> None:
        for p in self.net.parameters():
            p.sub_(p.grad, alpha=0.1)

    def zero_grad(self) -> None:
        self.net.zero_grad()


SCENARIOS.table(
    {
        "scheduler: zero first": Loop(schedule=zero_at(0), counted=STEPS - 1),
        "scheduler: zero in the middle": Loop(schedule=zero_at(2, 3), counted=STEPS - 2),
        "evaluation amid accumulation": Loop(backward=evaluating_between, same=Loop(backward=microbatches(3))),
        "two losses for one step": Loop(backward=two_losses, step=zero_in_place),
        "steps that the loop leaves out": Loop(step=leave_out_two, counted=STEPS - 2),
        "weights written after each step: clamp_": Loop(after=clamp),
        "weights written after each step: .data": Loop(after=clamp_data),
        "LBFGS": Loop(
            make=lambda trial: torch.optim.LBFGS(trial.parameters(), 0.3, 4, line_search_fn="strong_wolfe"),
            backward=nothing,
            step=in_lbfgs,
        ),
        "closures": Loop(backward=nothing, step=in_closure, same=PLAIN),
        "manager.step() before the optimizer's": Loop(attach=attach_by_hand, step=boundary_before, same=PLAIN),
        "manager.step() after the optimizer's": Loop(attach=attach_by_hand, after=boundary, same=PLAIN),
        "manager.step() after that of an unknown optimizer": Loop(manual=True, same=PLAIN),
        "manager.step() without attach": Loop(attach=lambda trial: None, after=boundary),
        "a loop without an optimizer": Loop(make=Duck, manual=True),
    }
)


@SCENARIOS.variants(enabled=[True, False])
def gradscaler(enabled: bool) -> None:
    """It skips two steps whose loss is infinite, if it is enabled. See also ``tests/job/test_boundary.py``."""
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=enabled)

    def backward(trial: Trial, index: int) -> None:
        x, y = batch(index)
        times = math.inf if enabled and index in (2, 3) else 1.0
        scaler.scale(nn.functional.mse_loss(trial.net(x), y) * times).backward()

    def step(trial: Trial, index: int) -> None:
        scaler.unscale_(trial.optimizer)
        nn.utils.clip_grad_norm_(trial.parameters(), 10.0)
        scaler.step(trial.optimizer)
        scaler.update()
        trial.optimizer.zero_grad()

    Loop(
        make=partial(Trial.adamw, fused=enabled),
        attach=lambda trial: trial.attach(trial.optimizer, scaler=scaler),
        backward=backward,
        step=step,
        counted=STEPS - 2 if enabled else STEPS,
        same=None if enabled else PLAIN,
    )()


@SCENARIOS.program
def compiled() -> None:
    """Attached as compiled, under ``next_step``."""
    trial = Trial(recipe=DelayedScaling(history_len=HISTORY, update="next_step"), judged=False)
    forward: Any = torch.compile(trial.net, backend="aot_eager")
    optimizer = trial.adamw()
    trial.manager.attach(forward, optimizer=optimizer)
    for index in range(STEPS):
        x, y = batch(index)
        output = forward(x)
        trial.compare(output, x)
        nn.functional.mse_loss(output, y).backward()
        take(optimizer)
    trial.accurate()
    state_is_right(trial.manager, STEPS)


def starts_high(trial: Trial) -> None:
    trial.attach(trial.optimizer)
    trial.manager.set_precision("*", "high", steps=2)


def goes_high(trial: Trial, index: int) -> None:
    if index == 1:
        trial.manager.set_precision("*", "high", steps=2)


def without_fp8_in_two(trial: Trial, index: int) -> None:
    if index not in (2, 3):
        return trial.train(trial.optimizer, 1, index)
    with trial.manager.no_fp8():
        return trial.train(trial.optimizer, 1, index)


@SCENARIOS.program
def high_precision_before_attach() -> None:
    """The first phase trains without FP8. ``attach`` comes with the second, and uses the weights of that time."""
    trial = Trial()
    with trial.manager.no_fp8():
        trial.train(trial.sgd(), 3)
    fresh = trial.adamw()
    trial.attach(fresh)
    trial.train(fresh, STEPS, start=4)  # The next batch would exceed scales of the one with the smallest amaxes.
    trial.right(STEPS)


RECIPES = {
    "current": CurrentScaling(),
    "rowwise": RowwiseScaling(),
    "block": BlockScaling(),
    "mx": MXFP8Scaling(scale_rounding="up"),
}
PARTLY: dict[str, Any] = {"ran": lambda fqn, role: False}

SCENARIOS.table(
    {
        "fp8 starts later": Loop(attach=starts_high, **PARTLY),
        "high precision meanwhile": Loop(after=goes_high, **PARTLY),
        "no_fp8 meanwhile": Loop(backward=nothing, step=without_fp8_in_two, **PARTLY),
        **{f"recipe: {name}": Loop(prepared={"recipe": recipe}) for name, recipe in RECIPES.items()},
    }
)


@SCENARIOS.variants(recipe=["delayed", *RECIPES])
def inference_only(recipe: str) -> None:
    trial = Trial(recipe=RECIPES.get(recipe))
    trial.net.eval()
    for index, mode in itertools.product(range(4), (torch.inference_mode, torch.no_grad, torch.enable_grad)):
        with mode():
            trial.net(batch(index)[0])
    trial.right(0)


def mistakes(trial: Trial, optimizer: Optimizer) -> None:
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


@SCENARIOS.variants(boundary=["optimizer", "manual"])
def switched_off(boundary: str) -> None:
    """FP8DIST_ENABLED=0: bitwise equal to plain torch, and nothing raises."""
    with mock.patch.dict(os.environ, {"FP8DIST_ENABLED": "0"}):
        trial, plain = Trial(), mlp()
        optimizer, expected = trial.adamw(), AdamW(plain.parameters(), lr=0.01)
        trial.attach(optimizer, boundary=boundary)
        with trial.manager.calibrate():
            trial.backward(0)
        for index in range(STEPS):
            trial.train(optimizer, 1, start=index)
            trial.train(expected, 1, start=index, net=plain)
            if boundary == "manual":
                trial.manager.step()
                trial.manager.step()
        assert weight_bits(trial.net) == weight_bits(plain)
        mistakes(trial, optimizer)


@SCENARIOS.program
def switched_off_with_an_optimizer_that_cannot_be_hooked() -> None:
    with mock.patch.dict(os.environ, {"FP8DIST_ENABLED": "0"}):
        trial = Trial()
        optimizer = Duck(trial)
        trial.manager.attach(optimizer=optimizer)
        trial.train(optimizer, STEPS)
        trial.accurate()

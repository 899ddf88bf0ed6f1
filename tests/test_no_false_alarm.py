"""Correct programs are silent and right: one process. ``test_no_false_alarm_ranks.py`` has those of two ranks.

Silent: no exception, nothing logged from WARNING up, no Python warning. Right: each forward within 8 % of float32 with
the same weights, as many steps as the optimizer took, and bitwise the equivalent program, where there is one.
"""

from __future__ import annotations

import copy
import itertools
import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import SGD, Adagrad, AdamW, Muon
from torch.optim.optimizer import Optimizer
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.checkpoint import checkpoint

import fp8dist
from fp8dist import BlockScaling, CurrentScaling, DelayedScaling, RowwiseScaling
from fp8dist.errors import ConfigurationError
from tests.support.quiet import (
    HISTORY,
    TOLERANCE,
    Trial,
    batch,
    fp8_bits,
    mlp,
    off,
    silence,
    state_is_right,
    weight_bits,
)
from tests.support.training import bits

PROGRAMS: dict[str, Callable[[], None]] = {}
STEPS = 6


def program(function: Callable[..., None]) -> Callable[..., None]:
    """Put it into the table."""
    PROGRAMS[function.__name__.replace("_", " ").strip()] = function
    return function


def variants(**arguments: Sequence[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Put it into the table once for each combination."""

    def add(function: Callable[..., None]) -> Callable[..., None]:
        for values in itertools.product(*arguments.values()):
            named = dict(zip(arguments, values))
            label = ", ".join(f"{key} {getattr(value, '__name__', value)}" for key, value in named.items())
            PROGRAMS[f"{function.__name__.replace('_', ' ').strip()}: {label}"] = partial(function, **named)
        return function

    return add


def plain_run(steps: int, make: Callable[[Any], Optimizer] = lambda p: AdamW(p, lr=0.01), net: Any = None) -> Trial:
    """The plainest program: one optimizer, attached."""
    trial = Trial(net)
    optimizer = make(trial.net.parameters())
    trial.manager.attach(optimizer=optimizer)
    trial.train(optimizer, steps)
    return trial


# Several optimizers ------------------------------------------------------------------------------


@variants(order=["as attached", "the other way round"])
def optimizers_of_disjoint_parameters(order: str) -> None:
    """Bitwise one optimizer with two groups."""
    split = Trial()
    weights, biases = ([p for p in split.parameters() if p.ndim == n] for n in (2, 1))
    optimizers = [AdamW(weights, lr=0.01), AdamW(biases, lr=0.02)]
    split.manager.attach(optimizer=optimizers)
    for index in range(STEPS):
        split.backward(index)
        for optimizer in optimizers if order == "as attached" else reversed(optimizers):
            optimizer.step()
            optimizer.zero_grad()
    split.right(STEPS)
    whole = Trial()
    weights, biases = ([p for p in whole.parameters() if p.ndim == n] for n in (2, 1))
    one = AdamW([{"params": weights, "lr": 0.01}, {"params": biases, "lr": 0.02}])
    whole.manager.attach(optimizer=one)
    whole.train(one, STEPS)
    whole.evaluate()
    assert split.bits() == whole.bits()


@variants(order=["as attached", "the other way round"])
def an_optimizer_for_each_layer(order: str) -> None:
    trial = Trial()
    optimizers: list[Optimizer] = [
        AdamW(trial.net[0].parameters(), lr=0.01),
        SGD(trial.net[2].parameters(), lr=0.1, momentum=0.9),
    ]
    trial.manager.attach(optimizer=optimizers)
    for index in range(STEPS):
        trial.backward(index)
        for optimizer in optimizers if order == "as attached" else reversed(optimizers):
            optimizer.step()
            optimizer.zero_grad()
    trial.right(STEPS)


@variants(warms=["the first", "the last"])
def one_of_two_optimizers_warms_up_from_zero(warms: str) -> None:
    """A step of one with lr 0 must not make the other's next step look like its second."""
    trial = Trial()
    optimizers = [AdamW(trial.net[0].parameters(), lr=0.01), AdamW(trial.net[2].parameters(), lr=0.01)]
    trial.manager.attach(optimizer=optimizers)
    warm = optimizers[0 if warms == "the first" else 1]
    scheduler = torch.optim.lr_scheduler.LambdaLR(warm, lambda step: max(0, step - 1) / 3)  # 0, 0, 1/3, …
    for index in range(STEPS):
        trial.backward(index)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
    assert STEPS - 2 <= trial.manager.steps <= STEPS
    trial.right(trial.manager.steps)


@program
def what_is_not_fp8_is_stepped_more_often() -> None:
    """A learned temperature has an optimizer of its own, which steps after each microbatch."""
    trial = Trial()
    temperature = nn.Parameter(torch.ones(()))
    often, main = SGD([temperature], lr=0.01), trial.adamw()
    trial.manager.attach(optimizer=[often, main])
    for index in range(STEPS):
        for micro in range(3):
            x, y = batch(3 * index + micro)
            nn.functional.mse_loss(trial.net(x) * temperature, y).backward()
            often.step()
            often.zero_grad()
        main.step()
        main.zero_grad()
    trial.right(STEPS)


@program
def an_unrelated_plain_model_trains_beside_it() -> None:
    trial, other = Trial(), mlp()
    mine, theirs = trial.adamw(), AdamW(other.parameters(), lr=0.01)
    trial.manager.attach(optimizer=mine)
    for index in range(STEPS):
        trial.backward(index)
        for _ in range(3):
            nn.functional.mse_loss(other(batch(index)[0]), batch(index)[1]).backward()
            theirs.step()
            theirs.zero_grad()
        mine.step()
        mine.zero_grad()
    trial.right(STEPS)
    assert trial.bits() == done(plain_run(STEPS)).bits()


def done(trial: Trial) -> Trial:
    """With the forward that ``right`` makes."""
    trial.evaluate()
    return trial


@variants(given=["optimizers", "nothing"])
def alternating_optimizers_on_the_same_weights(given: str) -> None:
    """AdamW in one epoch, SGD in the next; the loop says where a step ends."""
    trial = Trial()
    optimizers: list[Optimizer] = [trial.adamw(), trial.sgd()]
    trial.manager.attach(optimizer=optimizers if given == "optimizers" else None, boundary="manual")
    for index in range(8):
        optimizer = optimizers[(index // 2) % 2]
        trial.backward(index)
        optimizer.step()
        trial.manager.step()
        optimizer.zero_grad()
    trial.right(8)


@program
def muon_and_adamw() -> None:
    trial = Trial()
    weights, biases = ([p for p in trial.parameters() if p.ndim == n] for n in (2, 1))
    optimizers = [Muon(weights, lr=0.01), AdamW(biases, lr=0.01)]
    trial.manager.attach(optimizer=optimizers)
    for index in range(STEPS):
        trial.backward(index)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    trial.right(STEPS)


# Several models ----------------------------------------------------------------------------------


class Generated(nn.Module):
    """A generator and a discriminator in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.g, self.d = mlp(32, 64, 32), mlp(32, 64, 16)


@variants(parts=["two models", "one model"], frozen=[False, True], clipped=[False, True])
def gan(parts: str, frozen: bool, clipped: bool) -> None:
    """D takes two steps for one of G; optionally stands still meanwhile, or has its weights clipped after each step."""
    both = Generated() if parts == "one model" else None
    g = Trial(both.g if both else mlp(32, 64, 32))
    d = Trial(both.d if both else mlp(32, 64, 16))
    of_g, of_d = g.adamw(0.003), d.adamw(0.003)
    g.manager.attach(optimizer=of_g)
    d.manager.attach(optimizer=of_d)
    for index in range(2 * STEPS):
        noise, real = batch(index)[0], batch(index + 1)[0]
        (d.net(g.net(noise).detach()).mean() - d.net(real).mean()).backward()
        of_d.step()
        of_d.zero_grad()
        if clipped:
            with torch.no_grad():
                for p in d.parameters():
                    p.clamp_(-0.15, 0.15)
        if index % 2:
            d.net.requires_grad_(not frozen)
            (-d.net(g.net(noise)).mean()).backward()
            of_g.step()
            of_g.zero_grad()
            of_d.zero_grad()
            d.net.requires_grad_(True)
    g.right(STEPS)
    d.right(2 * STEPS)


@program
def two_managers_in_turn() -> None:
    """Each trains as if it were alone."""
    first, second = Trial(), Trial(mlp(32, 48, 16))
    optimizers = [first.adamw(), second.sgd(momentum=0.9)]
    for trial, optimizer in zip((first, second), optimizers):
        trial.manager.attach(optimizer=optimizer)
    for index in range(STEPS):
        first.backward(index)
        second.backward(index)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    first.right(STEPS)
    second.right(STEPS)
    alone = plain_run(STEPS, lambda p: SGD(p, lr=0.1, momentum=0.9), mlp(32, 48, 16))
    assert first.bits() == done(plain_run(STEPS)).bits()
    assert second.bits() == done(alone).bits()


@program
def copy_attached_and_trained_on_its_own() -> None:
    """Both go on from the same state; the original as if there were no copy."""
    trial = plain_run(3)
    twin = copy.deepcopy(trial.net)
    manager = fp8dist.get_manager(twin)
    mine, theirs = trial.adamw(), AdamW(twin.parameters(), lr=0.01)
    trial.manager.attach(optimizer=mine)
    manager.attach(optimizer=theirs)
    for index in range(3, 6):
        trial.train(mine, 1, start=index)
        trial.train(theirs, 1, start=index, net=twin)
    trial.right(6)
    state_is_right(manager, 6)
    assert fp8_bits(manager) == fp8_bits(trial.manager)
    assert weight_bits(twin) == weight_bits(trial.net)


@program
def copy_that_is_only_evaluated() -> None:
    trial = plain_run(3)
    optimizer = trial.adamw()
    trial.manager.attach(optimizer=optimizer)
    twin = copy.deepcopy(trial.net).eval()
    for index in range(3, 6):
        trial.train(optimizer, 1, start=index)
        trial.evaluate(twin)
    trial.right(6)


# Averages ----------------------------------------------------------------------------------------


@variants(made=["before attach", "after attach"], kind=["ema", "swa"])
def averaged_model(made: str, kind: str) -> None:
    """A deep copy whose weights are written to after each step, and which is evaluated: a plain average's weights."""
    how: dict[str, Any] = {"multi_avg_fn": get_ema_multi_avg_fn(0.5)} if kind == "ema" else {}
    trial = Trial()
    optimizer = trial.adamw()
    average = AveragedModel(trial.net, **how) if made == "before attach" else None
    trial.manager.attach(optimizer=optimizer)
    average = average or AveragedModel(trial.net, **how)
    plain = mlp()
    expected = AveragedModel(plain, **how)
    for index in range(STEPS):
        trial.train(optimizer, 1, start=index)
        average.update_parameters(trial.net)
        average.eval()
        trial.evaluate(average)
        plain.load_state_dict(trial.net.state_dict())
        expected.update_parameters(plain)
    trial.right(STEPS)
    assert weight_bits(average.module) == weight_bits(expected.module)
    assert fp8dist.get_manager(average.module).steps == 0


@program
def swa_with_batchnorm() -> None:
    trial = Trial(mlp(norm=True))
    optimizer = trial.sgd()
    trial.manager.attach(optimizer=optimizer)
    average, scheduler = AveragedModel(trial.net), SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)
    for index in range(STEPS):
        trial.train(optimizer, 1, start=index)
        if index >= 2:
            average.update_parameters(trial.net)
            scheduler.step()
    update_bn([batch(index)[0] for index in range(4)], average)
    average.eval()
    trial.evaluate(average)
    trial.right(STEPS)


def exchange(net: nn.Module, others: list[Tensor], how: str) -> None:
    """Swap parameters and ``others``, in one of the usual ways."""
    with torch.no_grad():
        for p, other in zip(net.parameters(), others):
            mine = p.detach().clone()
            if how == "copy_":
                p.copy_(other)
            elif how == ".data.copy_":
                p.data.copy_(other)
            else:
                p.data = other.clone()
            other.copy_(mine)


@variants(how=["copy_", ".data.copy_", ".data ="], update=["same_step", "next_step"])
def ema_swapped_in_and_out(how: str, update: str) -> None:
    """Training goes on as if nothing had been swapped."""
    swapped, still = (Trial(recipe=DelayedScaling(history_len=HISTORY, update=update)) for _ in range(2))  # type: ignore[arg-type]
    for trial in (swapped, still):
        optimizer = trial.adamw()
        trial.manager.attach(optimizer=optimizer)
        average = [p.detach().clone() for p in trial.parameters()]
        for index in range(STEPS):
            trial.train(optimizer, 1, start=index)
            for mean, p in zip(average, trial.parameters()):
                mean.lerp_(p.detach(), 0.5)
            if trial is swapped:
                exchange(trial.net, average, how)
            trial.net.eval()
            trial.evaluate()
            if trial is swapped:
                exchange(trial.net, average, how)
            trial.net.train()
    swapped.right(STEPS)
    still.right(STEPS)
    assert swapped.bits() == still.bits()


@variants(how=["copy_", ".data.copy_"])
def ema_in_swapped_weights(how: str) -> None:
    swapped, still = Trial(), Trial()
    for trial in (swapped, still):
        optimizer = trial.adamw()
        trial.manager.attach(optimizer=optimizer)
        average = [p.detach().clone() for p in trial.parameters()]
        for index in range(STEPS):
            trial.train(optimizer, 1, start=index)
            trial.evaluate()  # Casts that a write to .data would leave stale.
            for mean, p in zip(average, trial.parameters()):
                mean.lerp_(p.detach(), 0.5).mul_(1.5)
            if trial is swapped:
                with trial.manager.swapped_weights():
                    exchange(trial.net, average, how)
                    trial.evaluate()
                    exchange(trial.net, average, how)
    swapped.right(STEPS)
    still.right(STEPS)
    assert swapped.bits() == still.bits()


@program
def average_through_functional_call() -> None:
    trial = Trial(judged=False)
    optimizer = trial.adamw()
    trial.manager.attach(optimizer=optimizer)
    average = {name: p.detach().clone() for name, p in trial.net.named_parameters()}
    for index in range(STEPS):
        trial.train(optimizer, 1, start=index)
        for name, p in trial.net.named_parameters():
            average[name].lerp_(p.detach(), 0.5)
        with torch.no_grad():
            output = torch.func.functional_call(trial.net, average, batch(0)[0])
            trial.errors.append(off(output, torch.func.functional_call(trial.twin, average, batch(0)[0])))
    trial.right(STEPS)


# Low-rank adapters -------------------------------------------------------------------------------


class Adapted(nn.Module):
    """A Linear and, added to it, two of low rank."""

    def __init__(self, inner: int, outer: int, zero: bool) -> None:
        super().__init__()
        self.base = nn.Linear(inner, outer)
        self.lora_a, self.lora_b = nn.Linear(inner, 16, bias=False), nn.Linear(16, outer, bias=False)
        if zero:
            nn.init.zeros_(self.lora_b.weight)
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.lora_b(self.lora_a(x))


@variants(fp8=[False, True], zero=[False, True])
def lora(fp8: bool, zero: bool) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(Adapted(32, 64, zero), nn.ReLU(), Adapted(64, 16, zero))
    trial = Trial(net, skip=() if fp8 else ("*lora_*",))
    adapters = [p for p in net.parameters() if p.requires_grad]
    assert len(adapters) == 4
    optimizer = AdamW(adapters, lr=0.001)  # A weight that grows from zero doubles in its second step.
    trial.manager.attach(optimizer=optimizer)
    assert any("lora" in slot.fqn for slot in trial.manager.slots) == fp8
    before = [bits(layer.base.weight) for layer in (net[0], net[2])]
    trial.train(optimizer, STEPS)
    assert before == [bits(layer.base.weight) for layer in (net[0], net[2])]
    # The first base's input needs no gradient, so its output's gradient is cast by nobody; a zero weight is one step
    # late, and so are the gradients behind it.
    trial.right(STEPS, lambda fqn, role: fqn.endswith("base") and role != "grad_output")


@program
def frozen_then_unfrozen() -> None:
    """The optimizer has had all parameters from the start."""
    trial = Trial()
    trial.net[0].requires_grad_(False)
    optimizer = trial.adamw()
    trial.manager.attach(optimizer=optimizer)
    trial.train(optimizer, 3)
    trial.net[0].requires_grad_(True)
    trial.train(optimizer, 3, start=3)
    trial.net[2].requires_grad_(False)
    trial.train(optimizer, 3, start=6)
    trial.right(9, lambda fqn, role: role != "grad_output")


@program
def add_param_group() -> None:
    trial = Trial()
    trial.net[0].requires_grad_(False)
    optimizer = AdamW(trial.net[2].parameters(), lr=0.01)
    trial.manager.attach(optimizer=optimizer)
    trial.train(optimizer, 3)
    trial.net[0].requires_grad_(True)
    optimizer.add_param_group({"params": list(trial.net[0].parameters()), "lr": 0.001})
    trial.train(optimizer, 3, start=3)
    trial.right(6, lambda fqn, role: role != "grad_output")


@program
def one_group_has_lr_zero() -> None:
    """A layer that is frozen by its learning rate."""
    trial = Trial()
    optimizer = AdamW(
        [{"params": trial.net[0].parameters(), "lr": 0.0}, {"params": trial.net[2].parameters()}], lr=0.01
    )
    trial.manager.attach(optimizer=optimizer)
    trial.train(optimizer, STEPS)
    trial.right(STEPS)


@variants(part=["BatchNorm", "a Linear"])
def trained_with_a_part_in_eval_mode(part: str) -> None:
    trial = Trial(mlp(norm=True))
    optimizer = trial.adamw()
    trial.manager.attach(optimizer=optimizer)
    trial.net.train()
    trial.net[1 if part == "BatchNorm" else 0].eval()
    trial.train(optimizer, STEPS)
    trial.right(STEPS, lambda fqn, role: part == "BatchNorm" or fqn == "3")


# Optimizers of other kinds -----------------------------------------------------------------------


@variants(given=["optimizers", "nothing"], boundary=["after backward", "before backward"])
def optimizer_in_backward(given: str, boundary: str) -> None:
    """Bitwise the plain loop: the gradient of a layer's input is made before its weight is stepped."""
    trial = Trial()
    optimizers = {p: SGD([p], lr=0.1, momentum=0.9) for p in trial.parameters()}
    trial.manager.attach(optimizer=list(optimizers.values()) if given == "optimizers" else None, boundary="manual")

    def step(p: Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in trial.parameters():
        p.register_post_accumulate_grad_hook(step)
    for index in range(STEPS):
        if boundary == "before backward" and index:
            trial.manager.step()
        trial.backward(index)
        if boundary == "after backward":
            trial.manager.step()
    if boundary == "before backward":
        trial.manager.step()
    trial.right(STEPS)
    assert trial.bits() == done(plain_run(STEPS, lambda p: SGD(p, lr=0.1, momentum=0.9))).bits()


class Lookahead(Optimizer):
    """Slow weights that follow every three steps."""

    def __init__(self, optimizer: Optimizer, every: int = 3, alpha: float = 0.5) -> None:
        self.optimizer = optimizer
        super().__init__(optimizer.param_groups, {})
        self.param_groups = optimizer.param_groups
        self.every, self.alpha, self.count = every, alpha, 0
        self.slow = {p: p.detach().clone() for group in self.param_groups for p in group["params"]}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = self.optimizer.step(closure)
        self.count += 1
        if self.count % self.every == 0:
            for p, slow in self.slow.items():
                slow.lerp_(p, self.alpha)
                p.copy_(slow)
        return loss


@variants(attached=["outer", "inner", "manual"])
def lookahead(attached: str) -> None:
    trial, other = Trial(), Trial()
    for each, which in ((trial, attached), (other, "outer")):
        inner = each.adamw()
        outer = Lookahead(inner)
        if which == "manual":
            each.manager.attach(boundary="manual")
        else:
            each.manager.attach(optimizer={"outer": outer, "inner": inner}[which])
        for index in range(STEPS):
            each.train(outer, 1, start=index)
            if which == "manual":
                each.manager.step()
    trial.right(STEPS)
    assert trial.bits() == done(other).bits()


class Sam(Optimizer):
    """Sharpness-aware minimisation, in its usual public form."""

    def __init__(self, params: Iterable[Tensor], base: type[Optimizer], rho: float = 0.05, **options: Any) -> None:
        super().__init__(params, {"rho": rho, **options})
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    def _all(self) -> Iterator[tuple[dict[str, Any], Tensor]]:
        return ((group, p) for group in self.param_groups for p in group["params"] if p.grad is not None)

    @torch.no_grad()
    def first_step(self) -> None:
        norm = torch.stack([p.grad.norm() for _, p in self._all()]).norm()  # type: ignore[union-attr]
        for group, p in self._all():
            self.state[p]["old"] = p.data.clone()
            p.add_(p.grad * (group["rho"] / (norm + 1e-12)))  # type: ignore[operator]
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for _, p in self._all():
            p.data = self.state[p]["old"]
        self.base_optimizer.step()
        self.zero_grad()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        closure = torch.enable_grad()(closure)
        self.first_step()
        closure()
        self.second_step()


@variants(base=[SGD, AdamW], used=["step, outer", "step, inner", "two steps, inner", "two steps, manual"])
def sam(base: type[Optimizer], used: str) -> None:
    trial = Trial()
    options: dict[str, Any] = {"lr": 0.1, "momentum": 0.9} if base is SGD else {"lr": 0.01}
    optimizer = Sam(trial.net.parameters(), base, **options)
    if used == "two steps, manual":
        trial.manager.attach(boundary="manual")
    else:
        trial.manager.attach(optimizer=optimizer if used.endswith("outer") else optimizer.base_optimizer)
    for index in range(STEPS):
        trial.backward(index)
        if used.startswith("step"):
            optimizer.step(lambda index=index: trial.backward(index))
        else:
            optimizer.first_step()
            trial.backward(index)
            optimizer.second_step()
            if used.endswith("manual"):
                trial.manager.step()
    trial.right(STEPS)


class Twice(AdamW):
    """Overrides ``step`` and calls it."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@variants(hooked=[True, False], closure=[False, True])
def subclass_that_calls_super(hooked: bool, closure: bool) -> None:
    """One boundary per step, whether torch has hooked the base's ``step`` (as its first instance makes it) or not."""
    if hooked:
        AdamW([nn.Parameter(torch.ones(1))])
    original = AdamW.step if hooked else getattr(AdamW.step, "__wrapped__", AdamW.step)
    with mock.patch.object(AdamW, "step", original):
        assert getattr(AdamW.step, "hooked", False) == hooked
        trial = Trial()
        optimizer = Twice(trial.parameters(), lr=0.01)
        trial.manager.attach(optimizer=optimizer)
        for index in range(STEPS):
            if closure:
                optimizer.step(lambda index=index: trial.backward(index))
            else:
                trial.backward(index)
                optimizer.step()
            optimizer.zero_grad()
    trial.right(STEPS)
    assert trial.bits() == done(plain_run(STEPS)).bits()


class Odd(Optimizer):
    """Plain SGD; what it calls its learning rate is its own affair."""

    def __init__(self, params: Iterable[Tensor], defaults: dict[str, Any]) -> None:
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=0.1)


@variants(defaults=[{}, {"eta": 0.1}, {"lr": None}, {"lr": 0.1}])
def optimizer_with_another_learning_rate(defaults: dict[str, Any]) -> None:
    trial = plain_run(STEPS, lambda p: Odd(p, dict(defaults)))
    trial.right(STEPS)
    assert trial.bits() == done(plain_run(STEPS, lambda p: SGD(p, lr=0.1, foreach=False))).bits()


@variants(options=[{"lr": torch.tensor(0.01), "foreach": False}, {"fused": True}, {"foreach": True}, {"amsgrad": True}])
def adamw_with(options: dict[str, Any]) -> None:
    plain_run(STEPS, lambda p: AdamW(p, **{"lr": 0.01, **options})).right(STEPS)


@program
def adagrad() -> None:
    """Its state is there before the first step."""
    plain_run(STEPS, lambda p: Adagrad(p, lr=0.01)).right(STEPS)


class ScheduleFree(Optimizer):
    """Trains at one point and is evaluated at another: ``train()`` and ``eval()`` write to the weights."""

    def __init__(self, params: Iterable[Tensor], lr: float = 0.1, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "training": True})

    @torch.no_grad()
    def _move(self, weight: Callable[[float], float], training: bool) -> None:
        for group in self.param_groups:
            if group["training"] != training:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.data.lerp_(self.state[p]["z"], weight(group["beta"]))
                group["training"] = training

    def eval(self) -> None:
        self._move(lambda beta: 1 - 1 / beta, False)

    def train(self) -> None:
        self._move(lambda beta: 1 - beta, True)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                z, part = self.state[p].setdefault("z", p.detach().clone()), 1 / group["k"]
                p.lerp_(z, part).add_(p.grad, alpha=group["lr"] * (group["beta"] * (1 - part) - 1))
                z.sub_(p.grad, alpha=group["lr"])


@program
def schedule_free() -> None:
    trial = Trial()
    optimizer = ScheduleFree(trial.parameters())
    trial.manager.attach(optimizer=optimizer)
    for index in range(STEPS):
        trial.net.train()
        optimizer.train()
        trial.train(optimizer, 1, start=index)
        trial.net.eval()
        optimizer.eval()
        trial.evaluate()
    trial.net.train()
    optimizer.train()
    trial.right(STEPS)


@variants(name=["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def torchao_low_bit(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = pytest.importorskip("torchao.optim")
    trial = Trial(mlp(64, 64, 64), judged=False)
    optimizer = getattr(module, name)(trial.net.parameters(), lr=0.01)
    trial.manager.attach(optimizer=optimizer)
    x, y = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(0))
    # It compiles its update, which takes half a minute on a CPU, and is the same uncompiled.
    with mock.patch.object(torch, "compile", lambda function, **options: function):
        for _ in range(STEPS):
            output = trial.net(x)
            trial.errors.append(off(output, plain_forward(trial, x)))
            nn.functional.mse_loss(output, y).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert any(type(s).__name__.startswith("OptimState") for s in optimizer.state[trial.net[0].weight].values())
    trial.accurate()
    state_is_right(trial.manager, STEPS)


def plain_forward(trial: Trial, x: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.func.functional_call(trial.twin, dict(trial.net.named_parameters()), x)


class Offload(Optimizer):
    """As torchao's CPUOffloadOptimizer, which wants a GPU: it never calls ``Optimizer.__init__``, has an optimizer per
    large parameter over a copy, and writes the copy back; small parameters have one of their own."""

    def __init__(self, params: Iterable[nn.Parameter], kind: type[Optimizer], **options: Any) -> None:
        self.copies: dict[nn.Parameter, Tensor] = {}
        self.inner: dict[nn.Parameter, Optimizer] = {}
        small = []
        for p in params:
            if p.ndim < 2:
                small.append(p)
                continue
            self.copies[p] = p.detach().clone()
            self.copies[p].grad = torch.empty_like(p)
            self.inner[p] = kind([self.copies[p]], **options)
            p.register_post_accumulate_grad_hook(self._take)
        self.small = kind(small, **options)

    def _take(self, p: nn.Parameter) -> None:
        self.copies[p].grad.copy_(p.grad)  # type: ignore[union-attr,arg-type]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.small.step()
        for p, host in self.copies.items():
            self.inner[p].step()
            p.copy_(host)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for p in self.copies:
            p.grad = None
        self.small.zero_grad()


@program
def cpu_offload() -> None:
    trial = Trial()
    optimizer = Offload(trial.parameters(), AdamW, lr=0.01)
    trial.manager.attach(boundary="manual")
    for index in range(STEPS):
        trial.train(optimizer, 1, start=index)
        trial.manager.step()
    trial.right(STEPS)
    assert trial.bits() == done(plain_run(STEPS)).bits()


@variants(given=["nothing", "the masters' optimizer"])
def master_copies_in_float32(given: str) -> None:
    """The net is bfloat16; its optimizer has float32 copies, which are copied back."""
    trial = Trial(mlp().bfloat16())
    masters = [p.detach().float() for p in trial.parameters()]
    optimizer = AdamW(masters, lr=0.01)
    if given == "nothing":
        trial.manager.attach(boundary="manual")
    else:
        trial.manager.attach(optimizer=optimizer)
    for index in range(STEPS):
        trial.backward(index)
        for master, p in zip(masters, trial.parameters()):
            master.grad, p.grad = p.grad.float(), None  # type: ignore[union-attr]
        optimizer.step()
        with torch.no_grad():
            for master, p in zip(masters, trial.parameters()):
                p.copy_(master)
        if given == "nothing":
            trial.manager.step()
    trial.right(STEPS)


# Optimizers' states ------------------------------------------------------------------------------


@variants(attached=["after", "before"])
def optimizer_state_is_loaded(attached: str) -> None:
    """``set_optimizer_state_dict`` steps a fresh optimizer, with lr 0: no step of the model's."""
    source = Trial()
    optimizer = source.adamw()
    source.manager.attach(optimizer=optimizer)
    source.train(optimizer, 4)
    saved = copy.deepcopy(get_optimizer_state_dict(source.net, optimizer))
    fp8, weights = source.manager.state_dict(), copy.deepcopy(source.net.state_dict())
    source.train(optimizer, 4, start=4)
    trial = Trial()
    fresh = trial.adamw()
    if attached == "before":
        trial.manager.attach(optimizer=fresh)
    set_optimizer_state_dict(trial.net, fresh, saved)
    assert trial.manager.steps == 0
    trial.net.load_state_dict(weights)
    trial.manager.load_state_dict(fp8)
    if attached == "after":
        trial.manager.attach(optimizer=fresh)
    trial.train(fresh, 4, start=4)
    trial.right(8)
    assert trial.bits() == done(source).bits()


@program
def optimizer_state_is_read_before_the_first_step() -> None:
    """Training goes on as if nobody had asked, but for the optimizer's own count of steps."""
    trial, other = Trial(), Trial()
    for each in (trial, other):
        optimizer = each.sgd(momentum=0.9)
        each.manager.attach(optimizer=optimizer)
        if each is trial:
            get_optimizer_state_dict(each.net, optimizer)
            get_model_state_dict(each.net)
            assert each.manager.steps == 0
        each.train(optimizer, STEPS)
    trial.right(STEPS)
    assert trial.bits() == done(other).bits()


@program
def optimizer_made_anew_and_attached_again() -> None:
    """AdamW's state goes with it; then, another kind."""
    trial = Trial()
    for epoch in range(3):
        optimizer = trial.adamw() if epoch % 2 else trial.sgd()
        trial.manager.attach(optimizer=optimizer)
        trial.train(optimizer, 2, start=2 * epoch)
    trial.right(6)


@program
def attached_again_and_nothing_else() -> None:
    trial = Trial()
    optimizer = trial.adamw()
    for index in range(STEPS):
        trial.manager.attach(optimizer=optimizer)
        trial.train(optimizer, 1, start=index)
    trial.right(STEPS)


@program
def detached_then_trained_plainly() -> None:
    """Bitwise plain torch from then on."""
    trial = plain_run(3)
    trial.accurate()
    net = trial.manager.detach()
    plain = mlp()
    plain.load_state_dict(net.state_dict())
    for each in (net, plain):
        optimizer = AdamW(each.parameters(), lr=0.01)
        for index in range(STEPS):
            trial.train(optimizer, 1, start=index, net=each)
    assert weight_bits(net) == weight_bits(plain)


def _resume(orders: Iterable[tuple[str, ...]], folder: Path | None) -> None:
    whole = Trial()
    optimizer = whole.adamw(0.02)
    whole.manager.attach(optimizer=optimizer)
    whole.train(optimizer, 4)
    saved = {
        name: copy.deepcopy(each.state_dict()) for name, each in (("weights", whole.net), ("optimizer", optimizer))
    }
    saved["manager"] = whole.manager.state_dict()
    if folder is not None:
        whole.manager.save(folder / "fp8.safetensors")
    whole.train(optimizer, 4, start=4)
    whole.right(8)
    for order in orders:
        net = mlp()
        with torch.no_grad():
            for p in net.parameters():
                p.mul_(0.25)  # A fresh net is not the one that was saved.
        trial = Trial(net)
        fresh = trial.adamw(0.02)
        for what in order:
            if what == "attach":
                trial.manager.attach(optimizer=fresh)
            elif what == "weights":
                trial.net.load_state_dict(saved["weights"])
            elif what == "optimizer":
                fresh.load_state_dict(copy.deepcopy(saved["optimizer"]))  # It would share its tensors.
            elif folder is not None:
                trial.manager.load(folder / "fp8.safetensors")
            else:
                trial.manager.load_state_dict(saved["manager"])
        trial.train(fresh, 4, start=4)
        trial.right(8)
        assert trial.bits() == whole.bits(), order


@pytest.mark.parametrize("first", ["attach", "weights", "optimizer", "manager"])
def test_resumed_in_any_order(first: str, tmp_path: Path) -> None:
    orders = [
        order for order in itertools.permutations(("attach", "weights", "optimizer", "manager")) if order[0] == first
    ]
    with silence():
        _resume(orders, None)
        _resume(orders[:1], tmp_path)


# Schedulers, accumulation, closures --------------------------------------------------------------

SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "OneCycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.02, total_steps=STEPS + 1),
    "CosineWarmRestarts": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=3),
    "Linear": lambda o: torch.optim.lr_scheduler.LinearLR(o, start_factor=0.1, total_iters=4),
}


@variants(name=list(SCHEDULERS))
def scheduler(name: str) -> None:
    trial = Trial()
    optimizer = trial.adamw()
    trial.manager.attach(optimizer=optimizer)
    schedule = SCHEDULERS[name](optimizer)
    for index in range(STEPS):
        trial.train(optimizer, 1, start=index)
        schedule.step()
    trial.right(STEPS)


@variants(zeros=["the first", "two in the middle", "the last"])
def scheduler_that_passes_zero(zeros: str) -> None:
    """A step with lr 0 moves nothing: it is no boundary, and its amaxes count for the next step."""
    where = {"the first": (0,), "two in the middle": (2, 3), "the last": (STEPS - 1,)}[zeros]
    trial = Trial()
    optimizer = trial.adamw()
    trial.manager.attach(optimizer=optimizer)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0 if step in where else 1.0)
    for index in range(STEPS):
        trial.train(optimizer, 1, start=index)
        schedule.step()
    trial.right(STEPS - len(where))


@variants(microbatches=[8, 100])
def accumulation(microbatches: int) -> None:
    trial = Trial(judged=microbatches < 100)
    optimizer = trial.adamw()
    trial.manager.attach(optimizer=optimizer)
    for step in range(3):
        for micro in range(microbatches):
            trial.backward(step * microbatches + micro, times=1 / microbatches)
        optimizer.step()
        optimizer.zero_grad()
    trial.errors.append(off(trial.net(batch(0)[0]), plain_forward(trial, batch(0)[0])))
    trial.right(3)


@program
def evaluation_amid_accumulation() -> None:
    """It changes nothing."""
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
                optimizer.step()
                optimizer.zero_grad()
    trial.right(STEPS)
    assert trial.bits() == done(other).bits()


@program
def two_losses_for_one_step() -> None:
    trial = Trial()
    optimizer = trial.adamw()
    trial.manager.attach(optimizer=optimizer)
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
    """Where the loss is not to its liking; what was recorded there counts for the next step."""
    trial = Trial()
    optimizer = trial.adamw()
    trial.manager.attach(optimizer=optimizer)
    for index in range(STEPS):
        trial.backward(index)
        if index not in (1, 2):
            optimizer.step()
        optimizer.zero_grad()
    trial.right(STEPS - 2)


@program
def gradients_are_clipped() -> None:
    trial = Trial()
    optimizer = trial.adamw()
    trial.manager.attach(optimizer=optimizer)
    for index in range(STEPS):
        trial.backward(index)
        nn.utils.clip_grad_norm_(trial.net.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    trial.right(STEPS)


@variants(write=["clamp_", "mask", "noise", ".data"])
def weights_written_after_each_step(write: str) -> None:
    """Clipping, pruning, noise: after the step and before the next forward."""
    trial = Trial()
    optimizer = trial.adamw()
    trial.manager.attach(optimizer=optimizer)
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
    """Its new weights have outgrown the scale of the old ones: they are cast just in time."""
    trial = Trial()
    optimizer = trial.adamw(0.001)
    trial.manager.attach(optimizer=optimizer)
    trial.train(optimizer, 3)
    with torch.no_grad():
        trial.net[0].weight.mul_(16)
    trial.train(optimizer, 3, start=3)
    trial.right(6)


@variants(line_search=[None, "strong_wolfe"])
def lbfgs(line_search: str | None) -> None:
    """It moves the weights between the calls of the closure, and back."""
    trial = Trial()
    optimizer = torch.optim.LBFGS(trial.net.parameters(), lr=0.3, max_iter=4, line_search_fn=line_search)
    trial.manager.attach(optimizer=optimizer)

    def closure(index: int) -> Tensor:
        optimizer.zero_grad()
        return trial.backward(index)

    for index in range(STEPS):
        optimizer.step(partial(closure, index))
    trial.right(STEPS)


@variants(kind=[SGD, AdamW], named=[False, True])
def closures(kind: type[Optimizer], named: bool) -> None:
    """Bitwise the loop without them."""
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
    """Bitwise the optimizer's step as the boundary."""
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
    for index in range(STEPS):
        trial.train(optimizer, 1, start=index)
        trial.manager.step()
    trial.right(STEPS)


# GradScaler --------------------------------------------------------------------------------------

SCALED: dict[str, Callable[[Any], Optimizer]] = {
    "unfused": lambda p: SGD(p, lr=0.1, foreach=False),
    "foreach": lambda p: AdamW(p, lr=0.01, foreach=True),
    "fused": lambda p: AdamW(p, lr=0.01, fused=True),
}


@variants(kind=list(SCALED), update=["same_step", "next_step"], unscale=[False, True])
def gradscaler_skips(kind: str, update: str, unscale: bool) -> None:
    """Steps 2 and 3 are skipped: they are none, and nothing infinite remains."""
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


@variants(kind=list(SCALED))
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


@variants(update=["same_step", "next_step"], whole=[True, False])
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
        optimizer.step()
        optimizer.zero_grad()
    trial.accurate()
    state_is_right(trial.manager, STEPS)


class Checkpointed(nn.Module):
    """A block whose activations are computed again."""

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


@variants(accumulate=[1, 2])
def accelerate_prepared(accumulate: int) -> None:
    """Bitwise the loop without Accelerate."""
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
                plain.step()
                plain.zero_grad()
        trial.right(STEPS)
        assert trial.bits() == done(other).bits()
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


@program
def calibrated_then_trained() -> None:
    trial = Trial()
    optimizer = trial.adamw()
    trial.manager.attach(optimizer=optimizer)
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


@variants(how=["set_precision", "autocast", "fp8 starts later"])
def high_precision_meanwhile(how: str) -> None:
    trial = Trial()
    optimizer = trial.adamw()
    trial.manager.attach(optimizer=optimizer)
    if how == "fp8 starts later":
        trial.manager.set_precision("*", "high", steps=2)
    for index in range(STEPS):
        if how == "autocast" and index in (2, 3):
            with trial.manager.autocast(enabled=False):
                trial.train(optimizer, 1, start=index)
            continue
        if how == "set_precision" and index == 2:
            trial.manager.set_precision("*", "high", steps=2)
        trial.train(optimizer, 1, start=index)
    trial.right(STEPS, lambda fqn, role: False)


class Tied(nn.Module):
    """One weight for two Linears."""

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


@variants(recipe=list(RECIPES), attached=[False, True])
def other_recipes(recipe: str, attached: bool) -> None:
    trial = Trial(recipe=RECIPES[recipe]())
    optimizer = trial.adamw()
    if attached:
        trial.manager.attach(optimizer=optimizer)
    trial.train(optimizer, STEPS)
    trial.right(STEPS if attached else 0)


@variants(recipe=["delayed", *RECIPES], attached=[False, True])
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
    """What is refused, or warned of, where FP8 is on."""
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


@variants(mistakes=[False, True], boundary=["optimizer", "manual"])
def switched_off(mistakes: bool, boundary: str) -> None:
    """FP8DIST_ENABLED=0: bitwise plain torch, and nothing is ever refused."""
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


@program
def slots_of_foreign_modules() -> None:
    """Their amaxes are recorded by hand and enter the history at each boundary."""
    trial = Trial()
    trial.manager.register("extra", "input", "e4m3")
    optimizer = trial.adamw()
    trial.manager.attach(optimizer=optimizer)
    expected = []
    for index in range(STEPS):
        x, _ = batch(index)
        trial.manager.record("extra", "input", x)
        expected.append(float(x.abs().max()))
        trial.train(optimizer, 1, start=index)
    trial.right(STEPS)
    assert trial.manager.amax_history("extra", "input").tolist()[-STEPS:] == expected


def _refusal() -> None:
    """What the table would hide if nothing could raise: a step in calibrate() is refused."""
    trial = Trial()
    optimizer = trial.adamw()
    trial.manager.attach(optimizer=optimizer)
    with trial.manager.calibrate():
        trial.train(optimizer, 1)


def test_an_alarm_would_be_seen() -> None:
    with pytest.raises(ConfigurationError), silence():
        _refusal()
    trial = Trial()
    with pytest.raises(AssertionError, match="holds none of"), silence():
        trial.manager.attach(optimizer=AdamW(mlp().parameters()))
    trial.errors.append(2 * TOLERANCE)
    with pytest.raises(AssertionError):
        trial.accurate()


@pytest.mark.parametrize("name", PROGRAMS)
def test_silent_and_right(name: str) -> None:
    with silence("is switched off:" if name.startswith("switched off") else None):
        PROGRAMS[name]()

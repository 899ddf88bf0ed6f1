"""Correct programs are silent and accurate: several models, weight averages, adapters. See ``quiet.py``."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

import fp8dist
from fp8dist import DelayedScaling, RowwiseScaling
from tests.support.quiet import (
    HISTORY,
    PLAIN,
    STEPS,
    Loop,
    Trial,
    attached,
    batch,
    fp8_bits,
    mlp,
    off,
    state_is_right,
    take,
    weight_bits,
)
from tests.support.scenarios import Scenarios
from tests.support.training import bits

SCENARIOS = Scenarios()


@SCENARIOS.program
def an_unrelated_plain_model_trains_beside_it() -> None:
    other = mlp()
    theirs = AdamW(other.parameters(), lr=0.01)

    def backward(trial: Trial, index: int) -> None:
        trial.backward(index)
        for _ in range(3):
            nn.functional.mse_loss(other(batch(index)[0]), batch(index)[1]).backward()
            take(theirs)

    Loop(backward=backward, same=PLAIN)()


@SCENARIOS.variants(optimizers=["one", "one each, in threads"])
def two_managers(optimizers: str) -> None:
    """Each manager, with its own recipe, trains as if it were alone, even if both have one optimizer."""
    nets = partial(mlp, 32, 64, 16), partial(mlp, 32, 48, 16)
    recipes = None, RowwiseScaling()
    trials = [Trial(net(), recipe) for net, recipe in zip(nets, recipes)]
    one = AdamW([p for trial in trials for p in trial.parameters()], lr=0.01)
    for trial in trials:
        trial.optimizers = [one if optimizers == "one" else trial.adamw()]
        trial.attach(trial.optimizer)
    if optimizers == "one each, in threads":
        threads = [threading.Thread(target=trial.train, args=(trial.optimizer, STEPS)) for trial in trials]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    else:
        for index in range(STEPS):
            for trial in trials:
                trial.backward(index)
            take(*dict.fromkeys(trial.optimizer for trial in trials))
    for trial, net, recipe in zip(trials, nets, recipes):
        trial.right(STEPS)
        assert trial.bits() == Loop(net=net, prepared={"recipe": recipe}).run().bits()


@SCENARIOS.program
def copied_with_its_optimizer_and_trained_on_its_own() -> None:
    """Copy and original continue from the same state; the original is not affected by the copy."""
    trial, mine = attached()
    trial.train(mine, 3)
    twin, theirs = copy.deepcopy((trial.net, mine))
    manager = fp8dist.get_manager(twin).attach(optimizer=theirs)
    for index in range(3, 6):
        trial.train(mine, 1, start=index)
        trial.train(theirs, 1, start=index, net=twin)
    trial.right(6)
    state_is_right(manager, 6)
    assert fp8_bits(manager) == fp8_bits(trial.manager)
    assert weight_bits(twin) == weight_bits(trial.net)


@SCENARIOS.variants(made=["before attach", "after attach"])
def averaged_model(made: str) -> None:
    """A deep copy holds an average of the weights, updated after each step, and is evaluated."""
    how: dict[str, Any] = {"multi_avg_fn": get_ema_multi_avg_fn(0.5)}
    trial, steps = Trial(), HISTORY + 2
    optimizer = trial.adamw()
    average = AveragedModel(trial.net, **how) if made == "before attach" else None
    trial.attach(optimizer)
    average = average or AveragedModel(trial.net, **how)
    plain = mlp()
    expected = AveragedModel(plain, **how)
    for index in range(steps):
        trial.train(optimizer, 1, start=index)
        average.update_parameters(trial.net)
        average.eval()
        trial.evaluate(average)
        plain.load_state_dict(trial.net.state_dict())
        expected.update_parameters(plain)
    trial.right(steps)
    assert weight_bits(average.module) == weight_bits(expected.module)
    assert fp8dist.get_manager(average.module).steps == 0


@SCENARIOS.program
def swa_with_batchnorm() -> None:
    trial, optimizer = attached(mlp(norm=True), make=Trial.sgd)
    average, scheduler = AveragedModel(trial.net), SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)
    for index in range(STEPS):
        trial.train(optimizer, 1, start=index)
        if index >= 2:
            average.update_parameters(trial.net)
            scheduler.step()
    update_bn([batch(index)[0] for index in range(4)], average)
    trial.evaluate(average.eval())
    trial.right(STEPS)


@torch.no_grad()
def exchange(net: nn.Module, others: list[Tensor], how: str) -> None:
    """Swap parameters and ``others``, in one of the usual ways."""
    for p, other in zip(net.parameters(), others):
        mine = p.detach().clone()
        if how == "copy_":
            p.copy_(other)
        elif how == ".data.copy_":
            p.data.copy_(other)
        else:
            p.data = other.clone()
        other.copy_(mine)


def evaluated(how: str = "", update: str = "same_step", within: bool = False) -> Loop:
    """Return a loop with an evaluation after each step, of the average of the weights if ``how`` says how to swap.

    ``within``: the swap is made within ``swapped_weights``.
    """

    def attach(trial: Trial) -> None:
        trial.attach(trial.optimizer)
        trial.average = [p.detach().clone() for p in trial.parameters()]  # type: ignore[attr-defined]

    def after(trial: Trial, index: int) -> None:
        average: list[Tensor] = trial.average  # type: ignore[attr-defined]
        for mean, p in zip(average, trial.parameters()):
            mean.lerp_(p.detach(), 0.5)
        trial.net.train(within)
        if within:
            trial.evaluate()  # Casts weights that a write to .data would leave stale.
            with trial.manager.swapped_weights():
                exchange(trial.net, average, how)
                trial.evaluate()
                exchange(trial.net, average, how)
        else:
            if how:
                exchange(trial.net, average, how)
            trial.evaluate()
            if how:
                exchange(trial.net, average, how)
        trial.net.train()

    recipe = DelayedScaling(history_len=HISTORY, update=update)  # type: ignore[arg-type]
    return Loop(prepared={"recipe": recipe}, attach=attach, after=after, same=evaluated(update=update) if how else None)


SCENARIOS.table(
    {
        "EMA swapped in and out: copy_": evaluated("copy_"),
        "EMA swapped in and out: .data.copy_": evaluated(".data.copy_", "next_step"),
        "EMA swapped in and out: .data =": evaluated(".data ="),
        "EMA in swapped_weights: .data.copy_": evaluated(".data.copy_", within=True),
    }
)


@SCENARIOS.program
def average_through_functional_call() -> None:
    trial, optimizer = attached(judged=False)
    average = {name: p.detach().clone() for name, p in trial.net.named_parameters()}
    for index in range(STEPS):
        trial.train(optimizer, 1, start=index)
        for name, p in trial.net.named_parameters():
            average[name].lerp_(p.detach(), 0.5)
        with torch.no_grad():
            output = torch.func.functional_call(trial.net, average, batch(0)[0])
        trial.compare(output, batch(0)[0], average)
    trial.right(STEPS)


class Adapted(nn.Module):
    """A Linear plus two low-rank Linears."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.base = nn.Linear(inner, outer)
        self.lora_a, self.lora_b = nn.Linear(inner, 16, bias=False), nn.Linear(16, outer, bias=False)
        nn.init.zeros_(self.lora_b.weight)
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.lora_b(self.lora_a(x))


@SCENARIOS.program
def lora() -> None:
    """Adapters in FP8 that are zero at first."""
    torch.manual_seed(0)
    net = nn.Sequential(Adapted(32, 64), nn.ReLU(), Adapted(64, 16))
    trial = Trial(net, skip=None)
    # A weight that grows from zero doubles in its second step.
    optimizer = AdamW([p for p in net.parameters() if p.requires_grad], lr=0.001)
    trial.attach(optimizer)
    before = [bits(layer.base.weight) for layer in (net[0], net[2])]
    trial.train(optimizer, STEPS)
    assert before == [bits(layer.base.weight) for layer in (net[0], net[2])]
    # The first base's input needs no gradient, so its output's gradient is never cast. A zero weight gets its scale one
    # step late, and so do the gradients behind it.
    trial.right(STEPS, lambda fqn, role: fqn.endswith("base") and role != "grad_output")


def first_frozen() -> nn.Module:
    net = mlp()
    net[0].requires_grad_(False)
    return net


def unfreeze_and_freeze(trial: Trial, index: int) -> None:
    """The optimizer has all parameters from the start."""
    trial.net[0].requires_grad_(index >= 2)
    trial.net[2].requires_grad_(index < 5)


def add_param_group(trial: Trial, index: int) -> None:
    if index == 2:
        trial.net[0].requires_grad_(True)
        trial.optimizer.add_param_group({"params": list(trial.net[0].parameters()), "lr": 0.001})


def of_last(trial: Trial) -> AdamW:
    return AdamW(trial.net[2].parameters(), lr=0.01)


def of_frozen_first(trial: Trial) -> AdamW:
    """A learning rate of 0 freezes a layer."""
    first, last = trial.net[0].parameters(), trial.net[2].parameters()
    return AdamW([{"params": first, "lr": 0.0}, {"params": last}], lr=0.01)


def eval_mode(of: Callable[[Any], nn.Module]) -> Any:
    def attach(trial: Trial) -> None:
        trial.attach(trial.optimizer)
        of(trial.net).eval()

    return attach


NO_GRADIENTS: dict[str, Any] = {"ran": lambda fqn, role: role != "grad_output"}

SCENARIOS.table(
    {
        "frozen, then unfrozen": Loop(net=first_frozen, after=unfreeze_and_freeze, steps=9, **NO_GRADIENTS),
        "add_param_group": Loop(net=first_frozen, make=of_last, after=add_param_group, **NO_GRADIENTS),
        "one group has lr 0": Loop(make=of_frozen_first),
        "BatchNorm trains in eval mode": Loop(
            net=partial(mlp, norm=True), attach=eval_mode(lambda net: net[1]), steps=HISTORY + 2
        ),
        "a Linear trains in eval mode": Loop(
            net=partial(mlp, norm=True), attach=eval_mode(lambda net: net[0]), ran=lambda fqn, role: fqn == "3"
        ),
    }
)


class Generated(nn.Module):
    """A generator and a discriminator in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.g, self.d = mlp(32, 64, 32), mlp(32, 64, 16)


@SCENARIOS.variants(between=["nothing", "D is frozen and clipped"])
def gan_with_two_managers(between: str) -> None:
    """D takes two steps per step of G."""
    both = Generated()
    g, d = Trial(both.g), Trial(both.d)
    of_g, of_d = g.adamw(0.003), d.adamw(0.003)
    g.attach(of_g)
    d.attach(of_d)
    for index in range(2 * STEPS):
        noise, real = batch(index)[0], batch(index + 1)[0]
        (d.net(g.net(noise).detach()).mean() - d.net(real).mean()).backward()
        take(of_d)
        with torch.no_grad():
            for p in d.parameters() if between != "nothing" else ():
                p.clamp_(-0.15, 0.15)
        if index % 2:
            d.net.requires_grad_(between == "nothing")
            (-d.net(g.net(noise)).mean()).backward()
            take(of_g)
            of_d.zero_grad()
            d.net.requires_grad_(True)
    g.right(STEPS)
    d.right(2 * STEPS)


@SCENARIOS.program
def gan_with_one_manager() -> None:
    """D and G alternate, and G's step comes last. D is frozen then, and torch counts no write of a fused optimizer."""
    both = Generated()
    trial = Trial(both, judged=False)
    of_d, of_g = (AdamW(part.parameters(), lr=0.003, fused=True) for part in (both.d, both.g))
    trial.attach(of_d, of_g)
    for index in range(STEPS):
        noise, real = batch(index)[0], batch(index + 1)[0]
        (both.d(both.g(noise).detach()).mean() - both.d(real).mean()).backward()
        take(of_d)
        both.d.requires_grad_(False)
        (-both.d(both.g(noise)).mean()).backward()
        take(of_g)
        both.d.requires_grad_(True)
    for part, twin in ((both.g, trial.twin.g), (both.d, trial.twin.d)):
        twin.load_state_dict(part.state_dict())
        with torch.no_grad():
            trial.errors.append(off(part(batch(0)[0]), twin(batch(0)[0])))
    trial.accurate()
    state_is_right(trial.manager, STEPS)

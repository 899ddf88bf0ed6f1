"""Correct programs are silent and accurate: several optimizers and models, weight averages, adapters.

See ``quiet_loops.py``.
"""

from __future__ import annotations

import copy
import threading
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Muon
from torch.optim.optimizer import Optimizer
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

import fp8dist
from fp8dist import DelayedScaling
from tests.support.quiet import (
    HISTORY,
    STEPS,
    Trial,
    attached,
    batch,
    done,
    fp8_bits,
    mlp,
    off,
    plain_run,
    state_is_right,
    take,
    weight_bits,
)
from tests.support.scenarios import Scenarios
from tests.support.training import bits

SCENARIOS = Scenarios()
program, variants, cases = SCENARIOS.program, SCENARIOS.variants, SCENARIOS.cases


# Several optimizers ------------------------------------------------------------------------------


@variants(order=["as attached", "the other way round"])
def optimizers_of_disjoint_parameters(order: str) -> None:
    """Bitwise equal to one optimizer with two groups."""
    split = Trial()
    weights, biases = ([p for p in split.parameters() if p.ndim == n] for n in (2, 1))
    optimizers = [AdamW(weights, lr=0.01), AdamW(biases, lr=0.02)]
    split.manager.attach(optimizer=optimizers)
    for index in range(STEPS):
        split.backward(index)
        take(*(optimizers if order == "as attached" else reversed(optimizers)))
    split.right(STEPS)
    whole = Trial()
    weights, biases = ([p for p in whole.parameters() if p.ndim == n] for n in (2, 1))
    one = AdamW([{"params": weights, "lr": 0.01}, {"params": biases, "lr": 0.02}])
    whole.manager.attach(optimizer=one)
    whole.train(one, STEPS)
    whole.evaluate()
    assert split.bits() == whole.bits()


@variants(order=["the other way round"])
def an_optimizer_for_each_layer(order: str) -> None:
    trial = Trial()
    optimizers: list[Optimizer] = [
        AdamW(trial.net[0].parameters(), lr=0.01),
        SGD(trial.net[2].parameters(), lr=0.1, momentum=0.9),
    ]
    trial.manager.attach(optimizer=optimizers)
    for index in range(STEPS):
        trial.backward(index)
        take(*(optimizers if order == "as attached" else reversed(optimizers)))
    trial.right(STEPS)


@variants(warms=["the first", "the last"])
def one_of_two_optimizers_warms_up_from_zero(warms: str) -> None:
    """A step with lr 0 of one optimizer must not make the other's next step look like its second."""
    trial = Trial()
    optimizers = [AdamW(trial.net[0].parameters(), lr=0.01), AdamW(trial.net[2].parameters(), lr=0.01)]
    trial.manager.attach(optimizer=optimizers)
    warm = optimizers[0 if warms == "the first" else 1]
    scheduler = torch.optim.lr_scheduler.LambdaLR(warm, lambda step: max(0, step - 1) / 3)  # 0, 0, 1/3, …
    for index in range(STEPS):
        trial.backward(index)
        take(*optimizers)
        scheduler.step()
    assert STEPS - 2 <= trial.manager.steps <= STEPS
    trial.right(trial.manager.steps)


@program
def what_is_not_fp8_is_stepped_more_often() -> None:
    """A learned temperature has its own optimizer, which steps after each microbatch."""
    trial = Trial()
    temperature = nn.Parameter(torch.ones(()))
    often, main = SGD([temperature], lr=0.01), trial.adamw()
    trial.manager.attach(optimizer=[often, main])
    for index in range(STEPS):
        for micro in range(3):
            x, y = batch(3 * index + micro)
            nn.functional.mse_loss(trial.net(x) * temperature, y).backward()
            take(often)
        take(main)
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
            take(theirs)
        take(mine)
    trial.right(STEPS)
    assert trial.bits() == done(plain_run(STEPS)).bits()


@variants(given=["optimizers", "nothing"])
def alternating_optimizers_on_the_same_weights(given: str) -> None:
    """AdamW in one epoch, SGD in the next; the loop marks the boundaries."""
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
        take(*optimizers)
    trial.right(STEPS)


# Several models ----------------------------------------------------------------------------------


class Generated(nn.Module):
    """A generator and a discriminator in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.g, self.d = mlp(32, 64, 32), mlp(32, 64, 16)


@program
def one_optimizer_for_two_managers() -> None:
    """The optimizer's step is the boundary of both managers."""
    first, second = Trial(), Trial(mlp(32, 48, 16))
    optimizer = AdamW([*first.parameters(), *second.parameters()], lr=0.01)
    for trial in (first, second):
        trial.manager.attach(optimizer=optimizer)
    for index in range(STEPS):
        first.backward(index)
        second.backward(index)
        take(optimizer)
    first.right(STEPS)
    second.right(STEPS)
    assert first.bits() == done(plain_run(STEPS)).bits()


@cases(
    {"parts": "two models", "frozen": False, "clipped": False},
    {"parts": "one model", "frozen": True, "clipped": False},
    {"parts": "one model", "frozen": False, "clipped": True},
)
def gan(parts: str, frozen: bool, clipped: bool) -> None:
    """D takes two steps per step of G. Optionally D is frozen in between, or its weights are clipped after each
    step."""
    both = Generated() if parts == "one model" else None
    g = Trial(both.g if both else mlp(32, 64, 32))
    d = Trial(both.d if both else mlp(32, 64, 16))
    of_g, of_d = g.adamw(0.003), d.adamw(0.003)
    g.manager.attach(optimizer=of_g)
    d.manager.attach(optimizer=of_d)
    for index in range(2 * STEPS):
        noise, real = batch(index)[0], batch(index + 1)[0]
        (d.net(g.net(noise).detach()).mean() - d.net(real).mean()).backward()
        take(of_d)
        if clipped:
            with torch.no_grad():
                for p in d.parameters():
                    p.clamp_(-0.15, 0.15)
        if index % 2:
            d.net.requires_grad_(not frozen)
            (-d.net(g.net(noise)).mean()).backward()
            take(of_g)
            of_d.zero_grad()
            d.net.requires_grad_(True)
    g.right(STEPS)
    d.right(2 * STEPS)


@program
def gan_with_one_manager() -> None:
    """D and G alternate, and G's step comes last."""
    both = Generated()
    trial = Trial(both, judged=False)
    of_d, of_g = AdamW(both.d.parameters(), lr=0.003), AdamW(both.g.parameters(), lr=0.003)
    trial.manager.attach(optimizer=[of_d, of_g])
    for index in range(STEPS):
        noise, real = batch(index)[0], batch(index + 1)[0]
        (both.d(both.g(noise).detach()).mean() - both.d(real).mean()).backward()
        take(of_d)
        (-both.d(both.g(noise)).mean()).backward()
        take(of_g)
        of_d.zero_grad()
    for part, twin in ((both.g, trial.twin.g), (both.d, trial.twin.d)):
        twin.load_state_dict(part.state_dict())
        with torch.no_grad():
            trial.errors.append(off(part(batch(0)[0]), twin(batch(0)[0])))
    trial.accurate()
    state_is_right(trial.manager, STEPS)


@program
def two_managers_in_two_threads() -> None:
    """Each manager trains as if it were alone."""
    trials = [Trial(), Trial()]
    failures: list[BaseException] = []

    def work(trial: Trial) -> None:
        try:
            optimizer = trial.adamw()
            trial.manager.attach(optimizer=optimizer)
            trial.train(optimizer, STEPS)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(trial,)) for trial in trials]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    for trial in trials:
        trial.right(STEPS)
        assert trial.bits() == done(plain_run(STEPS)).bits()


@program
def net_and_optimizer_copied_together() -> None:
    trial = plain_run(3)
    optimizer = trial.adamw()
    trial.manager.attach(optimizer=optimizer)
    trial.train(optimizer, 2, start=3)
    net, theirs = copy.deepcopy((trial.net, optimizer))
    manager = fp8dist.get_manager(net).attach(optimizer=theirs)
    for index in range(5, 8):
        trial.train(optimizer, 1, start=index)
        trial.train(theirs, 1, start=index, net=net)
    trial.right(8)
    assert fp8_bits(manager) == fp8_bits(trial.manager)
    assert weight_bits(net) == weight_bits(trial.net)


@program
def two_managers_in_turn() -> None:
    """Each manager trains as if it were alone."""
    first, second = Trial(), Trial(mlp(32, 48, 16))
    optimizers = [first.adamw(), second.sgd(momentum=0.9)]
    for trial, optimizer in zip((first, second), optimizers):
        trial.manager.attach(optimizer=optimizer)
    for index in range(STEPS):
        first.backward(index)
        second.backward(index)
        take(*optimizers)
    first.right(STEPS)
    second.right(STEPS)
    alone = plain_run(STEPS, lambda p: SGD(p, lr=0.1, momentum=0.9), mlp(32, 48, 16))
    assert first.bits() == done(plain_run(STEPS)).bits()
    assert second.bits() == done(alone).bits()


@program
def copy_attached_and_trained_on_its_own() -> None:
    """Copy and original continue from the same state; the original is not affected by the copy."""
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


@cases(
    {"made": "before attach", "kind": "ema", "steps": HISTORY + 2},
    {"made": "before attach", "kind": "swa", "steps": STEPS},
    {"made": "after attach", "kind": "ema", "steps": STEPS},
)
def averaged_model(made: str, kind: str, steps: int) -> None:
    """A deep copy holds an average of the weights, updated after each step, and is evaluated."""
    how: dict[str, Any] = {"multi_avg_fn": get_ema_multi_avg_fn(0.5)} if kind == "ema" else {}
    trial = Trial()
    optimizer = trial.adamw()
    average = AveragedModel(trial.net, **how) if made == "before attach" else None
    trial.manager.attach(optimizer=optimizer)
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


@program
def swa_with_batchnorm() -> None:
    trial, optimizer = attached(mlp(norm=True), make=Trial.sgd)
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


@cases(
    {"how": "copy_", "update": "same_step"},
    {"how": ".data.copy_", "update": "next_step"},
    {"how": ".data =", "update": "same_step"},
)
def ema_swapped_in_and_out(how: str, update: str) -> None:
    """The swap does not affect training."""
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
            trial.evaluate()  # Casts weights that a write to .data would leave stale.
            for mean, p in zip(average, trial.parameters()):
                mean.lerp_(p.detach(), 0.5)
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
    trial, optimizer = attached(judged=False)
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
    """A Linear plus two low-rank Linears."""

    def __init__(self, inner: int, outer: int, zero: bool) -> None:
        super().__init__()
        self.base = nn.Linear(inner, outer)
        self.lora_a, self.lora_b = nn.Linear(inner, 16, bias=False), nn.Linear(16, outer, bias=False)
        if zero:
            nn.init.zeros_(self.lora_b.weight)
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.lora_b(self.lora_a(x))


@cases({"fp8": False, "zero": False}, {"fp8": True, "zero": True})
def lora(fp8: bool, zero: bool) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(Adapted(32, 64, zero), nn.ReLU(), Adapted(64, 16, zero))
    trial = Trial(net, skip=None if fp8 else ("*lora_*",))
    adapters = [p for p in net.parameters() if p.requires_grad]
    assert len(adapters) == 4
    optimizer = AdamW(adapters, lr=0.001)  # A weight that grows from zero doubles in its second step.
    trial.manager.attach(optimizer=optimizer)
    assert any("lora" in slot.fqn for slot in trial.manager.slots) == fp8
    before = [bits(layer.base.weight) for layer in (net[0], net[2])]
    trial.train(optimizer, STEPS)
    assert before == [bits(layer.base.weight) for layer in (net[0], net[2])]
    # The first base's input needs no gradient, so its output's gradient is never cast. A zero weight gets its scale one
    # step late, and so do the gradients behind it.
    trial.right(STEPS, lambda fqn, role: fqn.endswith("base") and role != "grad_output")


@program
def frozen_then_unfrozen() -> None:
    """The optimizer has all parameters from the start."""
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
    """A learning rate of 0 freezes a layer."""
    trial = Trial()
    optimizer = AdamW(
        [{"params": trial.net[0].parameters(), "lr": 0.0}, {"params": trial.net[2].parameters()}], lr=0.01
    )
    trial.manager.attach(optimizer=optimizer)
    trial.train(optimizer, STEPS)
    trial.right(STEPS)


@cases({"part": "BatchNorm", "steps": HISTORY + 2}, {"part": "a Linear", "steps": STEPS})
def trained_with_a_part_in_eval_mode(part: str, steps: int) -> None:
    trial, optimizer = attached(mlp(norm=True))
    trial.net.train()
    {"BatchNorm": trial.net[1], "a Linear": trial.net[0]}[part].eval()
    trial.train(optimizer, steps)
    trial.right(steps, lambda fqn, role: part == "BatchNorm" or fqn == "3")

"""Correct programs are silent and accurate: optimizers of many kinds, several, their states. See ``quiet.py``."""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim import SGD, Adagrad, AdamW, Muon
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.optimizer import Optimizer

from tests.support.quiet import STEPS, Loop, Trial, attached, batch, mlp, nothing, state_is_right, take
from tests.support.scenarios import Scenarios

SCENARIOS = Scenarios()


class ScheduleFree(Optimizer):
    """Trains at one point and evaluates at another: ``train()`` and ``eval()`` write to the weights."""

    def __init__(self, params: Iterable[Tensor], lr: float = 0.1, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "training": True})

    @torch.no_grad()
    def _move(self, weight: Callable[[float], float], training: bool) -> None:
        for group in self.param_groups:
            if group["training"] != training:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], weight(group["beta"]))
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


def schedule_free(trial: Trial, index: int) -> None:
    trial.train(trial.optimizer, 1, start=index)
    for part in (trial.net, trial.optimizer):
        part.eval()
    trial.evaluate()
    for part in (trial.net, trial.optimizer):
        part.train()


class Sam(Optimizer):
    """Sharpness-aware minimisation, as in its widespread public implementation."""

    def __init__(self, params: Iterable[Tensor], base: type[Optimizer], rho: float = 0.05, **options: Any) -> None:
        super().__init__(params, {"rho": rho, **options})
        self.optimizer = base(self.param_groups, **options)
        self.param_groups = self.optimizer.param_groups
        self.defaults.update(self.optimizer.defaults)

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
        self.optimizer.step()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.first_step()
        closure()
        self.second_step()


class Odd(Optimizer):
    """Plain SGD with another name for the learning rate."""

    def __init__(self, params: Iterable[Tensor], **defaults: Any) -> None:
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=0.1)


class GradientsElsewhere(SGD):
    """An SGD that takes gradients from ``main_grad``, as Megatron's optimizers do; ``.grad`` is None."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for p in (p for group in self.param_groups for p in group["params"]):
                p.sub_(p.main_grad, alpha=0.1)


def sam(trial: Trial) -> Sam:
    return Sam(trial.parameters(), AdamW, lr=0.01)


def attach_inner(trial: Trial) -> None:
    trial.attach(trial.optimizer.optimizer)


def in_closure(trial: Trial, index: int) -> None:
    trial.optimizer.step(lambda: trial.backward(index))
    trial.optimizer.zero_grad()


def in_two_steps(trial: Trial, index: int) -> None:
    trial.optimizer.first_step()
    trial.backward(index)
    trial.optimizer.second_step()
    trial.optimizer.zero_grad()


def into_main_grad(trial: Trial, index: int) -> None:
    trial.backward(index)
    for p in trial.parameters():
        p.main_grad, p.grad = p.grad, None  # type: ignore[attr-defined]


SCENARIOS.table(
    {
        "SAM": Loop(make=sam, step=in_closure),
        "SAM in two steps": Loop(make=sam, step=in_two_steps),
        "SAM: inner attached": Loop(make=sam, attach=attach_inner, step=in_closure),
        "SAM in two steps: inner attached": Loop(make=sam, attach=attach_inner, step=in_two_steps),
        **{
            f"optimizer with another learning rate: {defaults}": Loop(
                make=lambda trial, defaults=defaults: Odd(trial.parameters(), **defaults),
                same=Loop(make=partial(Trial.sgd, foreach=False)),
            )
            for defaults in ({"eta": 0.1}, {"lr": None})
        },
        **{
            f"AdamW: {options}": Loop(make=partial(Trial.adamw, **options))
            for options in ({"lr": torch.tensor(0.01), "foreach": False}, {"fused": True})
        },
        "schedule-free": Loop(
            make=lambda trial: ScheduleFree(trial.parameters()), backward=nothing, step=schedule_free
        ),
        "Adagrad, which makes its state before the first step": Loop(make=lambda trial: Adagrad(trial.parameters())),
        "gradients that are not in .grad": Loop(
            make=lambda trial: GradientsElsewhere(trial.parameters(), lr=0.1), backward=into_main_grad
        ),
    }
)


def step_in_backward(trial: Trial) -> list[Optimizer]:
    optimizers = {p: SGD([p], lr=0.1, momentum=0.9) for p in trial.parameters()}
    for p in trial.parameters():
        p.register_post_accumulate_grad_hook(lambda p: take(optimizers[p]))
    return list(optimizers.values())


def boundary_after_first(trial: Trial, index: int) -> None:
    if index:
        trial.manager.step()
    trial.backward(index)


SGD_MOMENTUM = Loop(make=partial(Trial.sgd, momentum=0.9))
"""Equal, since a layer's input gradient is computed before its weight is stepped in the backward."""

SCENARIOS.table(
    {
        "optimizers in backward: not attached": Loop(
            make=step_in_backward, manual=True, step=nothing, same=SGD_MOMENTUM
        ),
        "optimizers in backward: boundary before backward": Loop(
            make=step_in_backward,
            attach=Trial.attach,
            backward=boundary_after_first,
            step=nothing,
            after=lambda trial, index: trial.manager.step() if index == STEPS - 1 else None,
            same=SGD_MOMENTUM,
        ),
    }
)


@SCENARIOS.program
def torchao_low_bit() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = pytest.importorskip("torchao.optim")
    trial = Trial(mlp(64, 64, 64), judged=False)
    optimizer = module.AdamWFp8(trial.net.parameters(), lr=0.01)
    trial.manager.attach(optimizer=optimizer)
    x, y = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(0))
    # Compiling the update takes half a minute on a CPU, and the update is the same uncompiled.
    with mock.patch.object(torch, "compile", lambda function, **options: function):
        for _ in range(STEPS):
            output = trial.net(x)
            trial.compare(output, x)
            nn.functional.mse_loss(output, y).backward()
            take(optimizer)
    assert any(type(s).__name__.startswith("OptimState") for s in optimizer.state[trial.net[0].weight].values())
    trial.accurate()
    state_is_right(trial.manager, STEPS)


@SCENARIOS.variants(masters=["each", "one flat"])
def master_copies_in_float32(masters: str) -> None:
    """A bfloat16 net whose optimizer has float32 copies, which are copied back. One flat copy is attached."""
    trial = Trial(mlp().bfloat16())
    net, flat = trial.parameters(), masters == "one flat"
    copies: Any = [nn.Parameter(p.detach().float()) for p in net]
    if flat:
        copies = [torch.cat([p.detach().flatten() for p in copies])]
    optimizer = AdamW(copies, lr=0.01)
    trial.attach(*([optimizer] if flat else []))
    for index in range(STEPS):
        trial.backward(index)
        gradients = [p.grad.float() for p in net]  # type: ignore[union-attr]
        if flat:
            gradients = [torch.cat([gradient.flatten() for gradient in gradients])]
        for master, gradient in zip(copies, gradients):
            master.grad = gradient
        trial.net.zero_grad()
        optimizer.step()
        with torch.no_grad():
            for part, p in zip(copies[0].split([p.numel() for p in net]) if flat else copies, net):
                p.copy_(part.view_as(p))
        if not flat:
            trial.manager.step()
    trial.right(STEPS)


def by_dimension(of_weights: Callable[..., Optimizer], lr: float = 0.01) -> Callable[[Trial], list[Optimizer]]:
    """Return a function that makes an optimizer of the weights, and AdamW for the biases."""

    def make(trial: Trial) -> list[Optimizer]:
        weights, biases = ([p for p in trial.parameters() if p.ndim == n] for n in (2, 1))
        return [of_weights(weights, lr=0.01), AdamW(biases, lr=lr)]

    return make


def in_two_groups(trial: Trial) -> Optimizer:
    weights, biases = ([p for p in trial.parameters() if p.ndim == n] for n in (2, 1))
    return AdamW([{"params": weights, "lr": 0.01}, {"params": biases, "lr": 0.02}])


def by_layer(trial: Trial, kinds: tuple[Any, Any] = (AdamW, SGD)) -> list[Optimizer]:
    return [kind(trial.net[i].parameters(), lr=0.01) for kind, i in zip(kinds, (0, 2))]


def take_reversed(trial: Trial, index: int) -> None:
    take(*reversed(trial.optimizers))


def reverse(make: Callable[[Trial], list[Optimizer]]) -> Callable[[Trial], list[Optimizer]]:
    return lambda trial: make(trial)[::-1]


def warm_up(optimizer: Optimizer) -> LambdaLR:
    """A step with lr 0 of one optimizer must not make the other's next step look like its second."""
    return LambdaLR(optimizer, lambda step: max(0, step - 1) / 3)  # 0, 0, 1/3, …


def without_gradient(layer: int) -> Any:
    """As that of experts which no token visits, or of a pipeline's frozen stage."""

    def backward(trial: Trial, index: int) -> None:
        trial.backward(index)
        trial.net[layer].zero_grad()

    return backward


def frozen_last() -> nn.Module:
    net = mlp()
    net[2].requires_grad_(False)
    return net


def alternating(trial: Trial, index: int) -> None:
    """AdamW in one epoch, SGD in the next."""
    trial.optimizers[(index // 2) % 2].step()
    trial.net.zero_grad()


def of_two_kinds(trial: Trial) -> list[Optimizer]:
    return [trial.adamw(), trial.sgd()]


LAYERS = partial(by_layer, kinds=(AdamW, AdamW))

SCENARIOS.table(
    {
        "optimizers of disjoint parameters": Loop(make=by_dimension(AdamW, 0.02), same=Loop(make=in_two_groups)),
        "optimizers of disjoint parameters: the other way round": Loop(
            make=by_dimension(AdamW, 0.02), step=take_reversed, same=Loop(make=in_two_groups)
        ),
        "an optimizer for each layer": Loop(make=by_layer, step=take_reversed),
        "Muon and AdamW": Loop(make=by_dimension(Muon)),
        "the first of two optimizers warms up from zero": Loop(make=LAYERS, schedule=warm_up),
        "the last of two optimizers warms up from zero": Loop(make=reverse(LAYERS), schedule=warm_up),
        "the first of two optimizers has no gradient": Loop(make=LAYERS, backward=without_gradient(0)),
        "the last of two optimizers has no gradient": Loop(make=LAYERS, backward=without_gradient(2)),
        "the last of two optimizers is frozen": Loop(net=frozen_last, make=LAYERS),
        "alternating optimizers on the same weights: not attached": Loop(
            make=of_two_kinds, manual=True, step=alternating, steps=8
        ),
    }
)


@SCENARIOS.program
def what_is_not_fp8_is_stepped_more_often() -> None:
    """A learned temperature has its own optimizer, which steps after each microbatch."""
    trial = Trial()
    temperature = nn.Parameter(torch.ones(()))
    often, main = SGD([temperature], lr=0.01), trial.adamw()
    trial.attach(often, main)
    for index in range(STEPS):
        for micro in range(3):
            x, y = batch(3 * index + micro)
            nn.functional.mse_loss(trial.net(x) * temperature, y).backward()
            take(often)
        take(main)
    trial.right(STEPS)


@SCENARIOS.program
def optimizer_state_is_loaded_after_attach() -> None:
    """``set_optimizer_state_dict`` steps a fresh optimizer with lr 0, which does not count as a step."""
    source = Trial()
    optimizer = source.adamw()
    source.attach(optimizer)
    source.train(optimizer, 4)
    saved = copy.deepcopy(get_optimizer_state_dict(source.net, optimizer))
    fp8, weights = source.manager.state_dict(), copy.deepcopy(source.net.state_dict())
    source.train(optimizer, 4, start=4)
    trial = Trial()
    fresh = trial.adamw()
    trial.attach(fresh)
    set_optimizer_state_dict(trial.net, fresh, saved)
    assert trial.manager.steps == 0
    trial.net.load_state_dict(weights)
    trial.manager.load_state_dict(fp8)
    trial.train(fresh, 4, start=4)
    for each in (trial, source):
        each.right(8)
    assert trial.bits() == source.bits()


def attach_anew(trial: Trial, index: int) -> None:
    """A new optimizer takes over, of another kind; it is attached again in its second step."""
    if index % 2 == 0:
        trial.optimizers = [trial.adamw() if index % 4 else trial.sgd()]
    trial.attach(trial.optimizer)
    trial.backward(index)


SCENARIOS.table({"optimizers made anew and attached again": Loop(backward=attach_anew)})


WHAT = ("attach", "weights", "optimizer", "manager")


def _orders(first: str) -> list[tuple[str, ...]]:
    """Return two orders: the others as they stand, and the other way round."""
    others = tuple(what for what in WHAT if what != first)
    return [(first, *others), (first, *others[::-1])]


@SCENARIOS.variants(first=WHAT)
def resumed_in_any_order(first: str) -> None:
    """``manager.load`` is used in the first of the orders, ``load_state_dict`` in the others."""
    whole, optimizer = attached(make=partial(Trial.adamw, lr=0.02))
    whole.train(optimizer, 4)
    saved = copy.deepcopy({"weights": whole.net.state_dict(), "optimizer": optimizer.state_dict()})
    saved["manager"] = whole.manager.state_dict()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "fp8.safetensors"
        whole.manager.save(path)
        whole.train(optimizer, 4, start=4)
        whole.right(8)
        for place, order in enumerate(_orders(first)):
            net = mlp()
            with torch.no_grad():
                for p in net.parameters():
                    p.mul_(0.25)  # A fresh net differs from the saved one.
            trial = Trial(net)
            fresh = trial.adamw(0.02)
            calls: dict[str, Callable[[], Any]] = {
                "attach": lambda trial=trial, fresh=fresh: trial.attach(fresh),
                "weights": lambda trial=trial: trial.net.load_state_dict(saved["weights"]),
                # Without the copy they would share tensors.
                "optimizer": lambda fresh=fresh: fresh.load_state_dict(copy.deepcopy(saved["optimizer"])),
                "manager": partial(trial.manager.load, path)
                if place == 0
                else partial(trial.manager.load_state_dict, saved["manager"]),
            }
            for what in order:
                calls[what]()
            trial.train(fresh, 4, start=4)
            trial.right(8)
            assert trial.bits() == whole.bits(), order

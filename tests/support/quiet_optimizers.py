"""Correct programs are silent and accurate: optimizers of many kinds, and their states.

See ``quiet_loops.py``.
"""

from __future__ import annotations

import copy
import itertools
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
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
from torch.optim import SGD, Adagrad, AdamW
from torch.optim.optimizer import Optimizer

import fp8dist
from tests.support.quiet import (
    STEPS,
    Trial,
    attached,
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


# Optimizers of other kinds -----------------------------------------------------------------------


@cases(
    {"given": "optimizers", "boundary": "after backward"},
    {"given": "nothing", "boundary": "after backward"},
    {"given": "nothing", "boundary": "before backward"},
)
def optimizer_in_backward(given: str, boundary: str) -> None:
    """Bitwise equal to the plain loop: a layer's input gradient is computed before its weight is stepped."""
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
    """Slow weights that are updated every three steps."""

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
    """Sharpness-aware minimisation, as in its widespread public implementation."""

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


@variants(base=[AdamW], used=["step, outer", "step, inner", "two steps, inner", "two steps, manual"])
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
    """Overrides ``step`` and calls the parent's."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@cases({"hooked": True, "closure": False}, {"hooked": False, "closure": True}, {"hooked": True, "closure": True})
def subclass_that_calls_super(hooked: bool, closure: bool) -> None:
    """Counts one boundary per step, whether torch has hooked the base's ``step`` (as its first instance does) or
    not."""
    if hooked:
        AdamW([nn.Parameter(torch.ones(1))])
    original = AdamW.step if hooked else getattr(AdamW.step, "__wrapped__", AdamW.step)
    with mock.patch.object(AdamW, "step", original):
        assert getattr(AdamW.step, "hooked", False) == hooked
        trial, optimizer = attached(make=lambda trial: Twice(trial.net.parameters(), lr=0.01))
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
    """Plain SGD with another name for the learning rate."""

    def __init__(self, params: Iterable[Tensor], defaults: dict[str, Any]) -> None:
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=0.1)


@variants(defaults=[{"eta": 0.1}, {"lr": None}, {"lr": 0.1}])
def optimizer_with_another_learning_rate(defaults: dict[str, Any]) -> None:
    trial = plain_run(STEPS, lambda p: Odd(p, dict(defaults)))
    trial.right(STEPS)
    assert trial.bits() == done(plain_run(STEPS, lambda p: SGD(p, lr=0.1, foreach=False))).bits()


@variants(options=[{"lr": torch.tensor(0.01), "foreach": False}, {"fused": True}, {"foreach": True}])
def adamw_with(options: dict[str, Any]) -> None:
    plain_run(STEPS, lambda p: AdamW(p, **{"lr": 0.01, **options})).right(STEPS)


@program
def adagrad() -> None:
    """Adagrad creates its state before the first step."""
    plain_run(STEPS, lambda p: Adagrad(p, lr=0.01)).right(STEPS)


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
    trial, optimizer = attached(make=lambda trial: ScheduleFree(trial.net.parameters()))
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


@variants(name=["AdamW4bit", "AdamWFp8"])
def torchao_low_bit(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = pytest.importorskip("torchao.optim")
    trial = Trial(mlp(64, 64, 64), judged=False)
    optimizer = getattr(module, name)(trial.net.parameters(), lr=0.01)
    trial.manager.attach(optimizer=optimizer)
    x, y = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(0))
    # Compiling the update takes half a minute on a CPU, and the update is the same uncompiled.
    with mock.patch.object(torch, "compile", lambda function, **options: function):
        for _ in range(STEPS):
            output = trial.net(x)
            trial.errors.append(off(output, plain_forward(trial, x)))
            nn.functional.mse_loss(output, y).backward()
            take(optimizer)
    assert any(type(s).__name__.startswith("OptimState") for s in optimizer.state[trial.net[0].weight].values())
    trial.accurate()
    state_is_right(trial.manager, STEPS)


class GradientsElsewhere(SGD):
    """An SGD that takes gradients from ``main_grad``, as Megatron's optimizers do; ``.grad`` is None."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for p in (p for group in self.param_groups for p in group["params"]):
                p.sub_(p.main_grad, alpha=0.1)


@program
def gradients_that_are_not_in_grad() -> None:
    trial, optimizer = attached(make=lambda trial: GradientsElsewhere(trial.net.parameters(), lr=0.1))
    for index in range(STEPS):
        trial.backward(index)
        for p in trial.parameters():
            p.main_grad, p.grad = p.grad, None  # type: ignore[attr-defined]
        optimizer.step()
    trial.right(STEPS)


@variants(without=["the first", "the last", "the last, which is frozen"])
def one_of_two_optimizers_has_no_gradient(without: str) -> None:
    """As that of experts which no token visits, or of a pipeline's frozen stage."""
    trial = Trial()
    idle = 0 if without == "the first" else 2
    optimizers = [SGD(trial.net[i].parameters(), lr=0.1) for i in (0, 2)]
    if "frozen" in without:
        trial.net[2].requires_grad_(False)
    trial.manager.attach(optimizer=optimizers)
    for index in range(STEPS):
        trial.backward(index)
        trial.net[idle].zero_grad()
        take(*optimizers)
    trial.right(STEPS)


class Offload(Optimizer):
    """Like torchao's CPUOffloadOptimizer, which needs a GPU: never calls ``Optimizer.__init__``, steps a copy of each
    large parameter with its own optimizer and writes it back. Small parameters share an optimizer."""

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
    trial.train(optimizer, STEPS, after=trial.manager.step)
    trial.right(STEPS)
    assert trial.bits() == done(plain_run(STEPS)).bits()


@cases(
    {"given": "nothing", "masters": "each"},
    {"given": "nothing", "masters": "one flat"},
    {"given": "the masters' optimizer", "masters": "deep copies"},
    {"given": "the masters' optimizer", "masters": "one flat"},
)
def master_copies_in_float32(given: str, masters: str) -> None:
    """A bfloat16 net whose optimizer has float32 copies, maybe in one flat tensor, which are copied back."""
    trial = Trial(mlp().bfloat16())
    net = trial.parameters()
    copies = [p.detach().float() for p in net]
    if masters == "deep copies":
        copies = [nn.Parameter(p.detach().float()) for p in copy.deepcopy(net)]
    elif masters == "one flat":
        copies = [torch.cat([p.detach().float().flatten() for p in net])]
    optimizer = AdamW(copies, lr=0.01)
    if given == "nothing":
        trial.manager.attach(boundary="manual")
    else:
        trial.manager.attach(optimizer=optimizer)
    for index in range(STEPS):
        trial.backward(index)
        gradients = [p.grad.float() for p in net]  # type: ignore[union-attr]
        if masters == "one flat":
            gradients = [torch.cat([gradient.flatten() for gradient in gradients])]
        for master, gradient in zip(copies, gradients):
            master.grad = gradient
        trial.net.zero_grad()
        optimizer.step()
        parts = copies[0].detach().split([p.numel() for p in net]) if masters == "one flat" else copies
        with torch.no_grad():
            for part, p in zip(parts, net):
                p.copy_(part.view_as(p))
        if given == "nothing":
            trial.manager.step()
    trial.right(STEPS)


@variants(microbatches=[1])  # More would change weights between backwards, which warns.
def sam_of_each_microbatch(microbatches: int) -> None:
    """m-sharpness: each microbatch climbs and returns separately."""
    trial, optimizer = attached()
    for step in range(STEPS):
        total = [torch.zeros_like(p) for p in trial.parameters()]
        for micro in range(microbatches):
            index = step * microbatches + micro
            trial.backward(index, times=1 / microbatches)
            climbed = [p.grad / p.grad.norm() * 0.01 for p in trial.parameters()]  # type: ignore[union-attr,operator]
            with torch.no_grad():
                for p, by in zip(trial.parameters(), climbed):
                    p.add_(by)
            trial.net.zero_grad()
            trial.backward(index, times=1 / microbatches)
            with torch.no_grad():
                for p, by, sum_ in zip(trial.parameters(), climbed, total):
                    p.sub_(by)
                    sum_.add_(p.grad)  # type: ignore[arg-type]
            trial.net.zero_grad()
        for p, sum_ in zip(trial.parameters(), total):
            p.grad = sum_
        take(optimizer)
    trial.right(STEPS)


@program
def compiled_optimizer() -> None:
    """Compiled as in PyTorch's tutorial."""
    trial, optimizer = attached(make=lambda trial: trial.adamw(foreach=True))

    @torch.compile(fullgraph=False, backend="eager")
    def step() -> None:
        optimizer.step()

    for index in range(STEPS):
        trial.backward(index)
        step()
        optimizer.zero_grad()
    trial.right(STEPS)


# Optimizers' states ------------------------------------------------------------------------------


@variants(attached=["after", "before"])
def optimizer_state_is_loaded(attached: str) -> None:
    """``set_optimizer_state_dict`` steps a fresh optimizer with lr 0, which does not count as a step."""
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
    """Reading the state does not affect training, except for the optimizer's own step count."""
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
    """A new AdamW takes over the state; then an optimizer of another kind follows."""
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
def restored_then_trained_plainly() -> None:
    """Bitwise equal to plain torch after the restore."""
    trial = plain_run(3)
    trial.accurate()
    net = fp8dist.restore(trial.net)
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
                p.mul_(0.25)  # A fresh net differs from the saved one.
        trial = Trial(net)
        fresh = trial.adamw(0.02)
        for what in order:
            if what == "attach":
                trial.manager.attach(optimizer=fresh)
            elif what == "weights":
                trial.net.load_state_dict(saved["weights"])
            elif what == "optimizer":
                fresh.load_state_dict(copy.deepcopy(saved["optimizer"]))  # Without the copy they would share tensors.
            elif folder is not None:
                trial.manager.load(folder / "fp8.safetensors")
            else:
                trial.manager.load_state_dict(saved["manager"])
        trial.train(fresh, 4, start=4)
        trial.right(8)
        assert trial.bits() == whole.bits(), order


@variants(first=["attach", "weights", "optimizer", "manager"])
def resumed_in_any_order(first: str) -> None:
    orders = [
        order for order in itertools.permutations(("attach", "weights", "optimizer", "manager")) if order[0] == first
    ]
    _resume(orders, None)
    with tempfile.TemporaryDirectory() as folder:
        _resume(orders[:1], Path(folder))

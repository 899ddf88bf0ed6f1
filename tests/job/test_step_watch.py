"""Optimizer steps without a boundary raise; nested, repeated and empty steps do not count.

Other loops that forget the boundary are in ``tests/support/mistaken_steps.py``.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer
from torch.optim import optimizer as optimizer_module

import fp8dist
from fp8dist import CurrentScaling, DelayedScaling
from fp8dist.errors import ConfigurationError
from tests.support.logs import captured_log
from tests.support.ranks import on_ranks
from tests.support.training import batch, make_net, parameter_bits


def _backward(net: nn.Module, index: int = 0) -> None:
    x, y = batch(0, index)
    nn.functional.mse_loss(net(x), y).backward()


@on_ranks(2)
def test_a_forgotten_attach_is_logged_once() -> None:
    net = make_net()
    with captured_log() as log:
        fp8dist.prepare(net, group=dist.group.WORLD)
        for index in range(2):
            _backward(net, index)
    (message,) = [message for _, message in log]
    assert "is trained, but attach() was not called" in message


def test_the_optimizer_of_a_deepspeed_engine_is_refused() -> None:
    """As Accelerate and Transformers would attach: it is stepped once for each group of parameters."""
    engine = type("DeepSpeedEngine", (nn.Module,), {})()
    engine.module = make_net()
    optimizer = SGD(engine.module.parameters(), lr=0.1)
    with pytest.raises(ConfigurationError, match=r"deepspeed\.attach\(manager, engine\)"):
        fp8dist.prepare(engine.module).attach(engine, optimizer=optimizer)


def test_a_second_step_before_a_manual_boundary_is_refused_before_it_changes_anything() -> None:
    net = make_net()
    manager = fp8dist.prepare(net)
    attached, other = SGD(net.parameters(), lr=0.1), AdamW([net.first.weight, net.last.weight], lr=0.1)
    manager.attach(net, optimizer=attached, boundary="manual")
    said = {
        attached: r"SGD is about to step 3 FP8 weights .* still\. With boundary=\"manual\", call",
        other: r"AdamW .* 2 FP8 weights \(first, last\)",
    }
    for optimizer, text in said.items():
        _backward(net)
        optimizer.step()
        before = parameter_bits(net)
        with pytest.raises(ConfigurationError, match=text + r".*manager\.step\(\)"):
            optimizer.step()
        assert parameter_bits(net) == before
        manager.step()


def test_what_needs_no_steps_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frozen or foreign parameters, recipes with just-in-time scales, and disabled FP8."""
    for recipe, enabled in ((CurrentScaling(), "1"), (DelayedScaling(), "0")):
        monkeypatch.setenv("FP8DIST_ENABLED", enabled)
        net = make_net()
        fp8dist.prepare(net, recipe)
        optimizer = SGD(net.parameters(), lr=0.1)
        for index in range(3):
            _backward(net, index)
            optimizer.step()
        fp8dist.restore(net)
    monkeypatch.delenv("FP8DIST_ENABLED")
    net = make_net()
    fp8dist.prepare(net).attach(net)
    biases = SGD([net.first.bias, net.last.bias], lr=0.1)
    for index in range(3):
        _backward(net, index)
        biases.step()


class Lookahead(Optimizer):
    """An optimizer that steps another optimizer, twice."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner
        super().__init__([p for group in inner.param_groups for p in group["params"]], {"lr": 0.5})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        before = [p.detach().clone() for group in self.param_groups for p in group["params"]]
        self.inner.step()
        self.inner.step()
        with torch.no_grad():
            for p, old in zip((p for group in self.param_groups for p in group["params"]), before):
                p.lerp_(old, 0.5)


class Wrapped(SGD):
    """A subclass that calls its parent's step, which has its own hooks once an SGD exists."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # From Dynamo's own imports.
@pytest.mark.parametrize("how", ["of a subclass", "compiled"])
def test_a_step_is_one_boundary_whatever_it_calls(how: str) -> None:
    """``tests/support/quiet_optimizers.py`` has optimizers that step others."""
    net = make_net()
    SGD(net.parameters(), lr=0.1)
    manager = fp8dist.prepare(net)
    optimizer = (Wrapped if how == "of a subclass" else SGD)(net.parameters(), lr=0.1)
    manager.attach(net, optimizer=optimizer)
    step: Any = torch.compile(optimizer.step, backend="eager") if how == "compiled" else optimizer.step
    for index in range(4):
        _backward(net, index)
        step()
        assert not any(linear.fp8_slots.note.written(linear) for linear in (net.first, net.branch, net.last))
    assert manager.steps == 4


def test_a_nested_step_without_a_boundary_is_refused_once() -> None:
    net = make_net()
    fp8dist.prepare(net).attach(net)
    outer = Lookahead(SGD(net.parameters(), lr=0.1))
    _backward(net)
    outer.step()  # Two nested steps of the same weights.
    with pytest.raises(ConfigurationError, match=r"^Lookahead is about to step 3 FP8 weights"):
        outer.step()


def test_a_step_that_raised_is_not_around_later_ones() -> None:
    """The outer step never ends in torch's hooks; later steps are checked as usual."""
    net = make_net()
    fp8dist.prepare(net).attach(net)
    optimizer = SGD(net.parameters(), lr=0.1)

    def closure() -> float:
        raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        Lookahead(optimizer).inner.step(closure)
    _backward(net)
    optimizer.step()
    with pytest.raises(ConfigurationError, match="a second time"):
        optimizer.step()


def test_a_step_with_a_learning_rate_of_0_is_no_boundary() -> None:
    net = make_net()
    manager = fp8dist.prepare(net)
    optimizer = AdamW([{"params": [net.first.weight], "lr": 0.0}, {"params": [net.last.weight], "lr": 0.0}])
    manager.attach(net, optimizer=optimizer)
    _backward(net)
    for _ in range(3):
        optimizer.step()
    assert manager.steps == 0
    optimizer.param_groups[0]["lr"] = torch.tensor(0.0)
    optimizer.step()
    assert manager.steps == 0
    optimizer.param_groups[1]["lr"] = 1e-3  # One group with a learning rate is enough.
    optimizer.step()
    assert manager.steps == 1
    # Earlier amaxes are not lost.
    assert manager.slot("first", "input").amax == batch(0, 0)[0].abs().max()


def test_a_step_inside_backward_needs_a_manual_boundary() -> None:
    net = make_net()
    manager = fp8dist.prepare(net)
    optimizers = {p: SGD([p], lr=0.1) for p in net.parameters()}
    for p in net.parameters():
        p.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
    manager.attach(net, optimizer=list(optimizers.values()))
    with pytest.raises(ConfigurationError, match=r'steps inside backward.*boundary="manual"'):
        _backward(net)
    manager.attach(net, optimizer=list(optimizers.values()), boundary="manual")
    for index in range(3):
        _backward(net, index)
        manager.step()
    assert manager.steps == 3


def test_a_step_that_a_scaler_skipped_on_the_device_is_not_counted() -> None:
    """torch calls a fused optimizer even for a skipped step. A step counts only if parameters change."""
    net = make_net()
    manager = fp8dist.prepare(net)
    optimizer = SGD(net.parameters(), lr=0.01, fused=True)
    manager.attach(net, optimizer=optimizer, boundary="manual")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for index in range(6):
        before = parameter_bits(net)
        x, y = batch(0, index)
        loss = nn.functional.mse_loss(net(x), y) * (float("inf") if index in (1, 2, 4) else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if parameter_bits(net) != before:
            manager.step()
    assert manager.steps == 3


def _warnings_of_attach(net: nn.Module, optimizer: Any) -> list[tuple[int, str]]:
    with captured_log() as log:
        fp8dist.prepare(net).attach(net, optimizer=optimizer)
    return [(level, text) for level, text in log if "attach(optimizer" in text]


def test_attach_names_trainable_weights_that_no_optimizer_holds() -> None:
    net = make_net()
    ((level, text),) = _warnings_of_attach(net, SGD([net.first.weight, *net.last.parameters()], lr=0.1))
    assert level == logging.WARNING
    assert "1 trainable FP8 weights are in none of the optimizers: branch." in text
    net = make_net()
    net.branch.weight.requires_grad_(False)
    assert _warnings_of_attach(net, SGD([net.first.weight, net.last.weight], lr=0.1)) == []
    net = make_net()  # Master copies.
    assert _warnings_of_attach(net, SGD([p.detach().clone() for p in net.parameters()], lr=0.1)) == []


def test_a_manager_may_die_while_an_optimizer_steps() -> None:
    """The manager's hooks are in a dict that torch iterates over at that time."""
    holder = [fp8dist.prepare(make_net())]
    net = make_net()
    manager = fp8dist.prepare(net)
    optimizer = SGD(net.parameters(), lr=0.1)
    manager.attach(net, optimizer=optimizer)
    global_hooks = optimizer_module._global_optimizer_pre_hooks
    handle = optimizer_module.register_optimizer_step_pre_hook(lambda *_: holder.clear())
    global_hooks.move_to_end(handle.id, last=False)
    try:
        _backward(net)
        optimizer.step()
    finally:
        handle.remove()
    assert manager.steps == 1
    count = len(global_hooks)
    kept = [fp8dist.prepare(make_net()) for _ in range(3)]
    assert len(global_hooks) <= count + len(kept)  # The dead manager's hooks are gone.


def test_an_optimizer_of_a_copy_of_the_model_is_told_of_at_its_fourth_step() -> None:
    net = make_net()
    others = [parameter.detach().clone().requires_grad_() for parameter in net.parameters()]
    optimizer = SGD(others, lr=0.1)
    manager = fp8dist.prepare(net)
    manager.attach(net, optimizer=optimizer)
    told = []
    for step in range(6):
        _backward(net, step)
        for other, parameter in zip(others, net.parameters()):
            other.grad, parameter.grad = parameter.grad, None
        with captured_log() as log:
            optimizer.step()
        told += [step for _, text in log if "has stepped 3 times, and the FP8 weights of" in text]
    assert told == [3]


@pytest.mark.slow
@on_ranks(2)
def test_one_rank_warns_for_all() -> None:
    net = make_net()
    manager = fp8dist.prepare(net, group=dist.group.WORLD)
    net.append = nn.Linear(32, 32)
    ddp = DistributedDataParallel(net, find_unused_parameters=True)
    optimizer = SGD(ddp.parameters(), lr=0.1)
    with captured_log() as log:
        manager.attach(ddp, optimizer=optimizer)
        optimizer.step()
        ddp.eval()
        for index in range(3):
            _backward(ddp, index)
            optimizer.step()
    said = ("came after prepare()", "no parameter has a gradient", "eval()") if dist.get_rank() == 0 else ()
    assert len(log) == len(said)
    assert all(expected in text for expected, (_, text) in zip(said, log))

"""All microbatches of a step share a weight's FP8 cast, and a cast is never used after the weight changes."""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import fp8dist
from fp8dist import DelayedScaling, StateManager
from fp8dist.errors import ConfigurationError
from fp8dist.modules.casters import Cast, Caster, Request
from fp8dist.modules.fp8_linear import FP8Linear
from tests.support.training import Net, batch, bits, gradient_bits, make_net, parameter_bits, state_bits

MICROBATCHES = 3
STEPS = 4
LINEARS = 3


class Wandering(torch.optim.Optimizer):
    """Calls its closure twice and moves the weights in between through ``.data``, which bumps no version."""

    def __init__(self, parameters: Iterator[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self, closure: Any = None) -> Any:
        for _ in range(2):
            loss = closure()
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data.sub_(group["lr"] * parameter.grad)
        return loss


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=0.02, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.02, foreach=False),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05),
    "SGD, fused": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
}
WITH_CLOSURE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=4),
    "moves weights within its step": lambda p: Wandering(p, lr=0.05),
    "SGD with closure": lambda p: torch.optim.SGD(p, lr=0.05, fused=True),
}


@dataclass
class Run:
    """All results that reuse must not change, and the number of weight casts."""

    losses: list[bytes] = field(default_factory=list)
    gradients: list[Any] = field(default_factory=list)
    parameters: dict[str, bytes] = field(default_factory=dict)
    state: dict[str, bytes] = field(default_factory=dict)
    casts: int = field(default=0, compare=False)


def count_weight_casts(net: nn.Module, patch: pytest.MonkeyPatch) -> list[int]:
    """Record the addresses of the weights that are cast from now on, in order."""
    addresses = {m.weight.data_ptr() for m in net.modules() if isinstance(m, FP8Linear)}
    seen: list[int] = []
    original = Caster.cast

    def cast(self: Caster, x: Tensor, request: Request) -> Cast:
        if x.data_ptr() in addresses:
            seen.append(x.data_ptr())
        return original(self, x, request)

    patch.setattr(Caster, "cast", cast)
    return seen


def train(make: Callable[[Any], torch.optim.Optimizer], reuse: bool, closure: bool, evaluate: bool = False) -> Run:
    net = make_net()
    manager = fp8dist.prepare(net, DelayedScaling(history_len=3))
    optimizer = make(net.parameters())
    manager.attach(net, optimizer=optimizer)
    if not reuse:  # Before every forward, regardless of hooks.
        net.register_forward_pre_hook(lambda *_: manager._job.invalidate_casts())
    run = Run()
    with pytest.MonkeyPatch.context() as patch:
        casts = count_weight_casts(net, patch)
        for step in range(STEPS):

            def backward(step: int = step) -> Tensor:
                optimizer.zero_grad()
                total = torch.zeros(())
                for micro in range(MICROBATCHES):
                    x, y = batch(0, MICROBATCHES * step + micro)
                    loss = nn.functional.mse_loss(net(x), y) / MICROBATCHES
                    loss.backward()
                    run.losses.append(bits(loss))
                    total += loss.detach()
                    if evaluate:
                        with torch.no_grad():
                            run.losses.append(bits(net(batch(1, step)[0])))
                run.gradients.append(gradient_bits(net))
                return total

            if closure:
                optimizer.step(backward)
            else:
                backward()
                optimizer.step()
        run.casts = len(casts)
    run.parameters, run.state = parameter_bits(net), state_bits(manager)
    assert manager.steps == STEPS
    return run


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_reused_casts_equal_fresh_ones(name: str) -> None:
    reused = train(OPTIMIZERS[name], reuse=True, closure=False)
    fresh = train(OPTIMIZERS[name], reuse=False, closure=False)
    assert reused == fresh
    assert len(set(reused.losses)) == STEPS * MICROBATCHES
    assert reused.casts == LINEARS * STEPS
    assert fresh.casts == LINEARS * STEPS * MICROBATCHES


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_CLOSURE)
def test_closures_see_fresh_casts(name: str) -> None:
    """The optimizer may move the weights between two calls of the closure."""
    assert train(WITH_CLOSURE[name], reuse=True, closure=True) == train(WITH_CLOSURE[name], reuse=False, closure=True)


@pytest.mark.parametrize("name", ["AdamW, fused", "SGD"])
def test_forwards_with_grad_off_in_between_change_nothing(name: str) -> None:
    """They cast each time, because swapping weights for an evaluation triggers no hook."""
    reused = train(OPTIMIZERS[name], reuse=True, closure=False, evaluate=True)
    assert reused == train(OPTIMIZERS[name], reuse=False, closure=False, evaluate=True)
    assert reused.casts == LINEARS * STEPS * (1 + MICROBATCHES)


def test_reuse_resumes_after_a_closure() -> None:
    net, manager, _ = attached()
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=2)
    manager.attach(net, optimizer=optimizer)
    x, _ = batch(0, 0)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    with pytest.MonkeyPatch.context() as patch:
        casts = count_weight_casts(net, patch)
        net(x)
        net(x)
    assert len(casts) == LINEARS


# Valid uses of a cast ------------------------------------------------------------------------------


def attached(**recipe: Any) -> tuple[Net, StateManager, torch.optim.Optimizer]:
    """Return a net whose weight casts are reused."""
    net = make_net()
    manager = fp8dist.prepare(net, DelayedScaling(history_len=3, **recipe))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=True)
    manager.attach(net, optimizer=optimizer)
    return net, manager, optimizer


def fresh_output(net: Net, manager: StateManager, x: Tensor) -> bytes:
    """Return the net's output without reusing a cast. Records nothing."""
    with torch.no_grad(), mock.patch.object(manager._job, "reuse_casts", False):
        return bits(net(x))


def test_nothing_is_reused_without_an_attached_optimizer() -> None:
    """Without an attached optimizer, changes of weights cannot be detected."""
    net = make_net()
    manager = fp8dist.prepare(net)
    manager.attach(net)
    x, _ = batch(0, 0)
    before = net(x)
    for linear in (net.first, net.branch, net.last):
        linear.weight.data.mul_(-1)
    assert not torch.equal(net(x), before)
    assert bits(net(x)) == fresh_output(net, manager, x)


def test_a_cast_without_its_transpose_does_not_serve_training() -> None:
    """A forward with grad off needs no transposed copy and records nothing; training after it needs both."""
    net, manager, _ = attached()
    twin, other, _ = attached()
    x, y = batch(0, 0)
    with torch.no_grad():
        net(x)
    for n in (net, twin):
        nn.functional.mse_loss(n(x), y).backward()
    assert gradient_bits(net) == gradient_bits(twin)
    (sync,), (other_sync,) = manager._syncs, other._syncs
    assert torch.equal(sync.arena.pending, other_sync.arena.pending)
    assert float(sync.arena.pending.min()) > 0


def test_a_cast_without_its_transpose_does_not_serve_a_later_backward() -> None:
    """The mode never changes, so that only the missing copy distinguishes the two casts."""
    for recording in (False, True):
        gradients = []
        for look_first in (False, True):
            net, manager, _ = attached()
            net.train(recording)
            with manager.recording() if recording else contextlib.nullcontext():
                x, y = batch(0, 0)
                if look_first:
                    with torch.no_grad():
                        net(x)
                nn.functional.mse_loss(net(x), y).backward()
            gradients.append(gradient_bits(net))
        assert gradients[0] == gradients[1]


def test_a_cast_of_an_evaluation_does_not_hide_the_amax_from_training() -> None:
    """eval() with grad on makes both copies and records nothing."""
    net, manager, _ = attached()
    for linear in (net.first, net.branch, net.last):  # A user's own switch, without Module.train().
        linear.training = False
    x, _ = batch(0, 0)
    net(x)
    for linear in (net.first, net.branch, net.last):
        linear.training = True
    net(x)
    (sync,) = manager._syncs
    recorded = {s.fqn for s, i in sync.arena.index.items() if s.role == "weight" and sync.arena.pending[i] > 0}
    assert recorded == {"first", "branch", "last"}


def weights(net: Net) -> list[nn.Parameter]:
    return [net.first.weight, net.branch.weight, net.last.weight]


def through_data(net: Net) -> None:
    for weight in weights(net):
        weight.data.mul_(3.0).add_(0.01)


def through_numpy(net: Net) -> None:
    for weight in weights(net):
        weight.detach().numpy()[:] *= -2.0


def test_writes_that_nothing_can_see_need_refresh_weights() -> None:
    for write in (through_data, through_numpy):
        net, manager, _ = attached()
        x, _ = batch(0, 0)
        before = bits(net(x))
        versions = [(w.data_ptr(), w._version) for w in weights(net)]
        write(net)
        assert [(w.data_ptr(), w._version) for w in weights(net)] == versions
        assert bits(net(x)) == before  # As documented: the write is not detected.
        manager.refresh_weights()
        after = bits(net(x))
        assert after == fresh_output(net, manager, x)
        assert after != before
        # The scales follow from the new weights alone.
        for name in ("first", "branch", "last"):
            weight = getattr(net, name).weight.detach()
            assert float(manager.slot(name, "weight").scale) == float(torch.tensor(448.0) / weight.abs().max())


def test_refresh_weights_forgets_what_other_weights_were_like() -> None:
    net, manager, optimizer = attached()
    x, _ = batch(0, 0)
    net(x).sum().backward()
    optimizer.step()
    inputs_before = manager.slot("first", "input").amax_history
    assert manager.slot("first", "weight").amax_history.count_nonzero() == 1
    through_data(net)
    manager.refresh_weights()
    assert manager.slot("first", "weight").amax_history.count_nonzero() == 0
    assert torch.equal(manager.slot("first", "input").amax_history, inputs_before)
    # The scale survives the next step: the window has only the new weights.
    amax = net.first.weight.detach().abs().max()
    net(x).sum().backward()
    optimizer.step()
    assert float(manager.slot("first", "weight").scale) == float(torch.tensor(448.0) / amax)


def other_weights() -> dict[str, Tensor]:
    return {name: value * 5 for name, value in make_net(seed=99).state_dict().items()}


def _load(net: Net, manager: StateManager) -> None:
    net.load_state_dict(other_weights())


def _load_and_refresh(net: Net, manager: StateManager) -> None:
    net.load_state_dict(other_weights())
    manager.refresh_weights()


def _load_and_train(net: Net, manager: StateManager) -> None:
    net.load_state_dict(other_weights())
    net.train()


def _load_and_assign(net: Net, manager: StateManager) -> None:
    net.load_state_dict(other_weights(), assign=True)


def _data_then_train(net: Net, manager: StateManager) -> None:
    through_data(net)
    net.train()


def _data_then_eval(net: Net, manager: StateManager) -> None:
    through_data(net)
    net.eval()


def _data_then_load_state(net: Net, manager: StateManager) -> None:
    through_data(net)
    manager.load_state_dict(manager.state_dict())


def _data_then_reset(net: Net, manager: StateManager) -> None:
    through_data(net)
    manager.reset()


def _data_then_boundary(net: Net, manager: StateManager) -> None:
    through_data(net)
    for parameter in net.parameters():
        parameter.grad = None
    hooks = manager._attachment._hooks
    assert hooks is not None
    optimizer = hooks._last()
    assert optimizer is not None
    optimizer.step()


def _scale(net: Net, manager: StateManager) -> None:
    manager.slot("first", "weight").set_scale(0.5)


EVENTS = [
    _load,
    _load_and_refresh,
    _load_and_train,
    _load_and_assign,
    _data_then_train,
    _data_then_eval,
    _data_then_load_state,
    _data_then_reset,
    _data_then_boundary,
    _scale,
]


def test_a_cast_dies_at() -> None:
    for event in EVENTS:
        net, manager, _optimizer = attached()  # Keep a reference: the manager holds the optimizer weakly.
        x, _ = batch(0, 0)
        before = bits(net(x))
        event(net, manager)
        after = bits(net(x))
        assert after == fresh_output(net, manager, x)
        assert after != before


def test_a_cast_dies_at_an_attached_optimizer_that_is_not_the_boundary() -> None:
    net = make_net()
    manager = fp8dist.prepare(net, DelayedScaling(history_len=3))
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0, fused=True)
    manager.attach(net, optimizer=optimizer, boundary="manual")
    x, _ = batch(0, 0)
    y = net(x)
    before = bits(y)
    y.sum().backward()
    optimizer.step()
    assert bits(net(x)) == fresh_output(net, manager, x) != before
    assert manager.steps == 0


@pytest.mark.parametrize("update", ["same_step", "next_step"])
def test_a_cast_dies_at_a_boundary_without_an_optimizer_step(update: str) -> None:
    """The weights do not change, but the commit changes their scale."""
    net = make_net()
    manager = fp8dist.prepare(net, DelayedScaling(history_len=3, update=update))  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    manager.attach(net, optimizer=optimizer, boundary="manual")
    manager.slot("first", "weight").set_scale(0.5)
    x, _ = batch(0, 0)
    before = bits(net(x))
    manager.step()
    assert bits(net(x)) == fresh_output(net, manager, x) != before


def test_a_copy_has_casts_of_its_own() -> None:
    net, manager, optimizer = attached()
    x, _ = batch(0, 0)
    before = net(x)
    twin = copy.deepcopy(net)
    other = fp8dist.get_manager(twin)
    through_data(twin)
    assert bits(twin(x)) == fresh_output(twin, other, x)
    assert torch.equal(net(x), before)
    net(x).sum().backward()
    optimizer.step()
    assert bits(net(x)) == fresh_output(net, manager, x)


def test_tied_weights_are_cast_anew_after_a_step() -> None:
    model = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False))
    model[1].weight = model[0].weight
    manager = fp8dist.prepare(model, DelayedScaling(history_len=3))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=True)
    manager.attach(model, optimizer=optimizer)
    x, _ = batch(0, 0)
    model(x).sum().backward()
    optimizer.step()
    after = bits(model(x))
    with mock.patch.object(manager._job, "reuse_casts", False):
        assert bits(model(x)) == after


# Weights that are replaced without any notice -------------------------------------------------------


def fresh_before_every_forward(module: nn.Module, job: Any) -> None:
    """Disable reuse, regardless of hooks."""
    module.register_forward_pre_hook(lambda *_: job.invalidate_casts())


def _recreated_optimizer(reuse: bool, keep_old: bool) -> Any:
    net, manager, old = attached()
    if not reuse:
        fresh_before_every_forward(net, manager._job)
    losses = []

    def steps(optimizer: torch.optim.Optimizer, count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            for micro in range(2):
                x, y = batch(0, micro)
                loss = nn.functional.mse_loss(net(x), y)
                loss.backward()
                losses.append(bits(loss))
            optimizer.step()

    steps(old, 2)
    kept = [old] if keep_old else []
    del old
    gc.collect()
    new = torch.optim.SGD(net.parameters(), lr=0.05, fused=True)  # A user's loop that forgets to attach it.
    steps(new, 1)
    with pytest.raises(ConfigurationError, match=r"SGD is about to step 3 FP8 weights .* a second time"):
        steps(new, 1)
    assert len(kept) == keep_old
    return losses, parameter_bits(net), state_bits(manager)


@pytest.mark.slow
@pytest.mark.parametrize("keep_old", [False, True])
def test_a_recreated_optimizer_that_was_not_attached(keep_old: bool) -> None:
    assert _recreated_optimizer(True, keep_old) == _recreated_optimizer(False, keep_old)


def _functional_calls(reuse: bool) -> Any:
    net, manager, optimizer = attached()
    if not reuse:
        fresh_before_every_forward(net, manager._job)
    losses = []
    for step in range(3):
        for micro in range(4):
            x, y = batch(0, 4 * step + micro)
            temporaries = {name: p * 0.7**micro for name, p in net.named_parameters()}
            loss = nn.functional.mse_loss(torch.func.functional_call(net, temporaries, (x,)), y)
            del temporaries
            loss.backward()
            losses.append(bits(loss))
            del loss
        optimizer.step()
        optimizer.zero_grad()
    return losses, parameter_bits(net), state_bits(manager)


def test_functional_call_with_temporaries_under_accumulation() -> None:
    """The next microbatch's temporary may have the same address and version as the last one's."""
    assert _functional_calls(True) == _functional_calls(False)


def _copied_part(reuse: bool) -> list[bytes]:
    net = nn.ModuleDict({"block": make_net()})
    manager = fp8dist.prepare(net, DelayedScaling(history_len=3))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=True)
    manager.attach(net, optimizer=optimizer)
    twin = copy.deepcopy(net["block"])
    if not reuse:
        fresh_before_every_forward(twin, twin.first.fp8_slots.job)
    losses = []
    for step in range(4):
        x, y = batch(0, step)
        loss = nn.functional.mse_loss(twin(x), y)
        loss.backward()
        losses.append(bits(loss))
        for parameter in twin.parameters():
            assert parameter.grad is not None
            parameter.data.sub_(parameter.grad, alpha=0.5)
            parameter.grad = None
    return losses


def test_a_copied_part_that_is_trained_by_hand() -> None:
    """A copy's modules are not notified when its weights change."""
    assert _copied_part(True) == _copied_part(False)


def test_weights_swapped_for_an_evaluation() -> None:
    """The usual EMA evaluation: copy in through ``.data``, evaluate, copy back."""
    for training in (False, True):
        net, manager, _ = attached()
        net.train(training)
        x, _ = batch(0, 0)
        kept = [p.detach().clone() for p in net.parameters()]
        with torch.no_grad():
            before = bits(net(x))
            for parameter, average in zip(net.parameters(), make_net(seed=99).parameters()):
                parameter.data.copy_(average)
            swapped = bits(net(x))
            assert swapped == fresh_output(net, manager, x) != before
            for parameter, own in zip(net.parameters(), kept):
                parameter.data.copy_(own)
            assert bits(net(x)) == before


def test_refresh_weights_between_backward_and_boundary() -> None:
    """Amaxes of the old weights since the last boundary are dropped too."""
    for forward_again in (False, True):
        net, manager, optimizer = attached()
        for group in optimizer.param_groups:
            group["lr"] = 1e-30  # Changes nothing; a step with 0 would not count.
        x, _ = batch(0, 0)
        net(x).sum().backward()
        for weight in weights(net):
            weight.data.mul_(1e-3)
        manager.refresh_weights()
        if forward_again:
            net(x).sum().backward()
        optimizer.step()
        for name in ("first", "branch", "last"):
            amax = getattr(net, name).weight.detach().abs().max()
            expected = [0.0, 0.0, float(amax) if forward_again else 0.0]
            assert manager.slot(name, "weight").amax_history.tolist() == expected
            assert float(manager.slot(name, "weight").scale) == float(torch.tensor(448.0) / amax)
            assert manager.slot(name, "input").amax_history.count_nonzero() == 1

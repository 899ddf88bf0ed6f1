"""All microbatches of a step share a weight's FP8 cast, and a cast is never used after the weight changes."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fp8dist
from fp8dist import DelayedScaling
from tests.support.linear import watched_casts
from tests.support.training import batch, bits, gradient_bits, make_net, parameter_bits, state_bits

MICROBATCHES = 3
STEPS = 4
NAMES = ("first", "branch", "last")

Optimizer = torch.optim.Optimizer


class Job:
    """A net whose weight casts are reused, or made anew before every forward."""

    def __init__(self, reuse: bool = True, make: Callable[[Any], Optimizer] | None = None, **options: Any) -> None:
        self.net, self.reuse = make_net(), reuse
        self.manager = fp8dist.prepare(self.net, DelayedScaling(history_len=3, **options.pop("recipe", {})))
        self.optimizer = (make or fused_sgd)(self.net.parameters())
        self.manager.attach(self.net, optimizer=self.optimizer, **options)
        self.cast_anew(self.net, self.manager._job)
        self.seen: list[Any] = []
        self.x, _ = batch(0, 0)

    def cast_anew(self, module: nn.Module, job: Any) -> None:
        """Unless casts are reused: make none of this module outlive a forward, regardless of hooks."""
        if not self.reuse:
            module.register_forward_pre_hook(lambda *_: job.invalidate_casts())

    def backward(self, index: int) -> Tensor:
        x, y = batch(0, index)
        loss = nn.functional.mse_loss(self.net(x), y)
        loss.backward()
        self.seen.append(bits(loss))
        return loss.detach()

    def end(self) -> None:
        self.seen.append(gradient_bits(self.net))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def output(self) -> bytes:
        return bits(self.net(self.x))

    def fresh_output(self) -> bytes:
        """Return the net's output without reusing a cast. Records nothing."""
        with torch.no_grad(), mock.patch.object(self.manager._job, "reuse_casts", False):
            return self.output()

    def weights(self) -> list[nn.Parameter]:
        return [getattr(self.net, name).weight for name in NAMES]


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


def fused_sgd(parameters: Any) -> Optimizer:
    """It changes weights without bumping their versions."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, fused=True)


def plainly(job: Job, evaluates: bool = False) -> None:
    for number in range(STEPS):
        for micro in range(MICROBATCHES):
            job.backward(MICROBATCHES * number + micro)
            if evaluates:
                with torch.no_grad():
                    job.seen.append(bits(job.net(batch(1, number)[0])))
        job.end()


def evaluating(job: Job) -> None:
    """A forward with grad off casts each time, because swapping weights for an evaluation triggers no hook."""
    plainly(job, evaluates=True)


def by_closure(job: Job) -> None:
    """The optimizer may move the weights between two calls of the closure."""

    def closure() -> Tensor:
        job.optimizer.zero_grad()
        return sum((job.backward(micro) for micro in range(MICROBATCHES)), torch.zeros(()))

    for _ in range(STEPS):
        job.optimizer.step(closure)
    with watched_casts() as seen:
        job.output()
        job.output()
    assert len(seen) == len(NAMES) * (1 if job.reuse else 2), "reuse resumes after a closure"


def with_temporaries(job: Job) -> None:
    """The next microbatch's temporary may have the same address and version as the last one's."""
    for number in range(STEPS):
        for micro in range(MICROBATCHES):
            x, y = batch(0, MICROBATCHES * number + micro)
            temporaries = {name: p * 0.7**micro for name, p in job.net.named_parameters()}
            loss = nn.functional.mse_loss(torch.func.functional_call(job.net, temporaries, (x,)), y)
            del temporaries
            loss.backward()
            job.seen.append(bits(loss))
            del loss
        job.end()


def with_a_copied_part(job: Job) -> None:
    """A copy's modules are not notified when its weights change."""
    twin = copy.deepcopy(job.net.first)
    job.cast_anew(twin, twin.fp8_slots.job)
    for number in range(STEPS):
        loss = twin(batch(0, number)[0]).square().mean()
        loss.backward()
        job.seen.append(bits(loss))
        for parameter in twin.parameters():
            assert parameter.grad is not None
            parameter.data.sub_(parameter.grad, alpha=0.5)
            parameter.grad = None


@pytest.mark.parametrize(
    ("loop", "make", "casts"),
    [
        (plainly, fused_sgd, STEPS),
        (evaluating, lambda p: torch.optim.SGD(p, lr=0.05), STEPS * (1 + MICROBATCHES)),
        (by_closure, lambda p: Wandering(p, lr=0.05), None),
        *((loop, fused_sgd, None) for loop in (with_temporaries, with_a_copied_part)),
    ],
)
def test_reused_casts_equal_fresh_ones(loop: Callable[[Job], None], make: Any, casts: int | None) -> None:
    """``casts``: of each weight."""
    outcomes, counts = [], []
    for reuse in (True, False):
        job = Job(reuse, make)
        with watched_casts() as seen:
            loop(job)
        counts.append(len(seen) / len(NAMES))
        outcomes.append((job.seen, parameter_bits(job.net), state_bits(job.manager)))
    assert outcomes[0] == outcomes[1]
    if casts is not None:
        assert counts[0] == casts
    if loop is plainly:
        assert counts[1] == STEPS * MICROBATCHES


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("recording", [True, False])
@pytest.mark.parametrize("grad", [True, False])
def test_a_look_before_the_training_changes_no_gradient_and_no_amax(
    training: bool, recording: bool, grad: bool
) -> None:
    """A forward with grad off makes no transposed copy, one in eval records nothing: training needs both. With the
    same mode before and after, only the missing copy distinguishes the two casts."""
    outcomes = []
    for looks in (False, True):
        job = Job()
        with job.manager.recording() if recording else contextlib.nullcontext():
            for name in NAMES:  # A user's own switch, without Module.train(), which drops the casts.
                getattr(job.net, name).training = training
            if looks:
                with torch.set_grad_enabled(grad):
                    job.output()
            if not recording:
                for name in NAMES:
                    getattr(job.net, name).training = True
            job.backward(0)
        outcomes.append((gradient_bits(job.net), job.manager._syncs[0].arena.pending.tolist()))
    assert outcomes[0] == outcomes[1]
    assert min(outcomes[0][1]) > 0


def through_data(job: Job) -> None:
    for weight in job.weights():
        weight.data.mul_(3.0).add_(0.01)


@pytest.mark.parametrize("forward_again", [False, True])
@pytest.mark.parametrize("stepped", [False, True])
def test_refresh_weights_forgets_what_other_weights_were_like(forward_again: bool, stepped: bool) -> None:
    """In the window, and since the last boundary. ``stepped``: a boundary comes before the refresh, too."""
    job = Job(make=lambda p: torch.optim.SGD(p, lr=1e-30))  # Changes nothing; a step with 0 would not count.
    if stepped:
        job.backward(0)
        job.end()
        assert job.manager.slot("first", "weight").amax_history.count_nonzero() == 1
    job.backward(0)
    for weight in job.weights():
        weight.data.mul_(1e-3)
    job.manager.refresh_weights()
    if forward_again:
        job.backward(0)
    job.optimizer.step()
    for name in NAMES:
        amax = float(getattr(job.net, name).weight.detach().abs().max()) if forward_again else 0.0
        assert job.manager.slot(name, "weight").amax_history.tolist() == [0.0, 0.0, amax]
        scale = torch.tensor(448.0) / getattr(job.net, name).weight.detach().abs().max()
        assert float(job.manager.slot(name, "weight").scale) == float(scale)
        assert job.manager.slot(name, "input").amax_history.count_nonzero() == 1 + stepped


def load(job: Job, assign: bool = False) -> None:
    other = {name: value * 5 for name, value in make_net(seed=99).state_dict().items()}
    job.net.load_state_dict(other, assign=assign)


def step_of_nothing(job: Job) -> None:
    for parameter in job.net.parameters():
        parameter.grad = None
    job.optimizer.step()


def unattached(job: Job) -> None:
    """Without an attached optimizer, changes of weights cannot be detected."""
    job.manager.detach()
    job.manager.attach(job.net)
    job.output()
    through_data(job)


EVENTS: dict[str, tuple[Callable[[Job], object], Callable[[Job], object]]] = {
    "load": (load, lambda job: None),
    "load, refresh": (load, lambda job: job.manager.refresh_weights()),
    "load, train": (load, lambda job: job.net.train()),
    "assign": (lambda job: load(job, assign=True), lambda job: None),
    "train": (through_data, lambda job: job.net.train()),
    "eval": (through_data, lambda job: job.net.eval()),
    "load state": (through_data, lambda job: job.manager.load_state_dict(job.manager.state_dict())),
    "reset": (through_data, lambda job: job.manager.reset()),
    "refresh": (through_data, lambda job: job.manager.refresh_weights()),
    "boundary": (through_data, step_of_nothing),
    "scale": (lambda job: None, lambda job: job.manager.slot("first", "weight").set_scale(0.5)),
    "no optimizer": (unattached, lambda job: None),
}


@pytest.mark.parametrize("event", EVENTS)
def test_a_cast_dies_at(event: str) -> None:
    job = Job()
    before = job.output()
    write, happens = EVENTS[event]
    write(job)
    assert write is not through_data or job.output() == before, "nothing can see this write"
    happens(job)
    assert job.output() == job.fresh_output() != before


@pytest.mark.parametrize("update", ["same_step", "next_step"])
def test_with_manual_boundaries_a_cast_dies_at_the_optimizers_step_and_at_the_boundary(update: str) -> None:
    """The step changes the weights. The boundary does not, but its commit changes their scales."""
    job = Job(boundary="manual", recipe={"update": update})
    before = job.output()
    job.backward(0)
    job.optimizer.step()
    assert job.output() == job.fresh_output() != before
    assert job.manager.steps == 0
    job.manager.slot("first", "weight").set_scale(0.5)
    before = job.output()
    job.manager.step()
    assert job.output() == job.fresh_output() != before


@pytest.mark.parametrize("between", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_forward_is_repeated_after_its_precision_has_changed(reentrant: bool, between: bool) -> None:
    """The repetition casts the weight for fewer GEMMs than other microbatches of the step need, before and after."""

    def gradients(reuse: bool) -> Any:
        job = Job(reuse)
        plainly(job)
        x = batch(0, 0)[0].requires_grad_()
        job.manager.set_precision("*", "high", gemms=("dgrad",))
        output = checkpoint(job.net, x, use_reentrant=reentrant)
        job.manager.set_precision("*", "fp8")
        other = job.net(x) if between else None
        output.sum().backward()
        (job.net(x) if other is None else other).sum().backward()
        return gradient_bits(job.net)

    assert gradients(True) == gradients(False)

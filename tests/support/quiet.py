"""Correct programs must be silent and accurate: both words, a net that judges each of its forwards, and training loops.

Silent: no exception, no log record from WARNING up, no Python warning. Accurate: each forward is within 8 % of plain
torch in float32 with the current weights of the prepared net, which shares no code with fp8dist; steps match the
optimizer's, and results are bitwise those of the equivalent program, if there is one. The programs are the tables of
``quiet_*.py``.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import SGD, AdamW

import fp8dist
import fp8dist_kernels
from fp8dist import DelayedScaling, StateManager
from tests.support.logs import captured_log
from tests.support.training import bits

HISTORY = 16
STEPS = 6

TOLERANCE = 0.08
"""Relative to the norm of an output. Two Linears with E4M3 inputs and weights (rounded to 1/16) are 4 to 5 % off."""

Part = Callable[["Trial", int], Any]
"""A part of a loop: a function of the trial and of the step's index."""
Ran = Callable[[str, str], bool]
"""Whether the slot of a module and role took part."""

SOURCES = tuple(str(Path(str(package.__file__)).parent) for package in (fp8dist, fp8dist_kernels))


@contextlib.contextmanager
def silence(allowed: str | None = None) -> Iterator[None]:
    """Fail if fp8dist logs a warning or worse, or issues a Python warning. Ignores other libraries.

    ``allowed``: one line that contains this text is allowed.
    """
    with captured_log() as log, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        yield
    told = [message for _, message in log]
    if allowed is not None:
        assert len(told) == 1, f"logged: {told}"
        assert allowed in told.pop()
    assert not told, f"logged: {told}"
    ours = [str(w.message) for w in seen if w.filename.startswith(SOURCES) or "fp8" in str(w.message).lower()]
    assert not ours, f"warned: {ours}"


def mlp(*sizes: int, norm: bool = False) -> nn.Sequential:
    """Two Linears, 32 → 64 → 16 by default, with a ReLU (and a BatchNorm) between them. The weights are fixed."""
    first, middle, last = sizes or (32, 64, 16)
    torch.manual_seed(0)
    between = [nn.BatchNorm1d(middle)] if norm else []
    return nn.Sequential(nn.Linear(first, middle), *between, nn.ReLU(), nn.Linear(middle, last))


def batch(index: int, rank: int = 0) -> tuple[Tensor, Tensor]:
    """Return (x [16, 32], y [16, 16]): four batches per rank in turn, so amaxes stay within the history's."""
    generator = torch.Generator().manual_seed(100 * rank + index % 4)
    return torch.randn(16, 32, generator=generator), torch.randn(16, 16, generator=generator)


def off(output: Tensor, expected: Tensor) -> float:
    """Return the relative error by norms."""
    return float((output.detach().float() - expected).norm() / expected.norm())


def judge(net: nn.Module, twin: nn.Module, errors: list[float]) -> None:
    """Compare each forward of ``net``, and of its deep copies, with a forward of ``twin`` with the same weights."""

    def compare(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        for mine, theirs in zip(twin.modules(), module.modules()):
            mine.training = theirs.training
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        with torch.no_grad():
            same = {name: t.detach().clone() for name, t in tensors.items()}  # BatchNorm writes to its buffers.
            same = {name: t.float() if t.is_floating_point() else t for name, t in same.items()}
            expected = functional_call(twin, same, tuple(x.detach().float() for x in args))
            errors.append(off(output, expected))

    net.register_forward_hook(compare)


class Trial:
    """A prepared net, its plain twin, and the errors of its forwards.

    ``wrap``: returns the net that the loop calls, as DDP; then all ranks share the state, and each has its own batches.
    """

    def __init__(
        self,
        net: nn.Module | None = None,
        recipe: Any = None,
        *,
        judged: bool = True,
        wrap: Callable[[nn.Module], Any] | None = None,
        **settings: Any,
    ) -> None:
        self.net: Any = mlp() if net is None else net
        self.twin = copy.deepcopy(self.net).float()
        self.errors: list[float] = []
        self.optimizers: list[Any] = []
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        if wrap is not None:
            settings = {"group": dist.group.WORLD, **settings}
        recipe = DelayedScaling(history_len=HISTORY) if recipe is None else recipe
        self.manager: StateManager = fp8dist.prepare(self.net, recipe, **settings)
        if judged:
            judge(self.net, self.twin, self.errors)
        self.called = self.net if wrap is None else wrap(self.net)

    @property
    def optimizer(self) -> Any:
        return self.optimizers[0]

    def parameters(self) -> list[nn.Parameter]:
        return list(self.net.parameters())

    def adamw(self, lr: float = 0.01, **options: Any) -> AdamW:
        return AdamW(self.parameters(), lr=lr, **options)

    def sgd(self, lr: float = 0.1, **options: Any) -> SGD:
        return SGD(self.parameters(), lr=lr, **options)

    def attach(self, *optimizers: Any, **options: Any) -> None:
        """Attach what the loop calls. Without optimizers, the loop marks the boundaries."""
        called = (self.called,) if self.called is not self.net else ()
        options |= {"optimizer": list(optimizers)} if optimizers else {"boundary": "manual"}
        self.manager.attach(*called, **options)

    def backward(self, index: int, times: float = 1.0, net: nn.Module | None = None) -> Tensor:
        """Run forward and backward of one batch."""
        x, y = batch(index, self.rank)
        output = (self.called if net is None else net)(x.to(next(self.net.parameters()).dtype))
        loss = nn.functional.mse_loss(output.float(), y) * times
        loss.backward()
        return loss.detach()

    def train(self, optimizer: Any, steps: int, start: int = 0, net: nn.Module | None = None) -> None:
        """Run the simplest training loop."""
        for index in range(start, start + steps):
            self.backward(index, net=net)
            take(optimizer)

    def evaluate(self, net: nn.Module | None = None) -> None:
        """Run a forward without gradients, in the net's current mode."""
        with torch.no_grad():
            (self.net if net is None else net)(batch(1)[0].to(next(self.net.parameters()).dtype))

    def compare(self, output: Tensor, x: Tensor, weights: Mapping[str, Tensor] | None = None) -> None:
        """Compare an output with that of the plain net, with the current weights or those that are given."""
        with torch.no_grad():
            plain = functional_call(self.twin, dict(self.net.named_parameters() if weights is None else weights), x)
            self.errors.append(off(output, plain))

    def accurate(self) -> None:
        """Assert that each forward was close to its reference."""
        assert self.errors, "no forward was compared"
        assert max(self.errors) < TOLERANCE, [round(error, 3) for error in self.errors]

    def right(self, steps: int, ran: Ran = lambda fqn, role: True) -> None:
        """Assert that forwards were accurate, and that each slot that ``ran`` took part in each of ``steps`` steps."""
        self.evaluate()
        self.accurate()
        state_is_right(self.manager, steps, ran)

    def bits(self) -> dict[str, Any]:
        """Return weights and FP8 state, exactly."""
        return {**weight_bits(self.net), **fp8_bits(self.manager)}


def take(*optimizers: Any) -> None:
    """Take a step with each of the optimizers."""
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def take_all(trial: Trial, index: int) -> None:
    take(*trial.optimizers)


def boundary(trial: Trial, index: int) -> None:
    trial.manager.step()


def nothing(trial: Trial, index: int) -> None:
    pass


def microbatches(count: int) -> Part:
    """Return the forwards and backwards of a step of so many microbatches."""

    def backward(trial: Trial, index: int) -> None:
        for micro in range(count):
            trial.backward(index * count + micro, 1 / count)

    return backward


@dataclass(frozen=True, kw_only=True)
class Loop:
    """A training loop that is silent and right. Its parts are functions of the trial and of the step's index.

    ``make``: makes the optimizer, or several. ``attach``: attaches the manager; ``manual``: without an optimizer, and
    each step ends with ``manager.step()``. ``schedule``: makes the first optimizer's scheduler. ``counted``: how many
    steps the manager counts, by default all. ``ran``: whether the slot of this module and role took part in each.
    ``same``: a loop with the same weights and FP8 state in the end, bit by bit.
    """

    net: Callable[[], nn.Module] = mlp
    prepared: Mapping[str, Any] = field(default_factory=dict)
    make: Callable[[Trial], Any] = Trial.adamw
    attach: Callable[[Trial], Any] = lambda trial: trial.attach(*trial.optimizers)
    manual: bool = False
    schedule: Callable[[Any], Any] | None = None
    backward: Part = Trial.backward
    step: Part = take_all
    after: Part = nothing
    steps: int = STEPS
    counted: int | None = None
    ran: Ran = lambda fqn, role: True
    same: Loop | None = None

    def run(self) -> Trial:
        trial = Trial(self.net(), **self.prepared)
        made = self.make(trial)
        trial.optimizers = made if isinstance(made, list) else [made]
        trial.attach() if self.manual else self.attach(trial)
        schedule = self.schedule and self.schedule(trial.optimizer)
        for index in range(self.steps):
            self.backward(trial, index)
            self.step(trial, index)
            if self.manual:
                trial.manager.step()
            if schedule is not None:
                schedule.step()
            self.after(trial, index)
        trial.evaluate()
        return trial

    def __call__(self) -> Any:
        """Return what must be equal on all ranks."""
        trial = self.run()
        trial.accurate()
        state_is_right(trial.manager, self.steps if self.counted is None else self.counted, self.ran)
        if self.same is not None:
            assert trial.bits() == self.same.run().bits()
        return trial.bits()


PLAIN = Loop()


def attached(net: nn.Module | None = None, make: Callable[[Trial], Any] = Trial.adamw, **options: Any) -> Any:
    """Return a trial and its optimizer, attached."""
    trial = Trial(net, **options)
    trial.optimizers = [make(trial)]
    trial.attach(trial.optimizer)
    return trial, trial.optimizer


def state_is_right(manager: StateManager, steps: int, ran: Ran = lambda fqn, role: True) -> None:
    """Assert ``steps`` steps, that slots that ran are hot and took part in each, and that no amax was NaN or
    infinite."""
    assert manager.steps == steps
    assert manager.metrics()["fp8/nonfinite_amaxes"] == 0
    for slot in manager.slots:
        if ran(slot.fqn, slot.role) and manager.slot(*slot).recipe.delayed:
            filled = int((manager.slot(slot.fqn, slot.role).amax_history > 0).sum())
            assert filled == min(steps, HISTORY), f"{slot}: {filled} of {steps} steps"
            assert float(manager.slot(slot.fqn, slot.role).scale) != 1.0 or steps == 0, f"{slot} has no scale"


def weight_bits(net: nn.Module) -> dict[str, Any]:
    """Return parameters and buffers, exactly."""
    tensors = [*net.named_parameters(), *net.named_buffers()]
    return {name: bits(t.full_tensor() if hasattr(t, "full_tensor") else t) for name, t in tensors}


def fp8_bits(manager: StateManager) -> dict[str, Any]:
    """Return steps, scales and histories, exactly."""
    state: dict[str, Any] = {"steps": manager.steps}
    for slot in manager.slots:
        name = f"{slot.fqn}:{slot.role}"
        state[f"{name} scale"] = float(manager.slot(slot.fqn, slot.role).scale)
        state[f"{name} window"] = manager.slot(slot.fqn, slot.role).amax_history.tolist()
    return state

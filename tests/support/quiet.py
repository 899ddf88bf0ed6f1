"""Correct programs must be silent and accurate: defines both, and provides a net that judges each of its forwards.

The reference is plain torch in float32, with the current weights of the prepared net. It shares no code with fp8dist.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import AdamW
from torch.optim.optimizer import Optimizer

import fp8dist
import fp8dist_kernels
from fp8dist import DelayedScaling, StateManager
from tests.support.logs import captured_log
from tests.support.training import bits

HISTORY = 16
STEPS = 6

TOLERANCE = 0.08
"""Relative to the norm of an output. Two Linears with E4M3 inputs and weights (rounded to 1/16) are 4 to 5 % off."""

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
    """A prepared net, its plain twin, and the errors of its forwards."""

    def __init__(
        self, net: nn.Module | None = None, recipe: Any = None, *, judged: bool = True, **settings: Any
    ) -> None:
        self.net: Any = mlp() if net is None else net
        self.twin = copy.deepcopy(self.net).float()
        self.errors: list[float] = []
        recipe = DelayedScaling(history_len=HISTORY) if recipe is None else recipe
        self.manager: StateManager = fp8dist.prepare(self.net, recipe, **settings)
        if judged:
            judge(self.net, self.twin, self.errors)

    def parameters(self) -> list[nn.Parameter]:
        return list(self.net.parameters())

    def adamw(self, lr: float = 0.01, **options: Any) -> torch.optim.AdamW:
        return torch.optim.AdamW(self.net.parameters(), lr=lr, **options)

    def sgd(self, lr: float = 0.1, **options: Any) -> torch.optim.SGD:
        return torch.optim.SGD(self.net.parameters(), lr=lr, **options)

    def backward(self, index: int, rank: int = 0, times: float = 1.0, net: nn.Module | None = None) -> Tensor:
        """Run forward and backward of one batch."""
        x, y = batch(index, rank)
        output = (self.net if net is None else net)(x.to(next(self.net.parameters()).dtype))
        loss = nn.functional.mse_loss(output.float(), y) * times
        loss.backward()
        return loss.detach()

    def train(
        self,
        optimizer: Any,
        steps: int,
        start: int = 0,
        net: nn.Module | None = None,
        rank: int = 0,
        after: Callable[[], Any] | None = None,
    ) -> None:
        """Run the simplest training loop. ``after``: called after each step."""
        for index in range(start, start + steps):
            self.backward(index, rank, net=net)
            take(optimizer)
            if after is not None:
                after()

    def evaluate(self, net: nn.Module | None = None) -> None:
        """Run a forward without gradients, in the net's current mode."""
        with torch.no_grad():
            (self.net if net is None else net)(batch(1)[0].to(next(self.net.parameters()).dtype))

    def accurate(self) -> None:
        """Assert that each forward was close to its reference."""
        assert self.errors, "no forward was compared"
        assert max(self.errors) < TOLERANCE, [round(error, 3) for error in self.errors]

    def right(self, steps: int, ran: Callable[[str, str], bool] = lambda fqn, role: True) -> None:
        """Assert that forwards were accurate, and that each slot that ``ran`` took part in each of ``steps`` steps."""
        self.evaluate()
        self.accurate()
        state_is_right(self.manager, steps, ran)

    def bits(self) -> dict[str, Any]:
        """Return weights and FP8 state, exactly."""
        return {**weight_bits(self.net), **fp8_bits(self.manager)}


def attached(net: nn.Module | None = None, make: Any = Trial.adamw, **options: Any) -> tuple[Trial, Any]:
    """Return a trial and its optimizer, attached. ``make``: the optimizer's function of the trial."""
    trial = Trial(net, **options)
    optimizer = make(trial)
    trial.manager.attach(optimizer=optimizer)
    return trial, optimizer


def take(*optimizers: Any) -> None:
    """Take a step with each of the optimizers."""
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def state_is_right(manager: StateManager, steps: int, ran: Callable[[str, str], bool] = lambda fqn, role: True) -> None:
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


def plain_run(steps: int, make: Callable[[Any], Optimizer] = lambda p: AdamW(p, lr=0.01), net: Any = None) -> Trial:
    """Run the simplest program: one optimizer, attached."""
    trial, optimizer = attached(net, lambda trial: make(trial.net.parameters()))
    trial.train(optimizer, steps)
    return trial


def done(trial: Trial) -> Trial:
    """Run the forward that ``right`` runs."""
    trial.evaluate()
    return trial


def plain_forward(trial: Trial, x: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.func.functional_call(trial.twin, dict(trial.net.named_parameters()), x)

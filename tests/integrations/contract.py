"""What a trainer's file hands to ``test_contract.py``, and the clauses that trainers share."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fp8dist
from fp8dist.errors import DivergenceError
from fp8dist.state.groups import local_part

__all__ = [
    "STEPS",
    "WIDTH",
    "Adapter",
    "ByHand",
    "Job",
    "Kept",
    "Ours",
    "Trainee",
    "as_torchrun_starts_it",
    "batch",
    "diverged",
    "kept_of",
    "mlp",
    "needs",
    "play",
    "require_masters",
    "resumed",
    "same",
    "undisturbed",
]

STEPS, WIDTH = 20, 32

Kept = tuple[dict[str, bytes], list[Tensor]]
"""FP8 state and this rank's parameters."""


def same(a: Kept, b: Kept) -> bool:
    """Return True if all bits are equal."""
    return a[0] == b[0] and all(torch.equal(x, y) for x, y in zip(a[1], b[1], strict=True))


def kept_of(manager: Any, model: nn.Module) -> Kept:
    """Return what must be equal to the last bit, of a model that may be sharded."""
    return manager.state_dict(), [local_part(p.detach()).clone() for p in model.parameters()]


def needs(package: str, how_long: pytest.MarkDecorator = pytest.mark.long) -> list[pytest.MarkDecorator]:
    """Return the marks of tests in the real trainer."""
    missing = importlib.util.find_spec(package) is None
    return [pytest.mark.skipif(missing, reason=f"{package} is not installed"), how_long]


class Ours:
    """``fp8dist.integrations.STACK``. It needs its trainer, so it is imported when a name of it is used."""

    def __init__(self, stack: str) -> None:
        self._module = f"fp8dist.integrations.{stack}"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # As pytest asks for.
            raise AttributeError(name)
        return getattr(importlib.import_module(self._module), name)


def mlp() -> nn.Module:
    """Return the model of trainers that take any, always with the same weights."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))


def batch(place: int) -> Tensor:
    """Return this rank's batch of this number, [8, WIDTH]."""
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(10 * place + dist.get_rank()))


def as_torchrun_starts_it() -> None:
    """Set torchrun's variables, and forget Accelerate's state of an earlier test."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    rank = str(dist.get_rank())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=str(dist.get_world_size()))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")  # The group exists: nobody connects.


class Trainee:
    """A model in a loop of the user. ``model``: what a forward calls."""

    manager: Any
    model: Any

    def train(self, places: Iterable[int]) -> list[float]:
        """Train with these batches, and return this rank's losses. COLLECTIVE."""
        raise NotImplementedError

    def forward(self, place: int) -> Any:
        """Run the model on this batch. COLLECTIVE."""
        return self.model(batch(place))

    def parameters(self) -> list[Tensor]:
        """Return copies of this rank's parameters."""
        return kept_of(self.manager, self.model)[1]

    def kept(self) -> Kept:
        """Return what must be equal to the last bit."""
        return self.manager.state_dict(), self.parameters()


class ByHand(Trainee):
    """The model that the real trainer has, in DDP and a plain loop.

    Args:
        prefix: of the names of its modules.
        reduces_each: reduce the gradients of each micro-batch, and add the means.
        model: in place of ``mlp``'s.
    """

    def __init__(
        self, accumulate: int = 1, prefix: str = "", reduces_each: bool = False, model: nn.Module | None = None
    ) -> None:
        model = mlp() if model is None else model
        model = nn.Sequential(OrderedDict({prefix: model})) if prefix else model
        self.manager, self.accumulate = fp8dist.prepare(model, group=dist.group.WORLD), accumulate
        self.model = nn.parallel.DistributedDataParallel(model)
        self.sums = [torch.zeros_like(p) for p in model.parameters()] if reduces_each else []
        self.begin()

    def begin(self) -> None:
        """Go on with another optimizer. COLLECTIVE."""
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.manager.attach(self.model, optimizer=self.optimizer)

    def train(self, places: Iterable[int]) -> list[float]:
        losses = []
        for place in places:
            last = (place + 1) % self.accumulate == 0
            self.model.require_backward_grad_sync = last or bool(self.sums)
            loss = self.forward(place).square().mean()
            losses.append(loss.item())
            (loss / self.accumulate).backward()
            for parameter, whole in zip(self.model.parameters(), self.sums):
                whole += parameter.grad
                parameter.grad = whole.clone() if last else None
                whole *= not last
            if last:
                self.optimizer.step()
                self.optimizer.zero_grad()
        return losses


def play(
    generator: Any, judge: Any, optimizers: Any, backward: Callable[[Tensor], Any], x: Tensor, real: Tensor
) -> None:
    """Take a step of a GAN."""
    fake = generator(x)
    optimizers[1].zero_grad()
    backward(judge(fake.detach()).mean() - judge(real).mean())
    optimizers[1].step()
    optimizers[0].zero_grad()
    backward(-judge(fake).mean())
    optimizers[0].step()


# Clauses of trainers whose loop is the user's: they take functions that start one -------------------


def resumed(start: Callable[[], Trainee], save: Callable[[Trainee], Any], load: Callable[[Trainee], Any]) -> None:
    """Compare a run with one that is resumed after step 5."""
    whole = start()
    whole.train(range(5))
    save(whole)
    whole.train(range(5, 10))
    again = start()
    load(again)
    again.train(range(5, 10))
    assert same(whole.kept(), again.kept())


def diverged(trainee: Trainee, damage: Callable[[Trainee], Any]) -> str:
    """Return the error after rank 1 was damaged. The ranks are compared every second step."""
    trainee.train(range(4))
    if dist.get_rank() == 1:
        with torch.no_grad():
            damage(trainee)
    with pytest.raises(DivergenceError) as caught:
        trainee.train(range(4, 8))
    return str(caught.value)


def require_masters(manager: fp8dist.StateManager, weight: Tensor, fqn: str) -> None:
    """Assert that the manager's checks read the trainer's master weights: all fit, until a weight changes alone. Then
    at least one rank finds it."""
    report = manager.check(coherence=True)
    assert report.compared_by["inside the rank"] > 0
    assert not [text for text in report.skipped if "not the model's parameters" in text]
    before = weight.detach().clone()
    weight.data.mul_(1.5)
    report = manager.check(coherence=True, policy="warn")
    assert {f.name.endswith(f"{fqn}.weight") for f in report.findings if f.kind == "coherence"} == {True}
    weight.data.copy_(before)
    assert not manager.check(coherence=True).findings


def undisturbed(start: Callable[[], Trainee]) -> Trainee:
    """Evaluations, a second model that is trained by turns, and a teacher in eval() change nothing in the first. The
    teacher stays as it is. Return the first."""
    alone = start()
    losses = alone.train(range(6))
    first, second, teacher = start(), start(), start()
    teacher.train(range(2))
    teacher.model.eval()
    before, outputs, found = teacher.kept(), [], []
    for step in range(6):
        with torch.no_grad():
            outputs.append(teacher.forward(50))
        found += first.train([step])
        if step % 2:
            second.train([step])
        first.model.eval()
        with torch.no_grad():
            first.forward(100 + step)
        first.model.train()
    assert found == losses
    assert same(alone.kept(), first.kept())
    assert second.manager.steps == 3
    assert same(teacher.kept(), before)
    assert all(torch.equal(output, outputs[0]) for output in outputs)
    return first


Job = tuple[Any, ...]
"""A function that each rank of a pool calls with a folder, the same on all, and its other arguments."""

Jobs = Mapping[str, Job]


@dataclass(frozen=True)
class Adapter:
    """The jobs of one trainer, and what its runs and its example write.

    Args:
        by_hand: train with the trainer and with a loop by hand, and compare all bits.
        resumed: compare a run with one that was resumed.
        diverged: by case, the name of a tensor that a rank damages, and a job that returns the error.
        undisturbed: compare a run with one beside which there are evaluations or other models.
        refused: mistakes, which raise.
        unclean: jobs of ``refused`` leave something behind in their processes.
        recorded: called with the folder, the run's name, and "whole", "killed" or "resumed"; returns what
            ``require_resumed`` wants.
        resumes: ``recorded`` can be killed and resumed.
        ends_group: ``recorded`` destroys the process group.
        saved, checkpoint: the steps after which ``recorded`` saves, and the names of the checkpoints.
        evaluated: the steps after which ``recorded`` evaluates.
        columns: numbers of each step that the run must have.
        logged: names of other numbers that a resumed run must have, too.
        steps, prints, through, run, lines: of the example: its ``--steps``, a part of what it prints, the start of the
            command, the folder of the run in that of ``--out``, and the number of its lines; 0: it has no ``--out``.
    """

    by_hand: Jobs
    resumed: Jobs
    diverged: Mapping[str, tuple[str, Job]]
    undisturbed: Jobs
    refused: Jobs
    recorded: Callable[..., Any]
    unclean: bool = False
    resumes: bool = True
    ends_group: bool = False
    saved: tuple[int, ...] = ()
    checkpoint: str = "{step}"
    evaluated: tuple[int, ...] = ()
    columns: Mapping[str, list[float]] = field(default_factory=dict)
    logged: tuple[str, ...] = ("grad_norm",)
    steps: int = 4
    prints: str = "FP8: "
    through: tuple[str, ...] = ()
    run: str = "."
    lines: int = 4

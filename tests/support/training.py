"""Small models, deterministic data, exact comparisons, and an oracle of amaxes that shares no code with fp8dist."""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.parallel import DistributedDataParallel

import fp8dist
from fp8dist import StateManager
from fp8dist.modules.fp8_linear import FP8Linear
from tests.support.states import saved_of

SlotName = tuple[str, str]
Amaxes = dict[SlotName, float]


class Net(nn.Module):
    """Three eligible Linears, one of them optional, and an optional BatchNorm."""

    def __init__(self, batchnorm: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(32, 48)
        self.norm: nn.Module = nn.BatchNorm1d(48) if batchnorm else nn.Identity()
        self.branch = nn.Linear(48, 48)
        self.last = nn.Linear(48, 16)

    def forward(self, x: Tensor, skip: bool = False) -> Tensor:
        h = torch.relu(self.norm(self.first(x)))
        if not skip:
            h = h + self.branch(h)
        return self.last(h)


def make_net(seed: int = 0, batchnorm: bool = False) -> Net:
    """Return the same net for the same seed."""
    torch.manual_seed(seed)
    return Net(batchnorm)


def batch(rank: int, index: int) -> tuple[Tensor, Tensor]:
    """Return (x [8, 32], y [8, 16]); magnitudes differ from batch to batch and rank to rank."""
    generator = torch.Generator().manual_seed(1000 * rank + index)
    x = torch.randn(8, 32, generator=generator) * (1 + 0.3 * ((7 * index + 3 * rank) % 5))
    return x, torch.randn(8, 16, generator=generator)


def unwrapped(net: nn.Module) -> nn.Module:
    """Return the net."""
    return net


_SGD = partial(torch.optim.SGD, lr=0.01)


class SmallJob:
    """A net that is prepared with the group of all ranks, wrapped, and attached. ``called``: what the loop calls.

    Args:
        wrap: ``unwrapped``, for a net that is called as it is.
        attach: arguments of ``attach`` beside the optimizer.
        options: of ``prepare``.
    """

    def __init__(
        self,
        recipe: Any = None,
        net: nn.Module | None = None,
        wrap: Callable[..., Any] = DistributedDataParallel,
        optimizer: Callable[..., Any] = _SGD,
        attach: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        group = {"group": dist.group.WORLD} if dist.is_initialized() else {}
        self.net: Any = make_net() if net is None else net
        self.manager: StateManager = fp8dist.prepare(self.net, recipe, **{**group, **options})
        self.called: Any = wrap(self.net)
        self.optimizer = optimizer(self.called.parameters())
        self.manager.attach(self.called, optimizer=self.optimizer, **(attach or {}))

    def backward(self, index: int, rank: int | None = None) -> Tensor:
        """Return the loss of a batch, after its backward. ``rank``: whose batch it is, by default this rank's."""
        rank = (dist.get_rank() if dist.is_initialized() else 0) if rank is None else rank
        x, y = batch(rank, index)
        loss = nn.functional.mse_loss(self.called(x), y)
        loss.backward()
        return loss.detach()

    def step(self, index: int, rank: int | None = None) -> float:
        """Train on a batch. Return its loss."""
        loss = self.backward(index, rank)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss)


def bits(tensor: Tensor) -> bytes:
    """Return the memory of a tensor: NaN equals itself, 0.0 differs from -0.0."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def state_bits(manager: StateManager) -> dict[str, bytes]:
    """Return the complete FP8 state, exactly. Reading commits a pending sync."""
    return {name: bits(value) for name, value in saved_of(manager).items() if isinstance(value, Tensor)}


def parameter_bits(model: nn.Module) -> dict[str, bytes]:
    """Return all parameters, exactly."""
    return {name: bits(parameter) for name, parameter in model.named_parameters()}


def gradient_bits(model: nn.Module) -> dict[str, bytes | None]:
    """Return all gradients, exactly."""
    return {name: None if p.grad is None else bits(p.grad) for name, p in model.named_parameters()}


def histories(manager: StateManager) -> dict[SlotName, list[float]]:
    """Return each slot's amax window, oldest first."""
    return {(s.fqn, s.role): manager.slot(s.fqn, s.role).amax_history.tolist() for s in manager.slots}


class AmaxRecorder:
    """Records the amaxes of each FP8Linear on this rank, step by step, with module hooks, torch.abs and max."""

    def __init__(self, model: nn.Module) -> None:
        self.steps: list[Amaxes] = []
        self._open: Amaxes = {}
        for name, module in model.named_modules():
            if isinstance(module, FP8Linear):
                module.register_forward_pre_hook(self._saw_input(name))
                module.register_forward_hook(self._saw_output(name))

    def end_step(self) -> None:
        """End an optimizer step."""
        self.steps.append(self._open)
        self._open = {}

    def end_data(self, counts: bool) -> None:
        """End the data in the middle of a step. ``counts``: the amaxes seen so far were sent."""
        if counts and self._open:
            self.end_step()

    def _note(self, name: str, role: str, x: Tensor) -> None:
        seen = float(x.detach().float().abs().max())
        before = self._open.get((name, role), 0.0)
        self._open[name, role] = math.nan if math.isnan(seen) else max(seen, before)

    def _saw_input(self, name: str) -> Any:
        def hook(module: FP8Linear, args: tuple[Any, ...]) -> None:
            if module.training and torch.is_grad_enabled():
                self._note(name, "input", args[0])
                self._note(name, "weight", module.weight)

        return hook

    def _saw_output(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            if module.training and output.requires_grad:
                output.register_hook(lambda grad: self._note(name, "grad_output", grad))

        return hook


def expected_histories(
    slots: Sequence[SlotName], steps_of_ranks: Sequence[Sequence[Amaxes]], length: int
) -> dict[SlotName, list[float]]:
    """Return the histories that each rank must hold: per step the largest amax over the ranks that ran the slot."""
    taken: Mapping[SlotName, list[float]] = defaultdict(list)
    for step in range(max(map(len, steps_of_ranks))):
        present = [steps[step] for steps in steps_of_ranks if step < len(steps)]
        for slot in slots:
            seen = [amaxes[slot] for amaxes in present if slot in amaxes]
            if seen:
                taken[slot].append(max(seen))
    return {slot: ([0.0] * length + taken[slot])[-length:] for slot in slots}


@contextlib.contextmanager
def saved_tensors() -> Iterator[list[Tensor]]:
    """Yield a list of what autograd saves for backward inside."""
    saved: list[Tensor] = []
    with saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        yield saved

"""ReplayBuffer: keeps the batches of the last steps on the host, each with the state of the random number generators
at that time."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from fp8dist.checks.random_state import RandomState, random_state
from fp8dist.common.names import require_int
from fp8dist.errors import ConfigurationError
from fp8dist.job.manager import Internals, StateManager
from fp8dist.parallel.wrappers import compute_devices
from fp8dist.replays.neighbours import require_sendable
from fp8dist.state.groups import world_size


class KeptBatch(NamedTuple):
    """A batch on the host.

    Attributes:
        leaves: the leaves of the batch's pytree; tensors as copies on the CPU.
        devices: for each leaf, the device where the tensor was. None: the leaf is not a tensor.
        spec: the structure of the pytree.
        random_state: the state of the random number generators when the batch was kept.
    """

    leaves: list[Any]
    devices: list[torch.device | None]
    spec: TreeSpec
    random_state: RandomState

    def batch(self) -> Any:
        """Return a new copy of the batch, with its tensors on their original devices. Local."""
        return tree_unflatten(list(map(_copied, self.leaves, self.devices)), self.spec)

    @property
    def nbytes(self) -> int:
        """Bytes that the kept tensors take, with the random state."""
        tensors = [leaf for leaf in (*self.leaves, *self.random_state) if isinstance(leaf, Tensor)]
        return sum(tensor.nbytes for tensor in tensors)


class ReplayBuffer:
    """Keeps the batches of the last steps on the host, for ``replay_on``. Local.

        recorder = fp8dist.ReplayBuffer(manager, last=2)
        for batch in loader:
            recorder.keep(batch)
            loss = model(batch)

    It keeps this rank's batches of at most ``last`` steps, and about 20 kB per microbatch for the state of the random
    number generators. Each ``keep`` copies the batch to the CPU. Copying a batch from a GPU waits for the GPU, so call
    ``keep`` before you move the batch there, and move it in the ``step`` function that you pass to ``replay_on``. Kept
    batches are not saved in checkpoints.

    Args:
        manager: the StateManager of the model, or a model that was not prepared.
        last: number of steps to keep, at least 1. A jump of a delayed scale is noticed one step later, so it needs 2.
    """

    def __init__(self, manager: StateManager | nn.Module, last: int = 2) -> None:
        require_int("last", last, 1, what="a number of steps")
        if not isinstance(manager, (StateManager, nn.Module)):
            raise ConfigurationError(f"manager must be a StateManager or a model, got {type(manager).__name__}")
        self._manager = manager if isinstance(manager, StateManager) and manager.settings.enabled else None
        self._last = last
        self._steps: dict[int, list[KeptBatch]] = {}
        self._open: int | None = None  # The step in progress.
        self._paused = False
        self._owner = manager
        if self._manager is not None:
            Internals(self._manager).cycle.listeners.append(self._end_step)

    @functools.cached_property
    def _device(self) -> torch.device:
        """The device that computes. Read at the first ``keep``, because by then the model is on its final device."""
        model = self._owner if isinstance(self._owner, nn.Module) else Internals(self._owner).called_module
        parameter = next(model.parameters(), None)
        return torch.device("cpu") if parameter is None else compute_devices(model)(parameter)

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps whose batches are kept, oldest first."""
        return tuple(self._steps)

    @property
    def nbytes(self) -> int:
        """Bytes that the kept tensors take on the host."""
        return sum(kept.nbytes for batches in self._steps.values() for kept in batches)

    def keep(self, batch: Any, step: int | None = None) -> None:
        """Copy a batch to the host, with the present state of the random number generators. Local.

        Call it once per microbatch, right before its forward. Do not call it for evaluations.

        Args:
            batch: a pytree. Its tensors are copied, everything else is copied with ``copy.deepcopy``. With several
                ranks, tensors and plain values only, because a replay sends it to another rank.
            step: number of the step that the batch is for. A manager knows it, so give it only without FP8.

        Raises:
            ConfigurationError: ``step`` is missing without FP8, or given with it. Or a step was captured into a CUDA
                graph, whose replays end no step on the host; or ``batch`` cannot be sent.
        """
        if self._paused:  # The user's step may contain this call.
            return
        if self._manager is None and step is None:
            raise ConfigurationError("without FP8 nothing counts the steps: pass keep(batch, step), from 1")
        if self._manager is not None and step is not None:
            raise ConfigurationError("keep(batch, step): the manager counts the steps: leave step= out")
        if step is None:
            assert self._manager is not None
            if Internals(self._manager).cycle.job.captured:
                raise ConfigurationError("keep(): steps in a CUDA graph are not seen one by one: capture no step")
            step = self._manager.run_step + 1
        else:
            require_int("step", step, 0, what="the number of a step")
        if world_size() > 1:
            require_sendable(batch)
        if step != self._open:
            self._begin(step)
        leaves, spec = tree_flatten(batch)
        devices = [leaf.device if isinstance(leaf, Tensor) else None for leaf in leaves]
        copies = [_copied(leaf, torch.device("cpu")) for leaf in leaves]
        self._steps[step].append(KeptBatch(copies, devices, spec, random_state(self._device)))

    def counts_for(self, manager: object) -> bool:
        """True if ``manager`` is the one whose steps this buffer counts."""
        return self._manager is manager

    def of(self, step: int) -> list[KeptBatch]:
        """Return the kept batches of a step, in the order of its microbatches. Empty if the step is not kept."""
        return self._steps.get(step, [])

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Context in which ``keep`` does nothing. Local."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def _begin(self, step: int) -> None:
        # The number may be there already: a loss scaler skipped that step, or a checkpoint was loaded.
        self._steps.pop(step, None)
        while len(self._steps) >= self._last:
            del self._steps[next(iter(self._steps))]
        self._steps[step], self._open = [], step

    def _end_step(self, took_place: bool) -> None:
        self._open = None


def _copied(leaf: Any, device: torch.device | None) -> Any:
    """Return a copy of a leaf of a batch. ``device``: where to put a tensor; ignored for other leaves."""
    if not isinstance(leaf, Tensor):
        return copy.deepcopy(leaf)
    return leaf.detach().to(device, copy=True).requires_grad_(leaf.requires_grad)

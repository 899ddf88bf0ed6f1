"""Measure how long this rank waits for other ranks in each step, and its own time.

A slow rank waits little itself. The other ranks wait for it in their next collective: with DDP the gradient reduction,
which absorbs the skew before the FP8 sync; with FSDP an all-gather or reduce-scatter of the forward or backward. So the
waits in all these collectives are measured. The rest of the step is the rank's **own time**: compute, data loading and
any other delay.

On a CPU, the host waits for collectives. On CUDA, events measure the time on streams. There FSDP's collectives count in
full even if they overlap with compute, so own times can be compared between ranks but mean little in absolute terms.
The all-reduces of FSDP's gradient norm, of the loss guard and of recomputed weight scales are not measured and count as
own time: ranks enter them right after another collective, so they wait little.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

import fp8dist
from fp8dist import StateManager
from fp8dist.state.waits import Waits, clock_of
from tests.support.lab.gathering import WAYS, replaced

REDUCTIONS = ("reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor", "all_reduce")
"""Functions of torch.distributed that FSDP reduces gradients with, by torch version. The last reduces over replicas."""


class Waiting:
    """Measures the steps of this rank. Adds no collective and does not change the training."""

    def __init__(self, device: torch.device) -> None:
        self._clock = clock_of(device)
        self._steps = Waits()  # Durations of whole steps.
        self._others = Waits()  # Waits in collectives other than the FP8 sync.

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Time the enclosed block as one training step, from data to update. A block that raises does not count."""
        self._steps.drop()
        self._others.drop()
        with self._steps.waiting(self._clock):
            yield
        self._steps.end_step()
        self._others.end_step()

    def collectives(self) -> AbstractContextManager[None]:
        """Return a context that measures the collectives of FSDP's forwards and backwards."""

        def measured(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                with self._others.waiting(self._clock):
                    return function(*args, **kwargs)

            return call

        return replaced((*WAYS, *REDUCTIONS), measured)

    def backward(self, loss: Tensor) -> None:
        """Run the backward of a DDP model and measure its wait for the gradient reduction.

        DDP waits for its buckets in a callback at the end of the backward. A callback queued at the start of the
        backward runs just before it, and starts the timer.
        """
        with ExitStack() as until_the_end:

            def all_gradients_are_there() -> None:
                until_the_end.enter_context(self._others.waiting(self._clock))

            def begins(_: Tensor) -> None:
                Variable._execution_engine.queue_callback(all_gradients_are_there)

            loss.register_hook(begins)
            loss.backward()

    def take(self, manager: StateManager | None, steps: int) -> Tensor:
        """Return the ms of the steps since the last call, float32[3, steps] on the CPU. Local; waits for the device.

        The rows are: wait in the FP8 sync, wait in other collectives, whole step. NaN if a step did not end, and in
        the first row if there is no sync.
        """
        sync = fp8dist.take_waits(manager) if manager is not None else []
        rows = (sync, self._others.take(), self._steps.take())
        return torch.tensor([row + [math.nan] * (steps - len(row)) for row in rows], device="cpu")

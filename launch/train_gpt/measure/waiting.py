"""How long this rank waits for others in each step, and how long it takes for its own part.

A rank that is slow waits little itself. Where the others wait for it depends on what they come to first: under DDP the
reduction of gradients, which then takes up the skew before the FP8 sync could show it; under FSDP the next all-gather
or reduce-scatter, in forward and backward. So the collectives of a step are measured where they are waited for, and the
rest of the step is the rank's **own time**: compute, data, and whatever else holds it up.

On a CPU collectives are waited for on the host. On CUDA the times are those of streams, by events; there FSDP's
collectives count in full, though they may overlap with compute, so that own times can be compared between ranks, but
mean little in themselves. Not measured, and so part of the own time, are the all-reduces of FSDP's gradient norm, of
the loss guard, and of weight scales that are derived anew: all ranks have just met when they come to those.
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

from fp8dist import StateManager
from fp8dist.sync.waits import Waits, clock_of
from launch.train_gpt.measure.gathering import WAYS, replaced

__all__ = ["Waiting"]

REDUCTIONS = ("reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor", "all_reduce")
"""What FSDP reduces gradients with, in one torch or another; the last between replicas of shards."""


class Waiting:
    """Measures the steps of this rank. Adds no collective, and changes no number of the training."""

    def __init__(self, device: torch.device) -> None:
        self._clock = clock_of(device)
        self._steps = Waits()  # Whole steps, as if they were waits.
        self._others = Waits()  # In collectives other than the FP8 sync.

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """One training step, from its data to its update. What raises inside is no step."""
        self._steps.drop()
        self._others.drop()
        with self._steps.waiting(self._clock):
            yield
        self._steps.end_step()
        self._others.end_step()

    def collectives(self) -> AbstractContextManager[None]:
        """Measures the collectives of FSDP's forwards and backwards inside."""

        def measured(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                with self._others.waiting(self._clock):
                    return function(*args, **kwargs)

            return call

        return replaced((*WAYS, *REDUCTIONS), measured)

    def backward(self, loss: Tensor) -> None:
        """DDP's. When all gradients are there it waits for the reduction of its buckets, in a callback at the end of
        the backward. One that is queued when the backward begins runs just before it."""
        with ExitStack() as until_the_end:

            def all_gradients_are_there() -> None:
                until_the_end.enter_context(self._others.waiting(self._clock))

            def begins(_: Tensor) -> None:
                Variable._execution_engine.queue_callback(all_gradients_are_there)

            loss.register_hook(begins)
            loss.backward()

    def take(self, manager: StateManager | None, steps: int) -> Tensor:
        """float32[3, steps] on the CPU, in ms, of the steps since the last call: the wait in the FP8 sync, in all
        collectives without it, and the whole step. Local; waits for the device.

        NaN where a step did not end, and of the sync where there is none.
        """
        sync = manager.take_waits() if manager is not None else []
        rows = (sync, self._others.take(), self._steps.take())
        return torch.tensor([row + [math.nan] * (steps - len(row)) for row in rows], device="cpu")

"""How long a rank waits for the others in collectives: in host time on a CPU, in time of the current stream on CUDA."""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch

KEPT = 4096
"""Maximum number of steps whose waits are kept."""


class Moment(Protocol):
    """A recorded point in time. It may lie in the future, if the stream has not reached it yet."""

    def ms_since(self, earlier: Moment) -> float:
        """Return the milliseconds from an earlier moment of the same clock. Waits until this moment is reached."""


Clock = Callable[[], Moment]
"""Returns the current moment."""


class _OnHost:
    def __init__(self) -> None:
        self.seconds = time.perf_counter()

    def ms_since(self, earlier: Moment) -> float:
        assert isinstance(earlier, _OnHost)
        return 1e3 * (self.seconds - earlier.seconds)


class _OnStream:
    """The time at which the device's current stream reaches this point. A wait for NCCL blocks the stream, not the
    host."""

    def __init__(self, device: torch.device) -> None:
        with torch.cuda.device(device):
            self.event = torch.cuda.Event(enable_timing=True)
            self.event.record()

    def ms_since(self, earlier: Moment) -> float:
        assert isinstance(earlier, _OnStream)
        self.event.synchronize()
        return float(earlier.event.elapsed_time(self.event))


def clock_of(device: torch.device) -> Clock:
    """Return the clock that measures waits on this device."""
    return (lambda: _OnStream(device)) if device.type == "cuda" else _OnHost


class Waits:
    """Waits of one rank, summed per step, for the newest ``KEPT`` steps.

    Recording a wait takes two moments, and reads nothing from the device.
    """

    def __init__(self) -> None:
        self._open: list[tuple[Moment, Moment]] = []  # Waits of the current step.
        self._ended: deque[list[tuple[Moment, Moment]]] = deque(maxlen=KEPT)
        self._lost = 0
        self.averaged = False  # True if ``mean`` will be called.
        self._recent: deque[list[tuple[Moment, Moment]]] = deque(maxlen=KEPT)  # Steps since the last ``mean``.

    @contextlib.contextmanager
    def waiting(self, clock: Clock) -> Iterator[None]:
        """Time the enclosed block as time spent waiting in a collective."""
        start = clock()
        try:
            yield
        finally:
            self._open.append((start, clock()))

    def end_step(self) -> None:
        """Assign all waits since the last call to one step."""
        self._lost += len(self._ended) == KEPT
        self._ended.append(self._open)
        if self.averaged:
            self._recent.append(self._open)
        self._open = []

    def drop(self) -> None:
        """Drop the waits since the last step."""
        self._open = []

    def take(self) -> list[float]:
        """Return milliseconds, one number per step that ended since the last call; NaN for steps that are no longer
        kept. Waits until the device has reached the end of the last wait."""
        lost, self._lost = self._lost, 0
        kept = [_ms(step) for step in self._ended]
        self._ended.clear()
        return [math.nan] * lost + kept

    def mean(self) -> float:
        """Return the mean milliseconds of the steps that ended since the last call, of the newest if they are many; NaN
        without a step. Independent of ``take``; waits as it does."""
        recent = [_ms(step) for step in self._recent]
        self._recent.clear()
        return sum(recent) / len(recent) if recent else math.nan


def _ms(step: Sequence[tuple[Moment, Moment]]) -> float:
    return float(sum(end.ms_since(start) for start, end in step))

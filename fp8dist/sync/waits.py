"""How long a rank waits for others: host time on a CPU, time of the current stream on CUDA."""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol

import torch

__all__ = ["KEPT", "Clock", "Moment", "Waits", "clock_of"]

KEPT = 4096
"""Steps whose waits are kept for who has not asked."""


class Moment(Protocol):
    """A point of time that was noted, and may lie ahead: where a stream has not come to it."""

    def ms_since(self, earlier: Moment) -> float:
        """Milliseconds from an earlier moment of the same clock; waits until this one has come."""


Clock = Callable[[], Moment]
"""Notes the present moment."""


class _OnHost:
    def __init__(self) -> None:
        self.seconds = time.perf_counter()

    def ms_since(self, earlier: Moment) -> float:
        assert isinstance(earlier, _OnHost)
        return 1e3 * (self.seconds - earlier.seconds)


class _OnStream:
    """When the device's current stream gets here. A wait for NCCL holds up the stream and not the host."""

    def __init__(self, device: torch.device) -> None:
        with torch.cuda.device(device):
            self.event = torch.cuda.Event(enable_timing=True)
            self.event.record()

    def ms_since(self, earlier: Moment) -> float:
        assert isinstance(earlier, _OnStream)
        self.event.synchronize()
        return float(earlier.event.elapsed_time(self.event))


def clock_of(device: torch.device) -> Clock:
    """The clock by which a rank on this device waits."""
    return (lambda: _OnStream(device)) if device.type == "cuda" else _OnHost


class Waits:
    """Waits of one rank, summed up by steps; of more than ``KEPT`` steps those of the newest.

    Noting one costs two moments, whatever it is that is waited for, and reads nothing from the device.
    """

    def __init__(self) -> None:
        self._open: list[tuple[Moment, Moment]] = []  # Of the step that has not ended.
        self._ended: deque[list[tuple[Moment, Moment]]] = deque(maxlen=KEPT)
        self._lost = 0

    @contextlib.contextmanager
    def waiting(self, clock: Clock) -> Iterator[None]:
        """Time the enclosed block as time spent waiting in a collective."""
        start = clock()
        try:
            yield
        finally:
            self._open.append((start, clock()))

    def end_step(self) -> None:
        """What was waited for since the last call belongs to one step."""
        self._lost += len(self._ended) == KEPT
        self._ended.append(self._open)
        self._open = []

    def drop(self) -> None:
        """What was waited for since the last step belongs to none."""
        self._open = []

    def take(self) -> list[float]:
        """Milliseconds, one number per step that has ended since the last call; NaN for those that are not kept any
        more. Waits until the device has come to the end of the last one."""
        lost, self._lost = self._lost, 0
        kept = [sum(end.ms_since(start) for start, end in step) for step in self._ended]
        self._ended.clear()
        return [math.nan] * lost + [float(ms) for ms in kept]

"""Measure times on a device: interleaved runs with a cold cache, reported as medians with their spread."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

__all__ = [
    "Action",
    "Comparison",
    "CudaStopwatch",
    "HostStopwatch",
    "Stopwatch",
    "Timing",
    "back_to_back",
    "compare",
    "issue_time",
    "stopwatch_of",
]

Action = Callable[[], object]

FLUSHED_BYTES = 512 << 20
"""Several times the last-level cache of any GPU. Flushing also lets the host get ahead of the device."""

LONGEST_HEAD_START = 2e3
"""µs."""

FEWEST, MOST = 5, 60
"""Smallest and largest number of rounds in a comparison."""


@dataclass(frozen=True)
class Timing:
    """Median, 10th and 90th percentile of ``count`` runs, in µs."""

    median: float
    low: float
    high: float
    count: int

    @staticmethod
    def of(samples: Sequence[float]) -> Timing:
        """Summarise at least one sample."""
        ordered = sorted(samples)
        last = len(ordered) - 1
        low, high = ordered[round(0.1 * last)], ordered[round(0.9 * last)]
        return Timing(statistics.median(ordered), low, high, len(ordered))

    def as_dict(self) -> dict[str, float]:
        """Return the form of the results file."""
        return {"median_us": self.median, "low_us": self.low, "high_us": self.high, "count": self.count}


@dataclass(frozen=True)
class Comparison:
    """Interleaved runs of several actions. ``samples``: µs of each action, round by round."""

    samples: Mapping[str, Sequence[float]]

    def timings(self) -> dict[str, dict[str, float]]:
        """Return the ``Timing`` of each action, in the form of the results file."""
        return {name: Timing.of(samples).as_dict() for name, samples in self.samples.items()}

    def ratio(self, of: str, to: str) -> float:
        """Return how many times as long ``of`` takes as ``to``: the median over rounds, because clock drift affects
        both."""
        return statistics.median(a / b for a, b in zip(self.samples[of], self.samples[to]))


class Stopwatch(Protocol):
    """Measures times on one device. All times are in µs."""

    device: torch.device

    def now(self) -> float:
        """Wait for the device, and return the host's clock."""
        ...

    def rounds(
        self, actions: Sequence[Action], count: int, head_start: float = 0.0, before: Action | None = None
    ) -> list[list[float]]:
        """Return the times of each action in each of ``count`` rounds. Each starts with a cold cache; the order
        rotates.

        Args:
            head_start: how far the host gets ahead before each action, so that launch gaps do not count.
            before: runs before each action and before the cache is flushed, untimed.
        """
        ...

    def replay(self, action: Action, repeats: int) -> Action:
        """Return an action that runs ``action`` ``repeats`` times with one launch: a CUDA graph if the device has
        them."""
        ...


class CudaStopwatch:
    """Measures with events on the current stream of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._flushed = torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device=device)
        self._clean = torch.zeros(FLUSHED_BYTES // 4, dtype=torch.int32, device=device)  # Never written again.
        clock_khz = getattr(torch.cuda.get_device_properties(device), "clock_rate", 0) or 1_980_000
        self._cycles_per_us = clock_khz / 1e3

    def now(self) -> float:
        torch.cuda.synchronize(self.device)
        return 1e6 * time.perf_counter()

    def rounds(
        self, actions: Sequence[Action], count: int, head_start: float = 0.0, before: Action | None = None
    ) -> list[list[float]]:
        marks: list[list[tuple[Any, Any]]] = [[] for _ in actions]
        torch.cuda.synchronize(self.device)
        for first in range(count):
            for place in range(len(actions)):
                which = (first + place) % len(actions)
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                if head_start > 0:
                    torch.cuda._sleep(int(min(head_start, LONGEST_HEAD_START) * self._cycles_per_us))
                if before is not None:
                    before()
                self._flush()
                start.record()
                actions[which]()
                end.record()
                marks[which].append((start, end))
        torch.cuda.synchronize(self.device)
        return [[1e3 * start.elapsed_time(end) for start, end in pairs] for pairs in marks]

    def _flush(self) -> None:
        self._flushed.zero_()
        # Reading leaves no dirty cache lines, whose write-back would be timed with the next action.
        self._clean.amax()

    def replay(self, action: Action, repeats: int) -> Action:
        here, apart = torch.cuda.current_stream(self.device), torch.cuda.Stream(self.device)
        apart.wait_stream(here)
        with torch.cuda.stream(apart):
            for _ in range(3):
                action()
        here.wait_stream(apart)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(repeats):
                action()
        return graph.replay


class HostStopwatch:
    """Measures with the host's clock, for a device that runs synchronously. ``clock``: seconds."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.device = torch.device("cpu")
        self._clock = clock

    def now(self) -> float:
        return 1e6 * self._clock()

    def rounds(
        self, actions: Sequence[Action], count: int, head_start: float = 0.0, before: Action | None = None
    ) -> list[list[float]]:
        times: list[list[float]] = [[] for _ in actions]
        for first in range(count):
            for place in range(len(actions)):
                which = (first + place) % len(actions)
                if before is not None:
                    before()
                start = self.now()
                actions[which]()
                times[which].append(self.now() - start)
        return times

    def replay(self, action: Action, repeats: int) -> Action:
        def repeated() -> None:
            for _ in range(repeats):
                action()

        return repeated


def stopwatch_of(device: torch.device) -> Stopwatch:
    """Return the stopwatch for a device."""
    return CudaStopwatch(device) if device.type == "cuda" else HostStopwatch()


def compare(
    stopwatch: Stopwatch,
    actions: Mapping[str, Action],
    seconds: float,
    head_start: float = 0.0,
    before: Action | None = None,
) -> Comparison:
    """Run as many rounds as fit into ``seconds``, at least ``FEWEST``, after two that do not count. ``before``: see
    ``Stopwatch.rounds``."""
    todo = list(actions.values())
    stopwatch.rounds(todo, 1, head_start, before)  # Compiles.
    start = stopwatch.now()
    stopwatch.rounds(todo, 1, head_start, before)
    one_round = max(1.0, stopwatch.now() - start)
    count = min(MOST, max(FEWEST, int(1e6 * seconds / one_round)))
    return Comparison(dict(zip(actions, stopwatch.rounds(todo, count, head_start, before))))


def issue_time(stopwatch: Stopwatch, action: Action) -> float:
    """Return the µs that the host takes to issue ``action``, without waiting for the device."""
    stopwatch.now()
    start = time.perf_counter()
    action()
    taken = 1e6 * (time.perf_counter() - start)
    stopwatch.now()
    return taken


def back_to_back(stopwatch: Stopwatch, action: Action, repeats: int, samples: int) -> Timing:
    """Time one of ``repeats`` consecutive runs by the host's clock, with a warm cache."""
    times = []
    for _ in range(samples):
        start = stopwatch.now()
        for _ in range(repeats):
            action()
        times.append((stopwatch.now() - start) / repeats)
    return Timing.of(times)

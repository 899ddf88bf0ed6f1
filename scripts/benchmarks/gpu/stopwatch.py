"""Measure times on a device: interleaved runs, reported as medians, and as ratios with their intervals."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

Action = Callable[[], object]
CPU = torch.device("cpu")

FLUSHED_BYTES = 512 << 20
"""Bytes that a cache flush writes and reads: several times the last-level cache of any GPU. While the device flushes,
the host gets ahead of it."""

LONGEST_HEAD_START = 2e3
"""Longest time in µs for which the device is kept busy so that the host gets ahead."""

FEWEST, MOST = 6, 192
"""Smallest and largest number of rounds in a comparison. Fewer than 6 have no interval."""

CONFIDENCE = 0.95
NARROW = 1.01
"""A comparison ends when the upper end of each ratio's interval is at most this many times the lower end."""

WINDOW = 1e5
"""Length in µs of a window of ``sustained``: runs that are timed together."""


class Ratio(NamedTuple):
    """A ratio of times, and its confidence interval."""

    ratio: float
    low: float
    high: float


def timing_of(samples: Sequence[float]) -> dict[str, float]:
    """Summarise at least one sample in µs, in the form of the results file: median, 10th and 90th percentile."""
    ordered = sorted(samples)
    last = len(ordered) - 1
    low, high = ordered[round(0.1 * last)], ordered[round(0.9 * last)]
    return {"median_us": statistics.median(ordered), "low_us": low, "high_us": high, "count": len(ordered)}


@dataclass(frozen=True)
class Comparison:
    """Interleaved runs of several actions. ``samples``: µs of each action, round by round. ``issue_us``: what the host
    takes to issue the slowest of them."""

    samples: Mapping[str, Sequence[float]]
    issue_us: float = 0.0

    def timings(self) -> dict[str, dict[str, float]]:
        """Return ``timing_of`` each action."""
        return {name: timing_of(samples) for name, samples in self.samples.items()}

    def ratio(self, of: str, to: str) -> Ratio:
        """Return the time of ``of`` over the time of ``to``: the median of the ratios of single rounds, because a drift
        of the clock affects both times of a round."""
        ratios = [a / b for a, b in zip(self.samples[of], self.samples[to])]
        return Ratio(statistics.median(ratios), *interval_of_median(ratios))

    @property
    def settled(self) -> bool:
        """True if the interval of the ratio of each action to the first is narrow enough, see ``NARROW``."""
        first, *others = self.samples
        ratios = [self.ratio(other, first) for other in others]
        return all(ratio.high <= NARROW * ratio.low for ratio in ratios)


def interval_of_median(samples: Sequence[float]) -> tuple[float, float]:
    """Return the narrowest pair of order statistics that holds the true median with ``CONFIDENCE``.

    Makes no assumption about the distribution: P(X(r) <= median <= X(n + 1 - r)) >= 1 - 2 P(B < r), where B counts n
    tosses of a coin (David and Nagaraja, Order Statistics, third edition, 7.1). Too few samples give (0, inf).
    """
    count, rank, outside = len(samples), 0, 1
    while 2 * outside <= (1 - CONFIDENCE) * 2**count:
        rank += 1
        outside += math.comb(count, rank)
    if rank == 0:
        return 0.0, math.inf
    ordered = sorted(samples)
    return ordered[rank - 1], ordered[count - rank]


class Stopwatch:
    """Measures times on one device, in µs. This one uses the host's clock, for a device that runs synchronously.

    ``clock``: returns a time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter, device: torch.device = CPU) -> None:
        self.device = device
        self._clock = clock

    def now(self) -> float:
        """Wait for the device, and return the host's clock."""
        return 1e6 * self._clock()

    def replay(self, action: Action, repeats: int) -> Action:
        """Return an action that runs ``action`` ``repeats`` times: on a GPU, a CUDA graph with a single launch."""
        return repeated(action, repeats)

    def rounds(
        self, actions: Sequence[Action], count: int, head_start: float = 0.0, before: Action | None = None
    ) -> list[list[float]]:
        """Return the µs of each action in each of ``count`` rounds. Each action starts with a cold cache. The order of
        the actions rotates from round to round.

        Args:
            head_start: µs by which the host gets ahead of the device before each action, so that the device does not
                wait for launches.
            before: runs before each action and before the cache is flushed, untimed.
        """
        marks: list[list[tuple[Any, Any]]] = [[] for _ in actions]
        self.now()
        for first in range(count):
            for place in range(len(actions)):
                which = (first + place) % len(actions)
                self._get_ahead(head_start)
                if before is not None:
                    before()
                self._flush()
                start = self._mark()
                actions[which]()
                marks[which].append((start, self._mark()))
        self.now()
        return [[1e3 * float(start.elapsed_time(end)) for start, end in pairs] for pairs in marks]

    def _get_ahead(self, head_start: float) -> None:
        """Keep the device busy for ``head_start`` µs."""

    def _flush(self) -> None:
        """Empty the device's cache."""

    def event(self, external: bool = False) -> Any:
        """Return an event that can be recorded, and read after the device has passed it. ``external``: also if it is
        recorded in a CUDA graph."""
        return _HostEvent(self._clock)

    def _mark(self) -> Any:
        event = self.event()
        event.record()
        return event


class _HostEvent:
    """Stands for an event of the device where there is none."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock

    def record(self) -> None:
        self._at = self._clock()

    def elapsed_time(self, end: _HostEvent) -> float:
        """Return the ms between two events."""
        return 1e3 * (end._at - self._at)


class CudaStopwatch(Stopwatch):
    """Measures with events on the current stream of a GPU."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device=device)
        self._flushed = torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device=device)
        self._clean = torch.zeros(FLUSHED_BYTES // 4, dtype=torch.int32, device=device)  # Never written again.
        clock_khz = getattr(torch.cuda.get_device_properties(device), "clock_rate", 0) or 1_980_000
        self._cycles_per_us = clock_khz / 1e3

    def now(self) -> float:
        torch.cuda.synchronize(self.device)
        return 1e6 * time.perf_counter()

    def _get_ahead(self, head_start: float) -> None:
        if head_start > 0:
            torch.cuda._sleep(int(min(head_start, LONGEST_HEAD_START) * self._cycles_per_us))

    def _flush(self) -> None:
        self._flushed.zero_()
        # Reading leaves no dirty cache lines, whose write-back would be timed with the next action.
        self._clean.amax()

    def event(self, external: bool = False) -> Any:
        return torch.cuda.Event(enable_timing=True, external=external)

    def replay(self, action: Action, repeats: int) -> Action:
        here, apart = torch.cuda.current_stream(self.device), torch.cuda.Stream(self.device)
        apart.wait_stream(here)
        with torch.cuda.stream(apart):
            repeated(action, 3)()
        here.wait_stream(apart)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            repeated(action, repeats)()
        return graph.replay


def repeated(action: Action, times: int) -> Action:
    """Return an action that runs ``action`` ``times`` times."""

    def run() -> None:
        for _ in range(times):
            action()

    return run


def stopwatch_of(device: torch.device) -> Stopwatch:
    """Return the stopwatch for a device."""
    return CudaStopwatch(device) if device.type == "cuda" else Stopwatch()


def compare(
    stopwatch: Stopwatch, actions: Mapping[str, Action], seconds: float, before: Action | None = None
) -> Comparison:
    """Run rounds with a cold cache until the ratios are settled, ``MOST`` are done, or ``seconds`` are over.

    Two rounds that do not count come first, then at least ``FEWEST``. The host gets ahead of the device by the time
    that it takes to issue an action. ``before``: see ``Stopwatch.rounds``.
    """
    todo = list(actions.values())
    for action in todo:
        action()  # Compiles.
    ahead = max(issue_time(stopwatch, action) for action in todo)
    found = _settled(stopwatch, actions, seconds, lambda count: stopwatch.rounds(todo, count, ahead, before))
    return Comparison(found.samples, ahead)


def compare_in_a_row(stopwatch: Stopwatch, actions: Mapping[str, Action], seconds: float, repeats: int) -> Comparison:
    """As ``compare``, but by the host's clock, with a warm cache.

    Each action repeats its work ``repeats`` times; the reported time is that of one repetition.
    """

    def rounds(count: int) -> list[list[float]]:
        times = [[_timed(stopwatch, action) / repeats for action in actions.values()] for _ in range(count)]
        return [list(mine) for mine in zip(*times)]

    return _settled(stopwatch, actions, seconds, rounds)


def _settled(
    stopwatch: Stopwatch, names: Mapping[str, Any], seconds: float, rounds: Callable[[int], list[list[float]]]
) -> Comparison:
    rounds(1)  # Compiles.
    start = stopwatch.now()
    rounds(1)
    one_round = max(1.0, stopwatch.now() - start)
    end = stopwatch.now() + 1e6 * seconds
    comparison = Comparison({name: [] for name in names})
    done, count = 0, FEWEST
    while count > 0 and not (done and comparison.settled):
        new = rounds(count)
        comparison = Comparison({name: [*comparison.samples[name], *mine] for name, mine in zip(names, new)})
        done += count
        # Doubling makes tests of the interval few. Each test is a chance to stop at an interval that is wrong by luck.
        count = min(done, MOST - done, int((end - stopwatch.now()) / one_round))
    return comparison


def _timed(stopwatch: Stopwatch, action: Action) -> float:
    start = stopwatch.now()
    action()
    return stopwatch.now() - start


def sustained(stopwatch: Stopwatch, action: Action, seconds: float) -> list[float]:
    """Run ``action`` for ``seconds`` without a pause. Return the mean µs of a run for each window of runs, of which
    there are at least ``FEWEST``."""
    action()
    repeats = max(1, int(min(WINDOW, 1e6 * seconds) / max(1.0, _timed(stopwatch, action))))
    window = repeated(action, repeats)
    end = stopwatch.now() + 1e6 * seconds
    windows: list[float] = []
    while len(windows) < FEWEST or stopwatch.now() < end:
        windows.append(_timed(stopwatch, window) / repeats)
    return windows


def issue_time(stopwatch: Stopwatch, action: Action) -> float:
    """Return the µs that the host takes to issue ``action``, without waiting for the device."""
    stopwatch.now()
    start = time.perf_counter()
    action()
    taken = 1e6 * (time.perf_counter() - start)
    stopwatch.now()
    return taken

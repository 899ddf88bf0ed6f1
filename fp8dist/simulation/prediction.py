"""Predict the cost of the ways to reduce amaxes, as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp8dist.errors import ConfigurationError
from fp8dist.simulation.algorithms import Topology, Way, Workload, time_of
from fp8dist.simulation.constants import Algorithm, Constant, Constants
from fp8dist.simulation.fitting import Fit
from fp8dist.simulation.stragglers import Kind, Stragglers

__all__ = ["Cost", "Job", "SimulationReport"]


@dataclass(frozen=True)
class Cost:
    """The cost of a way, in µs per step.

    ``sync``: time of all its collectives if no rank is late. ``added``: wait of the last rank, which makes the step
    longer. ``wait_…``: wait of a rank for the collectives and for later ranks, over all ranks and steps. ``share``:
    share of the mean wait in a step that includes it. ``exact_wait``: the mean by formula, or None if there is none.
    """

    way: str
    collectives: int
    bytes: int
    sync: float
    added: float
    wait_mean: float
    wait_p50: float
    wait_p99: float
    share: float
    exact_wait: float | None


@dataclass(frozen=True)
class Job:
    """A job whose syncs are predicted.

    ``step``: duration of a step without syncs, µs. ``window``: time from the start of the sync to the first use of the
    new scales, µs (0 with ``same_step``).

    Raises:
        ConfigurationError: a number is out of range.
    """

    workload: Workload
    algorithm: Algorithm
    constants: Constants
    stragglers: Stragglers
    step: float = 1e6
    window: float = 0.0
    steps: int = 200
    seed: int = 0

    def __post_init__(self) -> None:
        if not (0 < self.step < float("inf") and 0 <= self.window <= self.step and self.steps > 0 and self.seed >= 0):
            raise ConfigurationError(
                "a step must be longer than 0 ms and no shorter than the window, steps 1 or more, the seed 0 or more"
            )

    def costs(self, topology: Topology) -> tuple[Cost, ...]:
        """Return the cost of each way of ``Workload.ways``. All use the same random draws."""
        waits = self.stragglers.waits(topology.ranks, self.steps, self.seed)
        p50, p99 = _quantiles(waits, (0.5, 0.99))
        mean, exact = float(waits.mean(dtype=np.float64)), self.stragglers.mean_wait(topology.ranks)
        return tuple(self._cost(way, topology, waits, mean, exact, p50, p99) for way in self.workload.ways)

    def _cost(
        self,
        way: Way,
        topology: Topology,
        waits: NDArray[np.float32],
        mean: float,
        exact: float | None,
        p50: float,
        p99: float,
    ) -> Cost:
        sync = self.sync(way, topology)
        if topology.ranks == 1:
            return Cost(way.name, 0, 0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
        left = sync - (self.window if way.overlaps else 0.0)
        if left < 0:  # The window hides delays as well.
            mean = float(np.maximum(waits + np.float32(left), 0).mean(dtype=np.float64))
            exact = None if waits.any() else 0.0
        else:
            mean, exact = mean + left, None if exact is None else exact + left
        return Cost(
            way=way.name,
            collectives=way.collectives,
            bytes=way.bytes,
            sync=sync,
            added=max(0.0, left),
            wait_mean=mean,
            wait_p50=max(0.0, p50 + left),
            wait_p99=max(0.0, p99 + left),
            share=mean / (self.step + mean),
            exact_wait=exact,
        )

    def sync(self, way: Way, topology: Topology) -> float:
        """Return the µs of all collectives of this way if no rank is late."""
        return time_of(way.parts(self.algorithm, topology), topology, self.constants)


def _quantiles(values: NDArray[np.float32], quantiles: Iterable[float]) -> list[float]:
    """Return quantiles without interpolation. For many values np.partition is faster than a sort."""
    flat = values.reshape(-1)
    places = [min(len(flat) - 1, int(q * len(flat))) for q in quantiles]
    ordered = np.partition(flat, places)
    return [float(ordered[place]) for place in places]


@dataclass(frozen=True)
class SimulationReport:
    """A prediction. ``str()`` is a table with all its assumptions. ``assumptions``: constants and job parameters."""

    topology: Topology
    algorithm: Algorithm
    update: str
    straggler: Kind
    costs: Sequence[Cost]
    assumptions: Sequence[Constant]
    calibration: Fit | None = None

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values. Times are in µs."""
        return {
            "ranks": self.topology.ranks,
            "nodes": self.topology.nodes,
            "algorithm": self.algorithm,
            "update": self.update,
            "straggler": self.straggler,
            "ways": [asdict(cost) for cost in self.costs],
            "assumptions": [asdict(constant) for constant in self.assumptions],
            "calibration": None if self.calibration is None else self.calibration.as_dict(),
        }

    def __str__(self) -> str:
        late = "no rank late" if self.straggler == "none" else f"{self.straggler} delays"
        lines = [f"{_where(self.topology)}, {self.algorithm}, {self.update}, {late}: per step", ""]
        head = ("", "collectives", "bytes", "sync", "step longer by", "wait mean", "p50", "p99", "of the step")
        rows = [head, *map(_row, self.costs)]
        widths = [max(map(len, column)) for column in zip(*rows)]
        for first, *cells in rows:
            numbers = (f"{cell:>{width}}" for cell, width in zip(cells, widths[1:]))
            lines.append("  ".join((f"{first:<{widths[0]}}", *numbers)))
        lines += ["", "Constants and assumptions:", *map(str, self.assumptions)]
        if self.calibration is not None:
            lines += ["", "Calibrated with:"]
            for run, measured, fitted in self.calibration.fits:
                lines.append(
                    f"{run.path}: {_where(run.topology)}, {run.field}: {_time(measured)}, fitted {_time(fitted)}"
                )
            lines += ["Limits of the fit:", *self.calibration.notes]
        return "\n".join(lines)


def _where(topology: Topology) -> str:
    ranks, nodes = (
        f"{n} {what}{'s' if n > 1 else ''}" for n, what in ((topology.ranks, "rank"), (topology.nodes, "node"))
    )
    return f"{ranks} on {nodes}"


def _row(cost: Cost) -> tuple[str, ...]:
    times = (cost.sync, cost.added, cost.wait_mean, cost.wait_p50, cost.wait_p99)
    return (cost.way, str(cost.collectives), str(cost.bytes), *map(_time, times), f"{100 * cost.share:.3g}%")


def _time(microseconds: float) -> str:
    for limit, factor, unit in ((1e3, 1.0, "µs"), (1e6, 1e-3, "ms")):
        if microseconds < 0.9995 * limit:  # Larger values round up to the limit with three digits.
            return f"{microseconds * factor:.3g} {unit}"
    return f"{microseconds * 1e-6:.3g} s"

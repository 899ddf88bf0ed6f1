"""A prediction for people and for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fp8dist.simulation.algorithms import Topology
from fp8dist.simulation.constants import Algorithm, Constant
from fp8dist.simulation.fitting import Fit
from fp8dist.simulation.prediction import Cost
from fp8dist.simulation.stragglers import Kind
from fp8dist.text import aligned

__all__ = ["SimulationReport"]


@dataclass(frozen=True)
class SimulationReport:
    """``str()`` is a table and all that it rests on. ``assumptions``: constants, and what describes the job."""

    topology: Topology
    algorithm: Algorithm
    update: str
    straggler: Kind
    costs: Sequence[Cost]
    assumptions: Sequence[Constant]
    calibration: Fit | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; times in µs."""
        return {
            "ranks": self.topology.ranks,
            "nodes": self.topology.nodes,
            "algorithm": self.algorithm,
            "update": self.update,
            "straggler": self.straggler,
            "ways": [cost.as_dict() for cost in self.costs],
            "assumptions": [constant.as_dict() for constant in self.assumptions],
            "calibration": None if self.calibration is None else self.calibration.as_dict(),
        }

    def __str__(self) -> str:
        late = "nobody late" if self.straggler == "none" else f"{self.straggler} delays"
        lines = [f"{_where(self.topology)}, {self.algorithm}, {self.update}, {late}: per step", ""]
        head = ("", "collectives", "bytes", "sync", "step longer by", "wait mean", "p50", "p99", "of the step")
        rows = [head, *map(_row, self.costs)]
        lines += aligned(rows, right=range(1, len(head)))
        lines += ["", "This rests on:", *map(str, self.assumptions)]
        if self.calibration is not None:
            lines += ["", "Calibrated with:"]
            for run, measured, fitted in self.calibration.fits:
                lines.append(
                    f"{run.path}: {_where(run.topology)}, {run.field}: {_time(measured)}, fitted {_time(fitted)}"
                )
            lines += ["What this does not tell:", *self.calibration.notes]
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
        if microseconds < 0.9995 * limit:  # Else three digits round up to it.
            return f"{microseconds * factor:.3g} {unit}"
    return f"{microseconds * 1e-6:.3g} s"

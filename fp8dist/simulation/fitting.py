"""Constants from runs: as many as the runs can tell apart."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp8dist.errors import ConfigurationError
from fp8dist.simulation.algorithms import time_of
from fp8dist.simulation.constants import TIMES, Algorithm, Constants
from fp8dist.simulation.runs import Run

__all__ = ["Fit", "fit"]

Matrix = NDArray[np.float64]

_LEAST_ANGLE = 0.02
"""Columns are told apart if the smallest singular value of the scaled matrix is above this share of the largest."""


@dataclass(frozen=True)
class Fit:
    """``fits``: (run, µs measured, µs by the fitted constants). ``notes``: what the runs do not tell, in sentences."""

    constants: Constants
    fits: tuple[tuple[Run, float, float], ...]
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        runs = [
            {
                "path": run.path,
                "ranks": run.topology.ranks,
                "nodes": run.topology.nodes,
                "field": run.field,
                "measured_us": measured,
                "fitted_us": fitted,
            }
            for run, measured, fitted in self.fits
        ]
        return {"runs": runs, "notes": list(self.notes)}


def fit(runs: Sequence[Run], algorithm: Algorithm, constants: Constants) -> Fit:
    """Fit the times that are defaults to runs under ``same_step``; those that were given stay, and so do bandwidths.

    Least squares of relative errors, none negative. Where runs cannot tell constants apart, their defaults say in which
    proportion they are: all of them have one common factor, or if that is told apart, all but the overhead have.

    Raises:
        ConfigurationError: there is nothing to fit, or no constants explain the runs.
    """
    free = [name for name in TIMES if constants.by_name[name].origin == "default"]
    parts = [run.way.parts(algorithm, run.topology) for run in runs]
    columns = np.array([[getattr(part, name) for name in free] for part in parts], dtype=np.float64)
    free = [name for name, column in zip(free, columns.T) if column.any()]
    if not free:
        raise ConfigurationError("nothing is left to fit: give runs with nodes, or fewer constants, beside --calibrate")
    guesses, slowdown = {name: constants[name] for name in free}, constants["slowdown"]
    if constants.by_name["slowdown"].origin == "default":  # It is in what is measured.
        for name in TIMES:
            kept = constants.by_name[name]
            if kept.origin == "default" and name not in free and kept.value:
                source = f"{kept.source}, times {slowdown:g}"
                constants = constants.having({name: kept.value * slowdown}, "default", source)
        slowdown = 1.0
        constants = constants.having({"slowdown": 1.0}, "fitted", "in the times")
    zero = constants.having({**dict.fromkeys(free, 0.0), "added_latency": 0.0}, "fitted", "")
    measured = np.array([run.wait for run in runs])
    known = np.array([time_of(part, run.topology, zero) for part, run in zip(parts, runs)])
    if (measured <= known).any():
        worst = runs[int(np.argmin(measured - known))]
        raise ConfigurationError(f"{worst.path}: its syncs are faster than the constants that were given allow")
    columns = slowdown * np.array([[getattr(part, name) for name in free] for part in parts]) / measured[:, None]
    groups = _groups(columns, free, guesses)
    shares = np.array([[_share(name, group, guesses) for group in groups] for name in free])
    solution = shares @ _least_squares(columns @ shares, (measured - known) / measured)
    source = f"{len(runs)} run{'s' if len(runs) > 1 else ''}"
    constants = constants.having(dict(zip(free, map(float, solution))), "fitted", source)
    without_added = constants.having({"added_latency": 0.0}, "given", "")
    fitted = [time_of(part, run.topology, without_added) for part, run in zip(parts, runs)]
    fits = tuple(zip(runs, map(float, measured), fitted))
    return Fit(constants, fits, tuple(_notes(runs, groups, constants)))


def _groups(columns: Matrix, free: list[str], guesses: dict[str, float]) -> list[list[str]]:
    """Constants that have a factor of their own each, and those with a common one."""
    rest = [name for name in free if name != "overhead"]
    candidates = [[[name] for name in free], [["overhead"], rest] if "overhead" in free and rest else [free], [free]]
    for groups in candidates:
        shares = np.array([[_share(name, group, guesses) for group in groups] for name in free])
        scaled = columns @ shares
        norms = np.linalg.norm(scaled, axis=0)
        if len(groups) <= len(columns) and (norms > 0).all():
            singular = np.linalg.svd(scaled / norms, compute_uv=False)
            if singular[-1] > _LEAST_ANGLE * singular[0]:
                return groups
    return [free]


def _share(name: str, group: list[str], guesses: dict[str, float]) -> float:
    """What a constant is when its group's factor is 1."""
    if name not in group:
        return 0.0
    return guesses[name] if any(guesses[other] for other in group) else 1.0


def _least_squares(matrix: Matrix, target: Matrix) -> Matrix:
    """The non-negative solution. There are few columns: every set of them is tried."""
    best, least = np.zeros(matrix.shape[1]), float(np.sum(target**2))
    for count in range(1, matrix.shape[1] + 1):
        for chosen in map(list, itertools.combinations(range(matrix.shape[1]), count)):
            solution = np.linalg.lstsq(matrix[:, chosen], target, rcond=None)[0]
            error = float(np.sum((matrix[:, chosen] @ solution - target) ** 2))
            if (solution >= 0).all() and error < least:
                best, least = np.zeros(matrix.shape[1]), error
                best[chosen] = solution
    return best


def _notes(runs: Sequence[Run], groups: list[list[str]], constants: Constants) -> list[str]:
    notes = []
    for group in groups:
        if len(group) > 1:
            notes.append(
                f"{', '.join(group)}: these runs cannot tell them apart; they are in the proportion of their defaults"
            )
    if all(run.topology.nodes == 1 for run in runs):
        notes.append("latency_inter: no run was on several nodes")
    notes.append("bandwidths: not fitted, the messages are too small to show them")
    notes.append("stragglers: who waited for a late rank is in the fitted times, too, and not told apart")
    if any(run.field == "sync_ms" for run in runs):
        notes.append(
            "sync_ms is rank 0's mean over an interval: a rank that comes early, or late, there is all that is seen"
        )
    notes.append("the runs are taken for same_step: a file does not say it, and next_step would hide most of it")
    return notes

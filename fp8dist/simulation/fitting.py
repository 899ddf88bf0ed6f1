"""Fit constants to runs, as many as the runs can distinguish."""

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
"""Constants can be distinguished if the scaled matrix has no singular value below this share of the largest one."""


@dataclass(frozen=True)
class Fit:
    """The result of a fit. ``fits``: (run, µs measured, µs with the fitted constants). ``notes``: limits of the fit."""

    constants: Constants
    fits: tuple[tuple[Run, float, float], ...]
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
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
    """Fit the times that still have defaults to runs with ``same_step``. Given times and bandwidths stay.

    Non-negative least squares of relative errors. If the runs cannot distinguish all constants, the defaults fix their
    proportions: the overhead and a common factor of the rest are fitted, or only one common factor of all.

    Raises:
        ConfigurationError: there is nothing to fit, or the given constants exceed the measured times.
    """
    free = [name for name in TIMES if constants.by_name[name].origin == "default"]
    parts = [run.way.parts(algorithm, run.topology) for run in runs]
    columns = np.array([[getattr(part, name) for name in free] for part in parts], dtype=np.float64)
    free = [name for name, column in zip(free, columns.T) if column.any()]
    if not free:
        raise ConfigurationError("no constant is left to fit: give fewer constants, or runs on several nodes")
    guesses, slowdown = {name: constants[name] for name in free}, constants["slowdown"]
    if constants.by_name["slowdown"].origin == "default":  # The measured times already include it.
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
        raise ConfigurationError(f"{worst.path}: its syncs are faster than the constants given by flags allow")
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
    """Return the value of a constant if its group's factor is 1."""
    if name not in group:
        return 0.0
    return guesses[name] if any(guesses[other] for other in group) else 1.0


def _least_squares(matrix: Matrix, target: Matrix) -> Matrix:
    """Return the non-negative least-squares solution. Tries every set of columns, because there are few."""
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
                f"{', '.join(group)}: these runs cannot distinguish them; they keep the proportions of their defaults"
            )
    if all(run.topology.nodes == 1 for run in runs):
        notes.append("latency_inter: no run was on several nodes")
    notes.append("bandwidths: not fitted, because the messages are too small")
    notes.append("stragglers: the fitted times include waits for late ranks")
    if any(run.field == "sync_ms" for run in runs):
        notes.append("sync_ms is rank 0's mean over an interval: it depends on how early or late rank 0 arrives")
    notes.append("assumed that the runs used same_step: the files do not record it, and next_step hides most waits")
    return notes

"""Fit constants to runs of the example job, as many as the runs can distinguish."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from scripts.simulation.model import TIMES, Algorithm, Array, Constants, Topology, Unusable, Way, time_of

FIELDS = ("sync_wait_p50_ms", "sync_ms")
"""Fields of a line with the sync time, the best first: the median over ranks, then rank 0's mean over an interval."""

LEAST_ANGLE = 0.02
"""Constants can be distinguished if the scaled matrix has no singular value below this share of the largest one."""


@dataclass(frozen=True)
class Run:
    """A measured run. ``wait``: µs per step, the median over the steps. ``field``: the field with this value."""

    path: str
    topology: Topology
    way: Way
    wait: float
    field: str


Calibration = dict[str, Any]
"""How well the fitted constants explain the runs, as ``--json`` prints it. "runs": for each its path, ranks, nodes,
field, and µs per step as measured and fitted. "notes": limits of the fit."""


# reading a run ----------------------------------------------------------------------------------------


def read_run(given: str, per_node: int, shared_cores: int | None) -> Run:
    """Read a run from its ``metrics.jsonl`` and the ``summary.json`` beside it.

    Args:
        given: PATH of the metrics, or PATH@NODES. Without NODES, the number of nodes is the number of hosts in the
            summary; if the summary does not name all ranks, it follows from ``per_node``.

    Raises:
        Unusable: the run cannot be read, or has no sync time.
    """
    path, _, nodes = given.rpartition("@") if given.rpartition("@")[2].isdigit() else (given, "", "")
    fields = ("ranks", "fp8_collectives_per_step", "fp8_bytes_per_sync")
    try:
        wait, field = _wait(Path(path).read_text(encoding="utf-8"))
        summary = json.loads(Path(path).with_name("summary.json").read_text(encoding="utf-8"))
        ranks, collectives, size = (round(summary[name]) for name in fields)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Unusable(
            f"{path}: {error}: give the metrics.jsonl of an FP8 run of the example job, with its summary.json beside it"
        ) from error
    if not (wait > 0 and ranks > 1 and collectives > 0 and size > 0):
        raise Unusable(f"{path}: no time was spent waiting in a sync: give a same_step run of several ranks")
    count = int(nodes) if nodes else _hosts(summary)
    if count is None:
        if ranks > per_node and ranks % per_node:
            raise Unusable(f"{path}: {ranks} ranks do not fill nodes of {per_node}: give PATH@NODES")
        count = max(1, ranks // per_node)
    if count < 1 or ranks % count:
        raise Unusable(f"{path}: {ranks} ranks do not divide equally over {count} nodes: give PATH@NODES")
    way = Way("run", ((round(size / 4), collectives),))
    return Run(path, Topology(ranks, ranks // count, shared_cores), way, wait, field)


def _wait(text: str) -> tuple[float, str]:
    """Return the median wait in µs, and its field. A killed run may leave an incomplete last line, which is skipped.

    Raises:
        ValueError: no line has a wait.
    """
    lines = [json.loads(line) for line in text.split("\n")[:-1]]
    for field in FIELDS:
        waits = [float(line[field]) for line in lines if line.get(field) is not None]
        if waits:
            return 1e3 * median(waits), field
    raise ValueError(f"no line has {' or '.join(FIELDS)}")


def _hosts(summary: dict[str, Any]) -> int | None:
    """Return the number of hosts, or None if the summary does not name the host of every rank."""
    ranks = (summary.get("waiting") or {}).get("ranks") or []
    hosts = {rank.get("host") for rank in ranks}
    return None if len(ranks) != summary["ranks"] or None in hosts else len(hosts)


# fitting ----------------------------------------------------------------------------------------------


def fit(runs: Sequence[Run], algorithm: Algorithm, constants: Constants) -> tuple[Constants, Calibration]:
    """Fit the times that still have defaults to runs with ``same_step``. Given times and bandwidths stay.

    Non-negative least squares of relative errors. If the runs cannot distinguish all constants, the defaults fix their
    proportions: the overhead and a common factor of the rest are fitted, or only one common factor of all.

    Raises:
        Unusable: there is nothing to fit, or the given constants exceed the measured times.
    """
    parts = np.array([run.way.parts(algorithm, run.topology) for run in runs])
    left = [name for name in TIMES if constants[name].origin == "default"]
    free = [name for name in left if parts[:, TIMES.index(name)].any()]
    if not free:
        raise Unusable("no constant is left to fit: give fewer constants, or runs on several nodes")
    guesses = {name: constants[name].value for name in free}
    slowdown = constants["slowdown"]
    if slowdown.origin == "default":  # The measured times already include it.
        for name in left:
            kept = constants[name]
            if name not in free and kept.value:
                source = f"{kept.source}, times {slowdown.value:g}"
                constants = constants.having({name: kept.value * slowdown.value}, "default", source)
        constants = constants.having({"slowdown": 1.0}, "fitted", "in the times")
    measured = np.array([run.wait for run in runs])
    known = np.array(_times(runs, parts, constants.having(dict.fromkeys(free, 0.0), "fitted", "")))
    if (measured <= known).any():
        worst = runs[int(np.argmin(measured - known))]
        raise Unusable(f"{worst.path}: its syncs are faster than the constants given by flags allow")
    columns = parts[:, [TIMES.index(name) for name in free]] * constants["slowdown"].value / measured[:, None]
    groups = _groups(columns, free, guesses)
    shares = _shares(groups, free, guesses)
    solution = shares @ _least_squares(columns @ shares, (measured - known) / measured)
    source = f"{len(runs)} run{'s' if len(runs) > 1 else ''}"
    constants = constants.having(dict(zip(free, map(float, solution))), "fitted", source)
    fitted = []
    for run, time in zip(runs, _times(runs, parts, constants)):
        place = {"path": run.path, "ranks": run.topology.ranks, "nodes": run.topology.nodes}
        fitted.append({**place, "field": run.field, "measured_us": run.wait, "fitted_us": time})
    return constants, {"runs": fitted, "notes": _notes(runs, groups)}


def _times(runs: Sequence[Run], parts: Array, constants: Constants) -> list[float]:
    """Return the µs of each run. No latency was added to the runs."""
    plain = constants.having({"added_latency": 0.0}, "given", "")
    return [time_of(part, run.topology, plain) for part, run in zip(parts, runs)]


def _groups(columns: Array, free: list[str], guesses: dict[str, float]) -> list[list[str]]:
    """Return the constants in groups that get a factor each, as many groups as the runs can distinguish."""
    rest = [name for name in free if name != "overhead"]
    candidates = [[[name] for name in free], *([[["overhead"], rest]] if "overhead" in free and rest else [])]
    for groups in candidates:
        scaled = columns @ _shares(groups, free, guesses)
        norms = np.linalg.norm(scaled, axis=0)
        if len(groups) <= len(columns) and (norms > 0).all():
            singular = np.linalg.svd(scaled / norms, compute_uv=False)
            if singular[-1] > LEAST_ANGLE * singular[0]:
                return groups
    return [free]


def _shares(groups: list[list[str]], free: list[str], guesses: dict[str, float]) -> Array:
    """Return the value of each constant (row) if the factor of its group (column) is 1."""
    shares = np.zeros((len(free), len(groups)))
    for column, group in enumerate(groups):
        any_guess = any(guesses[name] for name in group)
        for name in group:
            shares[free.index(name), column] = guesses[name] if any_guess else 1.0
    return shares


def _least_squares(matrix: Array, target: Array) -> Array:
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


def _notes(runs: Sequence[Run], groups: list[list[str]]) -> list[str]:
    notes = [
        f"{', '.join(group)}: these runs cannot distinguish them; they keep the proportions of their defaults"
        for group in groups
        if len(group) > 1
    ]
    if all(run.topology.nodes == 1 for run in runs):
        notes.append("latency_inter: no run was on several nodes")
    notes.append("bandwidths: not fitted, because the messages are too small")
    notes.append("stragglers: the fitted times include waits for late ranks")
    if any(run.field == "sync_ms" for run in runs):
        notes.append("sync_ms is rank 0's mean over an interval: it depends on how early or late rank 0 arrives")
    notes.append("assumed that the runs used same_step: the files do not record it, and next_step hides most waits")
    return notes

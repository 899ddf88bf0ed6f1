"""Skew between the ranks of a run, and the straggler that the other ranks wait for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

RECENT = 20
"""Number of newest steps from which a line of ``metrics.jsonl`` names the straggler."""

FEWEST = 8
"""Minimum number of steps to name a straggler, because the first steps are not typical."""

MOST = 0.75
"""Minimum share of steps in which a straggler is behind. Other ranks are late only occasionally, due to other work on
their host or late data."""

SHARE, FLOOR_MS = 0.05, 1.0
"""Minimum delay of a straggler, as a share of the whole step and in ms. Both must be exceeded."""


class Skew:
    """Collects the measurements of all ranks (see ``Waiting``), on rank 0.

    The **own time** of a rank in a step is the duration of the step minus the rank's waits. The rank with the most own
    time came last. A rank is **behind** by its own time minus that of the median rank.
    """

    def __init__(self, ranks: int) -> None:
        self._measured: Floats = np.empty((ranks, 3, 0))  # Of each step: in the sync, in other collectives, in total.

    def add(self, measured: Floats) -> list[dict[str, Any]]:
        """Add measurements, in ms, [ranks, 3, steps]: FP8 sync, other collectives, whole step. Return the fields of
        each step for ``metrics.jsonl``.

        Waits are quantiles over the ranks in one step. Skew is the largest minus the smallest own time. The fields are
        empty with one rank, and for a step that did not end.
        """
        ranks, _, steps = measured.shape
        ended: npt.NDArray[np.bool_] = ~np.any(np.isnan(measured[:, 2]), axis=0)
        if ranks == 1 or not ended.any():
            return [{}] * steps
        measured = measured[:, :, ended]
        self._measured = np.concatenate([self._measured, measured], axis=2)
        straggler = _straggler(self._measured[:, :, -RECENT:])
        own = _own(measured)
        columns: dict[str, list[Any]] = {}
        if not np.isnan(measured[:, 0]).any():
            columns.update(_columns("sync_wait", measured[:, 0]))
        columns.update(_columns("wait", _waited(measured)))
        columns["skew_ms"] = np.round(np.ptp(own, axis=0), 4).tolist()
        columns["last_rank"] = own.argmax(0).tolist()
        columns["straggler"] = [straggler and straggler[0]] * own.shape[1]
        lines = iter([dict(zip(columns, values)) for values in zip(*columns.values())])
        return [next(lines) if done else {} for done in ended.tolist()]

    def summary(self, hosts: Sequence[str]) -> dict[str, Any] | None:
        """Return the summary of all steps, or None with one rank or no steps. ``hosts``: names by rank."""
        measured = self._measured
        if not measured.size:
            return None
        own, straggler = _own(measured), _straggler(measured)
        skew = np.ptp(own, axis=0)
        kinds = {"sync_wait": measured[:, 0], "wait": _waited(measured), "own": own}
        named = straggler and dict(
            zip(("rank", "host", "behind_ms"), (straggler[0], hosts[straggler[0]], straggler[1]))
        )
        return {
            "steps": measured.shape[2],
            "straggler": named,
            "skew_p50_ms": _at(0.5, skew),
            "skew_p99_ms": _at(0.99, skew),
            "ranks": [
                {
                    "rank": rank,
                    "host": host,
                    **{f"{name}_p50_ms": _at(0.5, of[rank]) for name, of in kinds.items()},
                    **{f"{name}_p99_ms": _at(0.99, of[rank]) for name, of in kinds.items()},
                }
                for rank, host in enumerate(hosts)
            ],
        }


def lines_of(summary: dict[str, Any]) -> list[str]:
    """Format the result of ``Skew.summary`` for the terminal."""
    straggler, who = summary["straggler"], "none"
    if straggler is not None:
        who = f"rank {straggler['rank']} on {straggler['host']}, {straggler['behind_ms']:.1f} ms a step behind"
    lines = [
        f"{'straggler:':58}{who}",
        f"{'skew of the ranks, ms per step (p50, p99):':58}{summary['skew_p50_ms']:.1f}, {summary['skew_p99_ms']:.1f}",
        f"{'ms per step (p50, p99)':24}{'wait in the sync':>20}{'all waits':>20}{'own time':>20}",
    ]
    for rank in summary["ranks"]:
        cells = [_cell(rank, name) for name in ("sync_wait", "wait", "own")]
        lines.append(f"{'rank ' + str(rank['rank']) + ' on ' + rank['host']:24}" + "".join(f"{c:>20}" for c in cells))
    return lines


def _cell(rank: dict[str, Any], name: str) -> str:
    p50, p99 = rank[f"{name}_p50_ms"], rank[f"{name}_p99_ms"]
    return "-" if p50 is None else f"{p50:.1f}, {p99:.1f}"


def _straggler(measured: Floats) -> tuple[int, float] | None:
    """Return the worst straggler and its median ms behind, or None.

    If more than half of the ranks are slow, the median rank is slow too, and no rank counts as a straggler.
    """
    if measured.shape[2] < FEWEST:
        return None
    own = _own(measured)
    behind = own - np.quantile(own, 0.5, axis=0, method="lower")  # With two ranks, the faster one.
    mostly = np.quantile(behind, 1 - MOST, axis=1)
    margin = max(FLOOR_MS, SHARE * float(np.median(measured[:, 2])))
    found = [(round(float(np.median(behind[rank])), 4), rank) for rank in np.flatnonzero(mostly > margin).tolist()]
    return max(found)[::-1] if found else None


def _waited(measured: Floats) -> Floats:
    """Return the waits in all collectives, ms, [ranks, steps]."""
    waited: Floats = np.nan_to_num(measured[:, 0]) + measured[:, 1]
    return waited


def _own(measured: Floats) -> Floats:
    """Return the own time, ms, [ranks, steps]."""
    own: Floats = measured[:, 2] - _waited(measured)
    return own


def _columns(name: str, values: Floats) -> dict[str, list[float]]:
    """Return p50, p99 and maximum over the ranks, for each step. ``values``: ms, [ranks, steps]."""
    p50, p99 = np.quantile(values, [0.5, 0.99], axis=0).round(4).tolist()
    return {f"{name}_p50_ms": p50, f"{name}_p99_ms": p99, f"{name}_max_ms": values.max(0).round(4).tolist()}


def _at(quantile: float, values: Floats) -> float | None:
    """Return the quantile of the values that are not NaN, or None if all are NaN."""
    known = values[~np.isnan(values)]
    return round(float(np.quantile(known, quantile)), 4) if len(known) else None

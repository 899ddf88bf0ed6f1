"""Read sync times from runs of the example job."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, TypeGuard

from fp8dist.errors import ConfigurationError
from fp8dist.simulation.algorithms import Topology, Way

__all__ = ["Run", "read_run"]

FIELDS = ("sync_wait_p50_ms", "sync_ms")
"""Fields of a line with the sync time, the best first: the median over ranks, then rank 0's mean over an interval."""


@dataclass(frozen=True)
class Run:
    """A measured run. ``wait``: µs per step, the median over the steps. ``field``: the field with this value."""

    path: str
    topology: Topology
    way: Way
    wait: float
    field: str


def read_run(given: str, per_node: int, shared_cores: int | None) -> Run:
    """Read a run from its ``metrics.jsonl`` and the ``summary.json`` beside it.

    Args:
        given: PATH of the metrics, or PATH@NODES. Without NODES, the number of nodes is the number of hosts in the
            summary; if the summary does not name all ranks, it follows from ``per_node``.

    Raises:
        ConfigurationError: the run cannot be read, or has no sync time.
    """
    path, _, nodes = given.rpartition("@") if given.rpartition("@")[2].isdigit() else (given, "", "")
    waits, field = _waits(path)
    summary = _summary(Path(path).with_name("summary.json"))
    ranks, collectives, size = (
        _positive(summary, name, path) for name in ("ranks", "fp8_collectives_per_step", "fp8_bytes_per_sync")
    )
    if ranks != int(ranks) or ranks < 2:
        raise ConfigurationError(
            f"{path}: a run of {ranks:g} ranks has no sync to calibrate with: give a run of several ranks"
        )
    count = int(nodes) if nodes else _hosts(summary, int(ranks))
    if count is None:
        if ranks > per_node and ranks % per_node:
            raise ConfigurationError(f"{path}: {ranks:g} ranks do not fill nodes of {per_node}: give PATH@NODES")
        count = max(1, int(ranks) // per_node)
    if count < 1 or int(ranks) % count:
        raise ConfigurationError(f"{path}: {ranks:g} ranks do not divide equally over {count} nodes: give PATH@NODES")
    wait = 1e3 * median(waits)
    if wait <= 0:
        raise ConfigurationError(f"{path}: no time was spent waiting in the sync: calibrate with a same_step run")
    topology = Topology(int(ranks), int(ranks) // count, shared_cores)
    return Run(path, topology, Way("run", ((round(size / 4), max(1, round(collectives))),)), wait, field)


def _waits(path: str) -> tuple[list[float], str]:
    lines = list(_lines(path))
    for field in FIELDS:
        waits = [line[field] for line in lines if line.get(field) is not None]
        if waits:
            if not all(_is_number(wait) and wait >= 0 for wait in waits):
                raise ConfigurationError(
                    f"{path}: {field} is not a time in every line: give a metrics.jsonl of the example job"
                )
            return waits, field
    raise ConfigurationError(
        f"{path}: no line has {' or '.join(FIELDS)}: give the metrics.jsonl of a run of the example job in FP8"
    )


def _lines(path: str) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a file. Skip an incomplete last line, which a killed run may leave.

    Raises:
        ConfigurationError: another line is not a JSON object.
    """
    texts = [text for text in _text(Path(path)).split("\n") if text.strip()]
    for number, text in enumerate(texts, 1):
        try:
            line = json.loads(text)
        except ValueError:
            line = None
        if isinstance(line, dict):
            yield line
        elif number < len(texts) or number == 1:
            raise ConfigurationError(
                f"{path}: line {number} is not a JSON object: give a metrics.jsonl of the example job"
            )


def _summary(path: Path) -> dict[str, Any]:
    try:
        summary = json.loads(_text(path))
    except ValueError:
        summary = None
    if not isinstance(summary, dict):
        raise ConfigurationError(f"{path}: not a JSON object: give a run of the example job that has ended")
    return summary


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigurationError(
            f"{path}: {reason}: give the metrics.jsonl of a run of the example job, with its summary.json beside it"
        ) from error


def _positive(summary: dict[str, Any], name: str, path: str) -> float:
    value = summary.get(name)
    if not _is_number(value) or value <= 0:
        raise ConfigurationError(f"{path}: summary.json has no {name} above 0: give an FP8 run of several ranks")
    return float(value)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _hosts(summary: dict[str, Any], ranks: int) -> int | None:
    """Return the number of hosts, or None if the summary does not name the host of every rank."""
    waiting = summary.get("waiting")
    named = waiting.get("ranks") if isinstance(waiting, dict) else None
    if not isinstance(named, list) or len(named) != ranks or not all(isinstance(rank, dict) for rank in named):
        return None
    hosts = {rank.get("host") for rank in named}
    return None if None in hosts else len(hosts)

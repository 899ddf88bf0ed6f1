"""Runs of the example job, as far as they tell what a sync took."""

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
"""What is looked for in a line, the best first: the median over the ranks, and rank 0's mean over an interval."""


@dataclass(frozen=True)
class Run:
    """``wait``: µs per step, the median over the steps. ``field``: where it was read."""

    path: str
    topology: Topology
    way: Way
    wait: float
    field: str


def read_run(given: str, per_node: int, shared_cores: int | None) -> Run:
    """The run whose ``metrics.jsonl`` is at this path, with ``summary.json`` beside it.

    Args:
        given: PATH, or PATH@NODES. Without a number of nodes the hosts in the summary are counted, or if it does not
            name all ranks, ``per_node`` counts.

    Raises:
        ConfigurationError: it cannot be read, or does not say what a sync took.
    """
    path, _, nodes = given.rpartition("@") if given.rpartition("@")[2].isdigit() else (given, "", "")
    waits, field = _waits(path)
    summary = _summary(Path(path).with_name("summary.json"))
    ranks, collectives, size = (
        _positive(summary, name, path) for name in ("ranks", "fp8_collectives_per_step", "fp8_bytes_per_sync")
    )
    if ranks != int(ranks) or ranks < 2:
        raise ConfigurationError(
            f"{path}: a run of {ranks:g} ranks has no sync to calibrate with: give one of several ranks"
        )
    count = int(nodes) if nodes else _hosts(summary, int(ranks))
    if count is None:
        if ranks > per_node and ranks % per_node:
            raise ConfigurationError(f"{path}: {ranks:g} ranks do not fill nodes of {per_node}: give PATH@NODES")
        count = max(1, int(ranks) // per_node)
    if count < 1 or int(ranks) % count:
        raise ConfigurationError(f"{path}: {ranks:g} ranks are not on {count} nodes equally: give PATH@NODES")
    wait = 1e3 * median(waits)
    if wait <= 0:
        raise ConfigurationError(f"{path}: nothing was waited for in the sync: calibrate with a run under same_step")
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
    """The last line of a killed run may be cut off; what else is no object is an error."""
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
                f"{path}: line {number} is no JSON object: give a metrics.jsonl of the example job"
            )


def _summary(path: Path) -> dict[str, Any]:
    try:
        summary = json.loads(_text(path))
    except ValueError:
        summary = None
    if not isinstance(summary, dict):
        raise ConfigurationError(f"{path}: no JSON object: give a run of the example job that has come to its end")
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
        raise ConfigurationError(f"{path}: summary.json has no {name} above 0: give a run in FP8 of several ranks")
    return float(value)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _hosts(summary: dict[str, Any], ranks: int) -> int | None:
    """On how many hosts the ranks were; None: it does not say it of all."""
    waiting = summary.get("waiting")
    named = waiting.get("ranks") if isinstance(waiting, dict) else None
    if not isinstance(named, list) or len(named) != ranks or not all(isinstance(rank, dict) for rank in named):
        return None
    hosts = {rank.get("host") for rank in named}
    return None if None in hosts else len(hosts)

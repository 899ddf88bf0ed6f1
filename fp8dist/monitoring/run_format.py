"""The format of a run's folder: names of its files, and numbers as JSON. docs/reference/run-folder.md describes it."""

from __future__ import annotations

import math
from typing import Any

__all__ = [
    "EVENTS",
    "EXPERTS",
    "FORMAT",
    "HEADER",
    "METRICS",
    "RANKS",
    "SCALES",
    "VERSION",
    "from_json",
    "to_json",
    "was_repaired",
]

FORMAT, VERSION = "fp8dist run", 1
"""Value of ``format`` and ``version`` in the header."""

HEADER = "run.json"
"""What the run is: ranks, hosts, recipe, slots, modules, versions."""

METRICS = "metrics.jsonl"
"""One line per step: loss and other numbers."""

SCALES = "scales.jsonl"
"""One line per slot and observation."""

EXPERTS = "experts.jsonl"
"""One line per mixture and observation: tokens of each expert."""

RANKS = "ranks.jsonl"
"""One line per observation: numbers of each rank."""

EVENTS = "events.jsonl"
"""One line per event."""


def to_json(value: float | int | None) -> float | int | str | None:
    """Return the number as JSON has it: "NaN", "Infinity" and "-Infinity" are strings, because JSON has no such number.

    Python's ``float()`` reads these strings.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def was_repaired(report: Any) -> bool:
    """True if the report of an event says that all differences were repaired. Older versions write no "diverged"."""
    if not isinstance(report, dict):
        return False
    return report["diverged"] is False if "diverged" in report else report.get("consistent") is True


def from_json(value: Any) -> float:
    """Return a number that ``to_json`` wrote, and NaN for anything that is not a number."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return math.nan
    if isinstance(value, str) and value not in ("NaN", "Infinity", "-Infinity"):
        return math.nan
    try:
        return float(value)
    except OverflowError:  # An integer beyond float64.
        return math.nan

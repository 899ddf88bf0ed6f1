"""The format of a run's folder: names of its files. docs/reference/run-folder.md describes it."""

from __future__ import annotations

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


def was_repaired(report: Any) -> bool:
    """True if the report of an event says that all differences were repaired. Older versions write no "diverged"."""
    if not isinstance(report, dict):
        return False
    return report["diverged"] is False if "diverged" in report else report.get("consistent") is True

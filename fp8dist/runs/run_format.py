"""The format of a run's folder: names of its files. docs/reference/files.md describes it."""

from __future__ import annotations

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

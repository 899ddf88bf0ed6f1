"""Which faults of the fault lab are found by the sync's header, by checks and by audits, and how many steps later.

Each fault is planted in three runs of the lab on three ranks: with the sync alone, with a check in every step,
and with an audit in every step.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from launch.train_gpt.exits import DIVERGED
from tests.support import forked

RANKS = 3
SIZE = ["--layers", "1", "--width", "32", "--heads", "2", "--context", "32", "--batch-size", "4", "--log-every", "50"]
PERIOD = 4 * 6
"""Steps in which the audits of this model visit all sites: four Linears, each with three casts and three products."""

VISITED = 1 + PERIOD
"""A step whose audit visits the first wgrad of the backward."""

LONG, SEEDS = 600, 5
"""Steps and runs with a device that is wrong seldom."""

MODES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"header": (), "check": ("--check-every", "1"), "audit": ("--audit-every", "1")}
)

FAULTS: tuple[tuple[str, str, int, int, int], ...] = (
    ("one bit of a scale", "scale:1:5", 5, 12, 1),
    ("one bit of a weight", "weight:1:5", 5, 12, 1),
    ("one bit of a gradient, after the all-reduce", "gradient:1:5", 5, 12, 1),
    ("an update that a rank loses", "skip:1:5", 5, 12, 1),
    ("one bit of one product, which the step's audit visits", f"product:1:{VISITED}", VISITED, VISITED + 5, 1),
    ("one bit of one product, which the step's audit does not visit", "product:1:5", 5, 12, 1),
    ("a device whose products are all wrong", "bad-device:1:1", 1, 12, 1),
    ("a device with every hundredth product wrong", "bad-device:1:0.01", 1, LONG, SEEDS),
)
"""(in words, ``--inject``, its step, steps of the run, runs)."""


def faults() -> Iterator[dict[str, Any]]:
    """Yield for each fault and mode how many steps later it is found, in each run. None: not found."""
    for words, fault, step, steps, runs in FAULTS:
        row: dict[str, Any] = {"fault": words, "inject": fault}
        for mode, flags in MODES.items():
            given = [*SIZE, "--steps", str(steps), "--inject", fault, *flags]
            at = [_found_at([*given, "--seed", str(seed)]) for seed in range(runs if mode == "audit" else 1)]
            row[mode] = [None if one is None else one - step for one in at]
        print(row, flush=True)
        yield row


def _found_at(flags: list[str]) -> int | None:
    """Return the step whose end found a difference. None: the run ended without one."""
    with tempfile.TemporaryDirectory() as folder:
        done = forked.run([*flags, "--out", folder], RANKS, {"OMP_NUM_THREADS": "1"}, timeout=3600)
        if done.returncode == 0:
            return None
        if done.returncode != DIVERGED:
            raise RuntimeError(f"exit status {done.returncode}: {flags}: {done.stderr}")
        report = json.loads(Path(folder, "divergence.json").read_text())
        return min(finding["step"] for finding in report["findings"])

"""Compare two runs of the example job.

    python -m launch.train_gpt.compare_runs runs/fp32 runs/fp8

Exits with 1 if the final training losses differ by more than 2%, or if the ranks of a run ended with different
parameters or FP8 state.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

TOLERANCE = 0.02
"""Allowed gap. FP8 training of small models stays within it; a broken scale exceeds it."""

ROWS = {
    "final training loss": "final_training_loss",
    "validation loss": "validation_loss",
    "tokens/s": "tokens_per_s",
    "FP8 collectives per step": "fp8_collectives_per_step",
    "exposed sync, ms per step": "exposed_sync_ms_per_step",
    "FP8 state identical on all ranks": "fp8_state_identical",
    "parameters identical on all ranks": "parameters_identical",
}


def main(first: str, second: str) -> int:
    """Print the table and return the exit status."""
    runs = [json.loads(Path(folder, "summary.json").read_text(encoding="utf-8")) for folder in (first, second)]
    print(f"{'':36}{Path(first).name:>14}{Path(second).name:>14}")
    for label, key in ROWS.items():
        print(f"{label:36}{cell(runs[0][key]):>14}{cell(runs[1][key]):>14}")
    gap = runs[1]["final_training_loss"] / runs[0]["final_training_loss"] - 1
    print(f"gap between the final training losses: {gap:+.2%} (allowed: {TOLERANCE:.0%} either way)")
    same = all(run[key] is not False for run in runs for key in ("fp8_state_identical", "parameters_identical"))
    return 0 if same and abs(gap) <= TOLERANCE else 1


def cell(value: Any, none: str = "-") -> str:
    """Return a value as text: four digits of a float, yes or no, and ``none`` for None."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return none
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: compare_runs.py FIRST_RUN SECOND_RUN")
    sys.exit(main(*sys.argv[1:]))

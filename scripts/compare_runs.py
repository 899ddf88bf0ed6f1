"""Compare two runs of the example job.

    python -m scripts.compare_runs runs/fp32 runs/fp8

Exits with 1 if the final training losses differ by more than 2%.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

TOLERANCE = 0.02
"""Allowed gap. FP8 training of small models stays within it; a broken scale exceeds it."""


def main(first: str, second: str) -> int:
    """Print what differs, and return the exit status."""
    runs = [json.loads(Path(folder, "summary.json").read_text(encoding="utf-8")) for folder in (first, second)]
    print(f"{'':28}{Path(first).name:>14}{Path(second).name:>14}")
    for name, value in runs[0].items():
        if value != runs[1][name]:
            print(f"{name:28}{_cell(value):>14}{_cell(runs[1][name]):>14}")
    gap = runs[1]["final_training_loss"] / runs[0]["final_training_loss"] - 1
    print(f"gap between the final training losses: {gap:+.2%} (allowed: {TOLERANCE:.0%} either way)")
    return int(abs(gap) > TOLERANCE)


def _cell(value: float) -> str:
    return f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))

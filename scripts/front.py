"""Measure README's numbers about communication, with two runs of some steps of the fault lab on two ranks.

    python -m scripts.front    write scripts/results/front.json, and update the pages

It takes about a minute on two cores.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from scripts import results_files

STEPS = 4


def measured(folder: Path, precision: str) -> dict[str, Any]:
    """Train under FSDP2 on two ranks, and return the run's ``summary.json``."""
    out = folder / precision
    flags = ("--steps", str(STEPS), "--parallel", "fsdp2", "--precision", precision, "--out", str(out))
    command = ["launch/torchrun.sh", "-m", "tests.support.lab", *flags]
    environment = {**os.environ, "NPROC": "2", "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=results_files.ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    return summary


def main() -> None:
    """Measure, and publish."""
    with tempfile.TemporaryDirectory() as folder:
        bf16, fp8 = (measured(Path(folder), precision) for precision in ("bf16", "fp8"))
    numbers = {
        "gathered_bf16": bf16["bytes_gathered_per_step"],
        "gathered_fp8": fp8["bytes_gathered_per_step"],
        "collectives_per_step": fp8["fp8_collectives_per_step"],
        "bytes_per_sync": fp8["fp8_bytes_per_sync"],
        "slots": fp8["fp8_slots"],
    }
    results_files.publish("front", {**results_files.about(), **numbers})


if __name__ == "__main__":
    main()

"""The cost of recording a run every ten steps, as a share of the example job's step.

Trains two equal models of the example job's default size, one of which is recorded, in turns of ten steps, and prints
the median ratio of these pairs, and the time inside the recorder and the watch. Prints Markdown. Run it on an idle
machine: ``.venv/bin/python -m scripts.benchmarks.recording``.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import torch

from fp8dist.job.measurement import Measurement
from fp8dist.modules.casters import Caster
from fp8dist.runs.recorder import Recorder
from fp8dist.state.arena_sync import ArenaSync
from fp8dist.state.microbatches import Microbatches
from fp8dist.state.watch import Watch
from scripts.benchmarks.example_job import Job, in_turns
from scripts.benchmarks.markdown import table
from scripts.benchmarks.timing import timed_inside

EVERY = 10
"""Interval of the recording, and steps of a turn."""

INSIDE = (
    (Recorder, "log"),
    (Watch, "collect"),
    (Caster, "_measured"),
    (Microbatches, "forward"),
    (Microbatches, "backward"),
    (ArenaSync, "_keep_seen"),
    (Measurement, "_microbatches_known"),
)
"""What only a recorded run calls. ``collect`` includes what the recorder does with an observation."""


def main(pairs: int) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        plain, recorded = Job(), Job(Path(folder), EVERY)
        for job in (plain, recorded):
            job.train(EVERY)  # Warms up.
        found = in_turns(plain, recorded, pairs, EVERY)
        steps = EVERY * max(1, pairs // 4)
        with timed_inside(INSIDE, time.process_time) as spent:
            recorded.train(steps)
    low, _, high = found.quartiles
    print(f"step: {found.step_ms:.1f} ms; {pairs} pairs of {EVERY} steps")
    print(f"ratio with recording, median (quartiles): {found.ratio:.4f} ({low:.4f}, {high:.4f})\n")
    each = {name: sum(times) / steps for name, times in spent.items()}
    ordered = [*sorted(each.items(), key=lambda one: -one[1]), ("all", sum(each.values()))]
    rows = [[name, f"{ms:.4f}", f"{100 * ms / found.step_ms:.3f} %"] for name, ms in ordered]
    print(table(["inside", "ms per step", "share of the step"], rows))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)

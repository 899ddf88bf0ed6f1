"""What an audit costs against the step of the example job, and which faults it finds.

    python -m scripts.benchmarks.audits cost     two ranks, the example job's default size
    python -m scripts.benchmarks.audits faults   three ranks, runs of the fault lab with ``--inject``

Writes its part of ``scripts/results/audits.json``; ``python -m scripts.pages`` then fills the pages. ``cost`` trains
two equal models in turns of some steps, one of them with an audit in every step, so that all sites are visited.
``faults`` plants each fault in three runs of the lab: with the sync alone, with a check in every step, and with an
audit in every step.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import timeit
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fp8dist.checks.audit import Audits
from fp8dist.modules.casters import SITES
from fp8dist.state.settings import AUDIT_BYTES
from fp8dist_kernels.taps import notify
from launch.train_gpt.exits import DIVERGED
from scripts import results_files
from scripts.benchmarks.example_job import Job, in_turns
from scripts.benchmarks.gpu import environment
from scripts.benchmarks.timing import run_rank, timed_inside
from tests.support import forked
from tests.support.lab.gathering import replaced

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


EVERY = 100
"""The interval of audits, in steps, for which the share of a step is given."""

TURN = 8
"""Steps of a turn."""


GATHERS = ("all_gather_into_tensor", "all_gather_single", "all_to_all_single")
"""The collectives of an audit. The names depend on the version of torch."""


def cost() -> str:
    """Measure on this rank, and return the results as JSON. Rank 0 also writes them. COLLECTIVE."""
    sizes: list[int] = []

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(out: Tensor, given: Tensor, *arguments: Any, **options: Any) -> Any:
            sizes.append(given.nbytes)
            return function(out, given, *arguments, **options)

        return call

    # Before `attach`, which keeps the listener.
    inside = ((Audits, "record"), (Audits, "settle"))
    with timed_inside(inside, time.process_time) as spent, replaced(GATHERS, counted):
        plain, audited = (Job(group=dist.group.WORLD, audit_every=every) for every in (0, 1))
        linears = len(audited.manager.slots) // 3
        for job in (plain, audited):
            job.train(TURN)  # Warms up.
        for noted in (*spent.values(), sizes):
            noted.clear()
        found = in_turns(plain, audited, linears * len(SITES) // TURN, TURN)
    taken, settles = spent["Audits.record"], spent["Audits.settle"]
    audits = len(settles)
    calls = len(taken) / audits
    # A call that no audit wants.
    listening = 1e3 * timeit.timeit(lambda: notify(_TAP, "matmul", 0, (), {}, _TAP), number=10_000) / 10_000 * calls
    each = (sum(taken) + sum(settles)) / audits
    results = {
        "machine": environment.facts(torch.device("cpu"))["device"]["name"],
        "torch": torch.__version__,
        "linears": linears,
        "audits": audits,
        "step_ms": found.step_ms,
        "audit_ms": each,
        "listening_ms": listening,
        "ratio_every_step": found.ratio,
        "quartiles": found.quartiles,
        "every": EVERY,
        "share": (each / EVERY + listening) / found.step_ms,
        "bytes_mean": sum(sizes) / audits,
        "calls": len(sizes) / audits,
    }
    if dist.get_rank() == 0:
        _keep("cost", results)
    return json.dumps(results, indent=1)


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


def _keep(part: str, found: Any) -> None:
    results_files.write(results_files.path_of("audits"), {**(results_files.load("audits") or {}), part: found})


_TAP = torch.empty(0)
_TAP.listener = Audits({0: [("", 0)]}, EVERY, AUDIT_BYTES).record  # type: ignore[attr-defined]


def main(words: list[str]) -> None:
    """Run the parts that are named."""
    if "cost" in (words or ["cost"]):
        ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "scripts.benchmarks.audits"]
        subprocess.run([sys.executable, *ranks], check=True)
    if "faults" in (words or ["faults"]):
        rows: list[dict[str, Any]] = []
        for row in faults():
            rows.append(row)
            _keep("faults", rows)


if __name__ == "__main__":
    if "RANK" in os.environ:
        run_rank(cost)
    main(sys.argv[1:])

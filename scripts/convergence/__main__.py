"""Train the example job's model in high precision and with each recipe, with the same seeds, and compare.

    scripts/convergence/run                              300 steps, 3 seeds, everything
    scripts/convergence/run --keep                       also copy the results to scripts/results and into the pages
    scripts/convergence/run --layers 3 --width 128       a smaller model: other flags are the fault lab's
    scripts/convergence/run --no-gradients --experts 8   mixtures instead of MLPs, whose results are kept apart

You can interrupt it and start it again: it does not repeat runs that are finished in ``--out``.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fp8dist.common.numbers import from_json
from fp8dist.state.manifest import NUMERICS_VERSION
from launch.train_gpt.data import BadInput
from scripts import results_files
from scripts.convergence import results
from scripts.convergence.tables import gaps, gradients, layers
from scripts.convergence.tasks import Task, TaskFailed, run_all
from scripts.convergence.variants import VARIANTS
from tests.support.lab.options import parse as parse_job

FILE = "convergence.json"
LAB = ("-m", "tests.support.lab")
ON_RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
OURS = (
    *("--precision", "--recipe", "--high-gemms", "--fast-gemms", "--seed", "--out", "--parallel"),
    *("--steps", "--save-every", "--resume", "--fp8-gradients", "--share-batch"),
)
"""Flags of the lab that this program sets itself, or that would make the runs incomparable."""


def main(arguments: Sequence[str]) -> int:
    """Train and compare. Return the exit status: 0 success; 1 a run failed; 2 wrong flags."""
    own, flags = _parsed(arguments)
    tasks = _tasks(own, flags)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # Ends the runs, too.
    try:
        for (name, _), task in tasks.items():
            if name != "gradients":
                parse_job(task.program[task.program.index(LAB[1]) + 1 :])  # Rejects wrong flags before anything runs.
        run_all(list(tasks.values()), own.jobs, _say)
    except BadInput as error:
        _say(f"error: {error}")
        return 2
    except TaskFailed as error:
        _say(str(error))
        return 1
    data = _collected(own, flags, tasks)
    file = own.out / FILE
    results_files.write(file, data)
    for text in (gaps(data), gradients(data), layers(data)):
        print(text)
    _say(f"{file} written")
    if own.keep:
        results_files.publish(results.MIXTURE if _of_mixtures(flags) else results.CONVERGENCE, data)
    return 0


def _parsed(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="scripts/convergence/run",
        description="Loss curves, final gaps and gradients of each recipe against FP32.",
        epilog="Other flags are the fault lab's: python -m tests.support.lab --help.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    threads = int(os.environ.get("OMP_NUM_THREADS", "1"))
    add = parser.add_argument
    add("--steps", type=int, default=300, help="optimizer steps of each run")
    add("--seeds", type=int, default=3, help="number of seeds: 0, 1, …")
    add("--jobs", type=int, default=max(1, len(os.sched_getaffinity(0)) // threads), help="runs side by side")
    add("--out", type=Path, default=Path("runs/convergence"), help="folder for runs and results")
    add("--variants", nargs="+", choices=[*VARIANTS], default=[*VARIANTS], help="variants to train")
    add("--gradients", action=argparse.BooleanOptionalAction, default=True, help="compare gradients too, with seed 0")
    add("--keep", action="store_true", help="copy the results to scripts/results, and update the tables in the pages")
    own, flags = parser.parse_known_args(arguments)
    own.out = own.out.resolve()
    if min(own.steps, own.seeds, own.jobs) < 1:
        parser.error("--steps, --seeds and --jobs must be at least 1")
    taken = [flag for flag in flags if flag.split("=")[0] in OURS]
    if taken:
        parser.error(f"{taken[0]} is not for this program: it sets the flag itself, or the runs would be incomparable")
    if _of_mixtures(flags) and own.gradients:
        parser.error("--experts needs --no-gradients: only gradients of Linears are compared")
    if _of_mixtures(flags):  # NVFP4Scaling does not multiply experts.
        own.variants = [name for name in own.variants if "nvfp4" not in name]
    return own, flags


def _of_mixtures(flags: Sequence[str]) -> bool:
    return any(flag.split("=")[0] == "--experts" for flag in flags)


def _tasks(own: argparse.Namespace, flags: Sequence[str]) -> dict[tuple[str, int], Task]:
    """The tasks in the order they run, by (variant, seed); ("gradients", 0) measures gradients."""
    stamp = {"torch": torch.__version__, "numerics": NUMERICS_VERSION, "cuda": torch.cuda.is_available()}
    about = {"commit": results_files.commit_of()}
    common = ("--steps", str(own.steps), "--log-every", str(own.steps), *flags)
    made = {}
    if own.gradients:
        folder = own.out / "gradients"
        points = sorted({step for step in (1, own.steps // 6, own.steps // 2, own.steps) if step})
        program = ("-m", "scripts.convergence.gradients", "--points", *map(str, points))
        program = (*program, *common, "--seed", "0", "--out", str(folder))
        made["gradients", 0] = Task("gradients", folder, program, "gradients.json", stamp, about)
    for seed in range(own.seeds):
        for name in own.variants:
            folder, variant = own.out / name / f"seed-{seed}", VARIANTS[name]
            place = ("--parallel", "none" if variant.ranks == 1 else "ddp", "--seed", str(seed), "--out", str(folder))
            program = (*LAB, *common, *variant.flags, *place)
            if variant.ranks > 1:
                program = (*ON_RANKS, str(variant.ranks), *program)
            made[name, seed] = Task(f"{name}, seed {seed}", folder, program, "summary.json", stamp, about)
    return made


def _collected(own: argparse.Namespace, flags: Sequence[str], tasks: dict[tuple[str, int], Task]) -> dict[str, Any]:
    runs: dict[str, dict[str, Any]] = {}
    for (name, seed), task in tasks.items():
        if name == "gradients":
            continue
        summary = json.loads((task.folder / "summary.json").read_text())
        lines = [json.loads(line) for line in (task.folder / "metrics.jsonl").read_text().splitlines()]
        runs.setdefault(name, {})[str(seed)] = {
            "losses": [round(from_json(line["loss"]), 6) for line in lines],
            "validation_loss": round(summary["validation_loss"], 6),
            "tokens_per_s": summary["tokens_per_s"],
        }
    measured = tasks.get(("gradients", 0))
    return {
        "schema": results_files.SCHEMA,
        **results.about(flags, "cuda" if torch.cuda.is_available() else "cpu"),
        "commits": sorted({task.noted()["about"]["commit"] for task in tasks.values()}),
        "steps": own.steps,
        "runs": runs,
        "gradients": json.loads((measured.folder / measured.product).read_text()) if measured else None,
    }


def _say(text: str) -> None:
    print(f"convergence: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

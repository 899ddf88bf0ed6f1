"""Runs of the example job as a user starts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support import forked
from tests.support.forked import ROOT

LESSON = ROOT / "tests/launch/programs/ddp_lesson.py"
"""A program in plain torch: ``--steps N``, ``--fail-rank N``."""

TORCHRUN = (str(ROOT / "launch/torchrun.sh"),)
SINGLE = (sys.executable, "-m", "launch.train_gpt")

# The same without the seconds that torchrun and imports take, for tests of what happens once the job runs.
RANKS = ("forked ranks",)
ALONE = ("a forked process",)

STEPS = 12
TINY = f"--layers 1 --width 32 --heads 2 --context 32 --batch-size 4 --steps {STEPS} --log-every 5".split()


@dataclass(frozen=True)
class Run:
    """What a finished run left behind."""

    summary: dict[str, Any]
    lines: list[dict[str, Any]]
    output: str

    @property
    def losses(self) -> list[float]:
        """Training loss of each step; JSON keeps every bit."""
        return [line["loss"] for line in self.lines]


def start(command: tuple[str, ...], *flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command of the job with some environment variables on top, two ranks if it is torchrun.sh or RANKS."""
    variables = {"PYTHON": sys.executable, "NPROC": "2", "OMP_NUM_THREADS": "1", **variables}
    if command in (RANKS, ALONE):
        return forked.run(flags, int(variables["NPROC"]) if command == RANKS else None, variables)
    environment = {**os.environ, **variables}
    return subprocess.run(
        [*command, *flags], capture_output=True, text=True, timeout=120, cwd=ROOT, env=environment, check=False
    )


def finish(out: Path, command: tuple[str, ...], *flags: str, **variables: str) -> Run:
    """Run the job to its end and read what it wrote."""
    done = start(command, *flags, "--out", str(out), **variables)
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return read_run(out, done.stdout + done.stderr)


def read_run(out: Path, output: str) -> Run:
    """What a finished run wrote into its folder, and to the terminal."""
    return Run(json.loads((out / "summary.json").read_text()), metrics(out), output)


def metrics(out: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def assert_refused(done: subprocess.CompletedProcess[str], message: str) -> None:
    """It ended with exit status 2, and said this in one line."""
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stdout == ""
    assert message in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("train_gpt: error: ")


def assert_launcher_refused(done: subprocess.CompletedProcess[str], message: str) -> None:
    """The same of ``fp8dist launch``."""
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"fp8dist launch: error: {message}")
    assert done.stderr.count("\n") == 1

"""Runs the lab, and the example job, as a user starts them."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from fp8dist.cli.main import main
from launch.train_gpt import options, train
from tests.support import forked
from tests.support.forked import ROOT
from tests.support.lab import options as lab_options

LESSON = ROOT / "tests/launch/programs/ddp_lesson.py"
"""A program in plain torch: ``--steps N``, ``--fail-rank N``."""

TORCHRUN_SH = str(ROOT / "launch/torchrun.sh")
TORCHRUN = (TORCHRUN_SH, "-m", "tests.support.lab")

EXAMPLE = (TORCHRUN_SH,)
"""The example job."""

LAUNCH = ("fp8dist launch, forked",)
"""``fp8dist launch`` in a process that has already imported torch."""

# Without the start-up seconds of torchrun and imports, for tests of the running job.
RANKS = ("forked ranks",)
ALONE = ("a forked process",)
EXAMPLE_RANKS = ("forked ranks of the example job",)

STEPS = 12
SIZE = f"--layers 1 --width 32 --heads 2 --context 32 --batch-size 4 --steps {STEPS}".split()
TINY = [*SIZE, "--log-every", "5"]
"""A run of the lab of this size."""

TABLE_HEADER = "step  last good  kind"


@dataclass(frozen=True)
class Run:
    """The output of a finished run."""

    summary: dict[str, Any]
    lines: list[dict[str, Any]]
    output: str
    out: Path

    @property
    def losses(self) -> list[float]:
        """Return the training loss of each step. JSON keeps every bit."""
        return [line["loss"] for line in self.lines]


def start(command: tuple[str, ...], *flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command of the job with additional environment variables, on two ranks if it starts several."""
    variables = {"PYTHON": sys.executable, "NPROC": "2", "OMP_NUM_THREADS": "1", **variables}
    if command == EXAMPLE_RANKS:
        return forked.run(flags, int(variables["NPROC"]), variables, main=train.main)
    if command == LAUNCH:
        return forked.run(flags, None, variables, main=_launch)
    if command in (RANKS, ALONE):
        return forked.run(flags, int(variables["NPROC"]) if command == RANKS else None, variables)
    environment = {**os.environ, **variables}
    return subprocess.run(
        [*command, *flags], capture_output=True, text=True, timeout=120, cwd=ROOT, env=environment, check=False
    )


def _launch(words: list[str]) -> int:
    os.chdir(os.environ.get("FOLDER", ROOT))
    return main(["launch", *words])


def finish(out: Path, command: tuple[str, ...], *flags: str, **variables: str) -> Run:
    """Run the job to its end, and read its output files."""
    done = start(command, *flags, "--out", str(out), **variables)
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return read_run(out, done.stdout + done.stderr)


def read_run(out: Path, output: str) -> Run:
    """Read the output files and the terminal output of a finished run."""
    return Run(json.loads((out / "summary.json").read_text()), metrics(out), output, out)


class Runs:
    """The finished runs of a test run: a job with equal options runs once, whichever test and process asks first.

    Nobody may write into the folder of such a run. Ask for an own run with ``finish``.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(exist_ok=True)

    def __call__(self, command: tuple[str, ...], *flags: str, **variables: str) -> Run:
        """Return the run of RANKS, ALONE or EXAMPLE_RANKS with these flags, on two ranks if it starts several."""
        ranks = "1" if command == ALONE else variables.get("NPROC", "2")
        with mock.patch.dict(os.environ, {**variables, "WORLD_SIZE": ranks}):
            of = options.parse(flags, options.Options) if command == EXAMPLE_RANKS else lab_options.parse(flags)
        key = f"{command} {sorted({**variables, 'NPROC': ranks}.items())} {of}"
        out = self._folder / hashlib.sha256(key.encode()).hexdigest()[:16]
        said = out.with_suffix(".said")
        with out.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # Workers of pytest-xdist share the folder.
            if not said.exists():
                said.write_text(finish(out, command, *flags, **variables).output)
        return read_run(out, said.read_text())


def metrics(out: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def assert_refused(done: subprocess.CompletedProcess[str], message: str) -> None:
    """Assert that the job ended with exit status 2 and this one-line message."""
    assert done.returncode == 2, f"{message}: {done.args}\n{done.stdout}{done.stderr}"
    assert done.stdout == ""
    assert message in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("train_gpt: error: ")


def assert_launcher_refused(done: subprocess.CompletedProcess[str], message: str) -> None:
    """Assert the same of ``fp8dist launch``."""
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"fp8dist launch: error: {message}")
    assert done.stderr.count("\n") == 1

"""Runs the programs of launch/examples as a user starts them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.forked import ROOT


def run_example(stack: str, *flags: str, through: tuple[str, ...] = (), folder: Path | None = None) -> str:
    """Return what the example of a stack prints on two ranks.

    ``through``: the start of a command that runs it. ``folder``: where it runs.
    """
    program = str(ROOT / "launch" / "examples" / f"with_{stack}.py")
    command = [str(ROOT / "launch" / "torchrun.sh"), *through, program, *flags]
    variables = {**os.environ, "PYTHON": sys.executable, "NPROC": "2", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout

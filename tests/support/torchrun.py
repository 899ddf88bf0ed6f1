"""Runs a module or a program under torchrun, in processes of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.forked import ROOT


def torchrun(ranks: int, *words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run ``words`` on this many ranks, on a free port: a program, or ``-m`` and a module, with arguments."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *words]
    path = f"{ROOT}:{ROOT / 'kernels'}"
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0"}
    return subprocess.run(command, capture_output=True, text=True, timeout=150, env=environment, cwd=cwd)

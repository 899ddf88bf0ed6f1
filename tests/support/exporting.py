"""What scripts/setup-exporters gets for the tests: W&B and MLflow in an environment of their own, and Prometheus."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
HOME = ROOT / ".venv-exporters"
PYTHON = HOME / "bin" / "python"
UNPACKED = HOME / "prometheus" / "usr" / "bin"


def found(program: str) -> str | None:
    """Return the path of prometheus or promtool, or None."""
    return shutil.which(program, path=os.pathsep.join((str(UNPACKED), os.environ.get("PATH", ""))))


needs_tools = pytest.mark.skipif(not (HOME / "stamp").exists(), reason="scripts/setup-exporters gets W&B and MLflow")
needs_prometheus = pytest.mark.skipif(
    not (found("prometheus") and found("promtool")), reason="scripts/setup-exporters gets Prometheus"
)


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    """Run a program, and return what it prints. It sees this tree, and none of W&B's and MLflow's settings."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB_", "MLFLOW_", "PYTHONWARNINGS"))}
    environment = {**inherited, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", **variables}
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def run_json(program: str, cwd: Path, **variables: str) -> Any:
    """Run a Python program in the environment with W&B and MLflow, and return the JSON in the last line it prints."""
    return json.loads(run(PYTHON, "-c", program, cwd=cwd, **variables).splitlines()[-1])

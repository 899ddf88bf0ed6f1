"""scripts/gpu on a machine without a GPU: what it says, and that its benchmark runs at tiny sizes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.speed import results

ROOT = Path(__file__).resolve().parents[1]


def _gpu(*arguments: str, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [str(ROOT / "scripts" / "gpu"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment, check=False)


@pytest.mark.slow
def test_without_a_gpu_it_says_so_in_one_line(tmp_path: Path) -> None:
    for stages in ([], ["check"], ["tune", "sanitize"]):
        done = _gpu(*stages, "--out", str(tmp_path))
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("gpu: no GPU: ")
        assert len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_wrong_arguments() -> None:
    done = _gpu("chekc")
    assert done.returncode == 2
    assert "chekc is not a stage" in done.stderr
    assert "usage: scripts/gpu [check]" in done.stderr
    done = _gpu("check", "--out")
    assert (done.returncode, done.stderr) == (2, "gpu: --out needs a value\n")


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_benchmark_runs_at_tiny_sizes(tmp_path: Path) -> None:
    parts = [argument for name in results.PARTS for argument in ("--part", name)]
    done = _gpu("benchmark", "--smoke", "--out", str(tmp_path), "--commit", "abc", *parts, timeout=230)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.glob("*.json")
    data = results.read(path)
    assert (data["smoke"], data["commit"], data["dirty"]) == (True, "abc", False)
    assert list(data["parts"]) == list(results.PARTS)
    for name, part in data["parts"].items():
        assert (part["status"], part["problem"]) == ("done", None), name
        assert all(case["timings"] for case in part["cases"]), name
    assert "figures of smoke runs mean nothing" in done.stdout
    assert (tmp_path / "benchmark.log").read_text()

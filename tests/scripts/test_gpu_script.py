"""scripts/gpu on a machine without a GPU: its messages, and its benchmark at tiny sizes."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import fp8dist
from fp8dist_kernels.reference.magnitude import DID_NOT_RUN
from scripts.benchmarks.gpu import linears, matmuls, memory, results
from scripts.benchmarks.gpu.kernels import run_part
from scripts.benchmarks.gpu.lab import Lab
from scripts.benchmarks.gpu.matmuls import Matmuls
from scripts.benchmarks.gpu.memory import Memory
from scripts.benchmarks.gpu.stopwatch import Action, HostStopwatch

ROOT = Path(__file__).resolve().parents[2]


def _gpu(*arguments: str, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [str(ROOT / "scripts" / "gpu"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment, check=False)


@pytest.mark.slow
def test_without_a_gpu_it_says_so_in_one_line(tmp_path: Path) -> None:
    done = _gpu("tune", "sanitize", "--out", str(tmp_path))
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
def test_tiles_are_not_measured_of_an_unknown_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "none"))
    monkeypatch.delenv("COMMIT", raising=False)
    done = _gpu("tune", "--smoke", "--out", str(tmp_path))
    assert done.returncode == 1
    assert done.stderr == "gpu: tune: the commit is not known: name it with --commit\n"
    assert list(tmp_path.iterdir()) == [tmp_path / "tune.log"]


@pytest.mark.long
@pytest.mark.timeout(120)
def test_without_pytest_timeout_the_tests_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pytest_timeout", "xdist"):
        (tmp_path / f"{name}.py").write_text("raise ImportError\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    out = tmp_path / "out"
    done = _gpu(
        "check", "--smoke", "--out", str(out), "--", "-k", "test_fused_magnitude and special_values", timeout=110
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == "gpu: pytest-timeout is missing: only the whole check stage has a time limit\n"
    assert " passed" in (out / "check.log").read_text()


@pytest.mark.long
@pytest.mark.timeout(120)
def test_check_runs_the_tests_of_the_gpu_and_of_the_kernels(tmp_path: Path) -> None:
    done = _gpu("check", "--smoke", "--out", str(tmp_path), "--", "--collect-only", "-qq", "-n", "0", timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    collected = {line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line}
    kernels = {str(path.relative_to(ROOT)) for path in (ROOT / "tests/kernels").glob("test_fused_*.py")}
    on_a_gpu = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_gpu_*.py")}
    assert collected == (kernels | on_a_gpu) - {"tests/scripts/test_gpu_script.py"}


@pytest.mark.long
@pytest.mark.timeout(120)
def test_a_smoke_run_writes_nothing_into_the_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    before = sorted(Path(ROOT, "kernels").rglob("*"))
    done = _gpu("check", "--smoke", "--", "-n", "0", "-k", "test_fused_magnitude and special_values", timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(Path(ROOT, "kernels").rglob("*")) == before
    (out,) = tmp_path.glob("fp8dist-gpu-*")
    assert {path.name for path in out.iterdir()} >= {"check.log", "check.xml"}


@pytest.mark.long
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


def test_a_wrong_product_does_not_end_its_part(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A product of NaN has a NaN error, which JSON cannot represent."""

    def product(of: matmuls.Product, operands: Any, backend: str) -> Callable[[], torch.Tensor]:
        return lambda: torch.full((of.m, of.n), torch.nan, dtype=torch.bfloat16)

    monkeypatch.setattr(matmuls, "ours", product)
    path = tmp_path / "part.json"
    lab = Lab(HostStopwatch(), smoke=True)
    run_part(Matmuls("tensorwise"), lab, 100.0, functools.partial(results.write, path))
    part = json.loads(path.read_text())
    assert [case["gemm"] for case in part["cases"]] == ["fprop", "dgrad", "wgrad"]
    assert all(case["error"]["triton"] == "nan" for case in part["cases"])
    assert part["problem"].startswith("wrong: triton: relative error nan")
    assert part["figures"] == {}


class Noting(HostStopwatch):
    """Records the pending amaxes of the slots at the start of each action."""

    def __init__(self) -> None:
        super().__init__()
        self.pending: list[torch.Tensor] = []
        self.noted: list[float] = []

    def noting(self, action: Action) -> Action:
        def noted() -> None:
            self.noted += [float(pending.max()) for pending in self.pending]
            action()

        return noted

    def rounds(self, actions: Sequence[Action], *arguments: Any, **options: Any) -> list[list[float]]:
        return super().rounds([self.noting(action) for action in actions], *arguments, **options)


@pytest.mark.parametrize("kernel", ["cast_transpose_amax", "amax"])
def test_a_timed_cast_records_its_amax(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stopwatch = Noting()
    examine = memory._MEASURES[memory.KERNELS.index(kernel)]

    def examined(tensors: Any, pending: torch.Tensor) -> Any:
        stopwatch.pending.append(pending)
        return examine(tensors, pending)

    monkeypatch.setattr(memory, "_MEASURES", [examined] * len(memory.KERNELS))
    case = Memory().measure(Lab(stopwatch, smoke=True, seconds=0.0), memory.Planned(kernel, 16, 32))
    assert "problem" not in case
    assert set(stopwatch.noted) == {DID_NOT_RUN}


@pytest.mark.slow
def test_a_timed_layer_records_its_amaxes(monkeypatch: pytest.MonkeyPatch) -> None:
    stopwatch, prepare, both_ways = Noting(), linears._prepared, linears.Bench.both_ways
    models, by_the_host = [], []

    def prepared(*arguments: Any) -> linears.Prepared:
        models.append(prepare(*arguments))
        stopwatch.pending += models[-1].pending
        return models[-1]

    def noted(bench: linears.Bench, model: torch.nn.Module) -> Any:
        by_the_host.extend(float(p.max()) for one in models if one.model is model for p in one.pending)
        return both_ways(bench, model)

    monkeypatch.setattr(linears, "_prepared", prepared)
    monkeypatch.setattr(linears.Bench, "both_ways", noted)
    layer, *_ = linears.Linears().plan(lab := Lab(stopwatch, smoke=True, seconds=0.0))
    case = linears.Linears().measure(lab, layer)
    assert "problem" not in case
    arenas = [sync.arena for one in models for sync in fp8dist.get_manager(one.model)._syncs]
    assert all(arena.known_hot for arena in arenas), "as after the first steps of training"
    assert len(stopwatch.pending) == 2 + (linears.fast_everywhere(linears.RECIPES["delayed"]) is not None)
    assert set(stopwatch.noted) == {DID_NOT_RUN}
    assert by_the_host[-2:] == [DID_NOT_RUN] * 2, "one of each model in a row"

"""scripts/gpu and the parts of its stages, without a GPU. test_rehearsal.py runs it as a whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scripts import results_files
from scripts.benchmarks.gpu import check, results
from tests.support.scripts import program

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["tune"], "gpu: no GPU: "),
        (["chekc"], "invalid choice: 'chekc'"),
        ([], "required: stage"),
        (["check", "tune"], "unrecognized arguments: tune"),
        (["check", "--seconds", "600"], "expected 1 to 500"),
    ],
)
def test_what_cannot_run_says_so_and_writes_nothing(tmp_path: Path, arguments: list[str], problem: str) -> None:
    environment = {**os.environ, "PYTHON": ".venv/bin/python", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "scripts" / "gpu"), *arguments, *(["--out", "x"] if arguments else [])]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, env=environment)
    assert (done.returncode, done.stdout, list(tmp_path.iterdir())) == (2, "", [])
    assert problem in done.stderr
    commands = [f"    scripts/gpu {stage} " for stage in ("check", "tune", "benchmark")]
    assert len(done.stderr.splitlines()) == 1 if "no GPU" in problem else all(each in done.stderr for each in commands)


def test_a_command_ends_well_inside_ten_minutes() -> None:
    """Asking three Pythons, the stage, its last words, and the summary."""
    script = program("gpu")
    assert script.LONGEST + script.GRACE + script.GRACE < 560


DEAF = """
import os, signal, subprocess, sys, time
from tests.support.scripts import program
script = program("gpu")
script.GRACE = 1
os.setpgrp()
signal.signal(signal.SIGTERM, script.terminated)
deaf = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); "
child = deaf + "print('deaf', flush=True); time.sleep(60)"
parent = deaf + f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
log = script.Log(script.Path(sys.argv[1]))
status = log.run([sys.executable, "-c", parent], 3)
log.print(f"status {status}")
sys.exit(log.run([sys.executable, "-c", "print('the summary')"], 30))
"""


@pytest.mark.long
def test_a_stage_that_does_not_end_is_ended_and_the_summary_follows(tmp_path: Path) -> None:
    log, start = tmp_path / "deaf.log", time.monotonic()
    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    command = [sys.executable, "-c", DEAF, str(log)]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": paths}, timeout=50, check=True)
    assert time.monotonic() - start < 40
    lines = log.read_text().splitlines()
    assert lines[0] == "deaf"
    assert "gpu: cut off after 3 s" in lines
    assert "status 0" not in lines
    assert lines[-1] == "the summary"


WITHOUT_A_GPU = {
    "tests/cli/test_doctor.py": "scripts/gpu runs fp8dist doctor itself",
    "tests/kernels/test_tiles.py": "measured on a GPU by scripts/gpu tune",
}
"""Files that look for a GPU, and what of them check does not run there."""


def test_no_test_of_the_gpu_is_forgotten() -> None:
    """What tests say of a GPU, in any words, against the list of check."""
    files = {option for option in check._options() if option.startswith("tests/")}
    words = ("needs_gpu", "DEVICE", "cuda.is_available", ".cuda()", "nccl")
    own = Path(__file__).parent
    said = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if path.parent != own and (path.name.startswith("test_gpu_") or any(word in path.read_text() for word in words))
    }
    only_spoken_of = {path for path in said - files if not _looks_for_a_gpu(path)}
    assert said - files - only_spoken_of == set(WITHOUT_A_GPU)
    kernels = ("grouped_casts", "grouped_matmuls", "scaled_grouped", "fused_casts", "fused_matmuls", "gpu_kernels")
    wanted = {f"tests/kernels/test_{name}.py" for name in kernels}
    wanted |= {"tests/state/test_gpu_one_rank.py", "tests/modules/test_gpu_tokens.py", "tests/state/test_gpu_ranks.py"}
    assert wanted <= files
    assert all((ROOT / path).exists() for path in files)


def _looks_for_a_gpu(path: str) -> bool:
    """True if a test in the file runs otherwise, or at all, where there is a GPU."""
    text = (ROOT / path).read_text()
    of_gpus = "needs_gpu" in text or "cuda.is_available" in text or "tests.support.devices" in text
    return of_gpus or Path(path).name.startswith("test_gpu_")


def _report(nodeid: str, outcome: str, when: str = "call", message: str = "", nccl: int | None = None) -> Any:
    properties = [] if nccl is None else [("collectives", ("nccl", nccl))]
    longrepr = SimpleNamespace(reprcrash=SimpleNamespace(message=message))
    failed, skipped = outcome == "failed", outcome == "skipped"
    given = {"outcome": outcome, "when": when, "failed": failed, "skipped": skipped, "longrepr": longrepr}
    return SimpleNamespace(nodeid=nodeid, user_properties=properties, **given)


def test_what_the_tests_gave_is_written_after_each(tmp_path: Path) -> None:
    path = tmp_path / "nvidia-h200.json"
    device = {"name": "NVIDIA H200", "capability": [9, 0], "driver": None}
    versions = {"python": "3.12", "torch": "2.11.0", "triton": "3.6.0"}
    new = {**results.empty(None, False, "tree-1"), "device": device, "versions": versions}
    assert check.summary(path) == "check: no test has run"
    earlier = {"status": "done", "seconds": 1.0, "problem": None, "cases": [], "figures": {}}
    results_files.write(path, {**new, "parts": {"memory": results.stamped(earlier, new)}})
    recorder = check.Recorder(path, new)

    def tests() -> Any:
        data = results.read(path)
        assert list(data["parts"]) == ["memory"], "of the same code, though its commit is not known"
        return data["tests"]

    def run(nodeid: str, *reports: Any) -> None:
        recorder.pytest_runtest_logstart(nodeid)
        assert tests()["running"] == [nodeid]
        for report in reports:
            recorder.pytest_runtest_logreport(report)
        recorder.pytest_runtest_logfinish(nodeid)
        assert tests()["running"] == []

    run("a", _report("a", "passed", "setup"), _report("a", "passed", nccl=5), _report("a", "passed", "teardown"))
    ranks = "2 ranks: failed\n--- rank 0: raised\nTraceback\nRuntimeError: CUDA error: " + 300 * "x"
    run("b", _report("b", "failed", message=ranks), _report("b", "failed", message="worker 'gw1' crashed"))
    run("c", _report("c", "skipped", "setup"))
    run("d", _report("d", "passed"), _report("d", "failed", "teardown", "assert 1 == 2"))
    recorder.pytest_collectreport(_report("tests/e.py", "failed", "collect", "ModuleNotFoundError: e"))
    recorder.pytest_runtest_logstart("f")
    lines = check.summary(path).splitlines()
    assert lines[0].startswith("check: 1 passed, 3 failed, 1 skipped, ")
    assert lines[0].endswith("; cut off: not all were run")
    assert lines[1:] == [
        "  nccl was asked for 5 collectives",
        f"  failed b: {ranks.splitlines()[-1][: check.REASON]}",
        "  failed d: assert 1 == 2",
        "  failed tests/e.py: ModuleNotFoundError: e",
        "  not finished f",
        "  one test again: scripts/gpu check -- -n 0 -k b",
    ]
    recorder.pytest_runtest_logfinish("f")
    for stopped in ("stopping after 12 failures", False):
        session: Any = SimpleNamespace(shouldstop=False, shouldfail=stopped)
        recorder.pytest_sessionfinish(session, 1)
        assert tests()["cut_off"] == bool(stopped)
    again = check.Recorder(path, {**new, "date": "2999-01-01T00:00:00Z"}, chosen=True)
    for number in range(100):
        again.pytest_runtest_logreport(_report(f"{'x' * 100}{number}", "failed", message="y" * 300))
    again.pytest_sessionfinish(session, 0)
    assert tests()["passed"] == 1, "the whole run stays"
    assert len(check.summary(path)) < 6000, "the end of a long output may be all that is kept of it"
    assert "  and 88 more" in check.summary(path)


@pytest.mark.parametrize(("asked", "status"), [(0, 1), (3, 0)])
def test_a_check_without_a_collective_of_nccl_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], asked: int, status: int
) -> None:
    def passes(options: Any, plugins: Any) -> int:
        plugins[0].collectives["nccl"] += asked
        return 0

    monkeypatch.setattr(check.environment, "facts", lambda _: {"device": {"name": "NVIDIA H200"}})
    monkeypatch.setattr(check.pytest, "main", passes)
    assert check.main(["--out", str(tmp_path)]) == status
    assert ("No test has asked NCCL" in capsys.readouterr().out) == (status == 1)


def test_a_write_that_is_cut_off_leaves_the_earlier_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    path = tmp_path / "device.json"
    results_files.write(path, {"cases": 1})
    monkeypatch.setattr(results_files.os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        results_files.write(path, {"cases": 2})
    assert json.loads(path.read_text()) == {"cases": 1}


LOST = """
import torch
lost = []
def synchronize(device=None):
    if lost: raise RuntimeError("CUDA error: an illegal memory access was encountered")
torch.cuda.synchronize = synchronize
def test_a(): pass
def test_b(): lost.append(1)
def test_c(): pass
"""


@pytest.mark.long
@pytest.mark.parametrize("processes", [0, 1])
def test_a_lost_gpu_fails_one_test_and_no_other(processes: int, tmp_path: Path) -> None:
    (tmp_path / "test_lost.py").write_text(LOST)
    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "scripts.benchmarks.gpu.check", "-n", str(processes)]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", "test_lost.py"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stdout.count("an illegal memory access") >= 1
    if processes:  # xdist starts another process for the rest.
        assert "2 failed, 2 passed" in done.stdout, done.stdout
        assert "crashed while running 'test_lost.py::test_b'" in done.stdout
    else:
        assert "1 failed, 1 passed" in done.stdout, done.stdout
        assert "the GPU is lost in this process" in done.stdout

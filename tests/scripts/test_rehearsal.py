"""The commands of scripts/gpu, run as on a machine with a GPU: a copy without .git, a pretended H200, tiny sizes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fp8dist_kernels.triton.tables import TileTable
from scripts.benchmarks.gpu import results

pytestmark = [pytest.mark.long, pytest.mark.timeout(240)]

ROOT = Path(__file__).resolve().parents[2]
DEVICE = "NVIDIA H200"
FILE = "nvidia-h200.json"
CHOSEN = (
    "nccl or (give_the_same and _collectives) or (two_ranks and same_step) or (delayed-auto and not tokens) or "
    "(replayed and sgd and same_step) or "
    "(small and not wide and (test_ops or (test_updates and max-False)"
    " or (test_products and not tiles and tensorwise)))"
)
"""Tests of each kind that ``check`` runs. torch.compile does not run on a pretended GPU."""
ALONE = ("-n", "0", "-k", CHOSEN)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a copy of the tree that cannot be written to, without .git and without .venv."""
    copy = tmp_path_factory.mktemp("copy") / "tree"
    left_out = shutil.ignore_patterns(".*", "__pycache__", "site", "runs", "*.egg-info", "docs")
    shutil.copytree(ROOT, copy, ignore=left_out, symlinks=True)
    before = sorted(copy.rglob("*"))
    yield copy
    assert sorted(copy.rglob("*")) == before, "it writes to --out only"


def _start(tree: Path, out: Path, *arguments: str) -> subprocess.Popen[str]:
    names = ("COMMIT", "OUT", "PYTHONPATH", "TRITON_INTERPRET")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    environment |= {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "OUT": str(out), "GIT_CEILING_DIRECTORIES": "/"}
    command = [sys.executable, str(tree / "scripts" / "gpu"), *arguments]
    return subprocess.Popen(
        command, env=environment, cwd=out.parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip


def _run(tree: Path, out: Path, *arguments: str) -> list[str]:
    process = _start(tree, out, *arguments)
    try:
        output, _ = process.communicate(timeout=500)
    finally:
        _kill(process)
    assert process.returncode == 0, output[-12_000:]
    lines = output.splitlines()
    assert lines[0] == f"gpu: {arguments[0]} on {DEVICE}; results go to {out}"
    assert lines[-2].startswith(f"gpu: {arguments[0]} passed, ")
    assert (out / f"{arguments[0]}.log").read_text().splitlines() == lines[1:]
    return lines


def _kill(process: subprocess.Popen[str]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.communicate()


@pytest.mark.alone  # It takes 150 of its 240 seconds.
def test_check(tree: Path, tmp_path: Path) -> None:
    lines = _run(tree, tmp_path / "out", "check", "--smoke", "--", *ALONE)
    data = results.read(tmp_path / "out" / FILE)
    tests = data["tests"]
    assert (data["commit"], data["dirty"], data["run"][:5]) == (None, False, "tree-")
    assert (tests["failed"], tests["skipped"], tests["cut_off"], tests["running"]) == (0, 0, False, [])
    assert tests["passed"] >= 20
    assert lines[-4].startswith(f"check: {tests['passed']} passed, 0 failed, 0 skipped, ")
    assert lines[-3].endswith(f" was asked for {sum(tests['collectives'].values())} collectives")
    assert lines[-1] == f"gpu: a rehearsal: its figures in {tmp_path / 'out' / FILE} mean nothing"
    order = [line.split("::")[0] for line in lines if " PASSED " in line]
    files = ("kernels/test_gpu_kernels", "modules/test_gpu_linear", "job/test_gpu_graphs")
    files += ("state/test_gpu_one_rank", "state/test_gpu_ranks")
    assert list(dict.fromkeys(order)) == [f"tests/{file}.py" for file in files]


@pytest.mark.nightly
def test_a_failure_is_in_the_last_lines(tree: Path, tmp_path: Path) -> None:
    planted = tree / "tests" / "kernels" / "test_fused_planted.py"
    uses = "from tests.support.devices import DEVICE\n"  # As all tests that run on a GPU.
    planted.write_text(f'{uses}def test_planted() -> None:\n    assert DEVICE\n    raise ValueError("planted")\n')
    try:
        process = _start(tree, tmp_path / "out", "check", "--smoke", "--", "-n", "0", "-k", "test_planted")
        output, _ = process.communicate(timeout=120)
    finally:
        planted.unlink()
    assert process.returncode == 1
    assert any(line.startswith("torch ") for line in output.splitlines()), "fp8dist doctor comes first"
    *_, counts, failure, again, result, _ = output.splitlines()
    assert again == "  one test again: scripts/gpu check -- -n 0 -k test_planted"
    assert counts.startswith("check: 0 passed, 1 failed, 0 skipped, ")
    assert failure == "  failed tests/kernels/test_fused_planted.py::test_planted: ValueError: planted"
    assert result.startswith("gpu: check FAILED (status 1), ")


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", ["delayed", "current", "rowwise", "blocks", "autocast"])
def test_products_of_any_number_of_tokens(part: str) -> None:
    _on_a_pretended_gpu("9.0", "13.0", part)


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("capability", "cuda"), [("9.0", "12.8"), ("8.9", "13.0"), ("10.0", "13.0")])
def test_products_where_torch_has_fewer(capability: str, cuda: str) -> None:
    """A Hopper GPU with an older CUDA, Ada, and Blackwell: what torch refuses there reaches nobody."""
    _on_a_pretended_gpu(capability, cuda, "(float32 or autocast) and not triton and (rowwise or blocks or autocast)")


def _on_a_pretended_gpu(capability: str, cuda: str, chosen: str) -> None:
    paths = [ROOT / "tests" / "support" / "h200", ROOT, ROOT / "kernels"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    environment |= {"PRETENDED_CAPABILITY": capability, "PRETENDED_CUDA": cuda, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=--import-mode=importlib", "-W", "default", "-k"]
    command += [chosen, "-p", "no:cacheprovider", "-p", "no:xdist", "tests/modules/test_gpu_tokens.py"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stdout[-12_000:]
    assert "skipped" not in done.stdout.splitlines()[-1]


@pytest.mark.nightly
def test_tune(tree: Path, tmp_path: Path) -> None:
    _run(tree, tmp_path / "out", "tune", "--smoke")
    text = (tmp_path / "out" / "tables" / FILE).read_text()
    TileTable.from_json(text)
    table = json.loads(text)
    assert (table["device"], table["commit"], table["run"][:5]) == (DEVICE, None, "tree-")
    assert table["measured"]


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_benchmark(tree: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    lines = _run(tree, out, "benchmark", "--smoke", *(f"--part={name}" for name in results.PARTS))
    data = results.read(out / FILE)
    assert (data["smoke"], data["commit"], data["run"][:5]) == (True, None, "tree-")
    assert (data["device"]["name"], data["device"]["capability"]) == (DEVICE, [9, 0])
    assert list(data["parts"]) == list(results.PARTS)
    for name, part in data["parts"].items():
        assert (part["status"], part["problem"]) == ("done", None), name
        assert all(case["timings"] for case in part["cases"]), name
    assert "figures of smoke runs mean nothing" in lines

"""What README shows works as it stands there."""

from __future__ import annotations

import fnmatch
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fp8dist.manager import StateManager

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


FIRST, LOOP, FSDP, GRAPH, RECIPES, MOVE = re.findall(r"```python\n(.*?)```", README, re.S)


def _output_of_ranks(code: str, tmp_path: Path) -> list[str]:
    """What two ranks print that run this code."""
    assert len(code.splitlines()) <= 24
    script = tmp_path / "loop.py"
    # torch 2.13 with gloo sometimes aborts in interpreter shutdown after DDP (pytorch pull request 179291).
    script.write_text(code + "\nimport os, sys\nsys.stdout.flush()\nos._exit(0)\n")
    logs = tmp_path / "logs"  # A file per rank: on one pipe their lines would mix.
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    run = subprocess.run(
        [*launcher, "--redirects=1", f"--log-dir={logs}", str(script)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stderr
    return [line for log in logs.rglob("stdout.log") for line in log.read_text().splitlines()]


@pytest.mark.slow
def test_the_first_lines_run_under_torchrun(tmp_path: Path) -> None:
    assert _output_of_ranks(FIRST, tmp_path) == ["the ranks agree"]


@pytest.mark.slow
def test_loop_runs_under_torchrun(tmp_path: Path) -> None:
    lines = [line for line in _output_of_ranks(LOOP, tmp_path) if "fp8/step" in line]
    assert len(lines) == 2
    assert all("'fp8/step': 10.0" in line and "'fp8/cold_slots': 0.0" in line for line in lines)
    scales = {line.split()[0] for line in lines}
    assert len(scales) == 1, f"ranks ended with different scales: {scales}"


@pytest.mark.slow
def test_fsdp_runs_under_torchrun(tmp_path: Path) -> None:
    lines = _output_of_ranks(FSDP, tmp_path)
    assert len(lines) == 2
    assert len(set(lines)) == 1, f"ranks ended with different scales: {lines}"


@pytest.mark.slow
def test_captured_step_runs(tmp_path: Path) -> None:
    """Without a GPU it takes its steps one by one."""
    assert _output(GRAPH, tmp_path) == "steps: 13\n"


def _output(code: str, tmp_path: Path) -> str:
    """What one process prints that runs this code."""
    script = tmp_path / "script.py"
    script.write_text(code)
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.slow
def test_recipes_by_pattern(tmp_path: Path) -> None:
    assert [line.split("(")[0] for line in _output(RECIPES, tmp_path).splitlines()] == [
        "blocks.1 BlockScaling",
        "blocks.2 DelayedScaling",
        "lm_head CurrentScaling",
    ]


@pytest.mark.slow
def test_from_high_precision_to_fp8(tmp_path: Path) -> None:
    assert _output(MOVE, tmp_path) == "0.0 ()\n"


def test_table_of_methods_is_complete() -> None:
    table = README.split("## Which calls are collective")[1].split("## Flags")[0]
    hooks = {"join_hook", "join_device", "join_process_group"}
    public = {name for name in vars(StateManager) if not name.startswith("_")} - hooks
    missing = {name for name in public if f"{name}" not in table}
    assert not missing
    for name in re.findall(r"`manager\.(\w+)", README):
        assert hasattr(StateManager, name), f"README speaks of manager.{name}"


def test_files_that_are_cited_exist() -> None:
    """In comments, docstrings and pages: by path from the top, or the end of one."""
    patterns = ("*.*", *(f"{top}/**/*" for top in ("fp8dist", "kernels", "launch", "scripts", "tests")))
    paths = [path for pattern in patterns for path in ROOT.glob(pattern) if path.is_file()]
    names = ["/" + path.relative_to(ROOT).as_posix() for path in paths]
    theirs = ("train.py", "loop.py", "launch.py", "X.py")  # A user's; X stands for a name.
    missing = []
    for path in paths:
        if path.suffix in (".py", ".md", ".sh", ".sbatch", ".yaml", ".cfg", ""):
            text = path.read_text()
            prose = text if path.suffix == ".md" else " ".join(re.findall(r'""".*?"""|#[^\n]*', text, re.S))
            cited = re.findall(r"(?<![\w./*-])(?!pytorch/)[\w./*-]+\.(?:py|md|sh)\b", prose)
            missing += [(path.name, name) for name in cited if not fnmatch.filter(names, f"*/{name}")]
    assert [one for one in missing if one[1].rpartition("/")[2] not in theirs] == []


def test_environment_variables_are_documented() -> None:
    in_code = set(re.findall(r"FP8DIST_[A-Z_]+", (ROOT / "fp8dist" / "settings.py").read_text()))
    assert in_code
    assert in_code <= set(re.findall(r"FP8DIST_[A-Z_]+", README))

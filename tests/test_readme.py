"""What README shows works as it stands there."""

from __future__ import annotations

import fnmatch
import re
import runpy
from pathlib import Path

import pytest

from fp8dist.manager import StateManager
from tests.support import forked

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


FIRST, LOOP, FSDP, GRAPH, RECIPES, MOVE = re.findall(r"```python\n(.*?)```", README, re.S)


def _run_script(words: list[str]) -> int:
    runpy.run_path(words[0], run_name="__main__")
    return 0


def _output(code: str, tmp_path: Path, ranks: int | None = None) -> list[str]:
    """The lines that a process prints that runs this code, or so many ranks."""
    assert ranks is None or len(code.splitlines()) <= 24
    script = tmp_path / "script.py"
    script.write_text(code)
    done = forked.run([str(script)], ranks, {}, main=_run_script)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_the_first_lines_run_on_two_ranks(tmp_path: Path) -> None:
    assert _output(FIRST, tmp_path, 2) == ["the ranks agree"]


@pytest.mark.slow
def test_loop_runs_on_two_ranks(tmp_path: Path) -> None:
    lines = [line for line in _output(LOOP, tmp_path, 2) if "fp8/step" in line]
    assert len(lines) == 2
    assert all("'fp8/step': 10.0" in line and "'fp8/cold_slots': 0.0" in line for line in lines)
    scales = {line.split()[0] for line in lines}
    assert len(scales) == 1, f"ranks ended with different scales: {scales}"


@pytest.mark.slow
def test_fsdp_runs_on_two_ranks(tmp_path: Path) -> None:
    lines = _output(FSDP, tmp_path, 2)
    assert len(lines) == 2
    assert len(set(lines)) == 1, f"ranks ended with different scales: {lines}"


@pytest.mark.slow
def test_captured_step_runs(tmp_path: Path) -> None:
    """Without a GPU it takes its steps one by one."""
    assert _output(GRAPH, tmp_path) == ["steps: 13"]


@pytest.mark.slow
def test_recipes_by_pattern(tmp_path: Path) -> None:
    assert [line.split("(")[0] for line in _output(RECIPES, tmp_path)] == [
        "blocks.1 BlockScaling",
        "blocks.2 DelayedScaling",
        "lm_head CurrentScaling",
    ]


@pytest.mark.slow
def test_from_high_precision_to_fp8(tmp_path: Path) -> None:
    assert _output(MOVE, tmp_path) == ["0.0 ()"]


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

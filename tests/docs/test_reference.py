"""The reference pages list every public name exactly once, and nothing else."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import fp8dist
from fp8dist import ddp, exporters, fsdp
from fp8dist.common.divergence import Divergence, Finding
from fp8dist.job.manager import StateManager
from fp8dist.state import storage
from fp8dist.state.settings import VARIABLES, Settings
from launch.train_gpt import exits
from scripts.pages import exit_codes, flags, messages, variables
from tests.support.lab import exits as lab_exits
from tests.support.main_job import EXAMPLE_RANKS, RANKS, SIZE, TINY, start

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "docs" / "reference"


def page(name: str) -> str:
    return (REFERENCE / name).read_text()


def first_cells(text: str) -> list[str]:
    """Return the code spans in the first cell of each table row, in order."""
    rows = [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| `")]
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row)]


def section(text: str, heading: str) -> str:
    """Return the text below a heading, up to the next heading."""
    (found,) = re.findall(rf"^##+ {re.escape(heading)}\n(.*?)(?=^##|\Z)", text, re.M | re.S)
    return str(found)


def test_names_verbs_arguments_and_flags_are_on_their_pages() -> None:
    """Each public name is on the API page once, and each verb, argument and flag in its table."""
    directives = re.findall(r"^::: (\S+)$", page("api.md"), re.M)
    hooks = [
        f"fp8dist.{module.__name__.rpartition('.')[2]}.{name}"
        for module in (ddp, exporters, fsdp)
        for name in module.__all__
    ]
    assert sorted(directives) == sorted([*(f"fp8dist.{name}" for name in fp8dist.__all__), *hooks])
    text, table = page("cli.md"), flags.of_job()
    wanted = [mark for name in flags.COMMANDS for mark in (f"## fp8dist {name}\n", f"<!-- made: cli-{name} -->")]
    assert [mark for mark in wanted if mark not in text] == []
    assert sorted(first_cells(table)) == sorted(set(flags.flags_of(flags.job_parser())) - {"-h", "--help"})
    fields = {field.name for recipe in flags.RECIPES for field in dataclasses.fields(recipe)}
    assert set(first_cells(flags.of_recipes())) == fields
    # A value and a default are told apart.
    assert "| `--check-every` | `N` | 0, never | " in table
    assert "| `--watch-ranks` |  | off | " in table
    assert "| `--precision` | `bf16`, `fp32`, `fp8` | `fp8` | " in table
    assert "| `check_every` | `0` | " in flags.of_prepare()
    assert "| `FP8DIST_CHECK_EVERY` | 0: never | argument `check_every` |" in variables.of_library()
    assert "| `--ranks` | `N` | required | " in flags.of_simulation()


def test_variables_are_those_that_the_code_reads_and_sets() -> None:
    read = set()

    class Recorded(dict[str, str]):
        def get(self, name: str, default: Any = None) -> Any:
            read.add(name)
            return super().get(name, default)

    Settings.resolve(environ=Recorded())
    assert set(VARIABLES) == read
    anywhere = {
        name
        for top in ("fp8dist", "kernels", "launch")
        for path in (ROOT / top).rglob("*.py")
        for name in re.findall(r"FP8DIST_[A-Z_]*[A-Z]", path.read_text())
    }
    assert anywhere <= set(VARIABLES)
    launcher = (ROOT / "fp8dist" / "cli" / "launcher" / "environment.py").read_text()
    names = set(re.findall(r'(?:environment\.get\(|_number\(environment, )"([A-Z_]+)"', launcher))
    assert {name for name, _, _ in variables.launcher_variables()} == names - {"CUDA_VISIBLE_DEVICES"}  # CUDA's own.
    assert all(meaning and default for _, meaning, default in variables.launcher_variables())
    assert first_cells(variables.of_script()) == ["PYTHON"]
    plan = (ROOT / "fp8dist" / "cli" / "launcher" / "plan.py").read_text()
    rest = section((ROOT / "docs" / "launching.md").read_text(), "Variables").split("sets the following variables")[1]
    assert [name for name in first_cells(rest) if f'"{name}"' not in plan] == []


def test_table_of_collective_calls_is_complete() -> None:
    text = section(page("api.md"), "Collective calls")
    hooks = {"join_hook", "join_device", "join_process_group"}
    public = {name for name in vars(StateManager) if not name.startswith("_")} - hooks
    assert {name for name in public if f"manager.{name}" not in text} == set()
    functions = {
        name for name in fp8dist.__all__ if name[0].islower() and not hasattr(getattr(fp8dist, name), "__path__")
    }
    assert {name for name in functions - {"errors", "prepare"} if f"fp8dist.{name}" not in text} == set()


def test_every_exit_status_has_a_meaning() -> None:
    for module in (exits, lab_exits):
        statuses = exit_codes.statuses_of(module)
        assert statuses.keys() == set(_constants(Path(str(module.__file__))))
        assert all(len(meaning) > 10 for meaning in statuses.values())
    source = (ROOT / "fp8dist" / "cli" / "exit_codes.py").read_text()
    assert "CONSISTENT, DIVERGED, USAGE, UNREADABLE = range(4)" in source
    assert [line[:4] for line in exit_codes.of_cli().splitlines()[2:]] == ["| 0 ", "| 1 ", "| 2 ", "| 3 "]


def _constants(path: Path) -> Iterator[int]:
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, int):
            yield node.value.value


def test_fields_of_metrics_reports_and_states() -> None:
    manager = fp8dist.prepare(nn.Sequential(nn.Linear(16, 16)))
    names = first_cells(section((ROOT / "docs" / "watching.md").read_text(), "manager.metrics()"))
    assert names == list(manager.metrics())
    text = page("files.md") + (ROOT / "docs" / "design" / "formats.md").read_text()
    report = {field.name for field in dataclasses.fields(Divergence)} | {"consistent", "diverged"}
    assert set(first_cells(section(text, "divergence.json and divergence.txt"))) == report
    assert set(first_cells(section(text, "findings"))) == {field.name for field in dataclasses.fields(Finding)}
    state = first_cells(section(text, "FP8 state"))
    assert sorted(state) == sorted(["version", *storage._NAMES, "info", *storage._TENSORS])


@pytest.mark.slow
def test_fields_are_those_that_a_run_writes(tmp_path: Path) -> None:
    flags = (*TINY, "--watch-every", "4", "--watch-ranks", "--eval-every", "6", "--check-every", "6", "--experts", "2")
    done = start(RANKS, *flags, "--steps", "6", "--out", str(tmp_path / "done"))
    assert done.returncode == 0, done.stderr
    done = start(EXAMPLE_RANKS, *SIZE, "--steps", "2", "--out", str(tmp_path / "example"))
    assert done.returncode == 0, done.stderr
    by_example = json.loads((tmp_path / "example" / "summary.json").read_text())
    pages = ("reference/files.md", "design/formats.md", "fault-lab.md")
    text = "\n".join((ROOT / "docs" / name).read_text() for name in pages)
    sentence = section(text, "summary.json").split("\n| field")[0]
    assert set(re.findall(r"`(\w+)`", sentence)) == set(by_example)
    evidence = tmp_path / "evidence"
    stopped = start(
        RANKS, *flags, "--inject", "scale:1:8", "--out", str(tmp_path / "stopped"), FP8DIST_REPORT_DIR=str(evidence)
    )
    assert stopped.returncode == 4, stopped.stderr
    summary = json.loads((tmp_path / "done" / "summary.json").read_text())
    (mine,) = json.loads((evidence / "step00000008-rank0.json").read_text())
    written: dict[str, set[str]] = {
        "summary.json": set(summary),
        "waiting": set(summary["waiting"]),
        "findings": set(json.loads((tmp_path / "stopped" / "divergence.json").read_text())["findings"][0]),
        "FP8DIST_REPORT_DIR": {"stepS-report.txt", "stepS-report.json", "stepS-rankR.json", *mine},
    }
    for heading, fields in written.items():
        assert set(first_cells(section(text, heading))) == fields, heading
    lines = {
        f"{name}.jsonl": _keys(tmp_path / f"done/{name}.jsonl") for name in ("metrics", "scales", "ranks", "experts")
    }
    lines["metrics.jsonl"] |= _keys(tmp_path / "stopped" / "metrics.jsonl")
    lines["run.json"] = set(json.loads((tmp_path / "done" / "run.json").read_text()))
    further = set(first_cells(section(text, "Further numbers")))  # Of the lab.
    assert further < lines["metrics.jsonl"]
    lines["metrics.jsonl"] -= further
    for heading, fields in lines.items():
        assert set(first_cells(section(text, heading))) == fields, heading
    kinds = {json.loads(line)["kind"] for line in (tmp_path / "stopped" / "events.jsonl").read_text().splitlines()}
    assert {kind for kind in kinds if f'"{kind}"' not in section(text, "events.jsonl")} == set()
    assert kinds >= {"start", "checked", "diverged", "end"}
    told = section(text, "waiting")
    inside = {name for rank in summary["waiting"]["ranks"] for name in rank} | {"behind_ms"}
    assert {name for name in inside if f"`{name}`" not in told} == set()
    assert {re.sub(r"\d{8}", "S", re.sub(r"rank\d", "rankR", path.name)) for path in evidence.iterdir()} == {
        name for name in written["FP8DIST_REPORT_DIR"] if "." in name
    }


def _keys(path: Path) -> set[str]:
    lines: list[dict[str, Any]] = [json.loads(line) for line in path.read_text().splitlines()]
    return {key for line in lines for key in line}


def test_messages_are_quoted_once_up_to_their_first_clause() -> None:
    text = section((ROOT / "docs" / "mistakes.md").read_text(), "Calls that a phase refuses")
    (line,) = [line for line in text.splitlines() if line.startswith("- inside calibrate(): ")]
    assert "`a step`" in line
    for message, quoted in (
        ("the state is X, expected Z", "the state is X, expected Z"),
        ("no FP8 state in this: call prepare() first", "no FP8 state in this"),
        ("a b c d e f g h i j k l", "a b c d e"),
        ("\u2039…\u203a: the model has lazy parameters", "the model has lazy parameters"),
    ):
        assert messages.shortened(message) == quoted
    page = "| message has | what to do |\n|---|---|\n| ``a `b` c`` (warning) | x |\n| `d, e` | y |\n\n| `f` |\n\n"
    assert messages.quoted(page) == ["a `b` c", "d, e"]
    listed = (ROOT / "docs" / "mistakes.md").read_text().split("<!-- made: errors -->")[1]  # test_made.py: up to date.
    assert "it was saved by another recipe" not in listed

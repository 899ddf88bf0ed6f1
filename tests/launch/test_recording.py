"""The example job records its run with fp8dist.Recorder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import fp8dist
from fp8dist.runs.report.folder import RunFolder
from tests.support.main_job import ALONE, RANKS, TINY, assert_refused, finish, start


def events(out: Path) -> list[tuple[str, int]]:
    return [(event["kind"], event["step"]) for event in RunFolder(out).lines("events.jsonl").new()]


def digests(out: Path) -> dict[int, str]:
    return {
        event["step"]: event["digest"]
        for event in RunFolder(out).lines("events.jsonl").new()
        if event["kind"] == "saved"
    }


@pytest.mark.slow
def test_a_resumed_run_has_one_history(tmp_path: Path) -> None:
    flags = (*TINY, "--save-every", "4", "--watch-every", "3", "--watch-ranks", "--check-every", "5")
    finish(tmp_path, RANKS, *flags, "--stop-after", "6")
    run = finish(tmp_path, RANKS, *flags, "--resume", "auto")
    assert [line["step"] for line in run.lines] == list(range(1, 13))
    assert all(line["grad_norm"] > 0 and line["tokens"] == 256 for line in run.lines)
    assert [line["proven"] for line in run.lines[6:]] == list(range(7, 13))
    told = events(tmp_path)
    assert [one for one in told if one[0] in ("start", "saved", "end")] == [
        *[("start", 0), ("saved", 4), ("saved", 6), ("end", 6)],
        *[("start", 6), ("saved", 8), ("saved", 12), ("end", 12)],
    ]
    steps = [line["step"] for line in RunFolder(tmp_path).lines("ranks.jsonl").new()]
    assert steps == [3, 6, 9, 12]
    finish(tmp_path / "whole", RANKS, *flags)
    assert [digests(tmp_path)[step] for step in (4, 8, 12)] == [*digests(tmp_path / "whole").values()]
    assert len({*digests(tmp_path).values()}) == 4


@pytest.mark.slow
def test_alarms_and_faults_are_events(tmp_path: Path) -> None:
    flags = (
        "--watch-every",
        "4",
        "--watch-ranks",
        "--accumulate",
        "2",
        "--inject",
        "nan:1:8",
        "--inject",
        "spike:1:11",
    )
    finish(tmp_path, RANKS, *TINY, *flags, "--loss-guard", "warn", "--loss-factor", "1.5")
    lines: list[dict[str, Any]] = list(RunFolder(tmp_path).lines("events.jsonl").new())
    (nan,) = [line for line in lines if line["kind"] == "nonfinite"]
    assert (nan["step"], nan["rank"], nan["role"]) == (8, 1, "grad_output")
    assert [f"{nan['module']}:{nan['role']}"] == nan["slots"]
    (spike,) = [line for line in lines if line["kind"] == "spike"]
    assert spike["step"] == 11
    assert spike["loss"] > 1.5 * spike["median"]


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["fsdp1", "fsdp2"])
def test_the_gradient_norm_is_that_of_the_whole_model(tmp_path: Path, parallel: str) -> None:
    flags = (*TINY, "--precision", "fp32", "--steps", "3", "--parallel")
    runs = [finish(tmp_path / name, RANKS, *flags, name) for name in ("ddp", parallel)]
    norms = [[line["grad_norm"] for line in run.lines] for run in runs]
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)  # Sums in another order.
    assert RunFolder(tmp_path / parallel).header["precision"] == "fp32"
    assert not (tmp_path / parallel / "scales.jsonl").exists()


@pytest.mark.slow
def test_a_second_job_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    with fp8dist.Recorder(tmp_path):
        done = start(ALONE, *TINY, "--precision", "fp32", "--out", str(tmp_path))
    assert_refused(done, "another process records a run there")
    assert json.loads((tmp_path / "run.json").read_text())["precision"] == "float32"

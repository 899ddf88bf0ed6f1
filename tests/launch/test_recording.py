"""The example job records its run with fp8dist.Recorder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import fp8dist
from fp8dist.runs.report.folder import RunFolder
from tests.support.main_job import ALONE, RANKS, TINY, Runs, assert_refused, finish, start
from tests.support.suite import few


@pytest.mark.slow
def test_alarms_and_faults_are_events(tmp_path: Path) -> None:
    faults = ("--inject", "nan:1:8", "--inject", "spike:1:11")
    flags = ("--watch-every", "4", "--watch-ranks", "--accumulate", "2", *faults)
    finish(tmp_path, RANKS, *TINY, *flags, "--loss-guard", "warn", "--loss-factor", "1.5")
    lines: list[dict[str, Any]] = list(RunFolder(tmp_path).lines("events.jsonl").new())
    (nan,) = [line for line in lines if line["kind"] == "nonfinite"]
    assert (nan["step"], nan["rank"], nan["role"]) == (8, 1, "grad_output")
    assert [f"{nan['module']}:{nan['role']}"] == nan["slots"]
    (spike,) = [line for line in lines if line["kind"] == "spike"]
    assert spike["step"] == 11
    assert spike["loss"] > 1.5 * spike["median"]


@pytest.mark.slow
@pytest.mark.parametrize("parallel", few(["fsdp1", "fsdp2"], "fsdp2"))
def test_the_gradient_norm_is_that_of_the_whole_model(runs: Runs, parallel: str) -> None:
    flags = (*TINY, "--precision", "fp32", "--steps", "3", "--parallel")
    sharded = runs(RANKS, *flags, parallel)
    norms = [[line["grad_norm"] for line in run.lines] for run in (runs(RANKS, *flags, "ddp"), sharded)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)  # Sums in another order.
    assert RunFolder(sharded.out).header["precision"] == "fp32"
    assert not (sharded.out / "scales.jsonl").exists()


@pytest.mark.slow
def test_a_second_job_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    with fp8dist.Recorder(tmp_path):
        done = start(ALONE, *TINY, "--precision", "fp32", "--out", str(tmp_path))
    assert_refused(done, "another process records a run there")
    assert json.loads((tmp_path / "run.json").read_text())["precision"] == "float32"

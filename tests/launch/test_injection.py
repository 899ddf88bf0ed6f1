"""Faults injected into the example job: the job's reports and reactions."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.main_job import RANKS, TABLE_HEADER, TINY, TORCHRUN, finish, metrics, stop

THREE = {"NPROC": "3"}  # The smallest number of ranks with a majority.
SCALE = "blocks.0.attention_out:weight"
WEIGHT = "blocks.0.mlp_in.weight"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "step", "expected"),
    [
        # A scale is reported at its own step.
        ("--inject scale:1:5", 5, {"kind": "scale", "name": SCALE, "ranks": [1], "last_good_step": 3}),
        # The flip comes after the update of step 5. The checks run in steps 5 and 9, before their updates.
        (
            "--inject weight:2:5 --check-every 4",
            9,
            {"kind": "parameter", "name": WEIGHT, "ranks": [2], "last_good_step": 4, "index": [64, 0]},
        ),
    ],
    ids=["scale", "weight"],
)
def test_damage_is_reported(tmp_path: Path, flags: str, step: int, expected: dict[str, Any]) -> None:
    stopped = stop(tmp_path, *flags.split(), **THREE)
    (finding,) = stopped.findings
    assert ({"step": step, "reference_rank": 0} | expected).items() <= finding.items()
    if expected["kind"] == "scale":
        assert finding["value"] == 2 * finding["expected"]
        assert f"[rank 1] --inject scale:1:5: scale of {SCALE} is now" in stopped.stderr
        # Completed steps whose losses were not shared yet are kept too.
        assert [line["step"] for line in metrics(stopped.out)] == [1, 2, 3, 4]


@pytest.mark.long
@pytest.mark.nightly
def test_every_rank_fails_alike(tmp_path: Path) -> None:
    variables = {"FP8DIST_CHECK_EVERY": "4", "FP8DIST_CHECK_POLICY": "raise"}
    stopped = stop(tmp_path, "--precision", "fp32", "--inject", "weight:0:5", command=TORCHRUN, **THREE, **variables)
    (finding,) = stopped.findings
    assert (finding["name"], finding["ranks"], finding["reference_rank"]) == (WEIGHT, [0], 1)
    assert 5 <= finding["step"] <= 5 + 4
    assert "[rank 1] parameters differ between ranks" in stopped.stderr  # Rank 0 is the damaged one.
    assert [line["step"] for line in metrics(stopped.out)] == [1, 2, 3, 4, 5, 6, 7, 8]
    # torchrun may kill a rank between its last output and its exit.
    exit_codes = set(re.findall(r"exitcode  : (-?\d+)", stopped.stderr))
    assert "4" in exit_codes
    assert exit_codes <= {"4", "-15"}


@pytest.mark.slow
def test_two_ranks_cannot_mend_a_lost_update(tmp_path: Path) -> None:
    stopped = stop(tmp_path, "--inject", "skip:1:6", "--check-every", "3", "--check-policy", "repair")
    assert {finding["kind"] for finding in stopped.findings} == {"parameter"}
    assert WEIGHT in {finding["name"] for finding in stopped.findings}
    for finding in stopped.findings:
        assert (finding["ranks"], finding["reference_rank"]) == ([0, 1], None)
        assert 6 <= finding["step"] <= 6 + 3
    assert "no majority" in stopped.table


@pytest.mark.slow
def test_a_nan_is_counted_by_all_and_stops_nobody(tmp_path: Path) -> None:
    run = finish(tmp_path, RANKS, *TINY, "--inject", "nan:1:5", "--check-every", "4")
    assert "[rank 1] --inject nan:1:5: recorded a NaN amax for" in run.output
    assert run.summary["checks"] == 3  # After 4 and 8 steps, and at the end.
    assert run.summary["check_ms_per_check"] > 0
    assert run.summary["divergences"] == 0
    assert run.lines[0]["nonfinite_amaxes"] == 1  # Rank 0's counter. All ranks count the same.
    assert run.summary["fp8_state_identical"] is True
    assert run.summary["parameters_identical"] is True
    assert run.losses[-1] < run.losses[0]


@pytest.mark.long
def test_repair_goes_on_with_equal_ranks(tmp_path: Path) -> None:
    faults = [flag for fault in ("skip:1:6", "scale:2:8", "weight:0:12") for flag in ("--inject", fault)]
    (tmp_path / "divergence.txt").write_text("of an earlier run\n")
    run = finish(tmp_path, RANKS, *TINY, *faults, "--check-every", "3", "--check-policy", "repair", **THREE)
    told = " ".join(run.output.split())  # Long lines are wrapped.
    assert told.count("repaired, and checked again: ") == 3
    assert f"parameter '{WEIGHT}' on rank 1, from rank 0" in told
    assert f"scale of '{SCALE}' on rank 2, from rank 0" in told
    assert f"parameter '{WEIGHT}' on rank 0, from rank 1" in told
    assert run.summary["divergences"] == 3
    assert run.summary["fp8_state_identical"] is True
    assert run.summary["parameters_identical"] is True
    assert not (tmp_path / "divergence.txt").exists()


@pytest.mark.slow
def test_warn_says_it_and_goes_on(tmp_path: Path) -> None:
    flags = ["--inject", "skip:1:6", "--check-every", "3", "--check-policy", "warn", "--precision", "fp32"]
    run = finish(tmp_path, RANKS, *TINY, *flags)
    assert run.output.count(TABLE_HEADER) == 3  # After 6 and 9 steps, and at the end.
    assert (run.summary["checks"], run.summary["divergences"]) == (4, 3)
    assert run.summary["parameters_identical"] is False

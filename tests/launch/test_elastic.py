"""Killed and hanging ranks of the example job: messages of the other ranks, and bitwise-equal restarted runs."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.support.main_job import RANKS, TINY, TORCHRUN, Runs, finish, start
from tests.support.suite import few

pytestmark = pytest.mark.long

KILLED = [
    ("ddp", "kill-sync:1:2", 0),
    ("fsdp2", "kill-save:1:8", 4),
    ("ddp", "kill-backward:0:7", 4),
    ("fsdp1", "kill-forward:1:7", 4),
]
"""The parallelism, the fault, and the step from which the job goes on."""


@pytest.mark.parametrize(("parallel", "fault", "resumed"), few(KILLED, KILLED[1]))
def test_a_killed_rank_costs_steps_but_no_bit(
    tmp_path: Path, runs: Runs, parallel: str, fault: str, resumed: int
) -> None:
    flags = ["--parallel", parallel, "--save-every", "4", "--timeout", "60", "--inject", fault]
    run = finish(tmp_path, TORCHRUN, *TINY, *flags, MAX_RESTARTS="1", TMPDIR=str(tmp_path))
    assert f"--inject {fault}: SIGKILL" in run.output
    assert (run.summary["restarts"], run.summary["resumed_after_step"]) == (1, resumed)
    straight = runs(RANKS, *TINY, "--parallel", parallel)
    assert [line["step"] for line in run.lines] == [line["step"] for line in straight.lines]
    assert run.losses == straight.losses
    for key in ("final_training_loss", "validation_loss", "parameters_sha256"):
        assert run.summary[key] == straight.summary[key]
    assert run.summary["fp8_state_identical"] is True
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-00000008", "step-00000012"]
    # The surviving rank has logged its position.
    kind, victim, step = fault.split(":")
    (said,) = re.findall(rf"^rank {1 - int(victim)}: (.+)$", run.output, re.MULTILINE)
    # The killed rank's part of the sync may have arrived. Then the survivor fails in the next step.
    steps = (int(step), int(step) + 1) if kind == "kill-sync" else (int(step),)
    assert any(f"step {number}" in said for number in steps)
    assert "GPT" in said


def test_a_hanging_rank_is_given_up(tmp_path: Path) -> None:
    flags = ["--parallel", "fsdp2", "--timeout", "5", "--inject", "hang:1:6", "--out", str(tmp_path / "run")]
    done = start(TORCHRUN, *TINY, *flags, TMPDIR=str(tmp_path))
    assert done.returncode == 5, done.stdout + done.stderr
    assert "[rank 1] --inject hang:1:6: sleeping" in done.stderr
    (said,) = re.findall(r"^rank 0: .+$", done.stderr, re.MULTILINE)
    where = r"rank 0: step 6: (forward|backward): FP8 manager of GPT \(12 slots over ranks 0 to 1\): "
    waited = re.match(where + r"a collective failed or timed out after (\d+\.\d) s: .*Timed out waiting", said)
    assert waited is not None, said
    assert 5 <= float(waited[2]) < 15
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run/summary.json").exists()
    lines = subprocess.run(["ps", "-eo", "pid=,args="], capture_output=True, text=True, check=True).stdout.splitlines()
    assert [line for line in lines if str(tmp_path) in line and "-u -m tests.support.lab" in line] == []

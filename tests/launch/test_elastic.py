"""Killed and hanging ranks of the example job: messages of the other ranks, and bitwise-equal restarted runs."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.main_job import RANKS, ROOT, SINGLE, STEPS, TINY, TORCHRUN, Run, finish, metrics, start
from tests.support.suite import NIGHTLY

pytestmark = pytest.mark.long

Undisturbed = Callable[[str], Run]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """Return a function that makes a run without faults, once per kind of parallelism."""
    made: dict[str, Run] = {}

    def run(parallel: str) -> Run:
        if parallel not in made:
            made[parallel] = finish(tmp_path_factory.mktemp("run"), RANKS, *TINY, "--parallel", parallel)
        return made[parallel]

    return run


def processes_of(out: Path) -> list[str]:
    """Return the command lines of this run's live processes."""
    lines = subprocess.run(["ps", "-eo", "pid=,args="], capture_output=True, text=True, check=True).stdout.splitlines()
    return [line for line in lines if str(out) in line and "-u -m tests.support.lab" in line]


@pytest.mark.parametrize(
    ("parallel", "fault", "resumed"),
    [
        ("ddp", "kill-sync:1:2", 0),
        ("fsdp2", "kill-save:1:8", 4),
        pytest.param("ddp", "kill-backward:0:7", 4, marks=NIGHTLY),
        pytest.param("ddp", "kill-save:0:8", 4, marks=NIGHTLY),
        pytest.param("fsdp1", "kill-forward:1:7", 4, marks=NIGHTLY),
        pytest.param("fsdp2", "kill-sync:0:7", 4, marks=NIGHTLY),
    ],
)
def test_a_killed_rank_costs_steps_but_no_bit(
    tmp_path: Path, undisturbed: Undisturbed, parallel: str, fault: str, resumed: int
) -> None:
    flags = ["--parallel", parallel, "--save-every", "4", "--timeout", "60", "--inject", fault]
    run = finish(tmp_path, TORCHRUN, *TINY, *flags, MAX_RESTARTS="1", TMPDIR=str(tmp_path))
    assert f"--inject {fault}: SIGKILL" in run.output
    assert (run.summary["restarts"], run.summary["resumed_after_step"]) == (1, resumed)
    straight = undisturbed(parallel)
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
    assert processes_of(tmp_path) == []


def start_ranks(*commands: tuple[tuple[str, ...], str]) -> list[tuple[int, str]]:
    """Start a rank per (command, restart count of its agent). Return the exit status and stderr of each rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    processes = []
    for rank, (command, restarts) in enumerate(commands):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "TORCHELASTIC_RESTART_COUNT": restarts}
        environment = {**os.environ, **common, **own, "WORLD_SIZE": str(len(commands))}
        processes.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment))
    try:
        return [(process.returncode, said) for process in processes for _, said in [process.communicate(timeout=120)]]
    finally:
        for process in processes:
            process.kill()


@pytest.mark.nightly
def test_agents_that_count_differently_resume_alike(tmp_path: Path) -> None:
    """On two nodes the agents' restart counts may differ, here 0 and 1. Both ranks must resume from the same step."""
    flags = [*TINY, "--save-every", "6", "--inject", "kill-forward:0:9", "--out", str(tmp_path)]
    finish(tmp_path, RANKS, *TINY, "--save-every", "6", "--stop-after", "6")
    ends = start_ranks(*(((*SINGLE, *flags), own) for own in ("0", "1")))
    assert [status for status, _ in ends] == [0, 0], ends
    assert "resumed from" in ends[0][1]
    assert [line["step"] for line in metrics(tmp_path)] == list(range(1, STEPS + 1))


PARTNER = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.tensor(0), dist.ReduceOp.MAX)
os._exit(1)
"""


def test_a_rank_that_dies_at_the_start_is_missed(tmp_path: Path) -> None:
    job = (*SINGLE, *TINY, "--parallel", "ddp", "--timeout", "10", "--out", str(tmp_path))
    (status, said), _ = start_ranks((job, "0"), ((sys.executable, "-c", PARTNER), "0"))
    assert status == 5, said
    assert re.search(r"^rank 0: step 0: starting: .*a collective failed or timed out", said, re.MULTILINE), said
    assert "Traceback" not in said

"""launch/slurm.sbatch, submitted to a SLURM cluster with two nodes."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import slurm
from tests.support.main_job import LESSON, ROOT, SIZE, metrics
from tests.support.slurm import Slurm

pytestmark = [
    pytest.mark.long,
    pytest.mark.alone,
    pytest.mark.skipif(slurm.why_not() is not None, reason=str(slurm.why_not())),
]

SCRIPT = "launch/slurm.sbatch"
ON_THIS_MACHINE = ("--nodes", "2", "--cpus-per-task", "1")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Slurm]:
    """A SLURM cluster with two nodes."""
    with slurm.running(2) as cluster:
        yield cluster
        assert slurm.marked(cluster.folder)
    assert slurm.marked(cluster.folder) == []
    assert not cluster.folder.exists()


def submit(
    cluster: Slurm,
    out: Path,
    *flags: str,
    program: tuple[str, ...] = (),
    options: tuple[str, ...] = (),
    **variables: str,
) -> str:
    """Submit a tiny job, or ``program`` with its arguments, from the repository's root. Return the job's number."""
    out.mkdir()
    own = ["--output", str(out / "job.log"), *ON_THIS_MACHINE, *options]
    job_words = program or (*SIZE, *flags, "--out", str(out / "run"))
    words = ["sbatch", "--parsable", "--chdir", str(ROOT), *own, SCRIPT, *job_words]
    (port,) = slurm.free_ports(1)
    own_variables = {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "LOGS": str(out / "logs")}
    more = {**own_variables, "MASTER_PORT": str(port), **variables}
    (job,) = cluster.command(*words, **more)
    return job


def ended(cluster: Slurm, job: str) -> dict[str, str]:
    return cluster.wait_for(job, "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", timeout=200.0)


def processes_after(cluster: Slurm, seconds: float) -> list[tuple[int, str]]:
    """Wait up to ``seconds`` for the processes of jobs to end. Return those that remain."""
    deadline = time.monotonic() + seconds
    while (left := cluster.processes()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left


def test_a_job_on_two_nodes(cluster: Slurm, tmp_path: Path) -> None:
    out = tmp_path / "out"
    state = ended(cluster, submit(cluster, out, options=("--gpus-per-node", "1")))
    log = (out / "job.log").read_text()
    assert (state["JobState"], state["ExitCode"]) == ("COMPLETED", "0:0"), log
    summary = json.loads((out / "run/summary.json").read_text())
    assert summary["ranks"] == 2  # One per GPU that SLURM allocates; a node without GPUs has two.
    assert summary["fp8_collectives_per_step"] == 1
    assert [line["step"] for line in metrics(out / "run")] == list(range(1, summary["steps"] + 1))
    assert "[0]: final_training_loss:" in log
    assert len(list(out.glob("logs/node-0/*/attempt_0/0/stdout.log"))) == 1
    assert len(list(out.glob("logs/node-1/*/attempt_0/0/stdout.log"))) == 1
    assert processes_after(cluster, 20) == []


def test_a_program_on_two_nodes(cluster: Slurm, tmp_path: Path) -> None:
    """One rank fails on purpose. The job's status is that rank's, the highest of all nodes."""
    out, program = tmp_path / "out", (str(LESSON.relative_to(ROOT)), "--fail-rank", "1")
    state = ended(cluster, submit(cluster, out, program=program, options=("--gpus-per-node", "0"), NPROC="1"))
    log = (out / "job.log").read_text()
    assert (state["JobState"], state["ExitCode"]) == ("FAILED", "7:0"), log
    assert len(list(out.glob("logs/node-*/*/attempt_0/0/stderr.log"))) == 2
    assert "train_gpt" not in log
    assert processes_after(cluster, 20) == []


def test_a_mistake_is_told_before_any_rank_starts(cluster: Slurm, tmp_path: Path) -> None:
    out = tmp_path / "out"
    state = ended(cluster, submit(cluster, out, "--heads", "5", options=("--gpus-per-node", "1")))
    log = (out / "job.log").read_text()
    assert (state["JobState"], state["ExitCode"]) == ("FAILED", "2:0"), log
    assert "train_gpt: error: --width 32 is not a multiple of --heads 5" in log
    assert not (out / "logs").exists()


def test_a_cancelled_job_leaves_no_process(cluster: Slurm, tmp_path: Path) -> None:
    out = tmp_path / "out"
    job = submit(cluster, out, "--steps", "1000000", options=("--gpus-per-node", "1"))
    written, deadline = out / "run/metrics.jsonl", time.monotonic() + 150
    while not (written.exists() and written.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert cluster.state_of(job)["JobState"] == "RUNNING", (out / "job.log").read_text()
    ranks = [said for _, said in cluster.processes() if "-u -m launch.train_gpt" in said]
    assert len(ranks) >= 2
    cluster.command("scancel", job)
    assert ended(cluster, job)["JobState"] == "CANCELLED"
    assert processes_after(cluster, 30) == []

"""launch/slurm.sbatch up to the call of srun, and thus with more nodes than a test can have."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.support.main_job import ROOT

SCONTROL = """#!/bin/sh
[ "$1 $2 $3" = "show hostnames nodes" ] || exit 1
{body}
"""
SRUN = """#!/bin/sh
echo "$MASTER_ADDR $NNODES $LOGS"
printf '%s\\n' "$@"
"""


def submitted(
    folder: Path, body: str, *words: str, srun: str = SRUN, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run the script with arguments ``words`` in ``folder``, as SLURM does. A fake ``scontrol`` runs ``body``. A fake
    ``srun`` prints its arguments, or runs them."""
    for name, script in {"scontrol": SCONTROL.format(body=body), "srun": srun}.items():
        (folder / name).write_text(script)
        (folder / name).chmod(0o755)
    bare = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "MASTER_"))}
    job = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "nodes",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_SUBMIT_DIR": str(ROOT),
    }
    return subprocess.run(
        ["bash", str(ROOT / "launch/slurm.sbatch"), *words],
        cwd=folder,
        env={**bare, "PATH": f"{folder}:{os.environ['PATH']}", **job, **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_first_of_very_many_nodes_is_the_master(tmp_path: Path) -> None:
    """The names exceed a pipe's buffer, so their writer notices when the reader stops."""
    done = submitted(tmp_path, "seq --format node%.0f 100000")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[0] == "node1 2 fp8dist-7.ranks"


def test_jobs_that_cannot_start(tmp_path: Path) -> None:
    elsewhere = {"SLURM_SUBMIT_DIR": "/at"}
    for body, variables, said in [
        ("exit 0", {}, "scontrol names no host of nodes: set MASTER_ADDR to the first node"),
        ("exit 1", {}, "scontrol names no host of nodes: set MASTER_ADDR to the first node"),
        ("echo node1", elsewhere, "there is no /at/launch/torchrun.sh: set REPOSITORY to the clone of fp8dist"),
    ]:
        done = submitted(tmp_path, body, "train.py", **variables)
        assert (done.returncode, done.stdout, done.stderr) == (2, "", f"slurm.sbatch: error: {said}\n")
    assert submitted(tmp_path, "exit 1", MASTER_ADDR="node3").stdout.startswith("node3 ")
    done = submitted(tmp_path, "echo node1", "train.py", "--help", REPOSITORY=str(ROOT), **elsewhere)
    assert done.stdout.splitlines()[-3:] == [str(ROOT / "launch/torchrun.sh"), "train.py", "--help"]


def test_a_task_has_the_cpus_of_the_job(tmp_path: Path) -> None:
    for cpus, option in ({}, []), ({"SLURM_CPUS_PER_TASK": "64"}, ["--cpus-per-task=64"]):
        words = submitted(tmp_path, "echo node1", "--steps", "7", **cpus).stdout.splitlines()[1:]
        assert words[: words.index("bash")] == ["--kill-on-bad-exit=0", "--wait", "900", *option]
        assert words[-3:] == [str(ROOT / "launch/torchrun.sh"), "--steps", "7"]


TASK = """#!/bin/bash
# The one task of a job of one node.
while [[ $1 != bash ]]; do shift; done
SLURM_NODEID=0 exec "$@"
"""


PYTHON = """#!/bin/sh
printf '%s|' "$PWD" "$NODE_RANK" "$NPROC" "$@"
exit 7
"""


def test_a_program_gets_its_arguments_and_gives_the_status(tmp_path: Path) -> None:
    """Its path is relative to the folder of submission. No code of the example job runs."""
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    one = {"SLURM_JOB_NUM_NODES": "1", "NPROC": "1", "PYTHON": str(python)}
    done = submitted(tmp_path, "echo localhost", "train.py", "--help", "a b", srun=TASK, **one)
    assert (done.returncode, done.stdout) == (7, f"{tmp_path}|0|1|-m|fp8dist|launch|train.py|--help|a b|")

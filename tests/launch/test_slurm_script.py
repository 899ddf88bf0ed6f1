"""launch/slurm.sbatch up to where srun would start, so also with more nodes than a test can have."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.main_job import ROOT

SCONTROL = """#!/bin/sh
[ "$1 $2 $3" = "show hostnames nodes" ] || exit 1
{body}
"""
SRUN = """#!/bin/sh
echo "$MASTER_ADDR $NNODES $LOGS"
printf '%s\\n' "$@"
"""


def submitted(folder: Path, body: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the script as SLURM does, with ``scontrol`` doing this and ``srun`` telling what it is to do."""
    for name, script in {"scontrol": SCONTROL.format(body=body), "srun": SRUN}.items():
        (folder / name).write_text(script)
        (folder / name).chmod(0o755)
    bare = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "MASTER_"))}
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "nodes", "SLURM_JOB_NUM_NODES": "2", "SLURM_SUBMIT_DIR": "/at"}
    return subprocess.run(
        ["bash", str(ROOT / "launch/slurm.sbatch"), "--steps", "7"],
        env={**bare, "PATH": f"{folder}:{os.environ['PATH']}", **job, **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_first_of_very_many_nodes_is_the_master(tmp_path: Path) -> None:
    """Names of more bytes than a pipe holds: who writes them notices that nobody reads on."""
    done = submitted(tmp_path, "seq --format node%.0f 100000")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[0] == "node1 2 train-gpt-7.ranks"


@pytest.mark.parametrize("body", ["exit 0", "exit 1"])
def test_a_job_whose_nodes_nobody_knows(tmp_path: Path, body: str) -> None:
    done = submitted(tmp_path, body)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "slurm.sbatch: error: scontrol names no host of nodes: set MASTER_ADDR to the first\n"
    assert submitted(tmp_path, body, MASTER_ADDR="node3").stdout.startswith("node3 ")


@pytest.mark.parametrize(("cpus", "option"), [({}, []), ({"SLURM_CPUS_PER_TASK": "64"}, ["--cpus-per-task=64"])])
def test_a_task_has_the_cpus_of_the_job(tmp_path: Path, cpus: dict[str, str], option: list[str]) -> None:
    words = submitted(tmp_path, "echo node1", **cpus).stdout.splitlines()[1:]
    assert words[: words.index("bash")] == ["--kill-on-bad-exit=0", "--wait", "900", *option]
    assert words[-3:] == ["/at/launch/torchrun.sh", "--steps", "7"]

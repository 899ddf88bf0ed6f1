"""Users' programs, started by launch/torchrun.sh and by ``fp8dist launch``."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError

from fp8dist.cli.launcher import agent
from fp8dist.cli.main import main
from tests.support.hosted_job import START, HostedJob
from tests.support.hosts import lab_or_skip
from tests.support.main_job import LAUNCH, LESSON, assert_launcher_refused, start

PROGRAM = """
import os, socket
socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), timeout=60).close()
print(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}: done", flush=True)
"""
"""Reaches the store that a process group joins by. Without torch, which each rank would import for two seconds."""

SAID = [f"rank {rank} of 2: done\n" for rank in range(2)]


@pytest.mark.slow
def test_a_program_by_its_path(tmp_path: Path) -> None:
    """The path is relative to the caller's folder, not the repository. Each rank has a log."""
    (tmp_path / "program.py").write_text(PROGRAM)
    done = start(LAUNCH, "./program.py", FOLDER=str(tmp_path), LOGS="logs of it")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line for line in SAID if line not in done.stdout] == []
    for rank in range(2):
        (log,) = (tmp_path / "logs of it").glob(f"*/attempt_0/{rank}/stdout.log")
        assert log.read_text() == SAID[rank]
        assert f"[{rank}]: {log.read_text()}" in done.stdout


def test_the_launcher_has_help_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("-h", "--help"):
        assert main(["launch", flag]) == 0
        help_ = capsys.readouterr().out
        assert help_.startswith("usage: fp8dist launch ")
        for name in ("NPROC", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "MAX_RESTARTS", "JOIN_TIMEOUT"):
            assert f"\n    {name} " in help_
    with pytest.raises(SystemExit):
        main(["--help"])
    assert re.search(r"\n +launch +start a training program", capsys.readouterr().out)


def test_a_command_that_starts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in [
        ([], "name a program: fp8dist launch [-h] (PROGRAM | -m MODULE) [ARGUMENT …]"),
        (["-m"], "name a module after -m: fp8dist launch"),
        (["--steps", "7"], "no such flag: --steps; flags of the program come after its name: fp8dist launch"),
        (["no/such.py", "--help"], f"no such file: no/such.py, in the current folder {Path.cwd()}"),
        ([""], "no such file: '', in the current folder"),
    ]:
        status = main(["launch", *words])
        captured = capsys.readouterr()
        assert_launcher_refused(subprocess.CompletedProcess(words, status, captured.out, captured.err), message)


def test_another_node_that_has_ended_the_job_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def closed(arguments: list[str]) -> None:
        raise RendezvousClosedError("closed")

    monkeypatch.setattr(agent, "main", closed)
    assert main(["launch", __file__]) == 5
    said = capsys.readouterr().err
    missing = "another node has ended the job, or cannot be reached"
    assert said == f"fp8dist launch: {missing}: RendezvousClosedError: closed\n"


def test_of_ranks_that_fail_together_the_cause_gives_the_status(monkeypatch: pytest.MonkeyPatch) -> None:
    for codes, status in [
        ([1, 7], 7),  # Rank 0 failed in a collective with rank 1, without handling the error.
        ([5, 1], 1),  # The example job handles the error with exit 5.
        ([5, -15, 3], 3),
        ([1, -9], 128 + 9),
        ([7, 1], 7),
        ([7, 3, 9], 3),  # The first failure wins.
        ([5, 5], 5),
        ([-15], 128 + 15),
    ]:

        def failed(arguments: list[str], codes: list[int] = codes) -> None:
            failures = {rank: ProcessFailure(rank, 100 + rank, code, "<none>") for rank, code in enumerate(codes)}
            for failure, second in zip(failures.values(), (2, 1, 3)):  # Rank 1 has failed before rank 0.
                failure.timestamp = second
            raise ChildFailedError("program", failures)

        monkeypatch.setattr(agent, "main", failed)
        assert agent.run([]) == status


@pytest.mark.long
@pytest.mark.alone
def test_a_program_on_three_hosts(tmp_path: Path) -> None:
    program = ["lesson.py", "--steps", "4"]
    shutil.copy(LESSON, tmp_path / "lesson.py")
    with lab_or_skip(3) as lab:
        job = HostedJob(lab, tmp_path / "good", program=program, cwd=tmp_path, LOGS="logs").start_all()
        assert job.statuses(time.monotonic() + START) == [0, 0, 0], list(map(job.said, lab.hosts))
        for host in lab.hosts:
            (log,) = tmp_path.glob(f"logs/node-{host.index}/*/attempt_0/0/stdout.log")
            assert log.read_text().startswith(f"rank {host.index} of 3: loss ")
            assert f"[{host.index}]: {log.read_text()}" in job.said(host)
        job.assert_gone()
        job = HostedJob(lab, tmp_path / "bad", program=[*program, "--fail-rank", "1"], cwd=tmp_path).start_all()
        statuses = job.statuses(time.monotonic() + START)
        assert statuses[1] == 7, list(map(job.said, lab.hosts))
        assert 0 not in statuses
        job.assert_gone()

"""The lab on hosts with their own addresses: equal results, the cost of latency; and nothing is left of the hosts."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.hosted_job import HostedJob, assert_same
from tests.support.hosts import ROOT, lab_or_skip, why_not
from tests.support.main_job import RANKS, TINY, finish

pytestmark = [pytest.mark.long, pytest.mark.alone]

LATENCY = 0.0025
"""One-way, in s. A sync then takes 11 ms. Twice as much is longer than the optimizer's step on some machines."""


def test_four_hosts_train_as_one(tmp_path: Path) -> None:
    """gloo's ring follows the order of the ranks on any hosts, so the order of sums is the same."""
    flags = ["--parallel", "fsdp2", "--timeout", "60", "--inject", "slow:2:50"]
    with lab_or_skip(4) as lab:
        spread = HostedJob(lab, tmp_path, *flags).start_all().finish()
    assert_same(spread, finish(tmp_path / "one-host", RANKS, *TINY, *flags, NPROC="4"))
    ranks = spread.summary["waiting"]["ranks"]
    assert [rank["host"] for rank in ranks] == ["host0", "host1", "host2", "host3"]
    straggler = spread.summary["waiting"]["straggler"]
    assert (straggler["rank"], straggler["host"]) == (2, "host2")
    assert "rank 2 on host2" in spread.output


def test_next_step_hides_the_sync(tmp_path: Path) -> None:
    """The sync overlaps with the optimizer's step of 7 million parameters. Both runs wait for the same gradients."""
    size = ["--layers", "4", "--width", "384", "--heads", "4", "--context", "32", "--batch-size", "2"]
    flags = [*size, "--steps", "14", "--log-every", "14", "--timeout", "60"]
    runs = {}
    with lab_or_skip(2, delayed=True) as lab:
        lab.set_latency(LATENCY)
        for update in ("same_step", "next_step"):
            job = HostedJob(lab, tmp_path / update, *flags, "--update", update)
            runs[update] = job.start_all().finish(seconds=180)
    assert_same(runs["same_step"], runs["next_step"])
    exposed = {
        update: statistics.median(line["sync_wait_max_ms"] for line in run.lines[2:]) for update, run in runs.items()
    }
    assert exposed["same_step"] >= 2 * 1000 * LATENCY  # Two hops of a ring of two.
    assert exposed["next_step"] <= exposed["same_step"] / 10, exposed


KEEP = """
import sys, time
sys.path.insert(0, {root!r})
from tests.support.hosts import Lab
lab = Lab(2, delayed=True)
lab.hosts[0].start(["sleep", "1000"])
print(*(host.pid for host in lab.hosts), lab._forwarder.pid, flush=True)
time.sleep(1000)
"""


def test_nothing_is_left_of_hosts_whose_test_was_killed() -> None:
    if (reason := why_not(delayed=True)) is not None:
        pytest.skip(f"no lab of hosts: {reason}")
    holder = subprocess.Popen([sys.executable, "-c", KEEP.format(root=str(ROOT))], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    pids = [int(pid) for pid in holder.stdout.readline().split()]
    assert len(pids) == 3
    assert all(Path(f"/proc/{pid}").exists() for pid in pids)
    os.kill(holder.pid, signal.SIGKILL)
    holder.communicate()
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)

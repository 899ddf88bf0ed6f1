"""The example job on hosts with their own addresses: equal results, and the cost of network latency."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from tests.support.hosted_job import HostedJob, assert_same
from tests.support.hosts import lab_or_skip
from tests.support.main_job import RANKS, TINY, finish

pytestmark = [pytest.mark.long, pytest.mark.alone]

LATENCY = 0.005
"""One-way latency in seconds."""


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
    """The sync overlaps with the optimizer's step of 7 million parameters. Both runs wait for the same gradients.

    With the whole latency the sync takes 22 ms, which is longer than that step on some machines.
    """
    latency = LATENCY / 2
    size = ["--layers", "4", "--width", "384", "--heads", "4", "--context", "32", "--batch-size", "2"]
    flags = [*size, "--steps", "14", "--log-every", "14", "--timeout", "60"]
    runs = {}
    with lab_or_skip(2, delayed=True) as lab:
        lab.set_latency(latency)
        for update in ("same_step", "next_step"):
            job = HostedJob(lab, tmp_path / update, *flags, "--update", update)
            runs[update] = job.start_all().finish(seconds=180)
    assert_same(runs["same_step"], runs["next_step"])
    exposed = {
        update: statistics.median(line["sync_wait_max_ms"] for line in run.lines[2:]) for update, run in runs.items()
    }
    print(f"ms of a step that wait for the sync: {exposed}")
    assert exposed["same_step"] >= 2 * 1000 * latency  # Two hops of a ring of two.
    assert exposed["next_step"] <= exposed["same_step"] / 10, exposed

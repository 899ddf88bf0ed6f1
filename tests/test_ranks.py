"""The rank pool: results in order, and every rank's traceback when a rank fails or hangs."""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.forked import PRELOADED
from tests.support.ranks import RankPool, RanksFailed, on_ranks, serve, threads_of


def _sum_of_ranks() -> tuple[int, int]:
    total = torch.tensor(dist.get_rank())
    dist.all_reduce(total)
    return dist.get_rank(), int(total)


def _one_rank_raises() -> None:
    if dist.get_rank() == 1:
        raise ValueError("planted")
    dist.all_reduce(torch.zeros(1))


def test_results_come_in_rank_order(two_ranks: RankPool) -> None:
    assert two_ranks.run(_sum_of_ranks) == [(0, 1), (1, 1)]


@on_ranks(2)
def _fails_on_the_second(tmp_path: Path) -> None:
    assert dist.get_rank() == len(tmp_path.name) - 4


def test_an_assertion_on_a_rank_shows_its_values(two_ranks: RankPool) -> None:
    with pytest.raises(RanksFailed, match=r"rank 0: returned\n--- rank 1: raised\n(.*\n)*.*assert 1 == \(4 - 4\)"):
        _fails_on_the_second(tmp_path=Path("four"), two_ranks=two_ranks)


def _origin() -> tuple[bool, int]:
    return PRELOADED in sys.modules, threads_of(os.getppid())


def test_ranks_are_forked_from_one_thread_that_has_imported_torch(two_ranks: RankPool) -> None:
    """Without the preloaded imports, ranks work too, but all tests take three times as long."""
    assert two_ranks.run(_origin) == [(True, 1)] * 2


def _ends_early(left: Path, rank: int, *rest: Any) -> None:
    """Do not connect if this is rank 1, as often as the file has bytes."""
    if rank == 1 and (count := left.stat().st_size):
        os.truncate(left, count - 1)
        return
    serve(rank, *rest)


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 3])
def test_processes_that_end_before_they_are_connected_start_again(
    times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill = os.kill

    def too_late(pid: int, number: int) -> None:
        if number == signal.SIGUSR1:  # The process has ended since it was asked.
            raise ProcessLookupError
        kill(pid, number)

    monkeypatch.setattr(os, "kill", too_late)
    left = tmp_path / "left"
    left.write_bytes(bytes(times))
    pool = RankPool(2, functools.partial(_ends_early, left))
    try:
        if times == 3:
            with pytest.raises(
                RanksFailed, match=r"before they are connected\n--- rank 0: (.*\n)+--- rank 1: ended with status 0"
            ):
                pool.run(_sum_of_ranks)
        assert pool.run(_sum_of_ranks) == [(0, 1), (1, 1)]
    finally:
        pool.close()


def _aborts() -> None:
    if dist.get_rank() == 1:
        os.write(2, b"terminate called\n")
        os.abort()
    dist.all_reduce(torch.zeros(1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "shown"),
    [
        (_one_rank_raises, ["ValueError: planted", "rank 0: was here", "all_reduce"]),
        (_aborts, ["rank 1: ended with status -6\nterminate called\n", "in _aborts"]),
    ],
)
def test_a_failure_shows_what_each_rank_did_and_the_pool_recovers(function: Any, shown: list[str]) -> None:
    pool = RankPool(2)
    try:
        with pytest.raises(RanksFailed) as failure:
            pool.run(function)
        assert [text for text in shown if text not in str(failure.value)] == []
        assert pool.run(_sum_of_ranks) == [(0, 1), (1, 1)]
    finally:
        pool.close()


def _dies_later() -> int:
    if dist.get_rank() == 1:
        os.write(2, b"terminate called\n")
        threading.Timer(0.1, os.abort).start()
    return os.getpid()


def test_a_rank_that_dies_after_a_test_fails_the_next_one_alone() -> None:
    pool = RankPool(2)
    try:
        pool.run(_dies_later)
        wait([process.sentinel for process in pool._processes], 20)
        with pytest.raises(RanksFailed, match=r"rank 1 died after (.*\n)+--- rank 1: ended with status -6\nterminate"):
            pool.run(_sum_of_ranks)
        assert pool.run(_sum_of_ranks) == [(0, 1), (1, 1)]
    finally:
        pool.close()

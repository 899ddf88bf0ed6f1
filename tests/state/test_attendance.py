"""Roll calls: find the missing ranks after a failed collective, in bounded time and with few store operations."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch.distributed as dist

import fp8dist
from fp8dist.state.roll_call import (
    GRACE,
    LINGER,
    PATIENCE,
    REACH,
    SHOWN,
    TURN,
    TURNS,
    Attendance,
    Roll,
    _in_time,
    enrol,
)
from tests.support.forked import context
from tests.support.large_world import CountingStore, world

GRACE_S = 0.5


class HangingStore(CountingStore):
    """Accepts writes, but stops answering after the first ``answers`` answers."""

    def __init__(self, answers: int) -> None:
        super().__init__()
        self.left = answers

    def add(self, key: str, amount: int) -> int:
        hangs = not self.left
        total = super().add(key, amount)
        if hangs:
            time.sleep(3600)
        self.left -= 1
        return total


class GoneStore(CountingStore):
    """A store whose server has ended."""

    def add(self, key: str, amount: int) -> int:
        raise dist.DistNetworkError("Connection reset by peer")


def call_all(store: Any, callers: Sequence[int], ranks: Sequence[int], grace: float = GRACE_S) -> list[Attendance]:
    """Run the callers' roll calls at once, each in a thread."""
    with ThreadPoolExecutor(len(callers)) as pool:
        return list(pool.map(lambda rank: Roll(store, rank, ranks, "group").call(grace), callers))


@pytest.mark.slow
def test_who_is_missing_from_each_call_of_a_group() -> None:
    store = CountingStore()
    found = call_all(store, [1, 2, 3], range(5))
    assert [(one.missing, one.more) for one in found] == [((0, 4), False)] * 3
    # Who comes late gets the verdict, and is not its own missing rank.
    (late,) = call_all(store, [4], range(5), grace=60)
    assert late.missing == (0,)
    # Each call is a new one: it is the second of ranks 1 and 2, and the first of rank 0.
    assert [one.missing for one in call_all(store, [1, 2, 0], range(5))] == [(0, 3, 4), (0, 3, 4), (4,)]
    assert Roll(store, 1, [1, 2], "another group").call(GRACE_S).missing == (2,)


def test_nobody_waits_once_all_have_called() -> None:
    start = time.monotonic()
    found = call_all(CountingStore(), range(6), range(6), grace=60)
    assert time.monotonic() - start < 10
    assert [one.missing for one in found] == [()] * 6
    assert str(found[0]) == "All 6 ranks have reported: one was late, or a connection between two of them broke"


@pytest.mark.slow
def test_nobody_stays_long_for_a_rank_that_hears_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fp8dist.state.roll_call.LINGER", 0.3)
    store = CountingStore()
    store.set("roll/group/1/came", b"1")  # From a rank whose writes arrive.
    start = time.monotonic()
    (found,) = call_all(store, [0], range(2))
    assert found.missing == (1,)
    assert time.monotonic() - start < GRACE_S + TURN + 0.3 + 1


@pytest.mark.slow
def test_words_without_answers_are_no_presence() -> None:
    """A rank that can write to the store but gets no answers must not count as present, nor report for all."""
    store = HangingStore(0)
    deaf = Roll(store, 1, range(3), "group")
    threading.Thread(target=deaf.call, args=(GRACE_S,), daemon=True).start()
    while not store.total:
        time.sleep(0.01)
    store.left = 1000
    assert [one.missing for one in call_all(store, [0, 2], range(3))] == [(1,)] * 2


@pytest.mark.slow
@pytest.mark.parametrize(("answers", "limit"), [(0, 0.3), (2, GRACE_S + 0.5)])
def test_a_store_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch, answers: int, limit: float) -> None:
    monkeypatch.setattr("fp8dist.state.roll_call.REACH", 0.3)
    monkeypatch.setattr("fp8dist.state.roll_call.PATIENCE", 0.5)
    start = time.monotonic()
    assert _in_time(Roll(HangingStore(answers), 0, range(2), "group"), GRACE_S) is None
    assert limit - 0.1 <= time.monotonic() - start < limit + 2


def test_a_store_that_is_gone_costs_no_time() -> None:
    start = time.monotonic()
    assert _in_time(Roll(GoneStore(), 0, range(2), "group"), 60.0) is None
    assert time.monotonic() - start < REACH


def test_a_lookout_calls_the_roll_while_the_program_waits_in_the_store() -> None:
    """As in ``check()``, where a rank waits for the others before any collective."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    found: list[Attendance] = []

    def look() -> None:
        time.sleep(0.3)  # Until the program waits.
        found.append(fp8dist.roll_call(grace=timedelta(seconds=0.2)))
        store.clone().set("called", "")

    with world(0, 3, dist.PrefixStore("job", store)):
        threading.Thread(target=look, daemon=True).start()
        store.wait(["called"], timedelta(seconds=60))
    assert (found[0].unreachable, found[0].missing) == (None, (1, 2))


ABSENTEES = {"a host": list(range(8_184, 8_192)), "all but one": list(range(1, 16_384))}


@pytest.mark.slow
@pytest.mark.parametrize("absent", ABSENTEES.values(), ids=ABSENTEES.keys())
def test_16384_ranks_are_not_asked_for_one_by_one(monkeypatch: pytest.MonkeyPatch, absent: list[int]) -> None:
    turn = 0.05
    monkeypatch.setattr("fp8dist.state.roll_call.TURN", turn)
    monkeypatch.setattr("fp8dist.state.roll_call.LINGER", 0.3)
    store, size = CountingStore(), 16_384
    gone = set(absent)
    present = [rank for rank in range(size) if rank not in gone]
    caller = present[0]
    for rank in present[1:]:  # As call() does before it waits; a constant number of operations each.
        store.set(f"roll/group/1/present/{rank}", b"1")
    for counter in ("came", "reported"):
        store.set(f"roll/group/1/{counter}", str(len(present) - 1).encode())
    for rank in range(size):
        store.set(f"host/{rank}", f"h{rank // 8}".encode())
    store.operations.clear()
    store.keys = 0
    found = Roll(store, caller, range(size), "group").call(GRACE_S)
    assert found.missing == tuple(absent[:SHOWN])
    assert found.more == (len(absent) > SHOWN)
    # Reporting, one request per interval while waiting, one descent of the tree per named rank, and its host.
    waiting = (GRACE_S + turn * TURNS) / (size / 20_000)
    assert store.total <= 8 + waiting + (SHOWN + 1) * 2 * 14 + 2 * SHOWN
    assert store.keys <= 4 * size + (SHOWN + 1) * 16
    assert len(str(found)) < 1000


def test_the_sentence_names_hosts_and_is_short() -> None:
    assert str(Attendance(3, (1, 2))) == (
        "Missing of 3 ranks: ranks 1, 2: gone, hung, or out of reach, or this host is cut off"
    )
    hosts = tuple((rank, f"h{rank // 8}") for rank in (3, 8, 9))
    assert str(Attendance(16, (3, 8, 9, 12), False, hosts)) == (
        "Missing of 16 ranks: rank 3 (h0), ranks 8, 9 (h1), rank 12: gone, hung, or out of reach"
    )
    many = Attendance(128, tuple(range(8, 24)), True)
    assert str(many) == (
        "Missing of 128 ranks: more than 16, such as ranks 8, 9, 10, 11, 12, 13, 14, 15 and 8 more: gone, hung, or out "
        "of reach, or this host is cut off"
    )
    assert str(Attendance(8, (2, 3), early=True)) == (
        "Missing of 8 ranks: ranks 2, 3: gone, hung, or out of reach, or waiting for one that is"
    )
    assert str(Attendance(2, unreachable="h0:29500")) == (
        "The job's store on h0:29500 cannot be reached: this host is cut off, or that one is gone"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "early"),
    [
        ("[pair.cc:553] Connection closed by peer [10.0.0.3]:40001", True),
        ("[unbound_buffer.cc:78] Timed out waiting 10000ms for recv operation to complete", False),
        ("Watchdog caught collective operation timeout", False),
    ],
)
def test_who_fails_before_the_time_out_may_be_missed_by_ranks_that_wait(text: str, early: bool) -> None:
    with world(0, 4):
        found = fp8dist.roll_call(grace=timedelta(seconds=0.2), error=RuntimeError(text))
    assert (found.missing, found.early) == ((1, 2, 3), early)


def test_without_a_job_nobody_is_missed() -> None:
    assert fp8dist.roll_call() == Attendance()
    assert str(Attendance()) == "A rank is gone, hangs, or did not come here"


def _serving(rank: int, absent: int, port: int, pipe: Connection) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="3", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    enrol()
    with contextlib.suppress(RuntimeError):
        dist.barrier()
    if rank == 1:
        time.sleep(0.3)
    if rank != absent:
        pipe.send(str(fp8dist.roll_call(grace=timedelta(seconds=1.5))))
    os._exit(0)


def _said(pipe: Connection) -> str:
    assert pipe.poll(60)
    with contextlib.suppress(EOFError):
        return pipe.recv()
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("absent", [0, 2])
def test_a_rank_that_serves_the_store_stays_until_the_others_have_read(absent: int) -> None:
    """Without torchrun's agent, rank 0 serves the store. If rank 0 is the missing rank, the others report what they
    know."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pipes = []
    for rank in range(3):
        ours, theirs = context().Pipe()
        context().Process(target=_serving, args=(rank, absent, port, theirs), daemon=True).start()
        theirs.close()
        pipes.append(ours)
    said = [_said(pipe) for pipe in pipes]
    missed = f"Missing of 3 ranks: rank 2 ({socket.gethostname()}): gone, hung, or out of reach"
    gone = f"The job's store on 127.0.0.1:{port} cannot be reached: this host is cut off, or that one is gone"
    assert said == ([missed, missed, ""] if absent == 2 else ["", gone, gone])


def test_the_limits_are_what_the_documents_say() -> None:
    assert GRACE.total_seconds() + PATIENCE + REACH <= 10
    assert TURN * TURNS + LINGER < PATIENCE
    assert SHOWN == 16  # Missing ranks that a message names.

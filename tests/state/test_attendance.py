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
from fp8dist.state.roll_call import GRACE, LINGER, PATIENCE, REACH, SHOWN, TURN, TURNS, Attendance, Roll, _in_time
from tests.support.forked import context
from tests.support.large_world import world
from tests.support.ranks import RankPool
from tests.support.suite import few

GRACE_S = 0.5


class CountingStore:
    """A dictionary that counts the requests and the keys in them."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.operations = self.keys = 0
        self.lock = threading.Lock()

    def _count(self, keys: int = 1) -> None:
        self.operations += 1
        self.keys += keys

    def add(self, key: str, amount: int) -> int:
        with self.lock:
            self._count()
            total = int(self.values.get(key, b"0")) + amount
            self.values[key] = str(total).encode()
            return total

    def set(self, key: str, value: str) -> None:
        with self.lock:
            self._count()
            self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        with self.lock:
            self._count()
            return self.values[key]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        with self.lock:
            self._count(len(keys))
            return [self.values[key] for key in keys]

    def check(self, keys: Sequence[str]) -> bool:
        with self.lock:
            self._count(len(keys))
            return all(key in self.values for key in keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        with self.lock:
            self._count()
            assert expected == ""
            return self.values.setdefault(key, desired.encode())


class HangingStore(CountingStore):
    """Accepts writes, but stops answering after the first ``answers`` answers."""

    def __init__(self, answers: int) -> None:
        super().__init__()
        self.left = answers

    def add(self, key: str, amount: int) -> int:
        total = super().add(key, amount)
        if not self.left:
            time.sleep(3600)
        self.left -= 1
        return total


def call_all(store: Any, callers: Sequence[int], ranks: Sequence[int], grace: float = GRACE_S) -> list[Attendance]:
    """Run the callers' roll calls at once, each in a thread."""
    with ThreadPoolExecutor(len(callers)) as pool:
        return list(pool.map(lambda rank: Roll(store, rank, ranks, "group").call(grace), callers))


@pytest.mark.slow
@pytest.mark.parametrize(("size", "absent"), few([(2, [1]), (5, [0, 4]), (8, [1, 3, 5, 7])], (5, [0, 4])))
def test_all_callers_name_those_who_do_not_call(size: int, absent: list[int]) -> None:
    callers = [rank for rank in range(size) if rank not in absent]
    stores = CountingStore(), dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        calls = list(pool.map(lambda store: call_all(store, callers, range(size)), stores))
    for found in calls:
        assert [one.missing for one in found] == [tuple(absent)] * len(callers)
        assert not any(one.more for one in found)


def test_nobody_waits_once_all_have_called() -> None:
    start = time.monotonic()
    found = call_all(CountingStore(), range(6), range(6), grace=60)
    assert time.monotonic() - start < 10
    assert [one.missing for one in found] == [()] * 6
    assert str(found[0]) == "All 6 ranks have reported: one was late, or a connection between two of them broke"


@pytest.mark.slow
def test_who_comes_late_hears_the_verdict_and_is_not_its_own_missing_rank() -> None:
    store = CountingStore()
    (early,) = call_all(store, [0], range(3))
    (late,) = call_all(store, [2], range(3), grace=60)
    assert (early.missing, late.missing) == ((1, 2), (1,))


@pytest.mark.slow
def test_nobody_leaves_before_all_that_came_know() -> None:
    """The store may end with a rank or its agent. The other ranks would then report that they are cut off."""
    store, left, heard = CountingStore(), threading.Event(), threading.Event()

    class Slow(Roll):
        def _read(self, verdict: bytes) -> Attendance:
            time.sleep(LINGER / 2)
            assert not left.is_set()
            heard.set()
            return super()._read(verdict)

    def first() -> None:
        Roll(store, 0, range(3), "group").call(GRACE_S)
        left.set()

    with ThreadPoolExecutor(2) as pool:
        leaving = pool.submit(first)
        assert pool.submit(Slow(store, 1, range(3), "group").call, 60).result().missing == (2,)
        leaving.result()
    assert heard.is_set()


@pytest.mark.slow
def test_nobody_stays_long_for_a_rank_that_hears_nothing() -> None:
    store = CountingStore()
    store.values["roll/group/1/came"] = b"1"  # From a rank whose writes arrive.
    start = time.monotonic()
    (found,) = call_all(store, [0], range(2))
    assert found.missing == (1,)
    assert time.monotonic() - start < GRACE_S + TURN + LINGER + 1


@pytest.mark.slow
def test_each_call_of_a_group_is_a_new_one() -> None:
    store = CountingStore()
    assert [one.missing for one in call_all(store, [0, 1], range(3))] == [(2,)] * 2
    assert [one.missing for one in call_all(store, [0, 2], range(3))] == [(1, 2), ()]  # Rank 2's first roll call.
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(Roll(store, 1, [1, 2], "another group").call, GRACE_S).result()
    assert other.missing == (2,)


@pytest.mark.slow
def test_words_without_answers_are_no_presence() -> None:
    """A rank that can write to the store but gets no answers must not count as present, nor report for all."""
    store = HangingStore(0)
    deaf = Roll(store, 1, range(3), "group")
    threading.Thread(target=deaf.call, args=(GRACE_S,), daemon=True).start()
    while store.operations < 1:
        time.sleep(0.01)
    store.left = 1000
    assert [one.missing for one in call_all(store, [0, 2], range(3))] == [(1,)] * 2


@pytest.mark.slow
@pytest.mark.parametrize(("answers", "limit"), [(0, 1.0), (2, GRACE_S + 1.5)])
def test_a_store_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch, answers: int, limit: float) -> None:
    monkeypatch.setattr("fp8dist.state.roll_call.REACH", 1.0)
    monkeypatch.setattr("fp8dist.state.roll_call.PATIENCE", 1.5)
    start = time.monotonic()
    assert _in_time(Roll(HangingStore(answers), 0, range(2), "group"), GRACE_S) is None
    assert limit - 0.1 <= time.monotonic() - start < limit + 2


class GoneStore(CountingStore):
    """A store whose server has ended."""

    def add(self, key: str, amount: int) -> int:
        raise dist.DistNetworkError("Connection reset by peer")


def test_a_store_that_is_gone_costs_no_time() -> None:
    start = time.monotonic()
    assert _in_time(Roll(GoneStore(), 0, range(2), "group"), 60.0) is None
    assert time.monotonic() - start < REACH


ABSENTEES = {"a host": list(range(8_184, 8_192)), "all but one": list(range(1, 16_384))}


@pytest.mark.slow
@pytest.mark.parametrize("absent", ABSENTEES.values(), ids=ABSENTEES.keys())
def test_16384_ranks_are_not_asked_for_one_by_one(absent: list[int]) -> None:
    store, size = CountingStore(), 16_384
    gone = set(absent)
    present = [rank for rank in range(size) if rank not in gone]
    caller = present[0]
    for rank in present[1:]:  # As call() does before it waits; a constant number of operations each.
        store.values[f"roll/group/1/present/{rank}"] = b"1"
    for counter in ("came", "reported", "heard"):
        store.values[f"roll/group/1/{counter}"] = str(len(present) - 1).encode()
    for rank in range(size):
        store.values[f"host/{rank}"] = f"h{rank // 8}".encode()
    found = Roll(store, caller, range(size), "group").call(GRACE_S)
    assert found.missing == tuple(absent[:SHOWN])
    assert found.more == (len(absent) > SHOWN)
    # Reporting, one request per interval while waiting, one descent of the tree per named rank, and its host.
    waiting = (GRACE_S + TURN * TURNS) / (size / 20_000)
    assert store.operations <= 8 + waiting + (SHOWN + 1) * 2 * 14 + 2 * SHOWN
    assert store.keys <= 4 * size + (SHOWN + 1) * 16
    assert len(str(found)) < 1000


@pytest.mark.slow
def test_who_only_waits_asks_a_bounded_number_of_times() -> None:
    store, size = CountingStore(), 16_384
    found: list[Attendance] = []
    waiting = threading.Thread(target=lambda: found.append(Roll(store, 5, range(size), "group").call(3.0)))
    waiting.start()
    time.sleep(1.5)
    store.set("roll/group/1/verdict", '{"missing": [7], "more": false, "hosts": [[7, "h0"]]}')
    waiting.join()
    assert found[0].missing == (7,)
    assert store.operations <= 12


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


def _called(ranks: list[int], absent: int, enrolled: list[int]) -> Attendance | None:
    from fp8dist.state.roll_call import enrol

    if dist.get_rank() in enrolled:
        enrol()
    dist.barrier()
    if dist.get_rank() == absent or dist.get_rank() not in ranks:
        return None
    return fp8dist.roll_call(ranks, timedelta(seconds=2))


@pytest.mark.slow
def test_ranks_of_a_job_are_called_through_its_store() -> None:
    pool = RankPool(3)
    try:
        first = pool.run(_called, [2, 0, 1], 1, [0, 1])
        second = pool.run(_called, [2, 1], 2, [2])
    finally:
        pool.close()
    expected = Attendance(3, (1,), False, ((1, socket.gethostname()),))
    assert first == [expected, None, expected]
    assert second == [None, Attendance(2, (2,), False, ((2, socket.gethostname()),)), None]


def _serving(rank: int, absent: int, port: int, pipe: Connection) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="3", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    with contextlib.suppress(RuntimeError):
        dist.barrier()
    if rank == 1:
        time.sleep(0.3)
    if rank != absent:
        pipe.send(str(fp8dist.roll_call()))
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
    missed = "Missing of 3 ranks: rank 2: gone, hung, or out of reach"
    gone = f"The job's store on 127.0.0.1:{port} cannot be reached: this host is cut off, or that one is gone"
    assert said == ([missed, missed, ""] if absent == 2 else ["", gone, gone])


def test_the_limits_are_what_the_documents_say() -> None:
    assert GRACE.total_seconds() + PATIENCE + REACH <= 10
    assert TURN * TURNS + LINGER < PATIENCE
    assert SHOWN == 16  # Missing ranks that a message names.

"""Roll call: which ranks are missing after a collective has failed.

A failed collective does not say which ranks are missing. So each rank whose collective failed reports to the job's
store. One of them looks for the ranks that did not report, and stores the result for all.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from fp8dist.common.text import ranks_text
from fp8dist.errors import SyncError
from fp8dist.state.groups import absent, identity_of

GRACE = timedelta(seconds=3)
"""How long a rank that has reported waits for the others, which may notice the failure later."""

REACH = 3.0
"""Seconds within which the store must answer for the first time."""

PATIENCE = 4.0
"""Seconds after the grace at which a roll call is given up. REACH + GRACE + PATIENCE is its maximum duration."""

TURN, TURNS = 0.25, 8
"""Extra delay in seconds per reporting rank, so that one rank runs the search, and for how many ranks it grows."""

SHOWN = 16
"""Maximum number of missing ranks that are named."""

LINGER = 1.5
"""Seconds that a rank with the result waits for the others, because the store may end with its process or agent."""

_WORD = "word"
"""Key, in the job's store, of the error that the last failing rank has left. See ``leave_word``."""

UNKNOWN = "A rank is gone, hangs, or did not come here"


@dataclass(frozen=True)
class Attendance:
    """The result of a roll call. ``str()`` is a sentence without a full stop.

    ``called``: number of ranks called. ``missing``: ranks that did not report, or the first of them if ``more`` is
    True; None if unknown. ``hosts``: hosts of missing ranks, as far as known. ``unreachable``: the store that did not
    answer. ``early``: the collective failed before its timeout, so "missing" ranks may still be waiting in it: in a
    ring, only the neighbours of a dead rank notice at once. ``word``: the error that a rank has left before it stopped,
    see ``leave_word``.
    ``apart``: if no rank is missing, but they came from different places: ranks by place.
    """

    called: int = 0
    missing: tuple[int, ...] | None = None
    more: bool = False
    hosts: tuple[tuple[int, str], ...] = ()
    unreachable: str | None = None
    early: bool = False
    word: str | None = None
    apart: tuple[tuple[str, tuple[int, ...]], ...] = ()

    def __str__(self) -> str:
        return self._found() if self.word is None else f"{self._found()}. Before that, {self.word}"

    def _found(self) -> str:
        if self.unreachable is not None:
            return f"The job's store on {self.unreachable} cannot be reached: this host is cut off, or that one is gone"
        if self.missing is None:
            return UNKNOWN
        if self.apart:
            places = "; ".join(
                f"{place}: rank{'s' * (len(ranks) > 1)} {ranks_text(ranks)}" for place, ranks in self.apart
            )
            return f"All {self.called} ranks wait, but not for the same: {places}"
        if not self.missing:
            return f"All {self.called} ranks have reported: one was late, or a connection between two of them broke"
        hosts = dict(self.hosts)
        by_host: dict[str, list[int]] = {}
        for rank in self.missing:
            by_host.setdefault(hosts.get(rank, ""), []).append(rank)
        named = ", ".join(
            f"rank{'s' * (len(ranks) > 1)} {ranks_text(ranks)}" + (f" ({host})" if host else "")
            for host, ranks in by_host.items()
        )
        more = f"more than {len(self.missing)}, such as " if self.more else ""
        early = ", or waiting for one that is" if self.early else ""
        half = ", or this host is cut off" if self.more or 2 * len(self.missing) >= self.called else ""
        return f"Missing of {self.called} ranks: {more}{named}: gone, hung, or out of reach{early}{half}"


class Roll:
    """The roll calls of one rank in one group. The n-th call of a rank belongs to the n-th call of every other, without
    those that the others have ended before this rank began to wait."""

    def __init__(
        self,
        store: Any,
        rank: int,
        ranks: Sequence[int],
        identity: str,
        where: str = "",
        since: float = 0,
        of: str = "",
    ) -> None:
        """``store``: torch's store, or a similar object. ``ranks``: all ranks of the group. ``identity``: the group's
        name. ``where``: what this rank waits for. ``since``: ``time.time()`` when it began to. ``of``: the collective
        that has failed, to which ranks may come when the call has ended; "": unknown."""
        self.reached = threading.Event()
        self.found: Attendance | None = None
        self._store, self._rank, self._ranks = store, rank, ranks
        self._group, self._where, self._since, self._of = f"roll/{identity}", where, since, of
        self._interval = max(0.1, len(ranks) / 20_000)  # At most 20,000 queries per second.

    def connect(self) -> None:
        """Use a connection of its own to the store from now on, if the store can make one."""
        with contextlib.suppress(Exception):
            self._store = self._store.clone()

    def call(self, grace: float) -> Attendance:
        """Report, wait for the others, and return which ranks are missing. The number of store operations does not
        depend on the number of ranks, except on the rank that searches: there it grows with the logarithm."""
        call, verdict = self._report(grace)
        self.found = self._read(verdict)
        self._linger(call)
        return self.found

    def _report(self, grace: float) -> tuple[str, bytes]:
        """Return the name of the call, and its verdict."""
        store, rank = self._store, self._rank
        while self._is_over(call := f"{self._group}/{store.add(f'{self._group}/calls/{rank}', 1)}"):
            pass
        turn = store.add(f"{call}/came", 1)
        # The store has answered. A rank that can send but not receive counts as missing.
        self.reached.set()
        store.set(f"{call}/present/{rank}", self._where or "unknown")
        if self._of:
            store.set(f"{call}/of/{self._of}", "")
        verdict = f"{call}/verdict"
        if store.add(f"{call}/reported", 1) < len(self._ranks):
            deadline = time.monotonic() + grace + TURN * min(turn - 1, TURNS)
            while time.monotonic() < deadline:
                if store.check([verdict]):
                    return call, store.get(verdict)
                time.sleep(self._interval)
        found = {**self._search(f"{call}/present"), "time": time.time()}
        return call, store.compare_set(verdict, "", json.dumps(found))

    def pass_over(self) -> None:
        """Count the calls that have ended as earlier ones of this rank, whatever its clock says."""
        store, calls = self._store, f"{self._group}/calls/{self._rank}"
        while store.check([f"{self._group}/{store.add(calls, 0) + 1}/verdict"]):
            store.add(calls, 1)

    def _is_over(self, call: str) -> bool:
        """True if other ranks have ended the call before this rank began to wait, and for another collective."""
        verdict = f"{call}/verdict"
        if not self._since or not self._store.check([verdict]):
            return False
        ended = json.loads(self._store.get(verdict))["time"] < self._since
        return ended and not (self._of and self._store.check([f"{call}/of/{self._of}"]))

    def _linger(self, call: str) -> None:
        """Stay, for LINGER at most, until all ranks that came have read the verdict."""
        store, known, deadline = self._store, f"{call}/known", time.monotonic() + LINGER
        if store.add(f"{call}/read", 1) >= store.add(f"{call}/came", 0):
            store.set(known, "1")
            return
        while not store.check([known]) and time.monotonic() < deadline:
            time.sleep(self._interval)

    def _search(self, present: str) -> dict[str, Any]:
        """Return the first missing ranks, and their hosts."""
        missing = absent(self._store, self._ranks, lambda rank: f"{present}/{rank}", SHOWN + 1)
        shown = missing[:SHOWN]
        known = [rank for rank in shown if self._store.check([_host_of(rank)])]
        hosts = [(rank, self._store.get(_host_of(rank)).decode()) for rank in known]
        word = self._store.get(_WORD).decode() if self._store.check([_WORD]) else None
        found = {"missing": shown, "more": len(missing) > SHOWN, "hosts": hosts, "word": word}
        return found if missing else {**found, "apart": self._apart(present)}

    def _apart(self, present: str) -> list[tuple[str, list[int]]]:
        """Return ranks by what they wait for; nothing if that is the same."""
        places: dict[str, list[int]] = {}
        waited_at = self._store.multi_get([f"{present}/{rank}" for rank in self._ranks])
        for rank, place in zip(self._ranks, waited_at):
            places.setdefault(place.decode(), []).append(rank)
        return list(places.items()) if len(places) > 1 else []

    def _read(self, verdict: bytes) -> Attendance:
        found = json.loads(verdict)
        missing = tuple(rank for rank in found["missing"] if rank != self._rank)  # This rank came late.
        hosts = tuple((rank, host) for rank, host in found["hosts"])
        apart = tuple((place, tuple(ranks)) for place, ranks in found.get("apart", ()))
        return Attendance(len(self._ranks), missing, found["more"], hosts, word=found.get("word"), apart=apart)


def pass_over_calls(ranks: Sequence[int]) -> None:
    """Count the roll calls of these ranks that have ended as earlier ones of this rank, which has missed a call of
    theirs and begins another: clocks of hosts may differ. Local: two store operations for each, and two more."""
    Roll(_job_store(), dist.get_rank(), ranks, f"{identity_of(sorted(ranks))}/").pass_over()


def enrol() -> None:
    """Store the host of this rank, so that a roll call can name it. Local: one store operation. Never raises."""
    with contextlib.suppress(dist.DistNetworkError):  # The store is gone, as the next call that needs it says.
        _job_store().set(_host_of(dist.get_rank()), socket.gethostname())


def known_hosts(ranks: int) -> list[str] | None:
    """Return the hosts of the job's ranks, by rank; None unless all have enrolled. Local: two store operations."""
    names = [_host_of(rank) for rank in range(ranks)]
    try:
        store = _job_store()
        return [host.decode() for host in store.multi_get(names)] if store.check(names) else None
    except Exception:  # Of many kinds, and all mean that the store is not there.
        return None


def leave_word(text: str) -> None:
    """Store why this rank stops, for the roll calls of ranks that miss it. Local: one store operation. Never raises."""
    with contextlib.suppress(Exception):  # Of many kinds, and all mean that the store is not there.
        _job_store().set(_WORD, f"rank {dist.get_rank()} raised: {text}")


def roll_call(
    ranks: Sequence[int] | None = None,
    grace: timedelta = GRACE,
    error: BaseException | None = None,
    where: str = "",
    key: str = "",
    since: float = 0,
) -> Attendance:
    """Find out which ranks are missing after a collective has failed. Local: ranks that do not call it count as
    missing.

    Call it on all ranks whose collective failed, equally often, and not on a single rank: the n-th call of a rank for
    these ranks belongs to the n-th call of every other. It uses the store of the default process group. It takes
    ``grace`` as a rule and seven seconds more at most, because a rank that knows the result waits for the others. It is
    faster if the store is out of reach or all ranks have reported. Never raises.

    Args:
        ranks: the global ranks of the group whose collective failed. None: all ranks of the job.
        grace: how long to wait for ranks that notice the failure later.
        error: the error of the collective. If it is not a timeout, others may notice much later.
        where: what this rank waits for. If all ranks report, but wait for different things, the result says so.
        key: names what has failed, the same on all ranks. Calls with another key do not count as earlier ones.
        since: ``time.time()`` when this rank began to wait. Calls that others have ended before do not count, unless
            they were of the same failed collective.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return Attendance()
    members = range(dist.get_world_size()) if ranks is None else sorted(ranks)
    store = _job_store()
    of = where if error is not None else ""
    roll = Roll(store, dist.get_rank(), members, f"{identity_of(members)}/{key}", where, since, of)
    found = _in_time(roll, grace.total_seconds())
    if found is None:
        return Attendance(len(members), unreachable=_address(store))
    return replace(found, early=error is not None and not _timed_out(error))


@contextlib.contextmanager
def failing_by_name(who: str, what: Callable[[], str], ranks: Sequence[int]) -> Iterator[None]:
    """Convert an error of a collective in the block, such as a timeout, to a SyncError that names the missing ranks.

    Args:
        who: the owner of what is synchronised.
        what: called after a failure, returns a description of the operation.
        ranks: the global ranks that take part.
    """
    start = time.perf_counter()
    try:
        yield
    except RuntimeError as error:
        if not _is_of_communication(error):
            raise
        seconds = time.perf_counter() - start
        cause, where = " ".join(f"{type(error).__name__}: {error}".split()), what()
        raise SyncError(
            f"rank {dist.get_rank()}: {who}: {where} with ranks {ranks_text(ranks)} failed after {seconds:.1f} s. "
            f"{roll_call(ranks, error=error, where=where, since=time.time() - seconds)} ({cause})"
        ) from error


_OF_COMMUNICATION = ("gloo", "nccl", "timed out", "timeout", "connection", "socket")


def _is_of_communication(error: RuntimeError) -> bool:
    """True for errors of NCCL and gloo. A rank with an error of its own must not say that others are missing."""
    if isinstance(error, dist.DistError):
        return True
    message = str(error).lower()
    return type(error) is RuntimeError and any(word in message for word in _OF_COMMUNICATION)


def _timed_out(error: BaseException) -> bool:
    text = str(error).lower()
    return "timed out" in text or "timeout" in text


def _in_time(roll: Roll, grace: float) -> Attendance | None:
    """Return the roll call's result, or None if the store did not answer. Runs in a thread, because a call to the store
    may hang."""
    done, beside = threading.Event(), threading.current_thread() is not threading.main_thread()

    def call() -> None:
        with contextlib.suppress(Exception):  # Of many kinds, and all mean that the store is not there.
            if beside:  # Of a Lookout. While the program waits in the store, its connection serves no other thread.
                roll.connect()
            roll.call(grace)
        done.set()
        roll.reached.set()

    threading.Thread(target=call, daemon=True, name="roll call").start()
    if roll.reached.wait(REACH):
        done.wait(grace + PATIENCE)
    return roll.found


def _job_store() -> Any:
    return distributed_c10d.PrefixStore("fp8dist", distributed_c10d._get_default_store())


def _host_of(rank: int) -> str:
    return f"host/{rank}"


def _address(store: Any) -> str:
    """Return host and port of the job's store, or its class if it is not on TCP."""
    while isinstance(store, distributed_c10d.PrefixStore):
        store = store.underlying_store
    on_tcp = isinstance(store, dist.TCPStore)  # type: ignore[attr-defined]
    return f"{store.host}:{store.port}" if on_tcp else type(store).__name__

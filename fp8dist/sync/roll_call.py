"""Attendance: who is still there after a collective has failed.

A collective that fails tells a rank that something is wrong, not who is missing. So every rank that had one fail
reports to the job's store, and one of them looks who has not, and writes that down for all.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from fp8dist.sync.groups import absent, identity_of
from fp8dist.text import ranks_text

__all__ = ["Attendance", "enrol", "leave_word", "roll_call"]

GRACE = timedelta(seconds=3)
"""How long a rank that has reported waits for the others: they find out a little later or earlier."""

REACH = 3.0
"""Seconds within which the store must have answered once."""

PATIENCE = 4.0
"""Seconds beyond the grace after which a roll call is given up. With REACH and GRACE the most it may take."""

TURN, TURNS = 0.25, 8
"""Extra delay in seconds per reporting rank, so that one rank runs the search, and for how many ranks it grows."""

SHOWN = 16
"""So many missing ranks are named."""

LINGER = 1.5
"""Seconds that a rank which knows stays for those that do not yet: the store may end with it or with its agent."""

_WORD = "word"
"""Where in the job's store the last word of a rank is."""

UNKNOWN = "A rank is gone, hangs, or did not come here"


@dataclass(frozen=True)
class Attendance:
    """What a roll call found; ``str()`` is a sentence without a full stop.

    ``called``: how many ranks were called. ``missing``: those that did not report, the first of them if there are
    ``more``; None if that is not known. ``hosts``: of missing ranks, where they are known. ``unreachable``: the store
    that did not answer. ``early``: the collective failed before its time-out, so ranks that are well may be in it
    still: in a ring only the neighbours of a dead rank see at once that it is gone. ``word``: of a rank of the
    job, see ``leave_word``.
    """

    called: int = 0
    missing: tuple[int, ...] | None = None
    more: bool = False
    hosts: tuple[tuple[int, str], ...] = ()
    unreachable: str | None = None
    early: bool = False
    word: str | None = None

    def __str__(self) -> str:
        return self._found() if self.word is None else f"{self._found()}. Before that, {self.word}"

    def _found(self) -> str:
        if self.unreachable is not None:
            return f"The job's store on {self.unreachable} cannot be reached: this host is cut off, or that one is gone"
        if self.missing is None:
            return UNKNOWN
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
    """The roll calls of one rank in one group. The n-th of a rank meets the n-th of each other."""

    def __init__(self, store: Any, rank: int, ranks: Sequence[int], identity: str) -> None:
        """``store``: torch's, or what does the same. ``ranks``: all of the group. ``identity``: of the group."""
        self.reached = threading.Event()
        self.found: Attendance | None = None
        self._store, self._rank, self._ranks = store, rank, ranks
        self._group = f"roll/{identity}"
        self._interval = max(0.1, len(ranks) / 20_000)  # So that the store has 20,000 questions a second at most.

    def call(self, grace: float) -> Attendance:
        """Report, wait for the others, and tell who is missing. Needs a number of store operations that does not depend
        on how many ranks there are, but that of one rank's search, which grows with their logarithm."""
        call, verdict = self._report(grace)
        self.found = self._read(verdict)
        self._linger(call)
        return self.found

    def _report(self, grace: float) -> tuple[str, bytes]:
        """The name of the call, and its verdict."""
        store, rank = self._store, self._rank
        call = f"{self._group}/{store.add(f'{self._group}/calls/{rank}', 1)}"
        turn = store.add(f"{call}/came", 1)
        # An answer came: a rank whose words arrive, but that hears nothing, is not there.
        self.reached.set()
        store.set(f"{call}/present/{rank}", "1")
        verdict = f"{call}/verdict"
        if store.add(f"{call}/reported", 1) < len(self._ranks):
            deadline = time.monotonic() + grace + TURN * min(turn - 1, TURNS)
            while time.monotonic() < deadline:
                if store.check([verdict]):
                    return call, store.get(verdict)
                time.sleep(self._interval)
        return call, store.compare_set(verdict, "", json.dumps(self._search(f"{call}/present")))

    def _linger(self, call: str) -> None:
        """Stay, but not long, until all that came have heard the verdict."""
        store, known, deadline = self._store, f"{call}/known", time.monotonic() + LINGER
        if store.add(f"{call}/heard", 1) >= store.add(f"{call}/came", 0):
            store.set(known, "1")
            return
        while not store.check([known]) and time.monotonic() < deadline:
            time.sleep(self._interval)

    def _search(self, present: str) -> dict[str, Any]:
        """The first ranks that are not present, and their hosts."""
        missing = absent(self._store, self._ranks, lambda rank: f"{present}/{rank}", SHOWN + 1)
        shown = missing[:SHOWN]
        known = [rank for rank in shown if self._store.check([_host_of(rank)])]
        hosts = [(rank, self._store.get(_host_of(rank)).decode()) for rank in known]
        word = self._store.get(_WORD).decode() if self._store.check([_WORD]) else None
        return {"missing": shown, "more": len(missing) > SHOWN, "hosts": hosts, "word": word}

    def _read(self, verdict: bytes) -> Attendance:
        said = json.loads(verdict)
        missing = tuple(rank for rank in said["missing"] if rank != self._rank)  # This one has come late.
        hosts = tuple((rank, host) for rank, host in said["hosts"])
        return Attendance(len(self._ranks), missing, said["more"], hosts, word=said.get("word"))


def enrol() -> None:
    """Tell the job's store on which host this rank is, so that a roll call can name it. Local: one store operation."""
    _job_store().set(_host_of(dist.get_rank()), socket.gethostname())


def leave_word(text: str) -> None:
    """Put into the job's store why this rank stops, for the roll calls of those that miss it. Local: one store
    operation. Never raises."""
    with contextlib.suppress(Exception):  # Of many kinds, and all mean that the store is not there.
        _job_store().set(_WORD, f"rank {dist.get_rank()} raised: {text}")


def roll_call(
    ranks: Sequence[int] | None = None, grace: timedelta = GRACE, error: BaseException | None = None
) -> Attendance:
    """Who is missing, after a collective has failed. Local: the others need not come, that is what it finds out.

    All ranks whose collective failed call it alike: the n-th call of a rank for these ranks meets the n-th of each
    other, so none should call it on its own. It asks the store of the default process group, and takes ``grace``
    as a rule and seven seconds more at the most, as a rank that knows stays a little until the others do; less if the
    store is out of reach, or all have reported. Never raises.

    Args:
        ranks: the global ranks of the group whose collective failed. None: all of the job.
        grace: how long to wait for ranks that notice the failure later.
        error: what the collective raised. If it does not speak of a time-out, others may notice much later.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return Attendance()
    members = range(dist.get_world_size()) if ranks is None else sorted(ranks)
    store = _job_store()
    roll = Roll(store, dist.get_rank(), members, identity_of(members))
    found = _in_time(roll, grace.total_seconds())
    if found is None:
        return Attendance(len(members), unreachable=_address(store))
    return replace(found, early=error is not None and not _timed_out(error))


def _timed_out(error: BaseException) -> bool:
    text = str(error).lower()
    return "timed out" in text or "timeout" in text


def _in_time(roll: Roll, grace: float) -> Attendance | None:
    """The roll call's result; None if the store did not answer. A call to it may hang, hence the thread."""
    done = threading.Event()

    def call() -> None:
        with contextlib.suppress(Exception):  # Of many kinds, and all mean that the store is not there.
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


def _innermost(store: Any) -> Any:
    while isinstance(store, distributed_c10d.PrefixStore):
        store = store.underlying_store
    return store


def _is_tcp(store: Any) -> bool:
    return isinstance(store, dist.TCPStore)  # type: ignore[attr-defined]


def _address(store: Any) -> str:
    inner = _innermost(store)
    return f"{inner.host}:{inner.port}" if _is_tcp(inner) else type(inner).__name__

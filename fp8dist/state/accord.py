"""Accord and Votes: how ranks that are about to do something together find out, through the job's store, whether all
of them will.

The store is asked before any collective is issued. So a rank that fails, or does not come, leaves no collective of its
own behind that the others could take for theirs.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from fp8dist.errors import SyncError
from fp8dist.state.groups import SyncGroup, identity_of
from fp8dist.state.roll_call import failing_by_name, pass_over_calls, roll_call

_WELL, _TOO_FEW, _VAIN = "well", "too few", "in vain"

_PATIENCE = timedelta(seconds=60)
"""How long a vote waits for the other ranks. They leave a collective loader together, but have other work after it."""


class Accord:
    """The points that all ranks of a group must reach during one call of a collective function. The n-th call of a rank
    belongs to the n-th of every other.

    Args:
        call: name of the function, such as "replay()".
        timeout: how long to wait for the other ranks at each point.
    """

    def __init__(self, group: SyncGroup, call: str, timeout: timedelta) -> None:
        self._group, self._call, self._timeout = group, call, timeout
        self._points = 0
        with self._reaching_store():
            self._store: Any = self._next()

    def _next(self) -> Any:
        """Return the part of the job's store for this call."""
        call, group = self._call, self._group
        store = distributed_c10d.PrefixStore(f"fp8dist/{call}/{group.identity}", distributed_c10d._get_default_store())
        while (at := distributed_c10d.PrefixStore(str(store.add(f"count/{group.rank}", 1)), store)).check(["0"]):
            if at.get("0").decode() != _VAIN:  # Others gave up that call, so this one belongs to a later one.
                break
            pass_over_calls(group.ranks)
        return at

    def _reaching_store(self) -> contextlib.AbstractContextManager[None]:
        """Convert the error of a store that is gone to a SyncError that names it."""
        return failing_by_name(self._call, lambda: "the meeting", self._group.ranks)

    def reach(self, failure: str | None = None) -> str | None:
        """Report that this rank has reached the next point, and wait for the others. COLLECTIVE: six store operations,
        whatever the number of ranks.

        Args:
            failure: why this rank cannot go on; None: it can.

        Returns:
            The first failure that any rank has reported, the same on all ranks; None: there is none.

        Raises:
            SyncError: a rank did not come in time.
        """
        with self._reaching_store():
            return self._reach(failure)

    def _reach(self, failure: str | None) -> str | None:
        point, self._points = str(self._points), self._points + 1
        seconds = f"{self._timeout.total_seconds():.0f} s"
        if failure is not None:
            self._store.compare_set(point, "", failure)
        elif self._store.add(f"{point}/{_WELL}", 1) == self._group.size:
            self._store.compare_set(point, "", _WELL)
        late, since = None, time.time()
        try:
            self._store.wait([point], self._timeout)
        except (dist.DistStoreError, RuntimeError) as error:
            late = error
            self._store.compare_set(point, "", _VAIN)
        outcome: str = self._store.get(point).decode()
        if outcome == _VAIN:
            raise SyncError(
                f"rank {self._group.rank}: {self._call} was not reached by all ranks within {seconds}: it is "
                f"collective. {roll_call(self._group.ranks, where=self._call, since=since)}"
            ) from late
        return None if outcome == _WELL else outcome


def meet(group: SyncGroup, call: str) -> None:
    """Wait until all ranks of the group have come to this call. A rank that comes alone has then issued no collective
    that the others would take for one of theirs. COLLECTIVE, through the store.

    Args:
        call: name of the function, such as "check()".

    Raises:
        SyncError: a rank did not come within the time-out of the group. The message names it.
    """
    if not group.communicates or group.backend == "fake":  # Its other ranks do not exist.
        return
    failure = Accord(group, call, group.timeout).reach()
    if failure is not None:
        raise SyncError(failure)


class Votes:
    """Finds out, at points of the program, whether all ranks of a set want to do something that only all of them can do
    together. COLLECTIVE to create: on all ranks of the set, in the same order."""

    def __init__(self, ranks: Sequence[int]) -> None:
        """``ranks``: global ranks, this one among them."""
        self._size, self._last = len(ranks), ("", 0)
        self._store: Any = None
        if self._size > 1:
            own = f"fp8dist/votes/{identity_of(ranks)}"
            store = distributed_c10d.PrefixStore(own, distributed_c10d._get_default_store())
            with contextlib.suppress(RuntimeError):  # The store of a pretended job.
                number = store.add(f"made/{dist.get_rank()}", 1)
                self._store = distributed_c10d.PrefixStore(str(number), store)

    def carried(self, point: str) -> bool:
        """Vote for it. Return True if all ranks vote at this point; the same result on all ranks that vote. Local: a
        rank that does not want it does not call. Waits up to a minute for the others, and raises nothing.

        Args:
            point: name of the point of the program, the same on all ranks.
        """
        if self._store is None:
            return self._size == 1
        self._last = point, self._last[1] + 1 if self._last[0] == point else 0
        store = distributed_c10d.PrefixStore(f"{point}/{self._last[1]}", self._store)
        if store.add("came", 1) == self._size:
            store.compare_set("verdict", "", _WELL)
        try:
            store.wait(["verdict"], _PATIENCE)
        except (dist.DistStoreError, RuntimeError):
            store.compare_set("verdict", "", _TOO_FEW)  # Unless the last rank has just come.
        return bool(store.get("verdict").decode() == _WELL)

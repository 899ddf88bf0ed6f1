"""Accord: ranks tell each other through the job's store that they have come to a point, or why they have not.

A rank that fails issues no collective, so the others cannot mistake one for theirs.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d

from fp8dist.errors import SyncError
from fp8dist.sync.groups import SyncGroup
from fp8dist.sync.roll_call import roll_call

__all__ = ["Accord"]

_WELL = "well"


class Accord:
    """The points of one call of a function that is collective over a group. The n-th call of a rank belongs to the n-th
    of every other.

    Args:
        call: name of the function, such as "replay()".
        timeout: how long to wait for the other ranks at each point.
    """

    def __init__(self, group: SyncGroup, call: str, timeout: timedelta) -> None:
        store = distributed_c10d.PrefixStore(f"fp8dist/{call}/{group.identity}", distributed_c10d._get_default_store())
        number = store.add(f"count/{group.rank}", 1)
        self._store = distributed_c10d.PrefixStore(str(number), store)
        self._group, self._call, self._timeout = group, call, timeout
        self._points = 0

    def reach(self, failure: str | None = None) -> str | None:
        """Tell the other ranks that this one is here, or why it cannot go on. Wait for them. Return the first failure
        of any rank, the same on all ranks; None if there is none. COLLECTIVE: five store operations, whatever the
        number of ranks.

        Raises:
            SyncError: a rank did not come in time.
        """
        point, self._points = str(self._points), self._points + 1
        if failure is not None:
            self._store.compare_set(point, "", failure)
        elif self._store.add(f"{point}/{_WELL}", 1) == self._group.size:
            self._store.compare_set(point, "", _WELL)
        try:
            self._store.wait([point], self._timeout)
        except (dist.DistStoreError, RuntimeError) as error:
            raise SyncError(
                f"rank {self._group.rank}: {self._call} was not reached by all ranks within "
                f"{self._timeout.total_seconds():.0f} s: it is collective. {roll_call(self._group.ranks, error=error)}"
            ) from error
        told: str = self._store.get(point).decode()
        return None if told == _WELL else told

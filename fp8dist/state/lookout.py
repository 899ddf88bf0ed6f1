"""Lookout: names the ranks that a sync waits for, where the wait does not block the host.

NCCL's ``wait()`` blocks the stream. If a rank does not come, the host meets no error, and after the time-out torch's
watchdog ends the process without naming the missing ranks. So a thread looks at the age of the newest sync, and starts
a roll call (``roll_call.py``) shortly before the time-out.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from fp8dist.common.text import ranks_text
from fp8dist.state.groups import SyncGroup
from fp8dist.state.roll_call import GRACE, PATIENCE, REACH, roll_call

logger = logging.getLogger("fp8dist")

MARGIN = timedelta(seconds=REACH + PATIENCE + 4) + GRACE
"""Time before the time-out at which the roll call begins, and a quarter of the time-out at most."""

WHERE = "the FP8 sync of a step"


class Lookout:
    """Watches the newest sync of one arena. Its thread ends with ``close``, or when the Lookout is collected.

    Args:
        who: the owner of what is synchronised.
        place: index of the arena among those of its group, the same on all ranks.
    """

    def __init__(self, who: str, group: SyncGroup, place: int) -> None:
        self._newest: list[tuple[dist.Work, float, str]] = []
        self._launches = 0
        self._name = f"{group.round}/{place}"  # Of no other arena of these ranks.
        self._closed = threading.Event()
        timeout = group.timeout.total_seconds()
        patience = timeout - min(timeout / 4, MARGIN.total_seconds())
        watched = (self._newest, self._closed, who, group.rank, group.ranks, patience)
        threading.Thread(target=_watch, args=watched, daemon=True, name="fp8dist lookout").start()
        weakref.finalize(self, self._closed.set)

    def launched(self, work: dist.Work) -> None:
        """Watch this work from now on. Not for one that a CUDA graph captures, which runs later."""
        self._launches += 1
        self._newest[:] = [(work, time.monotonic(), f"{self._name}/{self._launches}")]

    def close(self) -> None:
        """End the thread, soon. Local."""
        self._closed.set()


def _watch(
    newest: list[tuple[dist.Work, float, str]],
    closed: threading.Event,
    who: str,
    rank: int,
    ranks: Sequence[int],
    patience: float,
) -> None:
    """Report each work that has not ended ``patience`` seconds after its launch, once."""
    done: dist.Work | None = None
    while not closed.wait(min(5.0, patience / 20)):
        for work, since, key in newest[:]:
            # The device is asked only late: a query may disturb the capture of a CUDA graph.
            if work is done or time.monotonic() - since < patience:
                continue
            done = work
            if not work.is_completed():
                seconds = time.monotonic() - since
                logger.error(
                    "fp8dist: rank %d: %s: %s with ranks %s has not ended after %.0f s. %s. The time-out of its group "
                    "may end this process soon",
                    rank,
                    who,
                    WHERE,
                    ranks_text(ranks),
                    seconds,
                    # A call of its own: ranks that were not late must not miss one in the count of the others.
                    roll_call(ranks, where=WHERE, key=key),
                )

"""Collectives that fail: from the communication library's text to one line that says who was where."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import NoReturn

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from fp8dist import StateManager
from fp8dist.errors import SyncError
from ranks import Ranks, leave

__all__ = ["CollectiveFailed", "Watch", "outlive_torchrun"]

MARKS = ("gloo", "nccl", "connection closed", "connection reset", "broken pipe", "timed out", "timeout")
"""What errors of collectives say that have no type of their own."""

LAST_WORDS = 3.0
"""Seconds between SIGTERM and the end of the process."""


class CollectiveFailed(Exception):
    """A collective failed or timed out on this rank; the message is one line for the terminal."""


class Watch:
    """Knows what this rank is doing, so that an error can say it."""

    def __init__(self, ranks: Ranks, model: str, manager: StateManager | None) -> None:
        self.step = 0
        self._ranks, self._subject = ranks, f"no FP8 manager ({model})"
        if manager is not None:
            members = "rank 0" if ranks.size == 1 else f"ranks 0 to {ranks.size - 1}"
            self._subject = f"FP8 manager of {model} ({len(manager.slots)} slots over {members})"

    @contextlib.contextmanager
    def during(self, what: str) -> Iterator[None]:
        """A failed collective inside is told with these words.

        Raises:
            CollectiveFailed: in place of what gloo, NCCL or the library raised.
        """
        start = time.monotonic()
        try:
            yield
        except (RuntimeError, CheckpointException) as error:
            if not _is_of_a_collective(error):
                raise
            text = " ".join(str(error).split())
            if not isinstance(error, SyncError):  # That one names rank, step and manager itself.
                seconds = time.monotonic() - start
                place = f"rank {self._ranks.rank}: step {self.step}: {what}: {self._subject}"
                text = f"{place}: a collective failed or timed out after {seconds:.1f} s: {text}"
            raise CollectiveFailed(text) from error


def _is_of_a_collective(error: BaseException) -> bool:
    if isinstance(error, (SyncError, dist.DistError)):
        return True
    text = str(error).lower()
    return any(mark in text for mark in MARKS)


def outlive_torchrun(status: int) -> None:
    """Give this process a few seconds after SIGTERM to find out for itself what has happened.

    torchrun ends all ranks as soon as it sees that one has failed; those may be waiting for it, and be about to say
    so. A handler in Python would have to wait for the collective to return. The wake-up file is written at once.
    """
    ours, pythons = socket.socketpair()
    pythons.setblocking(False)
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.set_wakeup_fd(pythons.fileno())

    def wait() -> NoReturn:
        while signal.SIGTERM not in ours.recv(64):
            pass
        time.sleep(LAST_WORDS)
        pythons.close()
        leave(status)

    threading.Thread(target=wait, daemon=True, name="after SIGTERM").start()

"""What ends a rank from outside, collectives that fail and disks that are full, in one line that says who was where."""

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

from fp8dist import StateManager, roll_call
from fp8dist.errors import ManifestMismatchError, SyncError
from launch.train_gpt.ranks import leave

__all__ = ["CheckpointFailed", "CollectiveFailed", "Whereabouts", "cause_of", "is_of_a_collective", "outlive_torchrun"]

MARKS = ("gloo", "nccl", "connection closed", "connection reset", "broken pipe", "timed out", "timeout")
"""What errors of collectives say that have no type of their own."""

ABSENT = "attach() was not reached"
"""What a ManifestMismatchError says when no manifests differ, but a rank did not come."""

LAST_WORDS = 6.0
"""Seconds between SIGTERM and the end of the process: a roll call takes half of that."""


class CollectiveFailed(Exception):
    """A collective failed or timed out on this rank; the message is one line for the terminal."""


class CheckpointFailed(Exception):
    """A checkpoint could not be written; the message is one line for the terminal."""


class Whereabouts:
    """Knows what this rank is doing, so that an error can say it."""

    def __init__(self, rank: int, size: int, model: str) -> None:
        self.step = 0
        self._rank, self._size, self._model = rank, size, model
        self._subject = f"no FP8 manager ({model})"

    def name(self, manager: StateManager) -> None:
        """Whose FP8 state this rank holds."""
        members = "rank 0" if self._size == 1 else f"ranks 0 to {self._size - 1}"
        self._subject = f"FP8 manager of {self._model} ({len(manager.slots)} slots over {members})"

    @contextlib.contextmanager
    def during(self, what: str) -> Iterator[None]:
        """A failed collective inside is told with these words.

        Raises:
            CollectiveFailed: in place of what gloo, NCCL or the library raised.
        """
        start = time.monotonic()
        try:
            yield
        except (RuntimeError, CheckpointException, ManifestMismatchError) as error:
            if not is_of_a_collective(error):
                raise
            text = " ".join(str(error).split())
            if not isinstance(error, SyncError):  # That one names rank, step, manager and who is missing itself.
                seconds = time.monotonic() - start
                if not isinstance(error, ManifestMismatchError):  # That one names who did not come.
                    text = f"{roll_call(error=error)}: {text}"
                place = f"rank {self._rank}: step {self.step}: {what}: {self._subject}"
                text = f"{place}: a collective failed or timed out after {seconds:.1f} s: {text}"
            raise CollectiveFailed(text) from error


def is_of_a_collective(error: BaseException) -> bool:
    """Whether it says that another rank is gone, or hangs."""
    if isinstance(error, (SyncError, dist.DistError)):
        return True
    if isinstance(error, ManifestMismatchError):
        return ABSENT in str(error)
    if isinstance(error, CheckpointException):
        return any(is_of_a_collective(cause) for cause, _ in error.failures.values())
    if not isinstance(error, RuntimeError):
        return False
    text = str(error).lower()
    return any(mark in text for mark in MARKS)


def cause_of(error: BaseException) -> str:
    """What went wrong, on one line; of a checkpoint that several ranks read or wrote, on the first that failed."""
    place = ""
    if isinstance(error, CheckpointException) and error.failures:
        rank = min(error.failures)
        place, error = f"rank {rank}: ", error.failures[rank][0]
    return place + " ".join(f"{type(error).__name__}: {error}".split())


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

"""Failed collectives and SIGTERM. Each error is one line that names rank, step and phase."""

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

MARKS = ("gloo", "nccl", "connection closed", "connection reset", "broken pipe", "timed out", "timeout")
"""Texts that identify errors of collectives, for errors without a type of their own."""

ABSENT = "attach() was not reached"
"""Part of the message of a ManifestMismatchError if a rank is missing, rather than manifests different."""

LAST_WORDS = 6.0
"""Seconds from SIGTERM to the exit of the process. A roll call takes half of them."""


class CollectiveFailed(Exception):
    """A collective failed or timed out on this rank; the message is one line for the terminal."""


class Whereabouts:
    """Tracks what this rank is doing, for error messages."""

    def __init__(self, rank: int, size: int, model: str) -> None:
        self.step = 0
        self._rank, self._size, self._model = rank, size, model
        self._subject = f"no FP8 manager ({model})"

    def name(self, manager: StateManager) -> None:
        """Set the manager that error messages name."""
        members = "rank 0" if self._size == 1 else f"ranks 0 to {self._size - 1}"
        self._subject = f"FP8 manager of {self._model} ({len(manager.slots)} slots over {members})"

    @contextlib.contextmanager
    def during(self, what: str) -> Iterator[None]:
        """Name this phase in the error of a collective that fails inside.

        Raises:
            CollectiveFailed: in place of the error of gloo, NCCL or the library.
        """
        start = time.monotonic()
        try:
            yield
        except (RuntimeError, CheckpointException, ManifestMismatchError) as error:
            if not is_of_a_collective(error):
                raise
            text = " ".join(str(error).split())
            if not isinstance(error, SyncError):  # A SyncError names rank, step, manager and missing ranks itself.
                seconds = time.monotonic() - start
                if not isinstance(error, ManifestMismatchError):  # A ManifestMismatchError names the missing ranks.
                    text = f"{roll_call(error=error)}: {text}"
                place = f"rank {self._rank}: step {self.step}: {what}: {self._subject}"
                text = f"{place}: a collective failed or timed out after {seconds:.1f} s: {text}"
            raise CollectiveFailed(text) from error


def is_of_a_collective(error: BaseException) -> bool:
    """Return True if the error means that another rank is gone or hangs."""
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


def outlive_torchrun(status: int) -> None:
    """Delay the exit, with ``status``, after SIGTERM by LAST_WORDS seconds: this rank can report its own error first.

    torchrun kills all ranks as soon as one fails, and the others may be about to report that they miss it. A Python
    signal handler cannot run before a blocking collective returns, so a thread reads the signal's wake-up file.
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

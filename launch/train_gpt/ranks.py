"""This process's rank and device, and simple collectives between the ranks."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from fp8dist import StateManager

__all__ = ["Ranks", "digest_of", "digest_of_state", "joined_ranks", "leave", "mean_of", "meet_at_the_end"]

PATIENCE = timedelta(seconds=10)
"""How long a failing rank waits for the other ranks to write their files and messages."""


@dataclass(frozen=True)
class Ranks:
    """This process's place in the job."""

    rank: int
    size: int
    device: torch.device
    backend: str | None  # None: no process group.
    restarts: int = 0  # Restarts of the job by torchrun: the maximum over the ranks.

    @property
    def first(self) -> bool:
        """True on rank 0, which writes files and prints."""
        return self.rank == 0

    def gather(self, values: Tensor) -> list[Tensor]:
        """Return every rank's ``values``, in rank order. All ranks pass the same shape. COLLECTIVE."""
        if self.size == 1:
            return [values]
        parts = [torch.empty_like(values) for _ in range(self.size)]
        dist.all_gather(parts, values)
        return parts

    def mean(self, values: Tensor) -> Tensor:
        """Return the elementwise mean over the ranks. COLLECTIVE."""
        return mean_of(self.gather(values))

    def gather_texts(self, text: str) -> list[str]:
        """Return every rank's text, in rank order. COLLECTIVE."""
        texts = [text] * self.size
        if self.size > 1:
            dist.all_gather_object(texts, text)
        return texts

    def agree(self, digest: str) -> bool:
        """Return True if all ranks hold the same digest. COLLECTIVE."""
        return len(set(self.gather_texts(digest))) == 1


@contextlib.contextmanager
def joined_ranks(parallel: str, timeout: timedelta, keeps: tuple[type[Exception], ...]) -> Iterator[Ranks]:
    """Pick the device and, unless ``parallel`` is "none", join the process group. COLLECTIVE.

    Args:
        timeout: time limit of a collective.
        keeps: errors that do not destroy the process group, because it is still needed or is broken.
    """
    rank = int(os.environ.get("RANK", "0"))
    size = int(os.environ.get("WORLD_SIZE", "1"))
    device, backend = _device_and_backend()
    if parallel == "none":
        yield Ranks(rank, size, device, None, _own_restarts())
        return
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend, device_id=device if backend == "nccl" else None, timeout=timeout)
    else:  # Not under torchrun: a group of one.
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    restarts = _most_restarts(device)
    try:
        yield Ranks(rank, size, device, backend, restarts)
    except keeps:
        raise
    except BaseException:
        dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def _device_and_backend() -> tuple[torch.device, str]:
    """Return nccl if each rank has a GPU of its own, else gloo, which allows ranks to share one."""
    if not torch.cuda.is_available():
        return torch.device("cpu"), "gloo"
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    enough = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return device, "nccl" if enough else "gloo"


def _own_restarts() -> int:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def _most_restarts(device: torch.device) -> int:
    """Return how often torchrun restarted the job. COLLECTIVE.

    Each agent counts only its own restarts: 0 on a node that restarted because another node's agent did.
    """
    count = torch.tensor(_own_restarts(), device=device)
    dist.all_reduce(count, dist.ReduceOp.MAX)
    return int(count)


def meet_at_the_end() -> None:
    """Wait up to PATIENCE until all ranks have written their files. COLLECTIVE.

    torchrun kills the other ranks as soon as one fails. Ignoring SIGTERM lets every rank exit with its own status.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with contextlib.suppress(Exception):  # The barrier fails if another rank is already gone.
        work = dist.barrier(async_op=True)
        if work is not None:
            work.wait(PATIENCE)


def leave(status: int = 0) -> NoReturn:
    """Exit without the interpreter's shutdown.

    A gloo thread releases the tensors of the last collective some time after it completes, and DDP keeps these threads
    alive past ``destroy_process_group``. A release during interpreter shutdown aborts the process (pytorch/pytorch pull
    request 179291); without this function one in seven successful runs failed that way.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def mean_of(parts: Sequence[Tensor]) -> Tensor:
    """Return the elementwise mean of the result of ``Ranks.gather``.

    It sums in rank order, so the result is reproducible; an all_reduce's order depends on the number of values.
    """
    return functools.reduce(torch.add, parts) / len(parts)


def digest_of_state(manager: StateManager) -> str:
    """Return the SHA-256 of the FP8 state dict's values. Without amax_sync the keys differ between ranks. Local."""
    digest = hashlib.sha256()
    for blob in manager.state_dict().values():
        digest.update(blob)
    return digest.hexdigest()


def digest_of(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return the SHA-256 of the tensors' names and bytes."""
    digest = hashlib.sha256()
    for name, tensor in tensors:
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()

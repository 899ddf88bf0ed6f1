"""Who is running: this process's rank, its device, and the few things that ranks tell each other."""

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

__all__ = ["Ranks", "digest_of", "joined_ranks", "leave", "mean_of", "meet_at_the_end"]

PATIENCE = timedelta(seconds=10)
"""How long a rank that is about to fail waits for the others to have written what they have to say."""


@dataclass(frozen=True)
class Ranks:
    """This process among all of the job."""

    rank: int
    size: int
    device: torch.device
    backend: str | None  # None: no process group.
    restarts: int = 0  # Of the job by torchrun, as far as any rank knows.

    @property
    def first(self) -> bool:
        """Whether this is the rank that writes files and speaks."""
        return self.rank == 0

    def gather(self, values: Tensor) -> list[Tensor]:
        """What each rank has given, of one shape. COLLECTIVE."""
        if self.size == 1:
            return [values]
        parts = [torch.empty_like(values) for _ in range(self.size)]
        dist.all_gather(parts, values)
        return parts

    def mean(self, values: Tensor) -> Tensor:
        """Elementwise mean over the ranks. COLLECTIVE."""
        return mean_of(self.gather(values))

    def gather_texts(self, text: str) -> list[str]:
        """What each rank has given. COLLECTIVE."""
        texts = [text] * self.size
        if self.size > 1:
            dist.all_gather_object(texts, text)
        return texts

    def agree(self, digest: str) -> bool:
        """Whether all ranks hold the same digest. COLLECTIVE."""
        return len(set(self.gather_texts(digest))) == 1


@contextlib.contextmanager
def joined_ranks(parallel: str, timeout: timedelta, keeps: tuple[type[Exception], ...]) -> Iterator[Ranks]:
    """Pick the device and, unless ``parallel`` is "none", join the process group. COLLECTIVE.

    Args:
        timeout: of collectives.
        keeps: after these errors the group is left as it is: it is needed still, or broken.
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
    """One GPU per rank and nccl where there are enough; nccl refuses to share one, gloo does not."""
    if not torch.cuda.is_available():
        return torch.device("cpu"), "gloo"
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    enough = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return device, "nccl" if enough else "gloo"


def _own_restarts() -> int:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def _most_restarts(device: torch.device) -> int:
    """How often torchrun has restarted the job. COLLECTIVE.

    The count is each agent's own: a node whose agent has restarted only because another's did still tells 0.
    """
    count = torch.tensor(_own_restarts(), device=device)
    dist.all_reduce(count, dist.ReduceOp.MAX)
    return int(count)


def meet_at_the_end() -> None:
    """Wait, but not for ever, until all ranks have written their files, before one of them fails. COLLECTIVE.

    torchrun ends the other ranks as soon as it sees that one has failed; all of them have the same status to tell.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with contextlib.suppress(Exception):  # Another rank is gone already: there is nobody to wait for.
        work = dist.barrier(async_op=True)
        if work is not None:
            work.wait(PATIENCE)


def leave(status: int = 0) -> NoReturn:
    """End the process, without the interpreter's shutdown.

    A gloo thread lets go of the last collective's tensors some time after it is done, and DDP keeps those threads
    alive past ``destroy_process_group``. When that happens while the interpreter shuts down, it aborts the process
    (pytorch/pytorch pull request 179291): of runs that had succeeded, one in seven failed.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def mean_of(parts: Sequence[Tensor]) -> Tensor:
    """Elementwise mean of what ``Ranks.gather`` gave.

    Summed in the order of the ranks: that in which an all_reduce adds depends on how many values there are.
    """
    return functools.reduce(torch.add, parts) / len(parts)


def digest_of(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """SHA-256 over names and bytes."""
    digest = hashlib.sha256()
    for name, tensor in tensors:
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()

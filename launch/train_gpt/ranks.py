"""The ranks of the job: this process's rank and device, and simple collectives between the ranks."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import record


@dataclass(frozen=True)
class Ranks:
    """This process's place in the job."""

    rank: int
    size: int
    device: torch.device
    backend: str
    restarts: int = 0  # Restarts of the job by torchrun: the maximum over the ranks.

    @property
    def first(self) -> bool:
        """True on rank 0, which writes files and prints."""
        return self.rank == 0

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean of a tensor over the ranks. COLLECTIVE."""
        total = value.clone()
        dist.all_reduce(total)
        return total / self.size


@contextlib.contextmanager
def joined_ranks(seconds: float) -> Iterator[Ranks]:
    """Pick the device and join the process group; without torchrun it is a group of one. COLLECTIVE.

    An error leaves the group as it is, because other ranks may still be in a collective: end the process by ``leave``.

    Args:
        seconds: time limit of a collective.
    """
    device, backend = _device_and_backend()
    limit = timedelta(seconds=seconds)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend, device_id=device if backend == "nccl" else None, timeout=limit)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield Ranks(dist.get_rank(), dist.get_world_size(), device, backend, most_restarts(device))
    dist.destroy_process_group()


def most_restarts(device: torch.device) -> int:
    """Return how often torchrun restarted the job. COLLECTIVE.

    Each agent counts only its own restarts: 0 on a node that restarted because another node's agent did.
    """
    count = torch.tensor(int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")), device=device)
    dist.all_reduce(count, dist.ReduceOp.MAX)
    return int(count)


def _device_and_backend() -> tuple[torch.device, str]:
    """Return nccl if each rank has a GPU of its own, else gloo, which allows ranks to share one."""
    if not torch.cuda.is_available():
        return torch.device("cpu"), "gloo"
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    enough = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return device, "nccl" if enough else "gloo"


def leave(status: int = 0) -> NoReturn:
    """Exit without the interpreter's shutdown.

    A gloo thread releases the tensors of the last collective some time after it completes, and DDP keeps these threads
    alive past ``destroy_process_group``. A release during interpreter shutdown aborts the process (pytorch/pytorch pull
    request 179291); without this function one in seven successful runs failed that way.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def run(program: Callable[[list[str]], int], arguments: list[str]) -> NoReturn:
    """Run a program, and leave with its exit status. Also writes torchelastic's error file if the program raises."""
    try:
        leave(record(program)(arguments) or 0)
    except SystemExit as left:
        leave(left.code if isinstance(left.code, int) else 1)
    except Exception:
        traceback.print_exc()
        leave(1)

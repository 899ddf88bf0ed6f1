"""Collectives between the ranks of the lab, digests of what they hold, and the end of a job that failed."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import signal
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from fp8dist import StateManager
from launch.train_gpt import ranks as example

PATIENCE = timedelta(seconds=10)
"""How long a failing rank waits for the other ranks to write their files and messages."""


@dataclass(frozen=True)
class Ranks(example.Ranks):
    """This process's place in the job. One rank alone makes no collective."""

    def gather(self, values: Tensor) -> list[Tensor]:
        """Return every rank's ``values``, in rank order. All ranks pass the same shape. COLLECTIVE."""
        if self.size == 1:
            return [values]
        parts = [torch.empty_like(values) for _ in range(self.size)]
        dist.all_gather(parts, values)
        return parts

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
def joined_ranks(seconds: float) -> Iterator[Ranks]:
    """Join the process group, as the example job does. COLLECTIVE."""
    with example.joined_ranks(seconds) as ranks:
        yield Ranks(*astuple(ranks))


def meet_at_the_end() -> None:
    """Wait up to PATIENCE until all ranks have written their files. COLLECTIVE.

    torchrun kills the other ranks as soon as one fails. Ignoring SIGTERM lets every rank exit with its own status.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with contextlib.suppress(Exception):  # The barrier fails if another rank is already gone.
        work = dist.barrier(async_op=True)
        if work is not None:
            work.wait(PATIENCE)


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

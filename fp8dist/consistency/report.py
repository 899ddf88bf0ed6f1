"""What one check found, and who agrees with whom."""

from __future__ import annotations

import os
import socket
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fp8dist.divergence import Divergence, Participant
from fp8dist.errors import DivergenceError

__all__ = ["DivergenceReport", "sides_of", "split", "this_rank"]


@dataclass(frozen=True)
class DivergenceReport(Divergence):
    """Everything that one check found. The findings are equal on all ranks that took part. ``str(report)`` is a table.

    Attributes:
        findings: what differs.
        compared: how many things of each kind were compared across the ranks: "slot", "parameter", "gradient",
            "optimizer"; of files also "scale" and the like. A group of one rank counts what it was named for.
        skipped: what this rank has not compared, and why.
        repaired: what was copied from the majority to the others.
        notes: what else there is to say.
        noun: what takes part, "rank" or "file".
    """

    def raise_if_diverged(self) -> None:
        """Raise DivergenceError unless ``consistent``."""
        if not self.consistent:
            raise DivergenceError(self)


def this_rank(device: torch.device, coords: dict[str, int] | None) -> Participant:
    """This process. ``device``: where its tensors are; ``coords``: its place in the mesh."""
    local = os.environ.get("LOCAL_RANK", "")
    local_rank = int(local) if local.isdigit() else None
    return Participant(dist.get_rank(), socket.gethostname(), local_rank, str(device), coords)


def sides_of(values: Mapping[int, Hashable]) -> tuple[tuple[int, ...], ...]:
    """The sets of ranks with equal values, the largest first, then the one with the lowest rank."""
    by_value: dict[Hashable, list[int]] = {}
    for rank in sorted(values):
        by_value.setdefault(values[rank], []).append(rank)
    return tuple(tuple(side) for side in sorted(by_value.values(), key=lambda side: (-len(side), side[0])))


def split(sides: tuple[tuple[int, ...], ...]) -> tuple[int | None, list[tuple[int, ...]]]:
    """(lowest rank of a strict majority, the other sides); (None, one list of everyone) without one."""
    total = sum(map(len, sides))
    if 2 * len(sides[0]) > total:
        return sides[0][0], list(sides[1:])
    return None, [tuple(sorted(rank for side in sides for rank in side))]

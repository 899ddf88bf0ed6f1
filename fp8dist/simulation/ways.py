"""Ways of reducing the amaxes of a step, as messages."""

from __future__ import annotations

from dataclasses import dataclass

from fp8dist.errors import ConfigurationError
from fp8dist.simulation.algorithms import Parts, parts_of
from fp8dist.simulation.constants import Algorithm
from fp8dist.simulation.topology import Topology

__all__ = ["Way", "Workload"]

HEADER = 8
"""Words before the amaxes, as in ``fp8dist_kernels.header``; nothing of this package imports torch."""


@dataclass(frozen=True)
class Way:
    """``messages``: (int32 words, how many of this size) of a step; ``overlaps``: they run beside something else."""

    name: str
    messages: tuple[tuple[int, int], ...]
    overlaps: bool = False

    @property
    def collectives(self) -> int:
        """Of a step."""
        return sum(count for _, count in self.messages)

    @property
    def bytes(self) -> int:
        """Of a step."""
        return sum(4 * words * count for words, count in self.messages)

    def parts(self, algorithm: Algorithm, topology: Topology) -> Parts:
        """Of all its collectives, one after the other."""
        total = Parts(0, 0, 0, 0, 0)
        for words, count in self.messages:
            total += parts_of(algorithm, topology, words).times(count)
        return total


@dataclass(frozen=True)
class Workload:
    """What there is to reduce: ``slots`` in ``arenas`` of about the same size, with ``lanes`` words more of each slot.

    Raises:
        ConfigurationError: there are fewer slots than arenas, or none.
    """

    slots: int = 672
    arenas: int = 1
    lanes: int = 0

    def __post_init__(self) -> None:
        if self.arenas < 1 or self.slots < self.arenas or self.lanes < 0:
            raise ConfigurationError("there is at least one arena, one slot in each, and no less than 0 lanes")

    @property
    def ways(self) -> tuple[Way, Way, Way]:
        """fp8dist's, and two to compare it with."""
        small, larger = divmod(self.slots, self.arenas)
        sizes = [(small + 1, larger), (small, self.arenas - larger)]
        sizes = [(size, count) for size, count in sizes if count]
        ours = tuple((HEADER + size * (1 + self.lanes), count) for size, count in sizes)
        halves: list[tuple[int, int]] = []
        for size, count in sizes:
            forward = size - size // 3
            halves += [(words, count) for words in (forward, size - forward) if words]
        return (
            Way("one per arena, beside the step", ours, overlaps=True),
            Way("two in the foreground", tuple(halves)),
            Way("one per tensor", ((1, self.slots),)),
        )

"""The parts of a step's all-reduces: topology, number of sequential messages, and bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from fp8dist.errors import ConfigurationError
from fp8dist.simulation.constants import Algorithm, Constants

__all__ = ["GLOO_SEGMENT", "Parts", "Topology", "Way", "Workload", "parts_of", "time_of"]

WORD = 4
"""Bytes of an int32."""

GLOO_SEGMENT = 1 << 20
"""kMaxSegmentSize of gloo's allreduce.h, in bytes."""


HEADER = 8
"""Words before the amaxes. A copy of the value in ``fp8dist_kernels.header``, because this package must not import
torch."""


@dataclass(frozen=True)
class Topology:
    """``ranks`` ranks on nodes of ``per_node`` GPUs. A job with fewer ranks than that has one node.

    ``shared_cores``: number of CPU cores that all ranks share, if one machine emulates several hosts. None: each rank
    has its own core.

    Raises:
        ConfigurationError: a number is below 1, or ``ranks`` is not a multiple of ``per_node``.
    """

    ranks: int
    per_node: int = 8
    shared_cores: int | None = None

    def __post_init__(self) -> None:
        if min(self.ranks, self.per_node, 1 if self.shared_cores is None else self.shared_cores) < 1:
            raise ConfigurationError("ranks, GPUs per node and shared cores must be 1 or more each")
        if self.ranks > self.per_node and self.ranks % self.per_node:
            raise ConfigurationError(
                f"{self.ranks} ranks do not fill nodes of {self.per_node} GPUs: give a multiple, or set GPUs per node"
            )

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return max(1, self.ranks // self.per_node)

    @property
    def on_a_node(self) -> int:
        """Ranks on each node."""
        return self.ranks // self.nodes

    @property
    def contention(self) -> float:
        """Ranks per core, at least 1."""
        return 1.0 if self.shared_cores is None else max(1.0, self.ranks / self.shared_cores)


class Parts(NamedTuple):
    """Factors of a collective's time: the count of each of ``constants.TIMES``, and the sequential bytes on a link."""

    overhead: float
    latency_intra: float
    latency_inter: float
    message: float
    bytes: float

    def __add__(self, other: object) -> Parts:
        assert isinstance(other, Parts)
        return Parts(*(a + b for a, b in zip(self, other)))

    def times(self, count: float) -> Parts:
        """Return the parts of ``count`` such collectives, one after the other."""
        return Parts(*(count * part for part in self))


_NOTHING = Parts(0, 0, 0, 0, 0)


def parts_of(algorithm: Algorithm, topology: Topology, words: int) -> Parts:
    """Return the parts of an all-reduce of int32[words]. All are 0 for one rank.

    tree: up and down a chain of GPUs in each node and a binary tree of nodes (NCCL's tuning.cc). ring: 2 (ranks - 1)
    steps, 2 (nodes - 1) of them between nodes (NCCL's tuning.cc). gloo: see ``_gloo``.
    """
    ranks, nodes = topology.ranks, topology.nodes
    if ranks == 1:
        return _NOTHING
    size = WORD * words
    if algorithm == "tree":
        levels = nodes.bit_length() - 1
        return Parts(1, 2 * (topology.on_a_node - 1), 2 * levels, 0, 2 * size)
    through = 2 * (ranks - 1) / ranks * size
    if algorithm == "ring":
        between = 2 * (nodes - 1)
        return Parts(1, 2 * (ranks - 1) - between, between, 0, through)
    hops = _gloo(ranks, words)
    return Parts(1, 0 if nodes > 1 else hops, hops if nodes > 1 else 0, hops * topology.contention, through)


def _gloo(ranks: int, words: int) -> int:
    """Return the number of sequential messages of gloo's ring (allreduce.cc, transport/tcp/pair.cc).

    A sender waits until the receiver announces that it is ready, which the receiver does after it has finished the
    segment before the last. So in each of the two phases, two segments take a round trip over the slowest link. One or
    two words wait only for the announcement of the first rank. From 3 words to 2 words per rank the result is an upper
    bound, because some segments are empty.
    """
    if words <= 2:
        return 2 * ranks - 1
    segments = max(2, -(-WORD * words // (GLOO_SEGMENT * ranks)))
    return 4 * -(-segments * (ranks - 1) // 2)


def time_of(parts: Parts, topology: Topology, constants: Constants) -> float:
    """Return the µs of a collective if no rank is late."""
    bandwidth = constants["bandwidth_inter" if topology.nodes > 1 else "bandwidth_intra"]
    times = (
        parts.overhead * constants["overhead"]
        + parts.latency_intra * constants["latency_intra"]
        + parts.latency_inter * constants["latency_inter"]
        + parts.message * constants["message"]
    )
    added = parts.latency_inter * constants["added_latency"]
    return constants["slowdown"] * times + added + parts.bytes / (1e3 * bandwidth)


@dataclass(frozen=True)
class Way:
    """A way to reduce the amaxes of a step.

    ``messages``: (int32 words, number of messages of this size) per step. ``overlaps``: they run in the background.
    """

    name: str
    messages: tuple[tuple[int, int], ...]
    overlaps: bool = False

    @property
    def collectives(self) -> int:
        """Collectives per step."""
        return sum(count for _, count in self.messages)

    @property
    def bytes(self) -> int:
        """Bytes per step."""
        return sum(WORD * words * count for words, count in self.messages)

    def parts(self, algorithm: Algorithm, topology: Topology) -> Parts:
        """Return the parts of all its collectives, one after the other."""
        total = _NOTHING
        for words, count in self.messages:
            total += parts_of(algorithm, topology, words).times(count)
        return total


@dataclass(frozen=True)
class Workload:
    """The amaxes to reduce: ``slots`` in ``arenas`` of about the same size, with ``lanes`` extra words per slot.

    Raises:
        ConfigurationError: there is no arena, an arena has no slot, or ``lanes`` is negative.
    """

    slots: int = 672
    arenas: int = 1
    lanes: int = 0

    def __post_init__(self) -> None:
        if self.arenas < 1 or self.slots < self.arenas or self.lanes < 0:
            raise ConfigurationError("needs at least one arena, one slot in each arena, and 0 or more lanes")

    @property
    def ways(self) -> tuple[Way, Way, Way]:
        """The way of fp8dist, and two other ways for comparison."""
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

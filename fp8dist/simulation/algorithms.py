"""What the all-reduces of a step consist of: where ranks are, how many messages one after the other, and how much."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from fp8dist.errors import ConfigurationError
from fp8dist.simulation.constants import Algorithm, Constants

__all__ = ["GLOO_SEGMENT", "Parts", "Topology", "Way", "Workload", "parts_of", "time_of"]

WORD = 4
"""Bytes."""

GLOO_SEGMENT = 1 << 20
"""gloo, allreduce.h: kMaxSegmentSize, in bytes."""


HEADER = 8
"""Words before the amaxes, as in ``fp8dist_kernels.header``; nothing of this package imports torch."""


@dataclass(frozen=True)
class Topology:
    """``ranks`` in nodes of ``per_node`` each; the one node of a smaller job is not full.

    ``shared_cores``: all ranks share so many CPU cores, as hosts do that one machine plays. None: each has its own.

    Raises:
        ConfigurationError: nodes would not be equally full.
    """

    ranks: int
    per_node: int = 8
    shared_cores: int | None = None

    def __post_init__(self) -> None:
        if min(self.ranks, self.per_node, 1 if self.shared_cores is None else self.shared_cores) < 1:
            raise ConfigurationError("ranks, GPUs per node and shared cores are 1 or more each")
        if self.ranks > self.per_node and self.ranks % self.per_node:
            raise ConfigurationError(
                f"{self.ranks} ranks do not fill nodes of {self.per_node} GPUs: give a multiple, or other GPUs per node"
            )

    @property
    def nodes(self) -> int:
        """How many nodes."""
        return max(1, self.ranks // self.per_node)

    @property
    def on_a_node(self) -> int:
        """Ranks on each node."""
        return self.ranks // self.nodes

    @property
    def contention(self) -> float:
        """How many ranks there are to a core, at least 1."""
        return 1.0 if self.shared_cores is None else max(1.0, self.ranks / self.shared_cores)


class Parts(NamedTuple):
    """How often each of ``constants.TIMES`` is in the time of a collective, and the bytes that go over a link one after
    the other."""

    overhead: float
    latency_intra: float
    latency_inter: float
    message: float
    bytes: float

    def __add__(self, other: object) -> Parts:
        assert isinstance(other, Parts)
        return Parts(*(a + b for a, b in zip(self, other)))

    def times(self, count: float) -> Parts:
        """So many of it, one after the other."""
        return Parts(*(count * part for part in self))


_NOTHING = Parts(0, 0, 0, 0, 0)


def parts_of(algorithm: Algorithm, topology: Topology, words: int) -> Parts:
    """Of an all-reduce of int32[words]. Nothing for one rank.

    tree: up and down a chain of GPUs in each node, and a binary tree of nodes (NCCL, tuning.cc). ring: 2 (ranks - 1)
    steps, of which 2 (nodes - 1) between nodes (the same). gloo: see ``_gloo``.
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
    """Messages one after the other of gloo's ring (allreduce.cc, transport/tcp/pair.cc).

    A segment leaves when the receiver has said that it is ready for it, which it says when it is done with the segment
    before the last; so two segments take a round trip over the slowest link, on all ranks, in each of the two phases. A
    single word (or two) waits for nobody's readiness but the first rank's. Between those it is an upper bound: some
    segments are empty.
    """
    if words <= 2:
        return 2 * ranks - 1
    segments = max(2, -(-WORD * words // (GLOO_SEGMENT * ranks)))
    return 4 * -(-segments * (ranks - 1) // 2)


def time_of(parts: Parts, topology: Topology, constants: Constants) -> float:
    """Microseconds, with nobody late."""
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
        return sum(WORD * words * count for words, count in self.messages)

    def parts(self, algorithm: Algorithm, topology: Topology) -> Parts:
        """Of all its collectives, one after the other."""
        total = _NOTHING
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

"""What one all-reduce consists of, by algorithm: how many messages one after the other, and where."""

from __future__ import annotations

from typing import NamedTuple

from fp8dist.simulation.constants import Algorithm, Constants
from fp8dist.simulation.topology import Topology

__all__ = ["GLOO_SEGMENT", "Parts", "parts_of", "time_of"]

WORD = 4
"""Bytes."""

GLOO_SEGMENT = 1 << 20
"""gloo, allreduce.h: kMaxSegmentSize, in bytes."""


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

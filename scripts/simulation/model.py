"""The model of an all-reduce: its constants, and the factors that they have. See docs/design/simulation.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Algorithm = Literal["tree", "ring", "gloo"]
ALGORITHMS: tuple[Algorithm, ...] = ("tree", "ring", "gloo")
Origin = Literal["default", "given", "fitted"]
Array = NDArray[np.float64]

TIMES = ("overhead", "latency_intra", "latency_inter", "message")
"""The constants in µs that add up to the time of a collective."""
BETWEEN = TIMES.index("latency_inter")

WORD = 4
"""Bytes of an int32."""
HEADER = 8
"""Words of a message before the amaxes: ``fp8dist_kernels.header``, copied because nothing here imports the library."""
GLOO_SEGMENT = 1 << 20
"""kMaxSegmentSize of gloo's allreduce.h, in bytes."""


class Unusable(ValueError):
    """A flag has an impossible value, or a file cannot be used. The text says so in one sentence."""


@dataclass(frozen=True)
class Constant:
    """A number that a prediction depends on."""

    name: str
    value: float
    unit: str
    source: str
    origin: Origin = "default"

    def __str__(self) -> str:
        return f"{self.name:<18}{self.value:>12.6g} {self.unit:<8}{self.origin:<9}{self.source}"


class Constants(dict[str, Constant]):
    """The constants that determine the time of an all-reduce, by name.

    ``overhead``: µs per collective. ``latency_intra``, ``latency_inter``: one-way latency inside a node and between
    nodes, µs. ``added_latency``: extra one-way latency between nodes, µs. ``message``: CPU time of a message at both
    ends together, µs. ``bandwidth_intra``, ``bandwidth_inter``: GB/s of a link. ``slowdown``: factor on all these
    times but ``added_latency``.
    """

    def having(self, values: Mapping[str, float], origin: Origin, source: str) -> Constants:
        """Return a copy in which these constants have new values."""
        changed = {n: replace(self[n], value=value, origin=origin, source=source) for n, value in values.items()}
        return Constants({**self, **changed})


def defaults(algorithm: Algorithm) -> Constants:
    """Return the default constants: published figures if available, else assumptions."""
    if algorithm == "gloo":
        ethernet = "assumption: Ethernet in one building; half of a ping round trip is better"
        overhead, intra, inter = (0.0, "included in message"), (0.0, "included in message"), (30.0, ethernet)
        message = (85.0, "docs/benchmarks.md: 0.35 ms for 2 ranks of one machine, 4 messages")
        bandwidths, link = (1.25, 1.25), "assumption: 10 Gbit/s"
        slowdown = (1.0, "the times were measured")
    else:
        tuner = "NCCL 2.28, tuning.cc, protocol LL"
        tree = algorithm == "tree"
        overhead, intra = (6.8 if tree else 6.6, tuner), (0.6, f"{tuner}, NVLink")
        inter = (5.0 if tree else 2.7, f"{tuner}, network")
        message = (0.0, "included in the latencies: GPUs send without the CPU")
        bandwidths, link = (141.0, 35.0), "NCCL 2.28, tuning.cc, llMaxBws of Hopper"
        slowdown = (2.1, "published small all-reduces take 1.8 to 2.4 times tuning.cc's value")
    found = [
        Constant(name, value, "µs", source) for name, (value, source) in zip(TIMES, (overhead, intra, inter, message))
    ]
    found += [
        Constant("added_latency", 0.0, "µs", "none added"),
        Constant("bandwidth_intra", bandwidths[0], "GB/s", link),
        Constant("bandwidth_inter", bandwidths[1], "GB/s", link),
        Constant("slowdown", slowdown[0], "", slowdown[1]),
    ]
    return Constants({constant.name: constant for constant in found})


@dataclass(frozen=True)
class Topology:
    """``ranks`` ranks on nodes of ``per_node`` GPUs. A job with fewer ranks than that has one node.

    ``shared_cores``: number of CPU cores that all ranks share, if one machine emulates several hosts. None: each rank
    has its own core.

    Raises:
        Unusable: a number is below 1, or ``ranks`` is not a multiple of ``per_node``.
    """

    ranks: int
    per_node: int = 8
    shared_cores: int | None = None

    def __post_init__(self) -> None:
        if min(self.ranks, self.per_node, 1 if self.shared_cores is None else self.shared_cores) < 1:
            raise Unusable("ranks, GPUs per node and shared cores must be 1 or more each")
        if self.ranks > self.per_node and self.ranks % self.per_node:
            raise Unusable(
                f"{self.ranks} ranks do not fill nodes of {self.per_node} GPUs: give a multiple, or set GPUs per node"
            )

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return max(1, self.ranks // self.per_node)


def parts_of(algorithm: Algorithm, topology: Topology, words: int) -> Array:
    """Return the factors of an all-reduce of int32[words]: of each of TIMES, and the sequential bytes on a link.

    All are 0 for one rank. tree: up and down a chain of GPUs in each node and a binary tree of nodes (NCCL's
    tuning.cc). ring: 2 (ranks - 1) steps, 2 (nodes - 1) of them between nodes (NCCL's tuning.cc). gloo: see ``_gloo``.
    """
    ranks, nodes, size = topology.ranks, topology.nodes, WORD * words
    if ranks == 1:
        return np.zeros(len(TIMES) + 1)
    if algorithm == "tree":
        levels = nodes.bit_length() - 1
        return np.array([1, 2 * (ranks // nodes - 1), 2 * levels, 0, 2 * size], np.float64)
    through = 2 * (ranks - 1) / ranks * size
    if algorithm == "ring":
        between = 2 * (nodes - 1)
        return np.array([1, 2 * (ranks - 1) - between, between, 0, through])
    hops = _gloo(ranks, words)
    cores = ranks if topology.shared_cores is None else topology.shared_cores
    contention = max(1.0, ranks / cores)
    return np.array([1, 0 if nodes > 1 else hops, hops if nodes > 1 else 0, hops * contention, through])


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


def time_of(parts: Array, topology: Topology, constants: Constants) -> float:
    """Return the µs of a collective if no rank is late."""
    times = float(parts[:-1] @ [constants[name].value for name in TIMES])
    added = float(parts[BETWEEN]) * constants["added_latency"].value
    bandwidth = constants["bandwidth_inter" if topology.nodes > 1 else "bandwidth_intra"].value
    return constants["slowdown"].value * times + added + float(parts[-1]) / (1e3 * bandwidth)


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

    def parts(self, algorithm: Algorithm, topology: Topology) -> Array:
        """Return the factors of all its collectives, one after the other. See ``parts_of``."""
        parts = [count * parts_of(algorithm, topology, words) for words, count in self.messages]
        return np.sum(parts, axis=0)


def ways(slots: int = 672, arenas: int = 1, lanes: int = 0) -> tuple[Way, Way, Way]:
    """Return the way of fp8dist to reduce the amaxes of a step, and two other ways for comparison.

    Args:
        slots: number of amaxes, in ``arenas`` of about the same size.
        lanes: extra words per slot.

    Raises:
        Unusable: there is no arena, an arena has no slot, or ``lanes`` is negative.
    """
    if arenas < 1 or slots < arenas or lanes < 0:
        raise Unusable("needs at least one arena, one slot in each arena, and 0 or more lanes")
    small, larger = divmod(slots, arenas)
    sizes = [(size, count) for size, count in ((small + 1, larger), (small, arenas - larger)) if count]
    ours = tuple((HEADER + size * (1 + lanes), count) for size, count in sizes)
    halves = tuple((words, count) for size, count in sizes for words in (size - size // 3, size // 3) if words)
    return (
        Way("one per arena, beside the step", ours, overlaps=True),
        Way("two in the foreground", halves),
        Way("one per tensor", ((1, slots),)),
    )

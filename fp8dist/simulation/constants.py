"""The constants of the model, and the source of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

__all__ = ["ALGORITHMS", "TIMES", "Algorithm", "Constant", "Constants", "defaults"]

Algorithm = Literal["tree", "ring", "gloo"]
ALGORITHMS: tuple[Algorithm, ...] = ("tree", "ring", "gloo")
TIMES = ("overhead", "latency_intra", "latency_inter", "message")
"""The constants in µs that add up to the time of a collective."""

Origin = Literal["default", "given", "fitted"]


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


@dataclass(frozen=True)
class Constants:
    """The constants that determine the time of an all-reduce.

    ``overhead``: µs per collective. ``latency_intra``, ``latency_inter``: one-way latency inside a node and between
    nodes, µs. ``added_latency``: extra one-way latency between nodes, µs. ``message``: CPU time of a message at both
    ends together, µs. ``bandwidth_intra``, ``bandwidth_inter``: GB/s of a link. ``slowdown``: factor on all these
    times but ``added_latency``.
    """

    by_name: Mapping[str, Constant]

    def __getitem__(self, name: str) -> float:
        return self.by_name[name].value

    def __iter__(self) -> Iterator[Constant]:
        return iter(self.by_name.values())

    def having(self, values: Mapping[str, float], origin: Origin, source: str) -> Constants:
        """Return a copy in which these constants have new values."""
        changed = {
            name: replace(self.by_name[name], value=value, origin=origin, source=source)
            for name, value in values.items()
        }
        return Constants({**self.by_name, **changed})


def defaults(algorithm: Algorithm) -> Constants:
    """Return the default constants: published figures if available, else assumptions."""
    tuner, assumed = "NCCL 2.28, tuning.cc, protocol LL", "assumption"
    ethernet = f"{assumed}: Ethernet in one building; half of a ping round trip is better"
    if algorithm == "gloo":
        times = (
            Constant("overhead", 0.0, "µs", "included in message"),
            Constant("latency_intra", 0.0, "µs", "included in message"),
            Constant("latency_inter", 30.0, "µs", ethernet),
            Constant("message", 85.0, "µs", "docs/benchmarks.md: 0.35 ms for 2 ranks of one machine, 4 messages"),
        )
        links, source = (1.25, 1.25), f"{assumed}: 10 Gbit/s"
        slowdown = Constant("slowdown", 1.0, "", "the times were measured")
    else:
        overhead, between = {"tree": (6.8, 5.0), "ring": (6.6, 2.7)}[algorithm]
        times = (
            Constant("overhead", overhead, "µs", tuner),
            Constant("latency_intra", 0.6, "µs", f"{tuner}, NVLink"),
            Constant("latency_inter", between, "µs", f"{tuner}, network"),
            Constant("message", 0.0, "µs", "included in the latencies: GPUs send without the CPU"),
        )
        links, source = (141.0, 35.0), "NCCL 2.28, tuning.cc, llMaxBws of Hopper"
        slowdown = Constant("slowdown", 2.1, "", "published small all-reduces take 1.8 to 2.4 times tuning.cc's value")
    rest = (
        Constant("added_latency", 0.0, "µs", "none added"),
        Constant("bandwidth_intra", links[0], "GB/s", source),
        Constant("bandwidth_inter", links[1], "GB/s", source),
        slowdown,
    )
    return Constants({constant.name: constant for constant in (*times, *rest)})

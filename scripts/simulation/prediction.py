"""The cost of the ways to reduce amaxes, with random delays of ranks that arrive late at a sync."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from scripts.simulation.model import Algorithm, Constants, Topology, Unusable, Way, time_of

Kind = Literal["none", "normal", "lognormal", "exponential", "slow"]
KINDS: tuple[Kind, ...] = ("none", "normal", "lognormal", "exponential", "slow")

LATEST = 1e12
"""Largest allowed delay, µs (eleven days)."""
DRAWS = 200_000_000
"""Largest number of delays drawn at once (0.8 GB)."""


@dataclass(frozen=True)
class Stragglers:
    """A distribution of delays in µs, drawn for each rank and step, except "slow".

    normal: ``delay`` is the standard deviation. lognormal: ``delay`` is the mean, ``sigma`` the standard deviation of
    the logarithm. exponential: ``delay`` is the mean. slow: a ``share`` of the ranks, at least one, arrives ``delay``
    late in every step.

    Raises:
        Unusable: a number is out of range.
    """

    kind: Kind = "none"
    delay: float = 0.0
    sigma: float = 1.0
    share: float = 0.01

    def __post_init__(self) -> None:
        if not (0 <= self.delay <= LATEST and 0 <= self.sigma < 10 and 0 <= self.share <= 1):
            raise Unusable(
                f"a straggler's delay must be from 0 to {LATEST:g} µs, sigma from 0 to below 10, the share from 0 to 1"
            )

    def waits(self, ranks: int, steps: int, seed: int) -> NDArray[np.float32]:
        """Return the µs between each rank's arrival and the last one's, float32[steps or 1, ranks].

        The result is deterministic for a seed.

        Raises:
            Unusable: ``steps`` times ``ranks`` exceeds DRAWS.
        """
        random = np.random.Generator(np.random.SFC64(seed))
        shape = (1 if self.kind in ("none", "slow") else steps, ranks)
        if shape[0] * ranks > DRAWS:
            raise Unusable(f"{shape[0]} steps of {ranks} ranks are over {DRAWS:,} draws: use fewer steps")
        if self.kind == "none" or self.delay == 0:
            return np.zeros((1, ranks), np.float32)
        factor = self.delay
        if self.kind == "slow":
            late = np.zeros(shape, np.float32)
            late[0, : max(1, round(self.share * ranks))] = 1
        elif self.kind == "exponential":
            late = random.standard_exponential(shape, np.float32)
        else:
            late = random.standard_normal(shape, np.float32)
        if self.kind == "lognormal":
            late *= np.float32(self.sigma)
            np.exp(late, out=late)  # In place, because a draw may fill 0.8 GB.
            factor *= math.exp(-(self.sigma**2) / 2)
        late *= np.float32(factor)
        return np.subtract(late.max(axis=1, keepdims=True), late, out=late)


@dataclass(frozen=True)
class Cost:
    """The cost of a way, in µs per step.

    ``sync``: time of all its collectives if no rank is late. ``added``: wait of the last rank, which makes the step
    longer. ``wait_…``: wait of a rank for the collectives and for later ranks, over all ranks and steps. ``share``:
    share of the mean wait in a step that includes it.
    """

    way: str
    collectives: int
    bytes: int
    sync: float
    added: float
    wait_mean: float
    wait_p50: float
    wait_p99: float
    share: float


@dataclass(frozen=True)
class Job:
    """A job whose syncs are predicted.

    ``step``: duration of a step without syncs, µs. ``window``: time from the start of the sync to the first use of the
    new scales, µs (0 with ``same_step``).

    Raises:
        Unusable: a number is out of range.
    """

    ways: tuple[Way, ...]
    algorithm: Algorithm
    constants: Constants
    stragglers: Stragglers
    step: float = 1e6
    window: float = 0.0
    steps: int = 200
    seed: int = 0

    def __post_init__(self) -> None:
        if not (0 < self.step < float("inf") and 0 <= self.window <= self.step and self.steps > 0 and self.seed >= 0):
            raise Unusable(
                "a step must be longer than 0 ms and no shorter than the window, steps 1 or more, the seed 0 or more"
            )

    def costs(self, topology: Topology) -> tuple[Cost, ...]:
        """Return the cost of each way. All use the same random draws."""
        if topology.ranks == 1:
            return tuple(Cost(way.name, 0, 0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0) for way in self.ways)
        waits = self.stragglers.waits(topology.ranks, self.steps, self.seed)
        places = [int(share * waits.size) for share in (0.5, 0.99)]
        ordered = np.partition(waits.reshape(-1), places)  # For many values faster than a sort.
        p50, p99 = (float(ordered[place]) for place in places)
        mean_wait = float(waits.mean(dtype=np.float64))
        found = []
        for way in self.ways:
            sync = time_of(way.parts(self.algorithm, topology), topology, self.constants)
            left = sync - (self.window if way.overlaps else 0.0)
            mean = mean_wait + left
            if left < 0:  # The window hides delays as well.
                mean = float(np.maximum(waits + np.float32(left), 0).mean(dtype=np.float64))
            found.append(
                Cost(
                    way=way.name,
                    collectives=way.collectives,
                    bytes=way.bytes,
                    sync=sync,
                    added=max(0.0, left),
                    wait_mean=mean,
                    wait_p50=max(0.0, p50 + left),
                    wait_p99=max(0.0, p99 + left),
                    share=mean / (self.step + mean),
                )
            )
        return tuple(found)

"""Random delays of ranks that arrive late at a sync."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fp8dist.errors import ConfigurationError

__all__ = ["KINDS", "Kind", "Stragglers"]

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
        ConfigurationError: a number is out of range.
    """

    kind: Kind = "none"
    delay: float = 0.0
    sigma: float = 1.0
    share: float = 0.01

    def __post_init__(self) -> None:
        if not (0 <= self.delay <= LATEST and 0 <= self.sigma < 10 and 0 <= self.share <= 1):
            raise ConfigurationError(
                f"a straggler's delay must be from 0 to {LATEST:g} µs, sigma from 0 to below 10, the share from 0 to 1"
            )

    def waits(self, ranks: int, steps: int, seed: int) -> NDArray[np.float32]:
        """Return the µs between each rank's arrival and the last one's, float32[steps or 1, ranks].

        The result is deterministic for a seed.

        Raises:
            ConfigurationError: ``steps`` times ``ranks`` exceeds DRAWS.
        """
        random = np.random.Generator(np.random.SFC64(seed))
        shape = (1 if self.kind in ("none", "slow") else steps, ranks)
        if shape[0] * ranks > DRAWS:
            raise ConfigurationError(f"{shape[0]} steps of {ranks} ranks are over {DRAWS:,} draws: use fewer steps")
        if self.kind == "none" or self.delay == 0:
            return np.zeros((1, ranks), np.float32)
        if self.kind == "slow":
            late = np.zeros((1, ranks), np.float32)
            late[0, : self._slow(ranks)] = self.delay
        elif self.kind == "exponential":
            late = np.float32(self.delay) * random.standard_exponential(shape, np.float32)
        else:
            late = random.standard_normal(shape, np.float32)
            if self.kind == "normal":
                late *= np.float32(self.delay)
            else:
                late *= np.float32(self.sigma)
                np.exp(late, out=late)
                late *= np.float32(self.delay * np.exp(-(self.sigma**2) / 2))
        np.subtract(late.max(axis=1, keepdims=True), late, out=late)
        return late

    def _slow(self, ranks: int) -> int:
        return max(1, round(self.share * ranks))

    def mean_wait(self, ranks: int) -> float | None:
        """Return the exact mean wait over ranks and steps, or None if there is no formula.

        The largest of n exponential delays has mean H(n) · ``delay``, with H(n) the n-th harmonic number, so the mean
        wait is (H(n) - 1) · ``delay``.
        """
        if self.kind == "none" or self.delay == 0 or ranks == 1:
            return 0.0
        if self.kind == "exponential":
            return self.delay * float(np.sum(1 / np.arange(2, ranks + 1)))
        if self.kind == "slow":
            return self.delay * (1 - self._slow(ranks) / ranks)
        return None

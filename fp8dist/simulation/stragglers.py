"""How late ranks come to a sync."""

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
"""µs: eleven days."""

DRAWS = 200_000_000
"""At once: 0.8 GB."""


@dataclass(frozen=True)
class Stragglers:
    """A distribution of delays, in µs; of each rank and step anew, but for "slow".

    normal: ``delay`` is the standard deviation. lognormal: the mean, and ``sigma`` the standard deviation of its
    logarithm. exponential: the mean. slow: ``share`` of the ranks, at least one, come ``delay`` late in every step.

    Raises:
        ConfigurationError: a number is negative, or a share above 1.
    """

    kind: Kind = "none"
    delay: float = 0.0
    sigma: float = 1.0
    share: float = 0.01

    def __post_init__(self) -> None:
        if not (0 <= self.delay <= LATEST and 0 <= self.sigma < 10 and 0 <= self.share <= 1):
            raise ConfigurationError(
                f"a straggler's delay is 0 to {LATEST:g} µs, sigma from 0 to 10, and the share from 0 to 1"
            )

    def waits(self, ranks: int, steps: int, seed: int) -> NDArray[np.float32]:
        """µs that each rank comes before the last one, float32[steps or 1, ranks]; the same for the same seed."""
        random = np.random.Generator(np.random.SFC64(seed))
        shape = (1 if self.kind in ("none", "slow") else steps, ranks)
        if shape[0] * ranks > DRAWS:
            raise ConfigurationError(f"{shape[0]} steps of {ranks} ranks are more than {DRAWS:,} draws: take fewer")
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
        """The exact mean over ranks and steps, where there is a formula; None: there is none.

        Of n exponential delays the largest is the n-th harmonic number of means, and H(n) - 1 of them is what is
        waited for.
        """
        if self.kind == "none" or self.delay == 0 or ranks == 1:
            return 0.0
        if self.kind == "exponential":
            return self.delay * float(np.sum(1 / np.arange(2, ranks + 1)))
        if self.kind == "slow":
            return self.delay * (1 - self._slow(ranks) / ranks)
        return None

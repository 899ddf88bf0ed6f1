"""Final losses, gaps to FP32, and their spread over seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from scripts.convergence.variants import REFERENCE, VARIANTS

FINAL_SHARE = 10
"""The final training loss is the mean over the last 1/FINAL_SHARE of a run."""


class Spread(NamedTuple):
    """Statistics of a figure over seeds. ``deviation``: the sample's standard deviation; None for one seed."""

    mean: float
    deviation: float | None
    low: float
    high: float


class Comparison(NamedTuple):
    """Results of one variant. Gaps are in percent of FP32's loss with the same seed, positive if FP32 is better. A gap
    is None if FP32 did not run with these seeds."""

    seeds: tuple[int, ...]
    training: Spread
    validation: Spread
    training_gap: Spread | None
    validation_gap: Spread | None
    goal: float | None

    @property
    def reached(self) -> str:
        """Say if the gap stays within the goal: with every seed, on average, or not."""
        if self.goal is None or self.training_gap is None:
            return "-"
        gap = self.training_gap
        if max(abs(gap.low), abs(gap.high)) <= self.goal:
            return "yes, with every seed"
        return "yes, on average" if abs(gap.mean) <= self.goal else "no"


def final_steps(steps: int) -> int:
    """Return the number of steps that the final training loss averages."""
    return max(1, steps // FINAL_SHARE)


def final_loss(losses: Sequence[float]) -> float:
    """Return the mean training loss of the last tenth of a run. A seed gives all variants the same batches."""
    return statistics.fmean(map(float, losses[-final_steps(len(losses)) :]))


def gap_percent(loss: float, reference: float) -> float:
    """Return how much higher a loss is than the reference, in percent of the reference."""
    return 100 * (loss - reference) / reference


def spread_of(values: Sequence[float]) -> Spread:
    """Return mean, standard deviation, lowest and highest; all NaN if a value is not finite."""
    if not all(map(math.isfinite, values)):
        return Spread(*4 * (math.nan,))
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return Spread(statistics.fmean(values), deviation, min(values), max(values))


def compare(runs: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> dict[str, Comparison]:
    """Compare each variant with FP32, in the order of VARIANTS.

    Args:
        runs: variant → seed → ``{"losses": [one per step], "validation_loss": …}``. A loss that is not finite may be
            given as text, such as "nan".
    """
    reference = runs.get(REFERENCE, {})
    found = {}
    for name, variant in VARIANTS.items():
        if not runs.get(name):
            continue
        seeds = sorted(runs[name], key=int)
        losses = list(zip(*(_losses(runs[name][seed]) for seed in seeds)))
        gaps: list[Spread | None] = [None, None]
        if name != REFERENCE and set(seeds) <= set(reference):
            expected = zip(*(_losses(reference[seed]) for seed in seeds))
            gaps = [spread_of([*map(gap_percent, *pair)]) for pair in zip(losses, expected)]
        found[name] = Comparison(tuple(map(int, seeds)), *map(spread_of, losses), *gaps, variant.goal)
    return found


def _losses(run: Mapping[str, Any]) -> tuple[float, float]:
    """Return the final training loss and the validation loss."""
    return final_loss(run["losses"]), float(run["validation_loss"])

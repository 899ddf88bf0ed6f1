"""The arithmetic: final losses, gaps to FP32, and their spread over seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from scripts.convergence.variants import REFERENCE, VARIANTS

__all__ = ["Comparison", "Spread", "compare", "final_loss", "final_steps", "gap_percent", "mean_curve", "spread_of"]

FINAL_SHARE = 10
"""The final training loss is the mean over the last of this many parts of a run."""


class Spread(NamedTuple):
    """Of one figure over seeds. ``deviation``: the sample's standard deviation; None for one seed."""

    mean: float
    deviation: float | None
    low: float
    high: float


class Comparison(NamedTuple):
    """One variant. Gaps are in percent of FP32's loss with the same seed, positive where FP32 is better; None: FP32 was
    not run with these seeds."""

    seeds: tuple[int, ...]
    training: Spread
    validation: Spread
    training_gap: Spread | None
    validation_gap: Spread | None
    goal: float | None

    @property
    def reached(self) -> str:
        """Whether the goal was: by how many seeds, and by their mean."""
        if self.goal is None or self.training_gap is None:
            return "-"
        gap = self.training_gap
        if max(abs(gap.low), abs(gap.high)) <= self.goal:
            return "yes, with every seed"
        return "yes, on average" if abs(gap.mean) <= self.goal else "no"


def final_steps(steps: int) -> int:
    """How many steps the final training loss is a mean over."""
    return max(1, steps // FINAL_SHARE)


def final_loss(losses: Sequence[float]) -> float:
    """Mean training loss of the last tenth of a run. Same seeds have the same batches, so they do not blur a gap."""
    return statistics.fmean(map(float, losses[-final_steps(len(losses)) :]))


def gap_percent(loss: float, reference: float) -> float:
    """How much higher a loss is, in percent of the reference."""
    return 100 * (loss - reference) / reference


def spread_of(values: Sequence[float]) -> Spread:
    """Mean, standard deviation, lowest and highest; all NaN if a value is not finite."""
    if not all(map(math.isfinite, values)):
        return Spread(*4 * (math.nan,))
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return Spread(statistics.fmean(values), deviation, min(values), max(values))


def mean_curve(curves: Sequence[Sequence[float]]) -> list[float]:
    """Mean at each step."""
    return [statistics.fmean(at_a_step) for at_a_step in zip(*curves, strict=True)]


def compare(runs: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> dict[str, Comparison]:
    """Each variant against FP32, in the order of VARIANTS.

    Args:
        runs: variant → seed → ``{"losses": [one per step], "validation_loss": …}``. A loss that is no number may be a
            text: "nan".
    """
    reference = runs.get(REFERENCE, {})
    found = {}
    for name, variant in VARIANTS.items():
        if not runs.get(name):
            continue
        seeds = sorted(runs[name], key=int)
        training = [final_loss(runs[name][seed]["losses"]) for seed in seeds]
        validation = [float(runs[name][seed]["validation_loss"]) for seed in seeds]
        training_gap = validation_gap = None
        if name != REFERENCE and set(seeds) <= set(reference):
            expected = [final_loss(reference[seed]["losses"]) for seed in seeds]
            training_gap = spread_of([gap_percent(*pair) for pair in zip(training, expected)])
            expected = [float(reference[seed]["validation_loss"]) for seed in seeds]
            validation_gap = spread_of([gap_percent(*pair) for pair in zip(validation, expected)])
        found[name] = Comparison(
            tuple(map(int, seeds)),
            spread_of(training),
            spread_of(validation),
            training_gap,
            validation_gap,
            variant.goal,
        )
    return found

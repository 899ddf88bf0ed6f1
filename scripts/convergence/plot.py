"""Loss curves as a picture. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

from scripts.convergence.comparison import gap_percent, mean_curve
from scripts.convergence.variants import REFERENCE, VARIANTS

__all__ = ["draw", "smoothed"]

WINDOW = 10
"""Steps that the gap is a mean over."""


def smoothed(curve: Sequence[float]) -> list[float]:
    """Mean over the last WINDOW steps, fewer at the start."""
    curve = list(map(float, curve))
    return [sum(part) / len(part) for part in (curve[max(0, i + 1 - WINDOW) : i + 1] for i in range(len(curve)))]


def draw(data: Mapping[str, Any], path: Path) -> None:
    """Above: mean training loss over the seeds, with a band from lowest to highest. Below: the gap to FP32 of the same
    seed in percent, likewise."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, figsize=(9, 9), sharex=True, height_ratios=(3, 2))
    runs = data["runs"]
    for name, variant in VARIANTS.items():
        if not runs.get(name):
            continue
        curves = {seed: smoothed(run["losses"]) for seed, run in runs[name].items()}
        _band(above, list(curves.values()), variant.title)
        reference = {seed: smoothed(run["losses"]) for seed, run in runs.get(REFERENCE, {}).items()}
        if name != REFERENCE and curves.keys() <= reference.keys():
            gaps = [[gap_percent(*pair) for pair in zip(curve, reference[seed])] for seed, curve in curves.items()]
            _band(below, gaps, variant.title)
        else:
            below.plot([], [])  # The next colour, so that a variant has the same in both.
    above.set(ylabel=f"training loss, nats per byte, mean of {WINDOW} steps", title="mean and range over seeds")
    below.set(xlabel="step", ylabel="gap to FP32, %")
    below.axhline(0, color="black", linewidth=0.5)
    above.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _band(axes: Any, curves: Sequence[Sequence[float]], label: str) -> None:
    steps = range(1, len(curves[0]) + 1)
    (line,) = axes.plot(steps, mean_curve(curves), label=label, linewidth=1)
    low, high = (list(map(extreme, zip(*curves))) for extreme in (min, max))
    axes.fill_between(steps, low, high, color=line.get_color(), alpha=0.15, linewidth=0)

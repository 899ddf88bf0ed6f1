"""Loss curves of the recipes, from scripts/results/convergence.json."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.convergence import results
from scripts.convergence.comparison import compare, gap_percent, mean_curve
from scripts.convergence.variants import REFERENCE, VARIANTS
from scripts.pictures.svg import Point, document, line, polygon, polyline, text

__all__ = ["draw"]

ROOT = Path(__file__).resolve().parents[2]
WINDOW = 10
"""Number of steps that each point of a curve averages."""

LIMIT = 2.5
"""The gap axis runs from -LIMIT to LIMIT, in percent."""

COLOURS = ("plain", "orange", "red", "green", "blue", "purple")


def draw() -> str:
    """Return the picture as SVG.

    Raises:
        ValueError: there are no results.
    """
    data = results.load(ROOT)
    if data is None:
        raise ValueError(f"{results.folder_of(ROOT) / results.FILE} is missing")
    runs: Mapping[str, Any] = data["runs"]
    curves = {
        name: {seed: smoothed(list(map(float, run["losses"]))) for seed, run in seeds.items()}
        for name, seeds in runs.items()
    }
    others = [name for name in VARIANTS if name != REFERENCE and name in curves]
    summary = compare(runs)
    gaps = {name: summary[name].training_gap for name in others}
    description = "Training losses fall from 5.6 to 2.5 nats per byte alike. Final gap to FP32: " + "; ".join(
        f"{VARIANTS[name].title} {gap.mean:+.3f} %" for name, gap in gaps.items() if gap is not None
    )
    parts = [
        text(24, 32, "Training loss: FP32, BF16 and the FP8 recipes", bold=True, size=15),
        text(
            736,
            32,
            f"nats per byte, mean of {len(runs[REFERENCE])} seeds and {WINDOW} steps",
            "muted",
            size=12,
            anchor="end",
        ),
        *_losses(curves, others),
        text(24, 268, "Gap to FP32 with the same seed, in percent", bold=True, size=15),
        text(736, 268, f"line: mean of {WINDOW} steps and the seeds; band: all seeds", "muted", size=12, anchor="end"),
    ]
    for place, (name, colour) in enumerate(zip(others, COLOURS)):
        gap = [
            [gap_percent(*pair) for pair in zip(curve, curves[REFERENCE][seed])] for seed, curve in curves[name].items()
        ]
        final = gaps[name]
        label = "" if final is None else f"final {final.mean:+.3f} %"
        x, y = 60 + 232 * (place % 3), 304 + 166 * (place // 3)
        parts += _gap(x, y, VARIANTS[name].title, label, gap, colour, place % 3 == 0)
    return document("Loss curves of the recipes", description + ".", 616, parts)


def smoothed(curve: Sequence[float]) -> list[float]:
    """Return the moving mean over the last WINDOW steps, fewer at the start."""
    return [statistics.fmean(curve[max(0, end - WINDOW) : end]) for end in range(1, len(curve) + 1)]


def _losses(curves: Mapping[str, Mapping[str, list[float]]], others: Sequence[str]) -> list[str]:
    """Return all variants in one plot."""
    left, right, top, bottom, low, high = 60, 736, 52, 216, 2.0, 6.0
    steps = len(next(iter(curves[REFERENCE].values())))

    def points(name: str) -> list[Point]:
        means = mean_curve(list(curves[name].values()))
        return [
            (left + (right - left) * (step + 1) / steps, bottom - (bottom - top) * (loss - low) / (high - low))
            for step, loss in enumerate(means)
        ]

    parts = []
    for tick in (2, 3, 4, 5, 6):
        y = bottom - (bottom - top) * (tick - low) / (high - low)
        parts.append(line((left, y), (right, y), "grid", width=1))
        parts.append(text(left - 8, y + 4, str(tick), "muted", size=12, anchor="end"))
    parts += [polyline(points(name), colour, width=1) for name, colour in zip(others, COLOURS)]
    reference = points(REFERENCE)
    parts.append(polyline(reference, "plain", width=2))
    x, y = reference[steps // 3]
    parts.append(text(x, y - 34, "seven lines on top of each other: FP32 and the six below", bold=True))
    parts.append(line((x + 20, y - 28), (x + 20, y), "muted", width=1))
    parts += [
        text(
            left + (right - left) * step / steps,
            bottom + 17,
            str(step) if step else "step 0",
            "muted",
            size=12,
            anchor="middle",
        )
        for step in range(0, steps + 1, 50)
    ]
    return parts


def _gap(
    x: float, y: float, title: str, label: str, curves: Sequence[Sequence[float]], colour: str, axis: bool
) -> list[str]:
    """Return the plot of one variant's gap."""
    width, high = 208, 112
    steps = len(curves[0])

    def at(step: int, percent: float) -> Point:
        return x + width * (step + 1) / steps, y + high / 2 * (1 - percent / LIMIT)

    parts = [text(x, y - 8, title, colour, bold=True)]
    for tick in (-2, -1, 0, 1, 2):
        height = at(0, tick)[1]
        parts.append(line((x, height), (x + width, height), "muted" if tick == 0 else "grid", width=1))
        if axis:
            parts.append(text(x - 8, height + 4, f"{tick:+d} %" if tick else "0", "muted", size=12, anchor="end"))
    upper = [at(step, max(values)) for step, values in enumerate(zip(*curves))]
    lower = [at(step, min(values)) for step, values in enumerate(zip(*curves))]
    parts += [
        polygon([*upper, *reversed(lower)], f"{colour}-solid", opacity=0.25),
        polyline([at(step, gap) for step, gap in enumerate(mean_curve(curves))], colour, width=1.5),
        text(x + width, at(0, -1.5)[1] + 4, label, colour, size=12, anchor="end", bold=True),
        text(x, y + high + 16, "0", "muted", size=12),
        text(x + width, y + high + 16, f"step {steps}", "muted", size=12, anchor="end"),
    ]
    return parts

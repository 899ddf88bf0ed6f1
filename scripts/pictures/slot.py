"""One slot over 200 training steps with one outlier: its amax, the largest amax of its history, and its scale."""

from __future__ import annotations

import math
import random
from typing import NamedTuple

import torch
from torch import nn

import fp8dist
from scripts.pictures.svg import document, line, polyline, rect, text

__all__ = ["Sample", "draw", "run"]

STEPS, OUTLIER, HISTORY = 200, 80, 64
SIZE = 200.0
"""The amax of the input at the outlier step."""

LEFT, RIGHT = 84, 736


class Sample(NamedTuple):
    """The slot after one step."""

    amax: float
    largest: float
    scale: float


def run() -> list[Sample]:
    """Train a Linear in this process, and read the slot of its input after each step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16))
    manager = fp8dist.prepare(model, fp8dist.DelayedScaling(history_len=HISTORY, margin=0))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    manager.attach(model, optimizer=optimizer)
    pattern = torch.linspace(-1, 1, 16 * 16).view(16, 16)
    jitter = random.Random(0)
    samples = []
    for step in range(1, STEPS + 1):
        amplitude = 3 * (1 + 0.4 * math.sin(step / 25)) * jitter.uniform(0.8, 1.2)
        model(pattern * (SIZE if step == OUTLIER else amplitude)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        largest = manager.slot("0", "input").amax_history.max().item()
        samples.append(Sample(manager.slot("0", "input").amax.item(), largest, manager.slot("0", "input").scale.item()))
    return samples


def draw() -> str:
    """Return the picture as SVG."""
    samples = run()
    before, low, after = (samples[step - 1].scale for step in (OUTLIER - 1, OUTLIER, OUTLIER + HISTORY))
    usual = [sample.amax for step, sample in enumerate(samples, 1) if step != OUTLIER]
    share = max(s.amax for s in samples[OUTLIER : OUTLIER + HISTORY]) / SIZE
    description = (
        f"Three plots over {STEPS} optimizer steps. The amax of the input drifts between {min(usual):.1f} and "
        f"{max(usual):.1f}, and is {SIZE:g} once, at step {OUTLIER}. The largest amax of the history is {SIZE:g} "
        f"from then on for {HISTORY} steps. The scale falls from {before:.0f} to {low:.2f} for as long, and then "
        f"returns to {after:.0f}."
    )
    first, last = _x(OUTLIER), _x(OUTLIER + HISTORY)
    return document(
        "A slot with one outlier",
        description,
        546,
        [
            text(24, 32, f"The input slot of a Linear, history_len={HISTORY}, margin=0", bold=True, size=14),
            rect(first, 58, last - first, 432, "grid", radius=0),
            text(
                (first + last) / 2,
                52,
                f"in the history for {HISTORY} steps",
                "red",
                size=12,
                anchor="middle",
                bold=True,
            ),
            *_plot(66, "amax of the step", [s.amax for s in samples], (1, 300), (1, 10, 100), "blue"),
            text(_x(OUTLIER) + 10, 82, f"step {OUTLIER}: {SIZE:g}, cast with", "blue", size=12),
            text(_x(OUTLIER) + 10, 99, "the scale before: it saturates", "blue", size=12),
            *_plot(214, "largest amax in the history", [s.largest for s in samples], (1, 300), (1, 10, 100), "orange"),
            text(_x(OUTLIER) + 10, 258, f"max of {HISTORY} steps: {SIZE:g}", "orange", size=12),
            *_plot(362, "scale = 448 / largest amax", [s.scale for s in samples], (1, 500), (1, 10, 100), "green"),
            text(
                _x(OUTLIER) + 10,
                436,
                f"{low:.2f}: inputs are cast to at\nmost {share:.1%} of FP8's range",
                "green",
                size=12,
            ),
            text(_x(OUTLIER) - 8, 414, f"{before:.0f}", "green", size=12, anchor="end"),
            text(_x(OUTLIER + HISTORY) + 8, 414, f"{after:.0f}: the outlier has left", "green", size=12),
            *(text(_x(step), 508, str(step), "muted", size=12, anchor="middle") for step in range(0, STEPS + 1, 40)),
            text((LEFT + RIGHT) / 2, 528, "optimizer step", "muted", anchor="middle"),
        ],
    )


def _x(step: float) -> float:
    return LEFT + (RIGHT - LEFT) * step / STEPS


def _plot(
    top: float, title: str, values: list[float], limits: tuple[float, float], ticks: tuple[int, ...], colour: str
) -> list[str]:
    """Return a curve over the steps, with a logarithmic value axis."""
    high = 124

    def y(value: float) -> float:
        share = math.log(value / limits[0]) / math.log(limits[1] / limits[0])
        return top + high * (1 - share)

    parts = []
    for tick in ticks:
        parts.append(line((LEFT, y(tick)), (RIGHT, y(tick)), "grid", width=1))
        parts.append(text(LEFT - 8, y(tick) + 4, str(tick), "muted", size=12, anchor="end"))
    parts.append(line((LEFT, top), (LEFT, top + high), "muted", width=1))
    parts.append(polyline([(_x(step + 1), y(value)) for step, value in enumerate(values)], colour, width=2))
    parts.append(text(LEFT + 8, top + 10, title, colour, bold=True))
    return parts

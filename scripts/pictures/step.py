"""One optimizer step on two ranks, under ``same_step`` and under ``next_step``."""

from __future__ import annotations

from typing import NamedTuple

from scripts.pictures.svg import arrow, document, line, rect, text

__all__ = ["draw"]

LEFT, RIGHT = 104, 740
LANE = 30
"""Height of a lane's bars."""

FORWARD, BACKWARD, LAUNCH, REDUCE, COMMIT, OPTIMIZER, DATA = 64, 120, 16, 76, 16, 104, 92
"""Length of each part in pixels. Not measured."""

LATER = 26
"""Delay of the end of rank 1's backward, in pixels."""


class _Bar(NamedTuple):
    """A bar in a lane. A bar that is too narrow for a label has a ``mark``, which the legend explains."""

    length: float
    colour: str
    label: str
    mark: str = ""


def draw() -> str:
    """Return the picture as SVG."""
    launch, commit = _Bar(LAUNCH, "purple", "", "L"), _Bar(COMMIT, "green", "", "C")
    after = [_Bar(OPTIMIZER, "blue", "optimizer"), _Bar(DATA, "plain", "data loading")]
    description = (
        "Two time lines of two ranks. Under same_step both ranks run forward and backward, launch the all-reduce, "
        "wait for it, commit, and only then run the optimizer, load data and begin the next forward. Under next_step "
        "the all-reduce runs while the optimizer and the data loading run, and the commit comes first in the next "
        "forward, which begins earlier by the time of the wait."
    )
    waits = (LATER + REDUCE, REDUCE)
    same = [
        [*_passes(late), launch, _Bar(wait, "red", "wait"), commit, *after] for late, wait in zip((0, LATER), waits)
    ]
    hidden = [[*_passes(late), launch, *after, commit] for late in (0, LATER)]
    start = LEFT + FORWARD + BACKWARD + LATER + LAUNCH
    return document(
        "One optimizer step under same_step and next_step",
        description,
        500,
        [
            *_section(
                28,
                'update="same_step"',
                "before the optimizer each rank waits for the slowest one and the all-reduce",
                same,
                start,
            ),
            *_section(
                216,
                'update="next_step"',
                "the all-reduce runs beside optimizer and data loading",
                hidden,
                start,
            ),
            *_difference(_end(same[1]), _end(hidden[1])),
            _legend(424),
        ],
    )


def _passes(late: float) -> list[_Bar]:
    return [_Bar(FORWARD, "plain", "forward"), _Bar(BACKWARD + late, "plain", "backward")]


def _end(bars: list[_Bar]) -> float:
    """Return the x at which the next forward begins."""
    return LEFT + sum(bar.length for bar in bars)


def _section(y: float, name: str, what: str, ranks: list[list[_Bar]], start: float) -> list[str]:
    """Return three lanes below a heading: rank 0, the network, rank 1."""
    parts = [text(24, y, name, bold=True, mono=True, size=14), text(210, y, what, "muted")]
    tops = (y + 16, y + 16 + 2 * (LANE + 14))
    for rank, (top, bars) in enumerate(zip(tops, ranks)):
        parts += [text(24, top + 20, f"rank {rank}"), *_lane(top, bars)]
    middle = y + 16 + LANE + 14
    parts += [
        text(24, middle + 20, "network"),
        line((LEFT, middle + LANE / 2), (RIGHT, middle + LANE / 2), "grid"),
        rect(start, middle + 2, REDUCE, LANE - 4, "orange", radius=13),
        text(start + REDUCE / 2, middle + 20, "all-reduce", "orange", anchor="middle", size=12),
    ]
    launches = [LEFT + FORWARD + BACKWARD + LAUNCH / 2, LEFT + FORWARD + BACKWARD + LATER + LAUNCH / 2]
    parts += [
        arrow((launches[0], tops[0] + LANE), (start + 4, middle + 8), "purple"),
        arrow((launches[1], tops[1]), (start + 4, middle + LANE - 6), "purple"),
    ]
    for top, bars in zip(tops, ranks):
        x = LEFT + sum(bar.length for bar in bars[: [bar.mark for bar in bars].index("C")]) + COMMIT / 2
        edge, near = (top + LANE, middle + 8) if top < middle else (top, middle + LANE - 6)
        if x - start - REDUCE < 40:
            parts.append(arrow((start + REDUCE - 4, near), (x - 2, edge), "orange"))
        else:
            parts.append(arrow((start + REDUCE, middle + LANE / 2), (x - 2, edge), "orange", dashed=True))
    return parts


def _lane(top: float, bars: list[_Bar]) -> list[str]:
    parts, x = [], float(LEFT)
    for bar in bars:
        ink = "card" if bar.colour == "plain" else bar.colour
        label, middle = bar.mark or bar.label, x + bar.length / 2
        parts.append(rect(x, top, bar.length, LANE, bar.colour, radius=4))
        parts.append(text(middle, top + 20, label, ink, anchor="middle", size=12, bold=bool(bar.mark)))
        x += bar.length
    parts.append(rect(x, top, RIGHT - x, LANE, "plain", radius=4))
    parts.append(text(RIGHT - 10, top + 20, "next forward", anchor="end", size=12))
    return parts


def _difference(same: float, hidden: float) -> list[str]:
    """Return the arrow below the lanes that shows how much earlier the next forward begins."""
    bottom = 216 + 16 + 3 * LANE + 2 * 14
    return [
        line((same, 28 + 16), (same, bottom + 30), "red", dashed=True),
        line((hidden, bottom), (hidden, bottom + 30), "red", dashed=True),
        arrow((same, bottom + 22), (hidden, bottom + 22), "red", width=2),
        text(
            hidden - 10,
            bottom + 26,
            "next_step hides the wait: the next forward begins this much earlier",
            "red",
            anchor="end",
        ),
    ]


def _legend(y: float) -> str:
    return (
        rect(24, y - 14, 18, 18, "purple", radius=4)
        + text(33, y, "L", "purple", anchor="middle", size=12, bold=True)
        + text(50, y, "launch: copy this step's amaxes into the message, start the all-reduce (COLLECTIVE)")
        + rect(24, y + 12, 18, 18, "green", radius=4)
        + text(33, y + 26, "C", "green", anchor="middle", size=12, bold=True)
        + text(50, y + 26, "commit: roll the histories, recompute the scales (local)")
        + text(24, y + 54, "Lengths are not to scale. The all-reduces of the gradients are left out.", "muted", size=12)
    )

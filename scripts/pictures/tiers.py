"""The tiers of the checker: when each runs, what it compares, what it costs."""

from __future__ import annotations

from typing import NamedTuple

from fp8dist.checks.localisation import MAX_EXPLAINED
from fp8dist_kernels.header import HEADER
from fp8dist_kernels.reference.content import BLOCK_BYTES
from scripts.pictures.svg import arrow, document, rect, text

__all__ = ["draw"]

HEADER_BYTES = 4 * HEADER
CHECK_BYTES = 104
"""Bytes of a clean check: 13 int64 words."""


class _Tier(NamedTuple):
    colour: str
    when: str
    compares: str
    cost: str


TIERS = (
    _Tier(
        "green",
        "every optimizer step",
        "manifest, step counter,\nall scales: in the header\nof the sync",
        f"{HEADER_BYTES} bytes,\nno collective of its own",
    ),
    _Tier(
        "blue",
        "every check_every steps,\nmanager.check(),\nfp8dist.check(…)",
        "a 128-bit digest of all\nFP8 state and of all\nreplicated parameters",
        f"one pass over the memory,\none all-reduce of {CHECK_BYTES} bytes\n(more on meshes)",
    ),
    _Tier(
        "orange",
        "when tier 1 differs",
        "a digest of each tensor\nand of each slot",
        "nothing while all is well",
    ),
    _Tier(
        "red",
        "when tier 1 differs",
        f"blocks of {BLOCK_BYTES >> 10} KiB of the\nfirst {MAX_EXPLAINED} things that differ",
        "nothing while all is well",
    ),
)
FINDS = (
    "finds: another set-up on a rank, a rank ahead or behind, a damaged scale",
    "finds: any bit that differs",
    "finds: which tensors and slots, on which ranks",
    "finds: the first differing element, both values, their distance in ULP",
)
COLUMNS = (120, 318, 530)
TOP, GAP = 56, 28
HIGH = (104, 104, 86, 86)


def draw() -> str:
    """Return the picture as SVG."""
    description = " ".join(
        f"Tier {number}: {' '.join(tier.when.split())}; compares {' '.join(tier.compares.split())}; "
        f"costs {' '.join(tier.cost.split())}; {finds}."
        for number, (tier, finds) in enumerate(zip(TIERS, FINDS))
    )
    tops = [TOP + sum(HIGH[:number]) + number * GAP for number in range(len(TIERS))]
    parts = [text(x, 38, name, "muted", bold=True) for x, name in zip(COLUMNS, ("when", "compares", "cost"))]
    for number, (tier, finds, y, high) in enumerate(zip(TIERS, FINDS, tops, HIGH)):
        parts += [
            rect(24, y, 712, high, tier.colour),
            text(42, y + high / 2 - 16, "tier", tier.colour, bold=True),
            text(42, y + high / 2 + 14, str(number), tier.colour, bold=True, size=26),
            *(text(x, y + 25, what) for x, what in zip(COLUMNS, tier[1:])),
            text(COLUMNS[0], y + high - 13, finds, tier.colour, bold=True, size=12.5),
        ]
    for number, label in ((1, "if something differs"), (2, "and then")):
        y = tops[number] + HIGH[number]
        parts += [arrow((58, y + 2), (58, y + GAP - 1), "muted"), text(72, y + 18, label, "muted", size=12)]
    return document("The tiers of the checker", description, tops[-1] + HIGH[-1] + 24, parts)

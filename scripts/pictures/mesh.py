"""The ranks that share a scale, on a mesh of 2 × 2 × 2 ranks."""

from __future__ import annotations

from scripts.pictures.svg import document, rect, text

__all__ = ["draw"]

SIZE = 2
"""Size of each axis. The axes are dp, fsdp and tp, in this order."""

CUTS = "FSDP cuts it along dim 0, TP along dim 1 (RowwiseParallel): 4 parts. DP keeps 2 copies of each."

CELL, HIGH = 158, 62


def draw() -> str:
    """Return the picture as SVG."""
    description = (
        "Eight ranks on a mesh of dp, fsdp and tp, 2 places on each axis. FSDP and tensor parallelism cut a Linear's "
        "weight into four parts; each part is on two ranks, one of each dp. All eight ranks are one group and share "
        "one scale for this weight. An expert that is on ranks 0 to 3 only has a group of these four; its counterpart "
        "on ranks 4 to 7 has another."
    )
    return document(
        "Who shares a scale on a mesh of DP, FSDP and TP",
        description,
        560,
        [
            text(24, 32, "The weight of a Linear", bold=True, size=15),
            text(24, 52, CUTS, "muted"),
            rect(24, 66, 712, 234, "blue", radius=12),
            text(40, 88, "group=mesh", "blue", bold=True, mono=True),
            text(720, 88, "one group of 8 ranks: one scale for this weight, one message", "blue", anchor="end"),
            *_half(40, 0),
            *_half(390, 1),
            text(24, 336, "The experts of a mixture", bold=True, size=15),
            text(
                24,
                356,
                "expert A lives on ranks 0 to 3, expert B on ranks 4 to 7: each has a scale of its own",
                "muted",
            ),
            text(24, 380, 'groups={"*.experts.*": expert_group}', mono=True),
            *_expert(24, "green", "A", "expert_group = ranks 0 to 3", range(4)),
            *_expert(388, "orange", "B", "expert_group = ranks 4 to 7", range(4, 8)),
            text(
                24,
                514,
                "Each rank passes the group that it is in. Each group has a message of its own, so each rank\n"
                "here takes part in two all-reduces per step: one of 8 ranks, one of 4.",
            ),
        ],
    )


def _half(x: float, dp: int) -> list[str]:
    """Return the ranks at one position of the dp axis."""
    parts = [text(x + 2, 116, f"dp = {dp}", bold=True)]
    for fsdp in range(SIZE):
        for tp in range(SIZE):
            rank = dp * SIZE * SIZE + fsdp * SIZE + tp
            left, top = x + tp * (CELL + 14), 126 + fsdp * (HIGH + 14)
            parts += [
                rect(left, top, CELL, HIGH, "card"),
                text(left + 12, top + 26, f"rank {rank}", bold=True),
                text(left + 12, top + 46, f"fsdp {fsdp}, tp {tp}", "muted", size=12),
                *_weight(left + CELL - 48, top + 13, fsdp, tp),
            ]
    note = "the same 4 parts again" if dp else "squares: which part of the weight a rank holds"
    parts.append(text(x + 2, 288, note, "muted", size=12))
    return parts


def _weight(x: float, y: float, row: int, column: int) -> list[str]:
    """Return a square of four cells with one cell filled."""
    places = [(i, j) for i in range(SIZE) for j in range(SIZE)]
    return [
        *(rect(x + 18 * j, y + 18 * i, 18, 18, "grid", radius=0) for i, j in places),
        rect(x + 18 * column, y + 18 * row, 18, 18, "blue", radius=0),
        rect(x + 18 * column + 4, y + 18 * row + 4, 10, 10, "blue-solid", radius=0),
    ]


def _expert(x: float, colour: str, name: str, group: str, ranks: range) -> list[str]:
    parts = [
        rect(x, 394, 348, 94, colour, radius=12),
        text(x + 16, 417, f"expert {name}", colour, bold=True),
        text(x + 332, 417, group, colour, anchor="end"),
    ]
    for place, rank in enumerate(ranks):
        parts += [
            rect(x + 16 + 80 * place, 430, 72, 42, "card"),
            text(x + 52 + 80 * place, 456, f"rank {rank}", anchor="middle", bold=True),
        ]
    return parts

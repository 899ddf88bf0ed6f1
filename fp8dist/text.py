"""Text for messages: names, ranks, kinds and tables."""

from __future__ import annotations

from collections.abc import Container, Sequence

__all__ = ["aligned", "first_few", "plural", "ranks_text"]

_SHOWN_RANKS = 8
"""Ranks that are listed before the rest is only counted."""


def first_few(names: Sequence[object], most: int = 4, none: str = "none") -> str:
    """Return the first ``most`` names as text, and how many more there are."""
    shown = ", ".join(map(str, names[:most])) or none
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ranks as text: the first few, and how many more there are."""
    return first_few(ranks, _SHOWN_RANKS, none="")


def aligned(rows: Sequence[Sequence[str]], right: Container[int] = ()) -> list[str]:
    """Return one line per row of a table. Columns are left-aligned, except for those in ``right``."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [
        "  ".join(f"{cell:{'>' if i in right else '<'}{widths[i]}}" for i, cell in enumerate(row)).rstrip()
        for row in rows
    ]


def plural(kind: str) -> str:
    """Return the plural of the name of a kind."""
    irregular = {"amax": "amaxes", "cold": "cold flags", "counters": "counters", "history": "histories"}
    return irregular.get(kind, "optimizer states" if kind == "optimizer" else f"{kind}s")

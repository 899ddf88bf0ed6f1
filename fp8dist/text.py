"""Names, ranks, kinds and tables as a message says them."""

from __future__ import annotations

from collections.abc import Container, Sequence

__all__ = ["aligned", "first_few", "plural", "ranks_text"]

_SHOWN_RANKS = 8
"""Ranks that are named one by one before the rest is counted."""


def first_few(names: Sequence[object], most: int = 4, none: str = "none") -> str:
    """Names for a message: so many of them, and how many more there are."""
    shown = ", ".join(map(str, names[:most])) or none
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks for a person; many of them are counted."""
    return first_few(ranks, _SHOWN_RANKS, none="")


def aligned(rows: Sequence[Sequence[str]], right: Container[int] = ()) -> list[str]:
    """A line for each row of a table, its columns to the left, or to the ``right``."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [
        "  ".join(f"{cell:{'>' if i in right else '<'}{widths[i]}}" for i, cell in enumerate(row)).rstrip()
        for row in rows
    ]


def plural(kind: str) -> str:
    """Of the name of a kind."""
    irregular = {"amax": "amaxes", "cold": "cold flags", "counters": "counters", "history": "histories"}
    return irregular.get(kind, "optimizer states" if kind == "optimizer" else f"{kind}s")

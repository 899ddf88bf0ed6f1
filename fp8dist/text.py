"""Names, ranks and kinds as a message says them."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["first_few", "plural", "ranks_text"]

_SHOWN_RANKS = 8
"""Ranks that are named one by one before the rest is counted."""


def first_few(names: Sequence[object]) -> str:
    """Names for a message: four of them, and how many more there are."""
    if not names:
        return "none"
    shown = ", ".join(map(str, names[:4]))
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks for a person; many of them are counted."""
    shown = ", ".join(map(str, ranks[:_SHOWN_RANKS]))
    return shown if len(ranks) <= _SHOWN_RANKS else f"{shown} and {len(ranks) - _SHOWN_RANKS} more"


def plural(kind: str) -> str:
    """Of the name of a kind."""
    irregular = {"amax": "amaxes", "cold": "cold flags", "counters": "counters", "history": "histories"}
    return irregular.get(kind, "optimizer states" if kind == "optimizer" else f"{kind}s")

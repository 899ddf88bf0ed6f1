"""Markdown tables."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["NOT_YET", "table"]

NOT_YET = "not measured yet"
"""What stands in a table for a figure that there is not."""


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table, with its last newline."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |\n" for line in lines)

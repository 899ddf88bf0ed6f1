"""Markdown tables."""

from __future__ import annotations

from collections.abc import Sequence

NOT_YET = "not measured yet"
"""Table cell for a missing figure."""


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table, with a trailing newline. Without rows it says that nothing was measured."""
    lines = [head, ["---"] * len(head), *(rows or [[NOT_YET, *["-"] * (len(head) - 1)]])]
    return "".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |\n" for line in lines)

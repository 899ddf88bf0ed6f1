"""Text for messages: names, ranks, kinds and tables."""

from __future__ import annotations

import re
from collections.abc import Container, Sequence

__all__ = ["aligned", "columns", "first_few", "plural", "printable", "ranks_text", "shortened", "size_text", "wrapped"]

_SHOWN_RANKS = 8
"""Ranks that are listed before the rest is only counted."""


def first_few(names: Sequence[object], most: int = 4, none: str = "none") -> str:
    """Return the first ``most`` names as text, and how many more there are."""
    shown = ", ".join(map(str, names[:most])) or none
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ranks as text: the first few, and how many more there are."""
    return first_few(ranks, _SHOWN_RANKS, none="")


def size_text(count: int) -> str:
    """Return a number of bytes as text, with three digits: "1.25 GB"."""
    size, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB", "PB"):
        if size < 999.5:
            break
        size, unit = size / 1000, larger
    return f"{size:.3g} {unit}"


def aligned(rows: Sequence[Sequence[str]], right: Container[int] = ()) -> list[str]:
    """Return one line per row of a table. Columns are left-aligned, except for those in ``right``."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [
        "  ".join(f"{cell:{'>' if i in right else '<'}{widths[i]}}" for i, cell in enumerate(row)).rstrip()
        for row in rows
    ]


def columns(rows: Sequence[Sequence[str]], width: int) -> tuple[list[int], list[list[str]]]:
    """Return (width of each column, lines of each row) of a table. Cells are wrapped, so that it is ``width`` wide.

    The widest columns become narrower first, and only columns without room to break at a separator are broken inside a
    word. Nothing is cut.
    """
    widths = [min(max(map(len, column)), width) for column in zip(*rows)]
    least = [max(len(piece.rstrip()) for cell in column for piece in _pieces(cell)) for column in zip(*rows)]
    while sum(widths) + 2 * (len(widths) - 1) > width and max(widths) > 1:
        roomy = [i for i, least_of_column in enumerate(least) if widths[i] > least_of_column] or range(len(widths))
        widths[max(roomy, key=widths.__getitem__)] -= 1
    lines = []
    for row in rows:
        parts = [wrapped(cell, w) for cell, w in zip(row, widths)]
        lines.append(
            [
                "  ".join(f"{part[i] if i < len(part) else '':<{w}}" for part, w in zip(parts, widths)).rstrip()
                for i in range(max(map(len, parts)))
            ]
        )
    return widths, lines


def wrapped(text: str, width: int) -> list[str]:
    """Return the text as lines of at most ``width`` characters, broken after spaces and separators, else anywhere."""
    lines = [""]
    for piece in _pieces(text):
        if lines[-1] and len(lines[-1]) + len(piece.rstrip()) > width:
            lines.append("")
        while len(piece.rstrip()) > width:
            lines[-1:] = [piece[:width], ""]
            piece = piece[width:]
        lines[-1] += piece
    return [line.rstrip() for line in lines]


def _pieces(text: str) -> list[str]:
    """Return the parts of a text between which a line may end. Numbers have one."""
    found = []
    for word in re.findall(r"\S+\s*|^\s+", text) or [""]:
        try:
            complex(word.strip().strip(",;"))
            found.append(word)
        except ValueError:
            found += re.findall(r"[^./_:,-]*[./_:,-]+\s*|[^./_:,-]+", word)
    return found


def plural(kind: str) -> str:
    """Return the plural of the name of a kind."""
    irregular = {"amax": "amaxes", "cold": "cold flags", "counters": "counters", "history": "histories"}
    return irregular.get(kind, "optimizer states" if kind == "optimizer" else f"{kind}s")


def printable(name: str) -> str:
    """Return the name with unprintable characters escaped. Names from files may contain anything."""
    return name if name.isprintable() else name.encode("unicode_escape").decode("ascii")


def shortened(text: str, most: int = 60) -> str:
    """Return the text, with its middle replaced by "…" if it is longer than ``most`` characters."""
    if len(text) <= most:
        return text
    head = (most - 1) // 2
    return f"{text[:head]}…{text[len(text) - (most - 1 - head) :]}" if most > 0 else ""

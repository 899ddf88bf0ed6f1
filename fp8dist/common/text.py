"""Text for messages: lists of names and ranks, sizes, plurals, tables. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Container, Sequence

_SHOWN_RANKS = 8
"""The most ranks that a text lists. The rest is counted."""


def first_few(names: Sequence[object], most: int = 4, none: str = "none") -> str:
    """Return the first ``most`` names as text, and how many more there are: "a, b, c, d and 3 more". ``none``: the text
    for no names."""
    shown = ", ".join(map(str, names[:most])) or none
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ranks as text: the first eight, and how many more there are."""
    return first_few(ranks, _SHOWN_RANKS, none="")


def placed(rank: object, microbatch: object) -> str:
    """Return where something happened, as the end of a text: ", rank 3, microbatch 0". None: not known, left out."""
    known = (("rank", rank), ("microbatch", microbatch))
    return "".join(f", {name} {number}" for name, number in known if number is not None)


def dtype_name(dtype: object) -> str:
    """Return the name of a dtype or a layout of torch, such as "bfloat16". (This module does not import torch.)"""
    return str(dtype).removeprefix("torch.")


def size_text(count: int) -> str:
    """Return a number of bytes as text with three digits: "1.25 GB". 1 kB is 1000 bytes."""
    size, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB", "PB"):
        if size < 999.5:
            break
        size, unit = size / 1000, larger
    return f"{size:.3g} {unit}"


def aligned(rows: Sequence[Sequence[str]], right: Container[int] = ()) -> list[str]:
    """Return one line per row of a table. ``right``: indices of the columns to align right; others are left-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [
        "  ".join(f"{cell:{'>' if i in right else '<'}{widths[i]}}" for i, cell in enumerate(row)).rstrip()
        for row in rows
    ]


def columns(rows: Sequence[Sequence[str]], width: int) -> tuple[list[int], list[list[str]]]:
    """Wrap the cells of a table so that its lines have at most ``width`` characters. Nothing is cut.

    The widest columns become narrower first. Words are broken at separators, and inside only if that is not enough.

    Returns:
        The width of each column, and the lines of each row.
    """
    widths = [min(max(map(len, column)), width) for column in zip(*rows)]
    # Width of the longest piece that has no separator, of each column.
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
    """Return the pieces of a text between which a line may end: after spaces and separators. A number is one piece."""
    found = []
    for word in re.findall(r"\S+\s*|^\s+", text) or [""]:
        try:
            complex(word.strip().strip(",;"))
            found.append(word)
        except ValueError:
            found += re.findall(r"[^./_:,-]*[./_:,-]+\s*|[^./_:,-]+", word)
    return found


def plural(kind: str) -> str:
    """Return the plural of a kind of finding or thing: "parameters", "optimizer states"."""
    irregular = {"amax": "amaxes", "cold": "cold flags", "counters": "counters", "history": "histories"}
    return irregular.get(kind, "optimizer states" if kind == "optimizer" else f"{kind}s")


def printable(name: str) -> str:
    """Return the name with unprintable characters escaped: a name from a file may hold any, also control characters."""
    return name if name.isprintable() else name.encode("unicode_escape").decode("ascii")


def shortened(text: str, most: int = 60) -> str:
    """Return the text with at most ``most`` characters: "…" replaces the middle of a longer one."""
    if len(text) <= most:
        return text
    head = (most - 1) // 2
    return f"{text[:head]}…{text[len(text) - (most - 1 - head) :]}" if most > 0 else ""

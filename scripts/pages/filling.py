"""Generated parts of pages, between the lines ``<!-- made: NAME -->`` and ``<!-- end of NAME -->``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

Parts = Mapping[str, Callable[[], str]]
"""The function that generates each part, by the part's name."""

_PART = re.compile(r"^(<!-- made: (?P<name>.+?) -->\n)(?P<text>.*?)(^<!-- end of (?P=name) -->$)", re.M | re.S)
_MARKER = re.compile(r"^<!-- (made:|end of) (.+?) -->$", re.M)


def pages(root: Path = ROOT) -> list[Path]:
    """Return the pages that may have generated parts."""
    top = [path for path in (root / "README.md", root / "ARCHITECTURE.md") if path.exists()]
    return [*top, *sorted((root / "docs").rglob("*.md"))]


def names(page: str) -> list[str]:
    """Return the names of a page's generated parts, in order."""
    return [part["name"] for part in _PART.finditer(page)]


def filled(page: str, parts: Parts) -> str:
    """Return the page's text with these parts regenerated. Other parts stay unchanged."""

    def made(part: re.Match[str]) -> str:
        if part["name"] not in parts:
            return part[0]
        text = parts[part["name"]]().strip("\n")
        return f"{part[1]}\n{text}\n\n{part[4]}" if text else f"{part[1]}{part[4]}"

    return _PART.sub(made, page)


def problems(page: str, known: Iterable[str]) -> list[str]:
    """Return the problems of a page's markers: unknown names, and parts without a beginning or an end."""
    complete, available = names(page), set(known)
    found = [f"there is no made part {name!r}" for name in complete if name not in available]
    for kind, name in _MARKER.findall(page):
        if name not in complete:
            found.append(f"{kind} {name} has no {'end' if kind == 'made:' else 'beginning'}")
    return found

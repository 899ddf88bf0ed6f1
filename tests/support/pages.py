"""Reads the pages of the manual and their code blocks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
TOP = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")

_BLOCK = re.compile(
    r"(?:^ *<!-- run: (?P<how>[^\n]*) -->\n)?"
    r"^(?P<indent> *)```(?P<language>\w+)\n(?P<text>.*?)^ *```\n"
    r"(?:(?:(?!^ *```).)*?<!-- output -->\n *```text\n(?P<output>.*?)^ *```\n)?",
    re.M | re.S,
)


MADE = re.compile(r"<!-- made: [^\n]* -->.*?<!-- end of [^\n]* -->\n", re.S)
"""Parts that scripts make."""


class Block(NamedTuple):
    """A code block. ``how``: the text of the comment before it. ``output``: what it prints, if the page says so."""

    page: str
    line: int
    language: str
    text: str
    how: str
    output: str | None


def pages() -> dict[str, str]:
    """Return the text of each page, by its path from the root."""
    paths = [*(ROOT / name for name in TOP), *sorted((ROOT / "docs").rglob("*.md"))]
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in paths}


def blocks(page: str, text: str) -> list[Block]:
    """Return the code blocks of a page."""
    return [
        Block(
            page,
            text.count("\n", 0, match.start("text")) + 1,
            match["language"],
            re.sub(f"^{match['indent']}", "", match["text"], flags=re.M),
            match["how"] or "",
            match["output"],
        )
        for match in _BLOCK.finditer(text)
    ]

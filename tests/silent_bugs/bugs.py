"""The list of bugs, as ``bugs.md`` beside this file has it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

__all__ = ["BUGS", "Bug"]


class Bug(NamedTuple):
    """``name``: also of the program. ``source``: project and number of the issue or pull request."""

    number: int
    name: str
    source: str
    link: str
    year: int
    kind: str
    what: str

    @property
    def afterwards(self) -> bool:
        """True for the ten that were drawn after the others had been run."""
        return self.number > 40


_ROW = re.compile(r"\| (\d+) \| (\w+) \| \[(.+?)\]\((.+?)\) \| (\d+) \| (.+?) \| (.+?) \|")

BUGS: dict[str, Bug] = {
    name: Bug(int(number), name, source, link, int(year), kind, what)
    for number, name, source, link, year, kind, what in _ROW.findall(Path(__file__).with_name("bugs.md").read_text())
}

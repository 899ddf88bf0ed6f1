"""Reference tables of environment variables, from the code that reads them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from pathlib import Path

from fp8dist import prepare
from fp8dist.cli import launch
from fp8dist.state.settings import VARIABLES
from scripts.benchmarks.markdown import table
from scripts.pages.filling import ROOT

SCRIPT = Path("launch") / "torchrun.sh"
_NAME, _MEANING, _DEFAULT = slice(4, 18), slice(18, 41), slice(41, None)
"""The columns of the launcher's help."""


def of_library() -> str:
    """Return a table of all ``FP8DIST_…`` variables, from ``fp8dist/state/settings.py``.

    The table of arguments has the meaning of those that are arguments of ``prepare``, too.
    """
    arguments = inspect.signature(prepare).parameters
    rows = []
    for name, (default, meaning) in VARIABLES.items():
        argument = name.removeprefix("FP8DIST_").lower()
        rows.append([f"`{name}`", default, f"argument `{argument}`" if argument in arguments else meaning])
    return table(["variable", "default", "meaning"], rows)


def of_launcher() -> str:
    """Return a table of the variables that ``fp8dist launch`` reads, from its help."""
    return _table(launcher_variables())


def of_script() -> str:
    """Return a table of the further variables that ``launch/torchrun.sh`` reads, from its comment."""
    comment = [line[2:] for line in (ROOT / SCRIPT).read_text(encoding="utf-8").splitlines() if line.startswith("# ")]
    return _table(_parsed([line for line in comment if re.match(r" {4}[A-Z]+ {2,}\S.* {2,}default: ", line)]))


def launcher_variables() -> list[tuple[str, str, str]]:
    """Return (name, meaning, default) of each variable in the launcher's help."""
    help_ = launch.__doc__ or ""
    return _parsed(help_.split("\nEnvironment (", 1)[1].split("\n\n", 1)[0].splitlines()[1:])


def _parsed(lines: Sequence[str]) -> list[tuple[str, str, str]]:
    rows: list[list[list[str]]] = []
    for line in lines:
        cells = [line[columns].strip() for columns in (_NAME, _MEANING, _DEFAULT)]
        if cells[0]:
            rows.append([[], [], []])
        for column, cell in zip(rows[-1], cells):
            column += [cell] if cell else []
    return [
        (" ".join(name), " ".join(meaning), " ".join(rest).removeprefix("default: ")) for name, meaning, rest in rows
    ]


def _table(rows: Sequence[tuple[str, str, str]]) -> str:
    """Return a table. Paths, patterns and variables become code; meanings start with a capital."""
    names = "|".join(name for name, _, _ in rows)
    code = re.compile(rf"\S*[*/]\S*[^\s,.;]|\b(?:{names}|node-NODE_RANK)\b")

    def sentence(text: str) -> str:
        return code.sub(r"`\g<0>`", f"{text[:1].upper()}{text[1:]}")

    texts = [[f"`{name}`", code.sub(r"`\g<0>`", default), sentence(meaning)] for name, meaning, default in rows]
    return table(["variable", "default", "meaning"], texts)

"""The table of public silent bugs, and what it counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from scripts import results_files
from scripts.benchmarks.markdown import table
from tests.silent_bugs.bugs import BUGS
from tests.silent_bugs.outcomes import ARGUMENT, DEFAULT, NOT_VISIBLE, PROGRAMS, TOOL

__all__ = ["count", "front", "of_bugs", "parts_of"]

Results = dict[str, Any]


def parts_of(root: Path) -> Mapping[str, Callable[[], str]]:
    """Return the parts of the page, from the published results."""
    results = results_files.load("silent_bugs", root) or {"rows": []}
    return {"silent-bugs": partial(of_bugs, results), "silent-counts": partial(of_counts, results)}


def _found(results: Results, *ways: str) -> list[str]:
    return [row["name"] for row in results["rows"] if row["way"] in (ways or (DEFAULT, ARGUMENT, TOOL))]


def count(results: Results) -> str:
    """Return how many are found."""
    return f"{len(_found(results))} of {len(results['rows'])}"


def front(root: Path) -> str:
    """Return the cell of README's table."""
    results = results_files.load("silent_bugs", root)
    if results is None:
        return "not counted yet"
    default, argument, tool = (len(_found(results, way)) for way in (DEFAULT, ARGUMENT, TOOL))
    ways = f"{default} by default, {argument} with an argument, {tool} by a tool"
    return f"[{count(results)}](docs/design/silent-bugs.md): {ways}"


def of_counts(results: Results) -> str:
    """Return the table of what is found, by whether ranks differ."""
    rows = []
    for text, alike in (("ranks differ", False), ("alike on all ranks", True)):
        names = [row["name"] for row in results["rows"] if PROGRAMS[row["name"]].alike == alike]
        ways = [len({*names} & {*_found(results, way)}) for way in (DEFAULT, ARGUMENT, TOOL, NOT_VISIBLE)]
        rows.append([text, str(len(names)), *map(str, ways)])
    return table(["", "bugs", DEFAULT, ARGUMENT, TOOL, NOT_VISIBLE], rows)


def of_bugs(results: Results) -> str:
    """Return the table of all bugs, one a row."""
    rows = []
    for row in results["rows"]:
        bug, program = BUGS[row["name"]], PROGRAMS[row["name"]]
        outcome = f"`{row['watch']}`" if row["watch"] else f"**{row['way']}**"
        if row["way"] == NOT_VISIBLE:
            outcome = f"{NOT_VISIBLE}: {program.unseen}"
        found = "-" if row["found"] is None else str(row["found"])
        first = {True: "yes", False: "no", None: "-"}[row["cause_first"]]
        source = f"[{bug.source}]({bug.link}), {bug.year}"
        what = f"{bug.kind}: {bug.name.replace('_', ' ')}"
        rows.append([str(bug.number), source, what, outcome, str(row["damage"]), found, first, row["plain"]])
    head = ["", "source", "bug", "found", "damage in step", "found in step", "cause in first row", "plain PyTorch"]
    return table(head, rows)

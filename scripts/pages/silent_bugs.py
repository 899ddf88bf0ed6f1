"""The table of public silent bugs, and what it counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from scripts.benchmarks.markdown import table
from tests.silent_bugs.bugs import BUGS
from tests.silent_bugs.outcomes import ARGUMENT, DEFAULT, NOT_VISIBLE, PROGRAMS, TOOL

Results = dict[str, Any]


def _rows(results: Results, afterwards: bool) -> list[dict[str, Any]]:
    """Return the rows of the first list, or of those drawn ``afterwards``."""
    return [row for row in results["rows"] if BUGS[row["name"]].afterwards == afterwards]


def _found(rows: list[dict[str, Any]], *ways: str) -> int:
    return sum(row["way"] in (ways or (DEFAULT, ARGUMENT, TOOL)) for row in rows)


def counts(results: Results) -> tuple[str, str]:
    """Return how many are found of the first list, and of those drawn afterwards."""
    first, second = (f"{_found(rows)} of {len(rows)}" for rows in (_rows(results, False), _rows(results, True)))
    return first, second


def front(results: Results) -> str:
    """Return the cell of README's table."""
    if not results["rows"]:
        return "not counted yet"
    default, argument, tool = (_found(_rows(results, False), way) for way in (DEFAULT, ARGUMENT, TOOL))
    ways = f"{default} by default, {argument} with an argument, {tool} by a tool"
    first, second = counts(results)
    return f"[{first}](docs/design/silent-bugs.md): {ways}; {second} drawn afterwards"


def of_counts(results: Results) -> str:
    """Return the table of what is found, by whether ranks differ."""
    rows = []
    for of, alike, some in _groups(results):
        ways = [_found(some, way) for way in (DEFAULT, ARGUMENT, TOOL, NOT_VISIBLE)]
        rows.append([f"{of}: {'alike on all ranks' if alike else 'ranks differ'}", str(len(some)), *map(str, ways)])
    return table(["", "bugs", DEFAULT, ARGUMENT, TOOL, NOT_VISIBLE], rows)


def of_alike(results: Results) -> str:
    """Return the table of what sees the bugs that are alike on all ranks."""
    rows = []
    for of, alike, some in _groups(results):
        if alike:
            counted = Counter(map(_seen_by, some))
            rows.append([of, str(len(some)), *(str(counted[way]) for way in _SEEN_BY)])
    return table(["", "alike on all ranks", *_SEEN_BY], rows)


def _groups(results: Results) -> Iterator[tuple[str, bool, list[dict[str, Any]]]]:
    """Yield (list, whether the bug is alike on all ranks, the rows of these bugs)."""
    for of, afterwards in (("the forty", False), ("the ten", True)):
        for alike in (False, True):
            yield of, alike, [row for row in _rows(results, afterwards) if PROGRAMS[row["name"]].alike == alike]


def _seen_by(row: Results) -> str:
    """Return what sees a bug that no comparison of replicas can see."""
    if row["way"] == DEFAULT:
        return "coherence"
    watch = row["watch"]
    return "values" if "values" in watch else watch if watch in _SEEN_BY else _OTHERS[not watch]


_OTHERS = ("other tools", NOT_VISIBLE)
_SEEN_BY = ("coherence", "values", "exact", *_OTHERS)


def of_bugs(results: Results, afterwards: bool = False) -> str:
    """Return the table of the forty bugs, one a row, or of those drawn ``afterwards``."""
    rows = []
    for row in _rows(results, afterwards):
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

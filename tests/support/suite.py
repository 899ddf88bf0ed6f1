"""What the suite needs, and which part of it runs.

CPU time is that of the tests and of the processes that they start: a sum per folder, and the tests that need most. The
last report of a test carries what the worker's process tree used since the test before it. A busy machine makes tests
take longer, but needs hardly more CPU time for them, so the limit is one of CPU time.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

__all__ = ["HOURS", "NIGHTLY", "PROPERTY", "Spent", "crossed", "few", "in_tenth", "lines"]

NIGHTLY = (pytest.mark.long, pytest.mark.nightly)
"""Marks of a case that need not run for every change, because another one is of the same behaviour."""

HOURS = (pytest.mark.nightly, pytest.mark.hours)
"""Marks of a long test that would not end in time in CI's tenth either."""

PROPERTY = "cpu_s"
"""Name of the user property of a report."""

_TICKS = os.sysconf("SC_CLK_TCK")


def few(cases: Iterable[Any], *kept: Any) -> list[Any]:
    """Return ``cases`` for ``parametrize``: those in ``kept`` run for every change, the others nightly. A tuple has a
    value for each argument."""
    of = [case if isinstance(case, tuple) else (case,) for case in cases]
    few = [case if isinstance(case, tuple) else (case,) for case in kept]
    assert all(case in of for case in few), few
    return [pytest.param(*case, marks=() if case in few else NIGHTLY) for case in of]


def crossed(**axes: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrise with all combinations of values. As many run for every change as make each value come up; the others
    are nightly."""
    values = [list(of) for of in axes.values()]
    kept = {tuple(i % len(of) for of in values) for i in range(max(map(len, values)))}
    cases = [
        pytest.param(*(of[i] for of, i in zip(values, places)), marks=() if places in kept else NIGHTLY)
        for places in itertools.product(*(range(len(of)) for of in values))
    ]
    return pytest.mark.parametrize(tuple(axes), cases)


def in_tenth(node: str, number: int) -> bool:
    """Return True if a test is of this tenth of all. Ten numbers in a row make all tests, each once."""
    return zlib.crc32(node.encode()) % 10 == number % 10


def of_tree(pid: int) -> float:
    """Return the CPU time of a process, of its living descendants, and of those that have been waited for, in s."""
    total = 0.0
    with contextlib.suppress(OSError):  # The process has ended: its parent counts it now, or init.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += sum(map(int, fields[11:15])) / _TICKS  # utime, stime, cutime, cstime.
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                total += sum(of_tree(int(child)) for child in (thread / "children").read_text().split())
    return total


class Spent:
    """A worker's CPU time since the last call."""

    def __init__(self) -> None:
        self._before = 0.0

    def since_last(self) -> float:
        """Return the CPU time since the last call, in s; at least 0: a child may end without a parent that counts."""
        now = of_tree(os.getpid())
        spent, self._before = max(0.0, now - self._before), now
        return spent


def lines(spent: Mapping[str, float], most: int = 10) -> list[str]:
    """Return a table: the CPU time per folder of tests, the sum, and the ``most`` tests that needed most. ``spent``:
    CPU time in s, by node id."""
    rooms: dict[str, float] = {}
    for node, seconds in spent.items():
        room = "/".join(node.partition("::")[0].split("/")[:-1]) or "."
        rooms[room] = rooms.get(room, 0.0) + seconds
    rows = sorted(rooms.items(), key=_seconds, reverse=True)
    top = sorted(spent.items(), key=_seconds, reverse=True)[:most]
    return [*map(_row, [*rows, ("all", sum(spent.values()))]), "", *map(_row, top)]


def _seconds(row: tuple[str, float]) -> float:
    return row[1]


def _row(row: Sequence[object]) -> str:
    return f"{row[1]:8.1f} s  {row[0]}"

"""What fp8dist reports of each program, computed: by default, with an argument, by a tool, or nothing."""

from __future__ import annotations

import importlib
import itertools
import re
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from tests.silent_bugs.job import ARGUMENTS, PLAIN, PROGRAMS, WATCHES, Program, Ran, run
from tests.support.ranks import RankPool, RanksFailed

for _kind in ("averages", "computing", "copies", "data", "files", "fp8_state", "optimizers"):
    importlib.import_module(f"tests.silent_bugs.{_kind}")

DEFAULT, ARGUMENT, TOOL, NOT_VISIBLE = "by default", "with an argument", "by a tool", "not visible"


class Outcome(NamedTuple):
    """``watch``: the argument or tool that found the bug; several are joined by " + ". ``damage``, ``found``: the step
    that the bug changed first, and the one in which it was reported. ``cause_first``: the first row of the report is
    the cause; None: there are no rows. ``plain``: what plain PyTorch does."""

    way: str
    watch: str
    damage: int
    found: int | None
    cause_first: bool | None
    plain: str


Pools = Mapping[int, RankPool]


def on_rank(name: str, bug: bool, on: frozenset[str]) -> Ran:
    """Run a program on this rank, which has imported all of them with this function."""
    return run(name, bug, on)


def _run(pools: Pools, name: str, bug: bool, *on: str) -> list[Ran]:
    ranks = PROGRAMS[name].ranks
    if ranks == 1:
        return [run(name, bug, frozenset(on))]
    ran: list[Ran] = pools[ranks].run(on_rank, name, bug, frozenset(on), timeout=60)
    return ran


def damage(healthy: list[Ran], buggy: list[Ran]) -> int:
    """Return the first step after which the bug has changed a result."""
    for results in zip(*(zip(h.seen, b.seen, strict=True) for h, b in zip(healthy, buggy)), strict=True):
        if max(float(np.linalg.norm(b - h) / np.linalg.norm(h)) for (_, h), (_, b) in results) > 1e-5:
            return results[0][0][0]
    raise AssertionError("the bug changes nothing")


def _texts(ran: list[Ran]) -> list[str]:
    return [text for one in ran for text in one.texts]


def is_cause_first(program: Program, ran: list[Ran]) -> bool | None:
    """Return whether the first row of the report is the cause.

    Raises:
        AssertionError: a row is about something else.
    """
    rows = next((one.rows for one in ran if one.rows), [])
    if not rows:
        assert any(re.search(program.cause, text) for text in _texts(ran)), "\n".join(_texts(ran))
        return None
    assert not (wrong := [row for row in rows if not re.search(program.also, row)]), wrong
    return re.search(program.cause, rows[0]) is not None


def plain_outcome(pools: Pools, name: str) -> tuple[int, str]:
    """Return the step that the bug changes first in plain PyTorch, and what PyTorch does."""
    healthy, again = _run(pools, name, False, PLAIN), _run(pools, name, False, PLAIN)
    same = [np.array_equal(a, b) for h, o in zip(healthy, again) for (_, a), (_, b) in zip(h.seen, o.seen)]
    assert all(same), "the healthy run does not repeat"
    try:
        return damage(healthy, _run(pools, name, True, PLAIN)), "nothing"
    except RanksFailed as failed:
        return 0, "a hang" if "not done within" in str(failed) else "an error"


def smallest_set(pools: Pools, name: str) -> tuple[tuple[str, ...], list[Ran]]:
    """Return the smallest set of watches that finds a bug, and what it found; of several the first. If nothing finds
    it, or nothing is needed, the set is empty."""
    ran = _run(pools, name, True)
    if _texts(ran) or not _texts(_run(pools, name, True, *WATCHES)):
        return (), ran
    for size in range(1, len(WATCHES) + 1):
        for on in itertools.combinations(WATCHES, size):
            if _texts(ran := _run(pools, name, True, *on)):
                return on, ran
    raise AssertionError("what all watches together find does not repeat")


def known_set(pools: Pools, name: str, known: tuple[str, ...]) -> tuple[tuple[str, ...], list[Ran]]:
    """Return what ``smallest_set`` does if its set is ``known``, without the search for a smaller one."""
    ran = _run(pools, name, True)
    if _texts(ran):
        return (), ran
    on = known or WATCHES
    ran = _run(pools, name, True, *on)
    return (on if _texts(ran) else ()), ran


def outcome(pools: Pools, name: str, known: tuple[str, ...] | None = None) -> Outcome:
    """Return what is reported of a program. ``known``: the smallest set of watches; None: searched for.

    Raises:
        AssertionError: the bug changes nothing, a healthy run is not silent, or a finding names something else.
    """
    damaged, plain = plain_outcome(pools, name)
    for on in ((), WATCHES):
        assert _texts(healthy := _run(pools, name, False, *on)) == [], _texts(healthy)
    on, ran = smallest_set(pools, name) if known is None else known_set(pools, name, known)
    if not _texts(ran):
        return Outcome(NOT_VISIBLE, "", damaged, None, None, plain)
    way = DEFAULT if not on else ARGUMENT if {*on} <= {*ARGUMENTS} else TOOL
    found = max(one.step for one in ran)
    return Outcome(way, " + ".join(on), damaged, found, is_cause_first(PROGRAMS[name], ran), plain)

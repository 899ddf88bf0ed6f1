"""What fp8dist reports of forty published silent bugs is as the manual's table has it.

``scripts/silent-bugs`` makes the table anew. A change that finds less, or other tensors, fails here.
"""

from __future__ import annotations

import inspect
from collections import Counter
from dataclasses import replace

import pytest

from scripts import results_files
from tests.silent_bugs import outcomes
from tests.silent_bugs.bugs import BUGS
from tests.silent_bugs.job import PLAIN, PROGRAMS, Ran, run
from tests.silent_bugs.outcomes import NOT_VISIBLE, Outcome, outcome
from tests.support.ranks import RankPool

PUBLISHED = {row.pop("name"): Outcome(**row) for row in results_files.load("silent_bugs")["rows"]}

SHORT = {next(name for name, bug in BUGS.items() if bug.kind == kind) for kind in {bug.kind for bug in BUGS.values()}}
"""One of each kind. The others are long."""


def _of(ranks: int) -> list[object]:
    names = [name for name in BUGS if PROGRAMS[name].ranks == ranks]
    return [pytest.param(name, marks=[] if name in SHORT else [pytest.mark.long]) for name in names]


@pytest.mark.parametrize("name", _of(1))
def test_on_one_rank(name: str) -> None:
    assert outcome({}, name) == PUBLISHED[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", _of(2))
def test_on_two_ranks(two_ranks: RankPool, name: str) -> None:
    assert outcome({2: two_ranks}, name) == PUBLISHED[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", _of(3))
def test_on_three_ranks(three_ranks: RankPool, name: str) -> None:
    assert outcome({3: three_ranks}, name) == PUBLISHED[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", _of(4))
def test_on_four_ranks(four_ranks: RankPool, name: str) -> None:
    assert outcome({4: four_ranks}, name) == PUBLISHED[name]


def test_each_bug_has_a_source_and_a_program() -> None:
    assert [bug.number for bug in BUGS.values()] == [*range(1, 41)]
    assert min(Counter(bug.kind for bug in BUGS.values()).values()) >= 2
    assert {*PROGRAMS} == {*BUGS} == {*PUBLISHED}
    for name, bug in BUGS.items():
        header = inspect.getdoc(PROGRAMS[name].run) or ""
        assert header.startswith(f"{bug.source}, {bug.year}. ")
        assert len(header) > len(f"{bug.source}, {bug.year}. ") + 40
        assert bug.link == f"https://github.com/{bug.source.replace(' ', '/issues/')}"


def test_what_is_not_visible_has_a_reason() -> None:
    unseen = {name for name, of in PUBLISHED.items() if of.way == NOT_VISIBLE}
    assert unseen == {name for name, program in PROGRAMS.items() if program.unseen}


def test_a_finding_of_another_tensor_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    program = PROGRAMS["norm_not_summed"]
    ran = Ran([], "DivergenceError", ["parameter 'final_norm.weight'"], ["parameters differ"], 3)
    assert outcomes.is_cause_first(program, [ran]) is True
    assert (
        outcomes.is_cause_first(replace(program, also="norm"), [replace(ran, rows=["parameter 'norm.bias'"])]) is False
    )
    with pytest.raises(AssertionError, match="router"):
        outcomes.is_cause_first(program, [replace(ran, rows=[*ran.rows, "parameter 'router.weight'"])])
    with pytest.raises(AssertionError):
        outcomes.is_cause_first(program, [replace(ran, rows=[], texts=["a text about something else"])])


def test_a_bug_that_changes_nothing_fails() -> None:
    healthy = run("merged_twice", False, frozenset({PLAIN}))
    with pytest.raises(AssertionError, match="changes nothing"):
        outcomes.damage([healthy], [healthy])
    assert outcomes.damage([healthy], [run("merged_twice", True, frozenset({PLAIN}))]) == 3

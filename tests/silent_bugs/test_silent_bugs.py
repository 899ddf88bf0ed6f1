"""What fp8dist reports of forty published silent bugs, and of ten drawn afterwards, is as the manual's table has it.

``scripts/silent-bugs`` makes the table anew. A change that finds less, or other tensors, fails here.
"""

from __future__ import annotations

import inspect
import random
from collections import Counter
from dataclasses import replace

import pytest

from scripts import results_files
from scripts.pages import silent_bugs as pages
from tests.silent_bugs import outcomes
from tests.silent_bugs.bugs import BUGS
from tests.silent_bugs.job import PLAIN, PROGRAMS, Ran, run
from tests.silent_bugs.outcomes import NOT_VISIBLE, Outcome, outcome
from tests.support.ranks import POOLS, RankPool

PUBLISHED = {row.pop("name"): Outcome(**row) for row in results_files.load("silent_bugs")["rows"]}

SHORT = {
    min((name for name, of in PUBLISHED.items() if of.way == way), key=lambda name: PROGRAMS[name].ranks)
    for way in {of.way for of in PUBLISHED.values()}
}
"""One of each way, on the fewest ranks. The others are long: the tests of a watch own what it finds."""


def _marked(name: str) -> object:
    marks = [] if PROGRAMS[name].ranks == 1 else [pytest.mark.slow]
    return pytest.param(name, marks=marks if name in SHORT else [*marks, pytest.mark.long])


@pytest.mark.parametrize("name", [_marked(name) for name in sorted(BUGS, key=lambda name: PROGRAMS[name].ranks)])
def test_a_bug_is_found_as_published(name: str, request: pytest.FixtureRequest) -> None:
    """Without the search for a smaller set of watches, which is nightly."""
    ranks, published = PROGRAMS[name].ranks, PUBLISHED[name]
    pools = {} if ranks == 1 else {ranks: request.getfixturevalue(POOLS[ranks])}
    assert outcome(pools, name, tuple(filter(None, published.watch.split(" + ")))) == published


@pytest.mark.long
@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name in BUGS if PUBLISHED[name].watch])
def test_no_smaller_set_of_watches_finds_it(
    two_ranks: RankPool, three_ranks: RankPool, four_ranks: RankPool, name: str
) -> None:
    found, _ = outcomes.smallest_set({2: two_ranks, 3: three_ranks, 4: four_ranks}, name)
    assert " + ".join(found) == PUBLISHED[name].watch


def test_each_bug_has_a_source_and_a_program() -> None:
    assert [bug.number for bug in BUGS.values()] == [*range(1, 51)]
    kinds = Counter(bug.kind for bug in BUGS.values() if not bug.afterwards)
    assert min(kinds.values()) >= 2
    drawn = random.Random(42).sample(list(kinds), 10)
    assert sorted(drawn) == sorted(bug.kind for bug in BUGS.values() if bug.afterwards)
    assert {*PROGRAMS} == {*BUGS} == {*PUBLISHED}
    for name, bug in BUGS.items():
        header = inspect.getdoc(PROGRAMS[name].run) or ""
        assert header.startswith(f"{bug.source}, {bug.year}. ")
        assert len(header) > len(f"{bug.source}, {bug.year}. ") + 40
        assert bug.link in [f"https://github.com/{bug.source.replace(' ', of)}" for of in ("/issues/", "/pull/")]


def test_the_pages_count_what_was_published() -> None:
    results = results_files.load("silent_bugs")
    found = Counter(BUGS[row["name"]].afterwards for row in results["rows"] if row["way"] != NOT_VISIBLE)
    assert pages.counts(results) == (f"{found[False]} of 40", f"{found[True]} of 10")
    front = pages.front(results)
    assert front.startswith(f"[{found[False]} of 40](docs/design/silent-bugs.md): ")
    assert front.endswith(f"; {found[True]} of 10 drawn afterwards")
    assert pages.front({"rows": []}) == "not counted yet"
    _, _, *lines = [line.split(" | ") for line in pages.of_counts(results).strip("|\n ").splitlines()]
    for of, some in ((40, lines[:2]), (10, lines[2:])):
        assert sum(int(line[1]) for line in some) == of
        assert sum(int(cell.strip("| ")) for line in some for cell in line[2:]) == of
        assert sum(int(line[5].strip("| ")) for line in some) == of - found[of == 10]


def test_what_is_not_visible_is_alike_on_all_ranks_and_has_a_reason() -> None:
    """Of those drawn afterwards at most one in ten more than of the forty: else the checks would be built for these."""
    unseen = {name for name, of in PUBLISHED.items() if of.way == NOT_VISIBLE}
    assert unseen == {name for name, program in PROGRAMS.items() if program.unseen}
    assert [name for name in unseen if not PROGRAMS[name].alike] == []
    afterwards = Counter(BUGS[name].afterwards for name in unseen)
    assert afterwards[True] / 10 <= afterwards[False] / 40 + 0.1


def test_a_finding_of_another_tensor_fails_and_so_does_a_bug_that_changes_nothing() -> None:
    program = replace(PROGRAMS["norm_not_summed"], also="norm")
    ran = Ran([], "DivergenceError", ["parameter 'final_norm.weight'"], ["parameters differ"], 3)
    assert outcomes.is_cause_first(program, [ran]) is True
    assert outcomes.is_cause_first(program, [replace(ran, rows=["parameter 'norm.bias'"])]) is False
    for wrong in (
        replace(ran, rows=[*ran.rows, "parameter 'router.weight'"]),
        replace(ran, rows=[], texts=["a text about something else"]),
    ):
        with pytest.raises(AssertionError):
            outcomes.is_cause_first(program, [wrong])
    healthy = run("merged_twice", False, frozenset({PLAIN}))
    with pytest.raises(AssertionError, match="changes nothing"):
        outcomes.damage([healthy], [healthy])
    assert outcomes.damage([healthy], [run("merged_twice", True, frozenset({PLAIN}))]) == 3

"""The suite's own account: what its tests cost, and which tenth of them runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.support import forked
from tests.support.suite import Spent, crossed, few, in_tenth, lines

BURN = "import time\nwhile time.process_time() < {}: pass"


def test_living_and_ended_children_count() -> None:
    spent = Spent()
    spent.since_last()
    subprocess.run([sys.executable, "-S", "-c", BURN.format(0.3)], check=True)
    assert 0.25 < spent.since_last() < 0.8  # The system counts in hundredths of a second.
    # A child's child, both alive: for ten seconds at most.
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', {BURN.format(10)!r}])"
    with subprocess.Popen([sys.executable, "-S", "-c", child], start_new_session=True) as living:
        try:
            found = 0.0
            while found < 0.5 and living.poll() is None:
                time.sleep(0.05)
                found += spent.since_last()
            assert found >= 0.5
            assert living.poll() is None
        finally:
            os.killpg(living.pid, signal.SIGKILL)


def test_the_table_has_sums_per_folder_and_the_largest_tests() -> None:
    spent = {"tests/a/x.py::one": 1.0, "tests/a/y.py::two[3/4]": 2.0, "tests/z.py::three": 0.5}
    assert lines(spent, most=2) == [
        "     3.0 s  tests/a",
        "     0.5 s  tests",
        "     3.5 s  all",
        "",
        "     2.0 s  tests/a/y.py::two[3/4]",
        "     1.0 s  tests/a/x.py::one",
    ]


def test_the_ten_tenths_make_all_tests() -> None:
    tests = [f"tests/test_{file}.py::test[{case}]" for file in range(20) for case in range(50)]
    drawn = [[test for test in tests if in_tenth(test, number)] for number in range(7, 17)]
    assert sorted(test for tenth in drawn for test in tenth) == sorted(tests)
    assert all(50 < len(tenth) < 150 for tenth in drawn)


def test_of_crossed_values_each_runs_for_every_change() -> None:
    names, cases = crossed(one="abcd", other=(1, 2, 3)).args
    assert names == ("one", "other")
    assert [case.values for case in cases if not case.marks] == [("a", 1), ("b", 2), ("c", 3), ("d", 1)]
    assert len(cases) == 12
    assert all({mark.name for mark in case.marks} in (set(), {"long", "nightly"}) for case in cases)


def test_of_few_cases_the_others_are_nightly() -> None:
    cases = few([("a", 1), ("b", 2)], ("b", 2))
    assert [(case.values, len(case.marks)) for case in cases] == [(("a", 1), 2), (("b", 2), 0)]
    with pytest.raises(AssertionError):
        few("ab", "c")


def _two_runs(words: list[str]) -> int:
    print(*(int(pytest.main([*words, f"--cpu-limit={limit}"])) for limit in (0.01, 1000)))
    return 0


@pytest.mark.slow
def test_a_run_beyond_the_limit_fails() -> None:
    test = "tests/test_suite.py::test_the_ten_tenths_make_all_tests"
    run = forked.run(["-q", "-n", "0", "-p", "no:cacheprovider", test], None, {}, main=_two_runs)
    assert run.stdout.splitlines()[-1:] == ["1 0"], run.stdout + run.stderr
    for limit in (0.01, 1000):
        assert f"s  {test}\nthe limit for all is {limit:g} s\n" in run.stdout

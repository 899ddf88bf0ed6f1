"""Fixtures shared by all tests."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

from tests.support import interpreter, suite
from tests.support.ranks import RankPool

if not torch.cuda.is_available():
    interpreter.install()
torch.set_num_threads(1)


POOLS = {"two_ranks": 2, "three_ranks": 3, "four_ranks": 4}
"""Fixture names and their numbers of ranks."""

_pools = pytest.StashKey[dict[str, RankPool]]()
_spent = pytest.StashKey[suite.Spent]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tenth", type=int, metavar="N", help="run one test of ten; numbers 0 to 9 make all")
    parser.addoption("--cpu-limit", type=float, metavar="S", help="fail if the tests need more CPU time, in seconds")


def pytest_sessionstart(session: pytest.Session) -> None:
    gc.disable()  # Until all tests are imported.
    session.stash[_pools] = {name: RankPool(size) for name, size in POOLS.items()}
    session.config.stash[_spent] = suite.Spent()


@pytest.fixture(scope="session")
def two_ranks(request: pytest.FixtureRequest) -> RankPool:
    """A pool of two gloo ranks."""
    return request.session.stash[_pools]["two_ranks"]


@pytest.fixture(scope="session")
def three_ranks(request: pytest.FixtureRequest) -> RankPool:
    """A pool of three gloo ranks: enough for a majority."""
    return request.session.stash[_pools]["three_ranks"]


@pytest.fixture(scope="session")
def four_ranks(request: pytest.FixtureRequest) -> RankPool:
    """A pool of four gloo ranks, for ties and for meshes with two axes."""
    return request.session.stash[_pools]["four_ranks"]


def _pools_of(item: pytest.Item) -> list[str]:
    return [name for name in POOLS if name in getattr(item, "fixturenames", ())]


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Run the tests of a pool consecutively and on one worker of pytest-xdist, so that each pool starts once."""
    tenth = config.getoption("--tenth")
    if tenth is not None:
        items[:] = [item for item in items if suite.in_tenth(item.nodeid, tenth)]
    for item in items:
        used = _pools_of(item)
        if used and item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(used[-1]))
    items.sort(key=lambda item: _pools_of(item)[-1:])
    return (yield)  # A hook wrapper, because pytest-xdist reads the marks in the same hook.


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Exempt modules and collected tests from garbage collection: each full one takes a quarter of a second else."""
    gc.freeze()
    gc.enable()


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Close a pool unless the next test uses it: gloo's threads keep polling while the ranks are idle."""
    wanted = [] if nextitem is None else _pools_of(nextitem)
    for name, pool in item.session.stash[_pools].items():
        if name not in wanted:
            pool.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[pytest.TestReport]:
    report: pytest.TestReport = yield
    if report.when == "teardown":  # Once per test: reading it takes milliseconds where ranks have many threads.
        report.user_properties.append((suite.PROPERTY, item.config.stash[_spent].since_last()))
    return report


def _cpu_times(reporter: pytest.TerminalReporter) -> dict[str, float]:
    spent: dict[str, float] = {}
    for reports in reporter.stats.values():
        for report in reports:
            for name, value in getattr(report, "user_properties", ()):
                if name == suite.PROPERTY:
                    spent[report.nodeid] = spent.get(report.nodeid, 0.0) + value
    return spent


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    yield
    limit = session.config.getoption("--cpu-limit")
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if limit is None or reporter is None or session.exitstatus:
        return
    if sum(_cpu_times(reporter).values()) > limit:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the CPU time of the tests; and registers and shared memory of the kernels that tests compiled and recorded
    with ``record_property("compiled", …)``."""
    terminalreporter.section("CPU time, with that of the processes that tests start")
    limit = terminalreporter.config.getoption("--cpu-limit")
    terminalreporter.write_line("\n".join(suite.lines(_cpu_times(terminalreporter))))
    if limit is not None:
        terminalreporter.write_line(f"the limit for all is {limit:g} s")
    passed = terminalreporter.getreports("passed")
    tables = [text for report in passed for name, text in report.user_properties if name == "compiled"]
    if tables:
        terminalreporter.section("kernels compiled ahead of time")
        header, *_ = tables[0].splitlines()
        lines = sorted({line for text in tables for line in text.splitlines()[1:]})
        terminalreporter.write_line("\n".join([header, *lines]))


@pytest.fixture(autouse=True)
def _nothing_compiled() -> None:
    """Isolate each test from earlier uses of torch.compile."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is not None:
        dynamo.counters["stats"]["unique_graphs"] = 0


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    logging.getLogger("fp8dist").setLevel(logging.NOTSET)  # The command line tests silence it.
    for name in list(os.environ):
        if name.startswith("FP8DIST_"):
            monkeypatch.delenv(name)

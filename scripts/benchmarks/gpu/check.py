"""Run the tests of the GPU and of the kernels, the most important first, and write their outcomes after each test.

    python -m scripts.benchmarks.gpu.check --out FOLDER [--commit ID] [--dirty] [--run ID] [-- PYTEST ARGUMENTS]
    python -m scripts.benchmarks.gpu.check --summary FILE

pytest needs no plugin. With pytest-xdist, tests run in several processes; with pytest-timeout, a test that hangs ends
its process. This module is also a pytest plugin: it sorts the tests, and ends a process whose GPU is lost.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.benchmarks.gpu import environment, results
from scripts.results_files import write

ROOT = Path(__file__).resolve().parents[3]
KERNELS = "tests/kernels/test_gpu_kernels.py"
SMALL = "small"
"""Occurs in the IDs of the tests that launch kernels at small sizes."""
ORDER = (
    f"{KERNELS}::{SMALL}",
    "tests/modules/test_gpu_tokens.py",
    "tests/modules/test_gpu_linear.py",
    "tests/job/test_gpu_graphs.py",
    "tests/modules/test_gpu_compile.py",
    "tests/state/test_gpu_one_rank.py",
    "tests/state/test_gpu_ranks.py",
    "tests/checks/test_gpu_compute.py",
    KERNELS,
)
"""The tests that run first, in this order. The other tests of files with ``MARK`` follow."""
MARK = "from tests.support.devices import"
"""Occurs in each file with tests that run on a GPU if there is one, or only on a GPU."""

WORKERS = 8
MOST_FAILURES = 12
TEST_SECONDS = 150
"""Time limit of one test in seconds. Inductor may compile for a minute."""
REASON = 160
"""Longest reason of a failure in the results, in characters."""


# The plugin, in each process of pytest-xdist -------------------------------------------------------------


def order(name: str) -> int:
    """Return the index in ``ORDER`` of the test with this ID; ``len(ORDER)`` if it is not in there."""
    file, _, rest = name.partition("::")
    places = [file, f"{file}::{SMALL}"] if SMALL in rest else [file]
    return min((ORDER.index(place) for place in places if place in ORDER), default=len(ORDER))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the tests by ``ORDER``. Equal ones keep the order of conftest.py, which has sorted before."""
    items.sort(key=lambda item: order(item.nodeid))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Wait for the GPU, so that an error of a kernel fails the test that launched it."""
    yield
    torch.cuda.synchronize()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[Any]:
    """End this process after an error that loses the GPU, because all later tests would fail as well. pytest-xdist then
    starts another process."""
    result = yield
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        if hasattr(item.config, "workerinput"):
            os._exit(1)
        item.session.shouldstop = "the GPU is lost in this process"
    return result


# The process that runs pytest ------------------------------------------------------------------------------


class Recorder:
    """Writes the outcomes to a results file after each test.

    ``new``: the other fields of the file. ``chosen``: True if only some tests run; the outcomes of an earlier complete
    run are then kept in the file.
    """

    def __init__(self, path: Path, new: Mapping[str, Any], chosen: bool = False) -> None:
        self._path, self._new, self._old = path, new, results.earlier(path)
        whole = (results.merged(self._old, new)["tests"] or {"cut_off": True})["cut_off"] is False
        self._key = "again" if chosen and whole else "tests"
        self._start = time.monotonic()
        self._running: dict[str, None] = {}
        self._outcomes: dict[str, str] = {}
        self._reasons: dict[str, str] = {}
        self.collectives: Counter[str] = Counter()
        """By backend, the number of collectives that the tests have called, as they report it."""
        self._write()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Write that the test is running, so that the file names a test that never ends."""
        self._running[nodeid] = None
        self._write()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note an outcome."""
        if report.when == "call":
            for name, value in report.user_properties:
                if name == "collectives":
                    self.collectives[value[0]] += value[1]
        if report.failed:
            self._fail(report)
        elif report.skipped or report.when == "call":
            self._outcomes.setdefault(report.nodeid, report.outcome)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Write the outcome."""
        self._running.pop(nodeid, None)
        self._write()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note a file that could not be imported."""
        if report.failed:
            self._fail(report)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Write the end."""
        whole = exitstatus in (0, 1) and not (session.shouldstop or session.shouldfail or self._running)
        self._write(cut_off=not whole)

    def _fail(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        self._running.pop(report.nodeid, None)
        self._outcomes[report.nodeid] = "failed"
        self._reasons.setdefault(report.nodeid, _reason(report))

    def _write(self, cut_off: bool = True) -> None:
        outcomes = list(self._outcomes.values())
        tests = {
            **{outcome: outcomes.count(outcome) for outcome in ("passed", "failed", "skipped")},
            "collectives": dict(self.collectives),
            "seconds": round(time.monotonic() - self._start, 1),
            "failures": [f"{name}: {reason}" for name, reason in self._reasons.items()],
            "running": list(self._running),
            "cut_off": cut_off,
        }
        new = {**self._new, self._key: results.stamped(tests, self._new)}
        write(self._path, results.merged(self._old, new))


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Return one line about a failure: its error; of a test with several ranks, the last error in their tracebacks."""
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = (crash.message if crash else str(report.longrepr)).strip().splitlines() or ["no reason"]
    errors = [line for line in lines if re.match(r"(E\s+)?[\w.]*(Error|Exception|Failed)\b", line)]
    return (errors[-1] if errors else lines[0])[:REASON]


def summary(path: Path) -> str:
    """Return a short text about the tests in a results file."""
    data = results.earlier(path)
    tests = data and max((data["tests"], data.get("again")), key=lambda one: one.get("date", "") if one else "")
    if not tests:
        return "check: no test has run"
    counts = f"{tests['passed']} passed, {tests['failed']} failed, {tests['skipped']} skipped"
    lines = [f"check: {counts}, {tests['seconds']:.0f} s{'; cut off: not all were run' if tests['cut_off'] else ''}"]
    lines += [f"  {backend} was asked for {n} collectives" for backend, n in tests.get("collectives", {}).items()]
    lines += [f"  failed {failure}" for failure in tests["failures"][:MOST_FAILURES]]
    more = len(tests["failures"]) - MOST_FAILURES
    lines += [f"  and {more} more"] if more > 0 else []
    lines += [f"  not finished {name}" for name in tests["running"][:WORKERS]]
    if tests["failures"]:
        test = tests["failures"][0].partition(": ")[0].rpartition("::")[2].partition("[")[0]
        lines.append(f"  one test again: scripts/gpu check -- -n 0 -k {test}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line described at the top of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--summary", type=Path, metavar="FILE", help="only print what a results file says")
    parser.add_argument("--out", type=Path, default=Path("kernels/results"), help="folder of the results")
    results.add_flags(parser)
    parser.add_argument("pytest", nargs="*")
    options = parser.parse_args(arguments)
    if options.summary:
        print(summary(options.summary))
        return 0
    facts = environment.facts(torch.device("cuda", 0))
    new = {**results.empty(options.commit, options.dirty, options.run, options.smoke), **facts}
    os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", tempfile.gettempdir())  # Not in the tree.
    recorder = Recorder(results.file_of(options.out, facts["device"]["name"]), new, bool(options.pytest))
    status = int(pytest.main([*_options(), *options.pytest], plugins=[recorder]))
    if not (status or options.smoke or options.pytest) and not recorder.collectives["nccl"]:
        print("No test has asked NCCL for a collective: what it does is not known.")
        return 1
    return status


def _options() -> list[str]:
    """Return the files and options of pytest."""
    named = dict.fromkeys(place.partition("::")[0] for place in ORDER)
    marked = (path for path in sorted(ROOT.glob("tests/*/test_*.py")) if MARK in path.read_text())
    files = dict.fromkeys([*named, *(str(path.relative_to(ROOT)) for path in marked)])
    # Without the strict options of setup.cfg: plugins may be missing, whose settings and marks are then unknown, and
    # other versions of packages may warn.
    options = ["-v", "--tb=short", "-o", "addopts=--import-mode=importlib", "-W", "default", "-p", "no:cacheprovider"]
    options += ["-p", "no:benchmark", f"--maxfail={MOST_FAILURES}", "--continue-on-collection-errors"]
    options += ["-p", "scripts.benchmarks.gpu.check"]
    if importlib.util.find_spec("xdist"):
        options += ["-n", str(WORKERS), "--dist", "loadgroup"]
    if importlib.util.find_spec("pytest_timeout"):  # A signal does not end a wait for the GPU.
        options += [f"--timeout={TEST_SECONDS}", "--timeout-method=thread"]
    return [*files, *options]


if __name__ == "__main__":
    sys.exit(main())

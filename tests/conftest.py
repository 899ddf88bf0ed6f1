"""Fixtures shared by all tests."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

from tests.support import interpreter
from tests.support.ranks import RankPool

if not torch.cuda.is_available():
    interpreter.install()
torch.set_num_threads(1)


def _pool(world_size: int) -> Iterator[RankPool]:
    pool = RankPool(world_size)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[RankPool]:
    """Two gloo ranks, alive for the session."""
    yield from _pool(2)


@pytest.fixture(scope="session")
def three_ranks() -> Iterator[RankPool]:
    """Three gloo ranks, alive for the session: enough for a majority."""
    yield from _pool(3)


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[RankPool]:
    """Four gloo ranks, alive for the session: two against two, and meshes of two axes."""
    yield from _pool(4)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Registers and shared memory of the kernels that tests compiled: what ``record_property("compiled", …)`` was
    given."""
    passed = terminalreporter.getreports("passed")
    tables = [text for report in passed for name, text in report.user_properties if name == "compiled"]
    if tables:
        terminalreporter.section("kernels compiled ahead of time")
        header, *_ = tables[0].splitlines()
        lines = sorted({line for text in tables for line in text.splitlines()[1:]})
        terminalreporter.write_line("\n".join([header, *lines]))


@pytest.fixture(autouse=True)
def _nothing_compiled() -> None:
    """That an earlier test used torch.compile is nothing to this one."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is not None:
        dynamo.counters["stats"]["unique_graphs"] = 0


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    logging.getLogger("fp8dist").setLevel(logging.NOTSET)  # The command line's has silenced it.
    for name in list(os.environ):
        if name.startswith("FP8DIST_"):
            monkeypatch.delenv(name)

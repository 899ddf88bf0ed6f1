"""Programs with a mistake are right, or an error or a warning names the mistake and the remedy. Correct programs are
right, and silent."""

from __future__ import annotations

import importlib
import logging
import os
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

from fp8dist.errors import ConfigurationError
from tests.support.mistakes import Bench, complaints, report, run_case
from tests.support.quiet import TOLERANCE, Trial, attached, silence
from tests.support.ranks import RankPool, RanksFailed
from tests.support.scenarios import SILENT, Scenarios
from tests.support.suite import NIGHTLY

TABLES = (
    *("mistaken_starts", "mistaken_steps", "mistaken_writes"),
    *("quiet_loops", "quiet_models", "quiet_optimizers", "quiet_ranks"),
)

SCENARIOS = Scenarios()
for _table in TABLES:
    for _name, _scenario in importlib.import_module(f"tests.support.{_table}").SCENARIOS.items():
        assert _name not in SCENARIOS, _name
        SCENARIOS[_name] = _scenario

BY_DATA = ("weights written after each step: .data", "local sgd: attached inner")
"""Programs that write to weights through .data between steps, at some of them."""

NOTHING_SHARED = ("local sgd", "fsdp2", "ranks hold parameters of their own")
"""Programs in which no parameter is known to be on two ranks, which a check says."""

SLOW = ("compiled", "resumed in any order")
RARE = "prepared after it was compiled and run"
"""It takes seconds."""

ALONE = [
    pytest.param(name, marks=NIGHTLY if name == RARE else pytest.mark.slow if name.startswith(SLOW) else ())
    for name, scenario in SCENARIOS.items()
    if scenario.ranks == 1
]
TOGETHER = [name for name, scenario in SCENARIOS.items() if scenario.ranks == 2]


@pytest.fixture(scope="module")
def bench(two_ranks: RankPool) -> Iterator[Bench]:
    return Bench(two_ranks, __name__)


def _silent(name: str) -> Any:
    """Run a SILENT scenario on this rank. Return what must be equal on all ranks."""
    # No ordinary loop looks like faulty memory, unless it writes through .data between two steps; and no check warns.
    checks = {
        "FP8DIST_AT_REST_EVERY": "0" if name in BY_DATA else "1",
        "FP8DIST_CHECK_EVERY": "0" if name.startswith(NOTHING_SHARED) else "1",
    }
    with mock.patch.dict(os.environ, checks), silence("is switched off:" if name.startswith("switched off") else None):
        return SCENARIOS[name].program()


@pytest.mark.parametrize("name", ALONE)
def test_in_one_process(name: str) -> None:
    scenario = SCENARIOS[name]
    if SILENT in scenario.outcomes:
        _silent(name)
    elif complaints(scenario, seen := [run_case(scenario)]):
        pytest.fail(report(scenario, seen), pytrace=False)


@pytest.mark.slow
@pytest.mark.xdist_group("scenarios")
@pytest.mark.parametrize("name", TOGETHER)
def test_on_two_ranks(bench: Bench, two_ranks: RankPool, name: str) -> None:
    scenario = SCENARIOS[name]
    if SILENT in scenario.outcomes:
        first, second = two_ranks.run(_silent, name, timeout=40)
        assert first == second
        return
    try:
        seen = bench.run(scenario)
    except RanksFailed as failed:
        pytest.fail(f"{name}: the ranks hang or died, expected {' or '.join(sorted(scenario.outcomes))}\n{failed}")
    if complaints(scenario, seen):
        pytest.fail(report(scenario, seen), pytrace=False)


def test_an_alarm_would_be_seen() -> None:
    trial, optimizer = attached()
    with pytest.raises(ConfigurationError), silence(), trial.manager.calibrate():
        trial.train(optimizer, 1)
    with pytest.raises(AssertionError, match="said so"), silence():
        logging.getLogger("fp8dist").warning("said so")
    with pytest.raises(AssertionError, match="fp8"), silence():
        warnings.warn("of fp8", stacklevel=1)
    trial = Trial()
    trial.errors.append(2 * TOLERANCE)
    with pytest.raises(AssertionError):
        trial.accurate()

"""What each integration promises, in the real trainer: one contract, and an adapter for each of the six."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.contract import Adapter, Job
from tests.support.examples import run_example
from tests.support.ranks import RankPool
from tests.support.recorded import require_readable, require_resumed, require_run

ADAPTERS: dict[str, Adapter] = {
    stack: importlib.import_module(f"tests.integrations.test_{stack}").ADAPTER
    for stack in ("transformers", "accelerate", "lightning", "deepspeed", "torchtitan", "megatron")
}


def _marks(stack: str) -> list[pytest.MarkDecorator]:
    missing = importlib.util.find_spec(stack) is None
    usual = pytest.mark.slow if stack == "accelerate" else pytest.mark.long
    return [pytest.mark.skipif(missing, reason=f"{stack} is not installed"), usual, pytest.mark.timeout(240)]


def every(clause: str) -> pytest.MarkDecorator:
    """Run a test with each case of each adapter."""
    return pytest.mark.parametrize(
        ("stack", "case"),
        [
            pytest.param(stack, case, marks=_marks(stack), id=f"{stack}, {case}")
            for stack, adapter in ADAPTERS.items()
            for case in getattr(adapter, clause)
        ],
    )


def run(ranks: RankPool, job: Job, folder: Path) -> list[Any]:
    """Run a job on the ranks."""
    function, *arguments = job
    return ranks.run(function, str(folder), *arguments)


@every("by_hand")
def test_it_trains_as_a_loop_by_hand(two_ranks: RankPool, tmp_path: Path, stack: str, case: str) -> None:
    run(two_ranks, ADAPTERS[stack].by_hand[case], tmp_path)


@every("resumed")
def test_a_resumed_run_has_the_same_bits(two_ranks: RankPool, tmp_path: Path, stack: str, case: str) -> None:
    run(two_ranks, ADAPTERS[stack].resumed[case], tmp_path)


@every("diverged")
def test_a_divergence_ends_the_training_on_all_ranks(
    two_ranks: RankPool, tmp_path: Path, stack: str, case: str
) -> None:
    name, job = ADAPTERS[stack].diverged[case]
    for said in run(two_ranks, job, tmp_path):
        assert name in said


@every("undisturbed")
def test_evaluations_and_other_models_change_nothing(
    two_ranks: RankPool, tmp_path: Path, stack: str, case: str
) -> None:
    run(two_ranks, ADAPTERS[stack].undisturbed[case], tmp_path)


@every("refused")
def test_misuse_is_an_error(two_ranks: RankPool, tmp_path: Path, stack: str, case: str) -> None:
    run(two_ranks, ADAPTERS[stack].refused[case], tmp_path)
    if ADAPTERS[stack].unclean:
        two_ranks.close()


@pytest.mark.parametrize("stack", [pytest.param(stack, marks=_marks(stack)) for stack in ADAPTERS])
def test_a_killed_and_resumed_run_has_the_bits_and_the_folder_of_a_whole_one(
    two_ranks: RankPool, tmp_path: Path, stack: str
) -> None:
    """A run of 20 steps, and one whose ranks are killed after step 14."""
    adapter = ADAPTERS[stack]
    (whole, losses, slots), _ = two_ranks.run(adapter.recorded, str(tmp_path), "whole", "whole")
    if adapter.ends_group:
        two_ranks.close()
    numbers = require_run(tmp_path / "run-whole", losses, slots)
    for column, values in adapter.columns.items():
        assert numbers.metrics.columns[column].tolist() == values
    saved = [(event.step, Path(event.data["path"]).name) for event in numbers.events if event.kind == "saved"]
    assert saved == [(step, adapter.checkpoint.format(step=step)) for step in adapter.saved]
    evaluated = numbers.metrics.step[numbers.metrics.columns["validation_loss"] > 0]
    assert evaluated.tolist() == [*adapter.evaluated]
    if adapter.resumes:
        require_resumed(two_ranks, adapter.recorded, tmp_path, (whole, losses, slots), *adapter.logged)
    if adapter.ends_group:
        two_ranks.close()


@pytest.mark.parametrize("stack", [pytest.param(stack, marks=[*_marks(stack), pytest.mark.long]) for stack in ADAPTERS])
def test_the_example_trains(tmp_path: Path, stack: str) -> None:
    adapter = ADAPTERS[stack]
    out = tmp_path / "run"
    flags = ("--steps", str(adapter.steps), *(("--out", str(out)) if adapter.lines else ()))
    assert adapter.prints in run_example(stack, *flags, through=adapter.through, folder=tmp_path)
    if adapter.lines:
        require_readable(out / adapter.run, adapter.lines)

"""What each integration promises, in the real trainer: one contract, and an adapter for each of the six."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from tests.integrations.contract import Adapter, needs
from tests.support.examples import run_example
from tests.support.ranks import RankPool
from tests.support.recorded import require_readable, require_resumed, require_run

ADAPTERS: dict[str, Adapter] = {
    stack: importlib.import_module(f"tests.integrations.test_{stack}").ADAPTER
    for stack in ("transformers", "accelerate", "lightning", "deepspeed", "torchtitan", "megatron")
}


def _marks(stack: str) -> list[pytest.MarkDecorator]:
    return needs(stack, pytest.mark.slow if stack == "accelerate" else pytest.mark.long)


@pytest.mark.parametrize(
    ("stack", "clause", "case"),
    [
        pytest.param(stack, clause, case, marks=_marks(stack), id=f"{stack}, {clause}: {case}")
        for clause in ("by_hand", "resumed", "diverged", "undisturbed", "refused")
        for stack, adapter in ADAPTERS.items()
        for case in getattr(adapter, clause)
    ],
)
def test_a_clause_holds(two_ranks: RankPool, tmp_path: Path, stack: str, clause: str, case: str) -> None:
    """``Adapter`` says what the clauses are."""
    job = getattr(ADAPTERS[stack], clause)[case]
    named, (function, *arguments) = job if clause == "diverged" else ("", job)
    for error in two_ranks.run(function, str(tmp_path), *arguments):
        assert named in (error or "")
    if clause == "refused" and ADAPTERS[stack].unclean:
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

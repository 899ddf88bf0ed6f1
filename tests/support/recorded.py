"""What the folder of a run must hold, whichever trainer wrote it; ranks that are killed."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import fp8dist
from fp8dist.cli.main import main
from fp8dist.runs.report.numbers import RunNumbers, read_run
from tests.support.ranks import RankPool, RanksFailed


def recorder(folder: str) -> Callable[[fp8dist.StateManager], fp8dist.Recorder]:
    """Return a function for ``run=`` that records FP8 numbers every 4 steps."""
    return lambda manager: fp8dist.Recorder(folder, manager, every=4, resume_after="state")


def require_run(folder: Path, losses: Mapping[int, float], slots: int) -> RunNumbers:
    """Read a run that was recorded every 4 steps, and compare it with what the trainer logged. ``losses``: by step.
    ``slots``: number of slots in FP8."""
    run = read_run(folder)
    assert dict(zip(run.metrics.step.tolist(), run.metrics.columns["loss"].tolist())) == losses
    assert not run.left_out
    lines = list(run.folder.lines("scales.jsonl").new())
    due = [step for step in range(1, max(losses) + 1) if step % 4 == 0]
    assert [line["step"] for line in lines] == [step for step in due for _ in range(slots)]
    assert {line["slot"] for line in lines} == {slot["slot"] for slot in run.folder.header["slots"]}
    assert all(line["amax"] > 0 for line in lines)
    assert run.metrics.newest("proven") == due[-1]
    return run


def require_readable(folder: Path, steps: int) -> None:
    """Require that ``fp8dist report`` makes a page of a run with this many steps, of which each has a loss."""
    losses = read_run(folder).metrics.columns["loss"]
    assert len(losses) == steps
    assert all(losses > 0)
    assert main(["report", str(folder), "--out", str(folder / "report.html")]) == 0


def fingerprint(state: Mapping[str, bytes], parameters: Iterable[Tensor]) -> str:
    """Return a digest of FP8 state and parameters, to be compared across processes."""
    digest = hashlib.sha256()
    for key in sorted(state):
        digest.update(state[key])
    for parameter in parameters:
        digest.update(parameter.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def die() -> None:
    """Kill this process."""
    os.kill(os.getpid(), signal.SIGKILL)


def require_resumed(
    ranks: RankPool, job: Callable[..., Any], folder: Path, whole: tuple[str, Mapping[int, float], int], *names: str
) -> None:
    """Kill a job, resume it, and require the bits and the numbers of a whole run.

    Args:
        job: called with the folder, the run's name, and "killed" or "resumed"; returns what ``whole`` is. Its run is
            recorded in ``folder/run-NAME``, that of ``whole`` in ``folder/run-whole``.
        whole: fingerprint, losses by step and number of slots of the whole run.
        names: fields of metrics.jsonl that must be equal, beside the loss.
    """
    fingerprint, losses, slots = whole
    with pytest.raises(RanksFailed, match="died"):
        ranks.run(job, str(folder), "part", "killed")
    (resumed, _, _), _ = ranks.run(job, str(folder), "part", "resumed")
    assert resumed == fingerprint
    _same_numbers(folder / "run-whole", folder / "run-part", *names)
    kinds = [event.kind for event in require_run(folder / "run-part", losses, slots).events]
    assert (kinds.count("start"), kinds[-1]) == (2, "end")


def _same_numbers(one: Path, other: Path, *names: str) -> None:
    """Require equal lines for equal steps. ``names``: fields of metrics.jsonl, beside the loss."""
    lines = [list(read_run(folder).folder.lines("metrics.jsonl").new()) for folder in (one, other)]
    kept = ("step", "loss", "proven", *names)
    first, second = ([{name: line.get(name) for name in kept} for line in each] for each in lines)
    assert first == second
    assert all(line[name] is not None for line in first for name in names)
    assert (one / "scales.jsonl").read_text() == (other / "scales.jsonl").read_text()

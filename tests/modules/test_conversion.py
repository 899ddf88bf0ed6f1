"""State saved by another recipe: rejected or converted. The expected scales are computed here, with NumPy."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fp8dist
from fp8dist import DelayedScaling, StateManager
from fp8dist.errors import CheckpointError
from tests.support.states import state_of
from tests.support.suite import crossed

OLD: dict[str, Any] = {"history_len": 4, "margin": 1, "amax_algo": "max", "format": "hybrid", "power_of_two": False}
CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "margin": ({"margin": -2}, "margin is 1 there and -2 here"),
    "format": (
        {"format": "e4m3"},
        "format of 0:grad_output is 'e5m2' there and 'e4m3' here (and 1 more slots have another format)",
    ),
    "power_of_two": ({"power_of_two": True}, "power_of_two is False there and True here"),
    "amax_algo": ({"amax_algo": "most_recent"}, "amax_algo is 'max' there and 'most_recent' here"),
    "all": (
        {"margin": 3, "format": "e4m3", "power_of_two": True, "amax_algo": "most_recent", "history_len": 2},
        "margin is 1 there and 3 here",
    ),
}
"""What changes, and what an error says of it."""


class Job:
    """A model, and its manager, which does not keep it alive."""

    def __init__(self, **recipe: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
        self.manager = fp8dist.prepare(self.model, DelayedScaling(**{**OLD, **recipe})).attach()


@pytest.fixture
def old() -> Iterator[StateManager]:
    """Three steps of falling amaxes. The second Linear never ran: its weight has only attach's scale."""
    job = Job()
    for step in range(3):
        job.model[0](torch.full((4, 16), 7.5 - step)).mul(3.0 - step).sum().backward()
        job.manager.step()
    yield job.manager
    del job  # Until now it has kept the model.


def _largest(role: str, format: str) -> np.float32:
    return np.float32(57344.0 if format == "hybrid" and role == "grad_output" else 448.0)


def _scale(amax: np.float32, role: str, recipe: dict[str, Any]) -> np.float32:
    scale = np.float32(_largest(role, recipe["format"]) / amax) / np.float32(2.0 ** recipe["margin"])
    return np.float32(2.0 ** (math.frexp(scale)[1] - 1)) if recipe["power_of_two"] else np.float32(scale)


def _expected(manager: StateManager, recipe: dict[str, Any], fqn: str, role: str) -> np.float32:
    """Return a slot's scale under ``recipe``, from the window and scale under the old recipe."""
    scale = np.float32(manager.slot(fqn, role).scale.item())
    window = manager.slot(fqn, role).amax_history.numpy()[-recipe["history_len"] :]
    amax = window[-1] if recipe["amax_algo"] == "most_recent" else window.max()
    if amax == 0:
        if state_of(manager)[fqn, role]["cold"]:
            return np.float32(1.0)
        amax = np.float32(_largest(role, OLD["format"]) / np.float32(2.0 ** OLD["margin"])) / scale
    return _scale(amax, role, recipe)


@crossed(change=CHANGES, by_file=[False, True])
def test_another_recipe_is_refused_or_has_its_own_scales(
    old: StateManager, change: str, by_file: bool, tmp_path: Path
) -> None:
    old.save(tmp_path / "state")
    changed, text = CHANGES[change]
    job, recipe = Job(**changed), {**OLD, **changed}
    new, before = job.manager, state_of(job.manager)

    def load(**how: bool) -> None:
        new.load(tmp_path / "state", **how) if by_file else new.load_state_dict(old.state_dict(), **how)

    for strict in (True, False):
        with pytest.raises(CheckpointError) as caught:
            load(strict=strict)
        name = str(tmp_path / "state") if by_file else "FP8 state 'shared'"
        assert all(part in str(caught.value) for part in (text, name, "convert=True"))
    assert (state_of(new), new.steps) == (before, 0)
    load(convert=True)
    for fqn, role in new.slots:
        expected = _expected(old, recipe, fqn, role)
        assert new.slot(fqn, role).scale.item() == expected, (fqn, role)
        assert new.slot(fqn, role).inv_scale.item() == np.float32(1) / expected
        window = old.slot(fqn, role).amax_history[-recipe["history_len"] :]
        assert new.slot(fqn, role).amax_history.equal(window)
    assert new.steps == 3
    state, saved = state_of(new), state_of(old)
    assert [slot for slot in state if state[slot]["cold"]] == [("1", "grad_output"), ("1", "input")]
    kept = [role for fqn, role in state if fqn == "0" and state[fqn, role]["scale"] == saved[fqn, role]["scale"]]
    assert kept == {"format": ["input", "weight"], "amax_algo": ["weight"]}.get(change, [])  # The weight is unchanged.


def test_what_decides_no_scale_may_differ(old: StateManager) -> None:
    job = Job(history_len=9, update="next_step", warmup="unit")
    job.manager.load_state_dict(old.state_dict())
    scales = {slot: state["scale"] for slot, state in state_of(old).items()}
    assert {slot: state["scale"] for slot, state in state_of(job.manager).items()} == scales


def test_nothing_is_converted_where_nothing_has_changed(old: StateManager) -> None:
    """A job may always pass convert=True. A scale set by hand shows if it was derived again."""
    old.slot("0", "input").set_scale(3.0)
    for change in ({}, {"format": "e4m3"}):
        job = Job(**change)
        job.manager.load_state_dict(old.state_dict(), convert=True)
        assert job.manager.slot("0", "input").scale == 3
        assert (state_of(job.manager) == state_of(old)) == (not change)


def test_a_callable_reduces_the_windows(old: StateManager) -> None:
    def oldest(windows: Tensor) -> Tensor:
        return windows[:, 1]  # Uses three of four entries.

    job = Job(amax_algo=oldest)
    with pytest.raises(CheckpointError, match=r"amax_algo is 'max' there and '.*oldest' here"):
        job.manager.load_state_dict(old.state_dict())
    job.manager.load_state_dict(old.state_dict(), convert=True)
    amax = old.slot("0", "input").amax_history.numpy()[1]
    assert job.manager.slot("0", "input").scale.item() == _scale(amax, "input", OLD)

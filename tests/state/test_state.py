"""What a manager shows and forgets of its state. ``tests/job/test_whole_job.py`` compares it with the oracle."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import fp8dist
from fp8dist import DelayedScaling, StateManager
from tests.support.oracle import float32
from tests.support.states import saved_of, state_of


def _manager(**recipe: Any) -> tuple[nn.Module, StateManager]:
    model = nn.Module()
    manager = fp8dist.prepare(model, DelayedScaling(**recipe))
    manager.register("a", "input", "e4m3")
    manager.register("b", "input", "e4m3")
    return model, manager


def _step(manager: StateManager, *values: float | None) -> None:
    for fqn, value in zip("ab", values):
        if value is not None:
            manager.slot(fqn, "input").record(torch.tensor([value]))
    manager.step()


def test_a_history_is_a_copy_and_a_scale_is_a_view() -> None:
    _model, manager = _manager(history_len=2)
    slot = manager.slot("a", "input")
    scale, inv_scale, amax, history = slot.scale, slot.inv_scale, slot.amax, slot.amax_history
    _step(manager, 2.0)
    assert history.tolist() == [0.0, 0.0]
    assert (scale.item(), inv_scale.item(), amax.item()) == (224.0, float32(1 / 224), 2.0)
    assert scale.shape == inv_scale.shape == amax.shape == ()
    manager.slot("a", "input").amax_history.fill_(9)
    assert manager.slot("a", "input").amax_history.tolist() == [0.0, 2.0]


def test_set_scale() -> None:
    _model, manager = _manager(history_len=3)
    manager.slot("a", "input").set_scale(3.0)
    assert manager.slot("a", "input").scale == 3
    assert manager.slot("a", "input").inv_scale == float32(1 / 3)
    assert saved_of(manager)["cold"].tolist() == [False, True]
    assert manager.slot("b", "input").scale == 1
    assert manager.slot("b", "input").inv_scale == 1
    for bad in (0.0, -1.0, math.inf, math.nan, 1e300, 1e-60):
        with pytest.raises(fp8dist.errors.ConfigurationError, match="positive and finite"):
            manager.slot("a", "input").set_scale(bad)
    assert manager.slot("a", "input").scale == 3


@pytest.mark.parametrize("update", ["same_step", "next_step"])
def test_reset_forgets_everything(update: str) -> None:
    _model, manager = _manager(history_len=3, update=update)
    fresh = state_of(manager)
    _step(manager, 1.0, math.nan)
    manager.slot("a", "input").record(torch.tensor([9.0]))
    manager.reset()
    manager.step()
    assert state_of(manager) == fresh
    assert manager.steps == 1

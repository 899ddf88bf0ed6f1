"""The host knows from a sync that no slot is cold. Its work does not depend on the number of slots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import fp8dist
from fp8dist import DelayedScaling, Fallback, StateManager
from fp8dist.checks.contents import ArenaContent
from fp8dist.state import overwrites
from fp8dist.state.arena_sync import ArenaSync
from fp8dist_kernels.reference import casts, update
from tests.support.counted import Operations


class Job:
    """Two Linears and their only arena. ``zero``: the second weight is zero at first, and stays cold for one step."""

    def __init__(self, steps: int = 2, update: Any = "same_step", zero: bool = False, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 16))
        if zero:
            nn.init.zeros_(self.model[1].weight)  # type: ignore[arg-type]
        recipe = DelayedScaling(history_len=4, update=update)
        self.manager: StateManager = fp8dist.prepare(self.model, recipe, **options)
        self.sync: ArenaSync = self.manager._syncs[0]
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.manager.attach(optimizer=self.optimizer)
        self.train(steps)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.model(torch.randn(8, 32)).square().sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def just_in_time(self) -> list[bool]:
        """Return what each cast of a forward and backward was told: True if it must look whether its slot is cold."""
        with mock.patch.object(casts, "quantize", wraps=casts.quantize) as quantize:
            self.model(torch.randn(8, 32)).sum().backward()
        return [call.kwargs["just_in_time"] for call in quantize.call_args_list]


def test_casts_look_for_cold_slots_until_a_sync_has_shown_that_there_are_none() -> None:
    job = Job(0)
    assert job.just_in_time() == [True] * 6
    job.optimizer.step()
    assert job.sync.arena.known_hot
    assert job.just_in_time() == [False] * 6
    with mock.patch("fp8dist.modules.casters.capturing", return_value=True):
        assert Job().just_in_time() == [True] * 6  # In a graph: state may be loaded after its capture.


def test_a_slot_that_stays_cold_keeps_them_looking_and_is_no_reason_for_a_fallback() -> None:
    """Both travel in one verdict."""
    job = Job(1, zero=True, fallback=Fallback(4))
    assert not job.sync.arena.known_hot
    job.train(1)
    assert job.sync.arena.known_hot
    assert job.manager.metrics()["fp8/high_precision_modules"] == 0


WRITES: dict[str, Callable[[StateManager, Any], Any]] = {
    "loaded": lambda manager, arena: manager.load_state_dict(manager.state_dict()),
    "cooled": lambda manager, arena: overwrites.make_cold(arena, [0]),
    "put back": lambda manager, arena: arena.put_back(arena.copied_state()),
    "slots put back": lambda _, arena: overwrites.put_back_slots(arena, arena.copied_state(), torch.tensor([0])),
    "shared": lambda manager, arena: arena.shared_state(),
    "repaired": lambda manager, arena: ArenaContent(arena).fields(0),
    "reset": lambda manager, arena: manager.reset(),
}


@pytest.mark.parametrize("write", WRITES)
def test_calls_that_may_make_slots_cold_are_noted(write: str) -> None:
    job = Job()
    arena = job.sync.arena
    assert arena.known_hot
    WRITES[write](job.manager, arena)
    assert not arena.known_hot
    assert job.just_in_time() == [True] * 6
    job.train(2)  # It is learned again.
    assert arena.known_hot


def test_a_verdict_from_before_such_a_call_says_nothing() -> None:
    job = Job(1, "next_step")
    job.manager.metrics()  # Reading commits the sync that is due.
    assert job.sync.verdict is not None
    overwrites.make_cold(job.sync.arena, [0])
    assert job.sync.read_verdict()[0].hot
    assert not job.sync.arena.known_hot


def test_a_slot_that_is_registered_is_cold() -> None:
    """Even while a verdict about the slots so far waits to be read."""
    model = nn.Sequential(nn.Linear(32, 48))
    manager = fp8dist.prepare(model, DelayedScaling(update="next_step"))
    for slot in manager.slots:
        manager.slot(*slot).set_scale(1.0)
    manager.step()
    manager.metrics()
    manager.register("extra", "input", "e4m3")
    manager.step()
    assert not manager._syncs[0].arena.known_hot


MOST = 69
"""Torch ops of a step, including fp8dist::launch and fp8dist::commit, and the ops that these two run inside. Three look
if a slot is still cold; they end when none is."""


def _ops_of_a_step(slots: int, history_len: int) -> Counter[str]:
    model = nn.Identity()
    manager = fp8dist.prepare(model, DelayedScaling(history_len=history_len))
    names = [f"m{i}" for i in range(slots)]
    for name in names:
        manager.register(name, "input", "e4m3")
    for name in names[::2]:  # Every other module does not run.
        manager.slot(name, "input").record(torch.ones(1))
    ops = Operations()

    def inside(function: Callable[..., Any]) -> Callable[..., Any]:
        """Enter the mode again: torch disables a mode while an op runs that the mode has seen."""

        def counted(*args: Any) -> Any:
            with ops:
                return function(*args)

        return counted

    with ops, mock.patch.multiple(update, launch=inside(update.launch), commit=inside(update.commit)):
        manager.step()
    assert manager.steps == 1
    seen = Counter(map(str, ops.seen))
    assert seen["fp8dist.launch.default"] == seen["fp8dist.commit.default"] == 1
    assert seen["aten.reciprocal.out"] == 1, "what a commit runs inside must be counted"
    return seen


@pytest.mark.parametrize("history_len", [1, 64])
def test_ops_of_a_step_are_constant_in_slots(history_len: int) -> None:
    few, many = _ops_of_a_step(3, history_len), _ops_of_a_step(300, history_len)
    assert few == many
    assert sum(few.values()) <= MOST

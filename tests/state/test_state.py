"""Random sequences of steps, copies, saves, loads and history lengths, compared with the oracle."""

from __future__ import annotations

import copy
import math
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import fp8dist
from fp8dist import DelayedScaling, StateManager
from fp8dist.errors import CheckpointError
from tests.support.oracle import Oracle, Rules, amax_of, bits_of, float32, of_bits
from tests.support.states import saved_of, state_of

Slot = tuple[str, str]

SLOTS: dict[Slot, str] = {
    ("a", "grad_output"): "e5m2",
    ("a", "input"): "e4m3",
    ("a", "weight"): "e4m3",
    ("b", "input"): "e5m2",
}

NAMED_VALUES = [
    0.0,
    -0.0,
    math.nan,
    -math.nan,
    math.inf,
    -math.inf,
    of_bits(1),
    of_bits(0x7F7FFFFF),
    1e-11,
    448.0,
    464.0,
    57344.0,
    61440.0,
]
amaxes = st.one_of(
    st.sampled_from([float32(v) for v in NAMED_VALUES]),
    st.floats(width=32, allow_nan=True, allow_infinity=True),
    st.floats(0.125, 8.0, width=32),
    st.floats(0.125, 8.0, width=32),
)
records = st.dictionaries(st.sampled_from(list(SLOTS)), st.lists(amaxes, min_size=1, max_size=2))
steps = st.tuples(st.just("step"), records)
others = st.one_of(
    st.tuples(st.sampled_from(["dict", "file", "deepcopy", "pickle", "look", "record only"]), records),
    st.tuples(st.just("resize"), st.sampled_from([1, 2, 3, 4, 5, 9])),
    st.tuples(st.just("resize"), st.sampled_from([1, 2, 3, 4, 5, 9])),
    st.tuples(st.just("rollback"), st.none()),
)
lives = st.lists(st.one_of(steps, steps, steps, others), min_size=1, max_size=40)
recipes = st.fixed_dictionaries(
    {
        "history_len": st.sampled_from([1, 2, 3, 4, 7, 16, 17]),
        "amax_algo": st.sampled_from(["max", "max", "most_recent"]),
        "margin": st.integers(-2, 3),
        "power_of_two": st.booleans(),
        "update": st.sampled_from(["same_step", "next_step"]),
        "warmup": st.sampled_from(["current", "unit"]),
    }
)


class _Life:
    """A manager and its oracle."""

    def __init__(self, recipe: dict[str, Any]) -> None:
        self.recipe = recipe
        self.oracle = Oracle(SLOTS, self._rules())
        self.model, self.manager = self._new()
        self.waiting: dict[Slot, list[float]] = {}
        self.early: tuple[Any, Any] | None = None

    def _rules(self) -> Rules:
        return Rules(**{k: v for k, v in self.recipe.items() if k != "update"})

    def _new(self) -> tuple[nn.Module, StateManager]:
        model = nn.Module()
        manager = fp8dist.prepare(model, DelayedScaling(**self.recipe))
        for (fqn, role), format in SLOTS.items():
            manager.register(fqn, role, format)
        return model, manager

    def apply(self, action: str, argument: Any) -> None:
        """Apply one event to both."""
        if action in ("step", "record only"):
            for (fqn, role), values in argument.items():
                self.manager.slot(fqn, role).record(torch.tensor(values))
                self.waiting.setdefault((fqn, role), []).extend(values)
            if action == "step":
                self.manager.step()
                self.oracle.step({slot: amax_of(values) for slot, values in self.waiting.items()})
                self.waiting = {}
        elif action == "dict":
            self._load_into_new(lambda new: new.load_state_dict(self.manager.state_dict()))
        elif action == "file":
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder, "state.safetensors")
                self.manager.save(path)
                self._load_into_new(lambda new: new.load(path))
        elif action == "resize":
            self.recipe = {**self.recipe, "history_len": argument}
            self._load_into_new(lambda new: new.load_state_dict(self.manager.state_dict()))
            self.oracle.resize(self._rules())
            self.early = None
        elif action == "deepcopy":
            self.model = copy.deepcopy(self.model)
            self.manager = fp8dist.get_manager(self.model)
        elif action == "pickle":
            self.model = pickle.loads(pickle.dumps(self.model))
            self.manager = fp8dist.get_manager(self.model)
        elif action == "rollback":
            if self.early is None:
                self.early = (self.manager.state_dict(), copy.deepcopy(self.oracle))
            else:
                self.manager.load_state_dict(self.early[0])
                self.oracle = copy.deepcopy(self.early[1])
                self.waiting = {}
        else:
            assert action == "look"
            self.check()

    def _load_into_new(self, load: Callable[[StateManager], None]) -> None:
        model, manager = self._new()
        load(manager)
        self.model, self.manager = model, manager
        self.waiting = {}  # Pending amaxes are not saved.

    def check(self) -> None:
        """Compare bitwise."""
        assert state_of(self.manager) == self.oracle.state()


def _live(recipe: dict[str, Any], life: list[tuple[str, Any]]) -> None:
    lived = _Life(recipe)
    for action, argument in life:
        lived.apply(action, argument)
    lived.check()
    # The restored state must also continue correctly: its window position must be the oracle's.
    for step in range(lived.recipe["history_len"] + 1):
        lived.apply("step", {slot: [0.5 + step] for slot in SLOTS})
        lived.check()


RELAXED = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}


@pytest.mark.slow
@given(recipes, lives)
@settings(max_examples=30, derandomize=True, database=None, **RELAXED)
def test_random_lives(recipe: dict[str, Any], life: list[tuple[str, Any]]) -> None:
    _live(recipe, life)


@pytest.mark.long
@pytest.mark.nightly
@pytest.mark.parametrize("part", range(2))  # Split for two workers.
@given(recipe=recipes, life=lives)
@settings(max_examples=1000 // 2, database=None, **RELAXED)
def test_many_random_lives(part: int, recipe: dict[str, Any], life: list[tuple[str, Any]]) -> None:
    _live(recipe, life)


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


def test_a_steady_amax_does_not_saturate() -> None:
    """amax * (448 / amax) may round to slightly above 448, which casts to 448 without loss."""
    model = nn.Module()
    manager = fp8dist.prepare(model, DelayedScaling(history_len=2))
    values = [of_bits(0x3F800000 + 7919 * i) for i in range(200)]
    for i in range(len(values)):
        manager.register(f"m{i:03d}", "input", "e4m3")
    for _ in range(3):
        for i, value in enumerate(values):
            manager.slot(f"m{i:03d}", "input").record(torch.tensor([value]))
        manager.step()
    assert manager.metrics()["fp8/saturated_amaxes"] == 0


@pytest.mark.parametrize(("format", "limit"), [("e4m3", 464.0), ("e5m2", 61440.0)])
def test_an_amax_that_rounds_to_the_largest_number_does_not_saturate(format: str, limit: float) -> None:
    """An amax half a step above the largest number does not saturate, the next float32 does."""
    for amax, saturated in ((limit, 0), (of_bits(bits_of(limit) + 1), 1)):
        model = nn.Module()
        manager = fp8dist.prepare(model, DelayedScaling(history_len=2))
        manager.register("a", "input", format)
        manager.slot("a", "input").set_scale(1.0)
        _step(manager, amax)
        assert manager.metrics()["fp8/saturated_amaxes"] == saturated


def test_partial_loads_keep_the_other_slots() -> None:
    """Non-strict: slots missing from the checkpoint keep their state, and extra slots are ignored."""
    small_model = nn.Module()
    small = fp8dist.prepare(small_model, DelayedScaling(history_len=2))
    small.register("b", "input", "e4m3")
    small.register("z", "input", "e4m3")
    for _ in range(3):
        small.slot("b", "input").record(torch.tensor([8.0]))
        small.step()
    _model, manager = _manager(history_len=3)
    _step(manager, 1.0, 2.0)
    before = state_of(manager)
    with pytest.raises(CheckpointError, match="missing slots: a:input; unexpected slots: z:input"):
        manager.load_state_dict(small.state_dict())
    assert state_of(manager) == before
    manager.load_state_dict(small.state_dict(), strict=False)
    assert state_of(manager)["a", "input"] == before["a", "input"]
    assert manager.slot("b", "input").amax_history.tolist() == [0.0, 8.0, 8.0]
    assert manager.slot("b", "input").scale == 56
    _step(manager, 4.0, 1.0)
    assert manager.slot("a", "input").amax_history.tolist() == [0.0, 1.0, 4.0]
    assert manager.slot("b", "input").amax_history.tolist() == [8.0, 8.0, 1.0]

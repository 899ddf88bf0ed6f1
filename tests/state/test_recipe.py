"""Recipes: defaults, immutability, and errors that name each bad value."""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8dist
from fp8dist import BlockScaling, CurrentScaling, DelayedScaling, Recipe, RowwiseScaling
from fp8dist.errors import ConfigurationError
from fp8dist.state import storage
from fp8dist_kernels.formats import E4M3, E5M2, Role
from tests.support.oracle import Oracle, Rules, bits_of, float32
from tests.support.states import bits

COMMON = {"format": "hybrid", "power_of_two": False, "high_precision": (), "fast_accumulation": ("fprop",)}
DEFAULTS: dict[type[Recipe], dict[str, Any]] = {
    DelayedScaling: {
        **{"history_len": 1024, "amax_algo": "max", "margin": 0, "update": "same_step", "warmup": "current"},
        **COMMON,
    },
    CurrentScaling: COMMON,
    RowwiseScaling: {**COMMON, "format": "e4m3"},
    BlockScaling: {"format": "e4m3", "power_of_two": False, "high_precision": ()},
}
WITH_ACCUMULATION = (DelayedScaling, CurrentScaling, RowwiseScaling)


def test_recipes() -> None:
    """Their defaults are those of the design, and they are immutable."""
    for kind, defaults in DEFAULTS.items():
        recipe = kind()
        assert dataclasses.asdict(recipe) == defaults
        assert recipe.delayed == (kind is DelayedScaling)
        described = {k: list(v) if isinstance(v, tuple) else v for k, v in defaults.items()}
        assert recipe.describe() == {"recipe": kind.__name__, **described}
        formats = [recipe.format_of(role) for role in (Role.INPUT, Role.WEIGHT, Role.GRAD_OUTPUT)]
        assert formats == [E4M3, E4M3, E5M2 if recipe.format == "hybrid" else E4M3]
        with pytest.raises(dataclasses.FrozenInstanceError):
            recipe.format = "hybrid"
        assert recipe == kind() != kind(power_of_two=True)
        assert hash(recipe) == hash(kind())
    with pytest.raises(ConfigurationError, match="Recipe is the base class of all recipes"):
        Recipe()


BAD: dict[str, tuple[Any, ...]] = {
    "format": ("e5m2", "HYBRID", None, E4M3),
    "power_of_two": (1, 0, None, "yes"),
    "high_precision": ("fprop", ("bprop",), None, 3, ("fprop", None), {"fprop": True}),
    "fast_accumulation": ("fprop", ("bprop",), None, True, ("fprop", None), {"fprop": True}),
    "history_len": (0, -1, 1_000_001, 2.0, "4", None, True),
    "margin": (-65, 65, 0.5, "0", None, False),
    "amax_algo": ("mean", "MAX", None, 3),
    "update": ("now", None, 1),
    "warmup": ("none", None, True),
}


def test_a_bad_value_is_named() -> None:
    for kind, defaults in DEFAULTS.items():
        for field in defaults:
            for value in BAD[field]:
                with pytest.raises(ConfigurationError) as caught:
                    kind(**{field: value})
                of = "a tuple of fprop, dgrad, wgrad" if field == "fast_accumulation" else ""
                assert str(caught.value).startswith(f"{field} must be {of}")
                assert str(caught.value).endswith(f"got {value!r}")
    for good in [{"history_len": 1}, {"history_len": 1_000_000}, {"margin": -64}, {"margin": 64}, {"amax_algo": max}]:
        DelayedScaling(**good)


def test_gemms_with_fast_accumulation() -> None:
    for kind in WITH_ACCUMULATION:
        for given, taken in (
            ((), ()),
            (["wgrad", "fprop", "wgrad"], ("fprop", "wgrad")),
            ({"dgrad"}, ("dgrad",)),
            (("wgrad", "dgrad", "fprop"), ("fprop", "dgrad", "wgrad")),
        ):
            recipe = kind(fast_accumulation=given)  # type: ignore[arg-type]
            assert recipe.fast_accumulation == taken
            described = json.loads(json.dumps(recipe.describe()))
            assert described["fast_accumulation"] == list(taken)
            assert Recipe.from_description(described) == recipe
        described = kind(power_of_two=True).describe()
        del described["fast_accumulation"]  # From before there was one: the default.
        assert Recipe.from_description(described) == kind(power_of_two=True)
    assert BlockScaling().fast_accumulation == ()


def test_a_checkpoint_from_before_fast_accumulation_loads() -> None:
    saver = fp8dist.prepare(nn.Sequential(nn.Linear(32, 32)), DelayedScaling(history_len=4))
    saver.slot("0", "input").record(torch.tensor([3.0]))
    saver.step()
    (key, blob), *_ = saver.state_dict().items()
    state, header = storage.from_bytes(blob, "a test")
    del state["recipes"][0]["fast_accumulation"]
    old = {key: storage.to_bytes(state, header)}
    for fast in (("fprop",), (), ("dgrad", "wgrad")):
        loader = fp8dist.prepare(nn.Sequential(nn.Linear(32, 32)), DelayedScaling(4, fast_accumulation=fast))
        loader.load_state_dict(old)
        assert bits(loader.slot("0", "input").scale) == bits(saver.slot("0", "input").scale)


def _median(windows: Tensor) -> Tensor:
    return windows.median(1).values


def _second_median(windows: Tensor) -> Tensor:
    return windows.median(1).values


class _Percentile:
    def __call__(self, windows: Tensor) -> Tensor:
        return windows.quantile(0.9, 1)


def test_descriptions_tell_recipes_apart() -> None:
    changes = {"history_len": 4, "margin": 1, "format": "e4m3", "update": "next_step", "warmup": "unit"}
    changes |= {"power_of_two": True, "fast_accumulation": (), "high_precision": ("wgrad",)}
    algorithms = ["max", "most_recent", _median, _second_median, _Percentile(), functools.partial(torch.amax, dim=1)]
    recipes = [DelayedScaling(**{name: value}) for name, value in changes.items()]
    recipes += [DelayedScaling(amax_algo=algorithm) for algorithm in algorithms]
    texts = {json.dumps(recipe.describe(), sort_keys=True) for recipe in recipes}
    assert len(texts) == len(recipes) == len(dataclasses.fields(DelayedScaling)) - 1 + len(algorithms)
    assert DelayedScaling(amax_algo=_median).describe() == DelayedScaling(amax_algo=_median).describe()


def test_a_callable_gets_windows_oldest_first() -> None:
    seen: list[Any] = []

    def weighted(windows: Tensor) -> Tensor:
        seen.append(windows.tolist())
        return windows[:, 0] + 2 * windows[:, 2]

    model = nn.Module()
    manager = fp8dist.prepare(model, DelayedScaling(history_len=3, amax_algo=weighted))
    manager.register("a", "input", "e4m3")
    manager.register("b", "input", "e4m3")
    oracle = Oracle({("a", "input"): "e4m3"}, Rules(3, amax_algo=lambda w: float32(w[0] + 2 * w[2])))
    for value in (1.0, 2.0, 3.0, 5.0):
        manager.slot("a", "input").record(torch.tensor([value]))
        manager.step()
        oracle.step({("a", "input"): value})
        assert bits(manager.slot("a", "input").scale) == bits_of(oracle.slots["a", "input"].scale)
    assert seen[-1] == [[2.0, 3.0, 5.0], [0.0, 0.0, 0.0]]
    assert manager.slot("b", "input").scale == 1


def test_a_callable_that_returns_something_else() -> None:
    for wrong in [lambda w: w, lambda w: w.amax(), lambda w: w.amax(1).double()]:
        model = nn.Module()
        manager = fp8dist.prepare(model, DelayedScaling(history_len=3, amax_algo=wrong))
        manager.register("a", "input", "e4m3")
        manager.slot("a", "input").record(torch.ones(1))
        with pytest.raises(ConfigurationError, match=r"amax_algo must return float32\[1\], got"):
            manager.step()

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


def test_defaults_are_those_of_the_design() -> None:
    assert dataclasses.asdict(DelayedScaling()) == {
        "history_len": 1024,
        "amax_algo": "max",
        "margin": 0,
        "format": "hybrid",
        "update": "same_step",
        "warmup": "current",
        "power_of_two": False,
        "high_precision": (),
        "fast_accumulation": ("fprop",),
    }


def test_a_bad_value_is_named() -> None:
    every = (
        [("format", v) for v in ("e5m2", "HYBRID", None, E4M3)]
        + [("power_of_two", v) for v in (1, 0, None, "yes")]
        + [("high_precision", v) for v in ("fprop", ("bprop",), None, 3, ("fprop", None), {"fprop": True})]
    )
    delayed = (
        [("history_len", v) for v in (0, -1, 1_000_001, 2.0, "4", None, True)]
        + [("margin", v) for v in (-65, 65, 0.5, "0", None, False)]
        + [("amax_algo", v) for v in ("mean", "MAX", None, 3)]
        + [("update", v) for v in ("now", None, 1)]
        + [("warmup", v) for v in ("none", None, True)]
    )
    fast = [("fast_accumulation", v) for v in ("fprop", ("bprop",), None, True, ("fprop", None), {"fprop": True})]
    for kind in (DelayedScaling, *JUST_IN_TIME):
        own = [*(delayed if kind is DelayedScaling else []), *(fast if kind in WITH_ACCUMULATION else [])]
        for field, value in [*every, *own]:
            with pytest.raises(ConfigurationError) as caught:
                kind(**{field: value})
            of = "a tuple of fprop, dgrad, wgrad" if field == "fast_accumulation" else ""
            assert str(caught.value).startswith(f"{field} must be {of}")
            assert str(caught.value).endswith(f"got {value!r}")


def test_values_at_the_ends_are_taken() -> None:
    for good in [{"history_len": 1}, {"history_len": 1_000_000}, {"margin": -64}, {"margin": 64}, {"amax_algo": max}]:
        DelayedScaling(**good)


JUST_IN_TIME: dict[type[Recipe], dict[str, Any]] = {
    CurrentScaling: {
        **{"format": "hybrid", "power_of_two": False, "high_precision": ()},
        "fast_accumulation": ("fprop",),
    },
    RowwiseScaling: {
        **{"format": "e4m3", "power_of_two": False, "high_precision": ()},
        "fast_accumulation": ("fprop",),
    },
    BlockScaling: {"format": "e4m3", "power_of_two": False, "high_precision": ()},
}

WITH_ACCUMULATION = (DelayedScaling, CurrentScaling, RowwiseScaling)


def test_recipes_without_state() -> None:
    for kind in JUST_IN_TIME:
        recipe = kind()
        assert dataclasses.asdict(recipe) == JUST_IN_TIME[kind]
        assert not recipe.delayed
        described = {k: list(v) if isinstance(v, tuple) else v for k, v in JUST_IN_TIME[kind].items()}
        assert recipe.describe() == {"recipe": kind.__name__, **described}
        assert [recipe.format_of(role) for role in (Role.INPUT, Role.WEIGHT)] == [E4M3, E4M3]
        assert recipe.format_of(Role.GRAD_OUTPUT) == (E5M2 if recipe.format == "hybrid" else E4M3)
        with pytest.raises(dataclasses.FrozenInstanceError):
            recipe.format = "hybrid"
        with pytest.raises(TypeError):
            kind(margin=1)


def test_gemms_with_fast_accumulation() -> None:
    for kind in WITH_ACCUMULATION:
        assert kind().fast_accumulation == ("fprop",)
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
    assert "fast_accumulation" not in BlockScaling().describe()
    with pytest.raises(ConfigurationError, match="BlockScaling does not have it"):
        BlockScaling(fast_accumulation=("fprop",))  # type: ignore[call-arg]


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


def test_frozen() -> None:
    recipe = DelayedScaling()
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.margin = 1  # type: ignore[misc]
    assert recipe == DelayedScaling()
    assert recipe != DelayedScaling(margin=1)
    assert hash(recipe) == hash(DelayedScaling())
    hybrid, e4m3 = DelayedScaling(), DelayedScaling(format="e4m3")
    assert [hybrid.format_of(role) for role in (Role.INPUT, Role.WEIGHT, Role.GRAD_OUTPUT)] == [E4M3, E4M3, E5M2]
    assert [e4m3.format_of(role) for role in Role] == [E4M3] * 3
    with pytest.raises(ConfigurationError, match="Recipe is the base class of all recipes"):
        Recipe()


def _median(windows: Tensor) -> Tensor:
    return windows.median(1).values


def _second_median(windows: Tensor) -> Tensor:
    return windows.median(1).values


class _Percentile:
    def __call__(self, windows: Tensor) -> Tensor:
        return windows.quantile(0.9, 1)


def test_descriptions_tell_recipes_apart() -> None:
    recipes = [
        DelayedScaling(),
        DelayedScaling(history_len=4),
        DelayedScaling(amax_algo="most_recent"),
        DelayedScaling(amax_algo=_median),
        DelayedScaling(amax_algo=_second_median),
        DelayedScaling(amax_algo=_Percentile()),
        DelayedScaling(margin=1),
        DelayedScaling(format="e4m3"),
        DelayedScaling(update="next_step"),
        DelayedScaling(warmup="unit"),
        DelayedScaling(power_of_two=True),
        DelayedScaling(fast_accumulation=()),
        DelayedScaling(fast_accumulation=("fprop", "wgrad")),
    ]
    texts = {json.dumps(recipe.describe(), sort_keys=True) for recipe in recipes}
    assert len(texts) == len(recipes)
    assert DelayedScaling(amax_algo=_median).describe() == DelayedScaling(amax_algo=_median).describe()
    assert DelayedScaling().describe()["recipe"] == "DelayedScaling"


def test_a_partial_can_be_described() -> None:
    recipe = DelayedScaling(amax_algo=functools.partial(torch.amax, dim=1))
    json.dumps(recipe.describe())


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
        manager.register("b", "input", "e4m3")
        manager.slot("a", "input").record(torch.ones(1))
        with pytest.raises(ConfigurationError, match=r"amax_algo must return float32\[2\], got"):
            manager.step()

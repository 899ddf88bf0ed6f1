"""Recipes of single modules: which pattern wins, several recipes in one model and process, and what is saved."""

from __future__ import annotations

import copy
import json
import math
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8dist
from fp8dist import (
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    MXFP8Scaling,
    NVFP4Scaling,
    Recipe,
    RowwiseScaling,
    StateManager,
    first_and_last,
)
from fp8dist.errors import CheckpointError, ConfigurationError
from fp8dist.modules.fp8_linear import FP8Linear
from fp8dist.modules.overrides import High
from tests.support import fp8_oracle
from tests.support.gemms import Gemms, assert_gemm, numbers
from tests.support.training import SmallJob, batch, make_net, parameter_bits, state_bits, unwrapped

RECIPES: tuple[Recipe, ...] = (
    DelayedScaling(history_len=4),
    DelayedScaling(history_len=2, amax_algo="most_recent", margin=1, format="e4m3", update="next_step"),
    DelayedScaling(warmup="unit", power_of_two=True, high_precision=("wgrad",)),
    CurrentScaling(),
    CurrentScaling(format="e4m3", power_of_two=True),
    CurrentScaling(high_precision=("dgrad", "fprop")),
    RowwiseScaling(),
    RowwiseScaling(format="hybrid", high_precision=("fprop",)),
    BlockScaling(),
    BlockScaling(format="hybrid", power_of_two=True),
    MXFP8Scaling(),
    MXFP8Scaling(scale_rounding="up", high_precision=("wgrad",)),
    NVFP4Scaling(),
    NVFP4Scaling(hadamard=False, stochastic_rounding=False, seed=3, margin=0, high_precision=("fprop",)),
)

MIXED: dict[str, Recipe | High] = {"first": MXFP8Scaling(), "last": BlockScaling(format="hybrid")}
"""With delayed scaling as default: three recipes in ``Net``."""


def converted(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, FP8Linear)]


def recipes(manager: StateManager) -> dict[str, Recipe]:
    return {slot.fqn: manager.slot(slot.fqn, "weight").recipe for slot in manager.slots}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"overrides": {"b*": RowwiseScaling(), "*": "high", "branch": BlockScaling()}}, {"branch": RowwiseScaling()}),
        (
            {"overrides": {"l*": "high", "[fl]*": RowwiseScaling()}},
            {"branch": DelayedScaling(margin=3), "first": RowwiseScaling()},
        ),
        ({"overrides": {"first": CurrentScaling(), "last": "high"}, "skip": ("*",)}, {"first": CurrentScaling()}),
        (
            {"overrides": {"*": CurrentScaling()}, "filter_fn": lambda module, fqn: module.out_features == 16},
            {"last": CurrentScaling()},
        ),
    ],
    ids=["the first match counts", "the default elsewhere", "a recipe beats skip", "no Linear becomes eligible"],
)
def test_which_recipe_a_module_has(settings: Any, expected: dict[str, Recipe]) -> None:
    model = make_net()
    manager = fp8dist.prepare(model, DelayedScaling(margin=3), **settings)
    assert recipes(manager) == expected
    assert sorted(converted(model)) == sorted(expected)
    if "skip" in settings:
        reasons = {row.fqn: row.reason for row in manager.coverage() if not row.fp8}
        assert reasons.keys() == {"last", "branch"}
        assert "overrides" in reasons["last"]
        assert reasons["branch"] == "it matches skip '*'"


def _tied() -> nn.Module:
    model = nn.ModuleDict({"a": nn.Linear(32, 32), "b": nn.Linear(32, 32), "c": nn.Linear(32, 32)})
    model["b"].weight = model["a"].weight
    return model


def test_modules_that_share_a_weight_have_one_recipe() -> None:
    with pytest.raises(ConfigurationError, match="a and b share a weight: overrides must give both the same recipe"):
        fp8dist.prepare(_tied(), overrides={"b": CurrentScaling()})
    # Writing the same values twice makes no difference, nor does high precision in one of them.
    manager = fp8dist.prepare(_tied(), overrides={"a": CurrentScaling(), "b": CurrentScaling()})
    assert recipes(manager) == {"a": CurrentScaling(), "b": CurrentScaling(), "c": DelayedScaling()}
    assert [slot.role for slot in manager.slots if slot.fqn == "b"] == ["grad_output", "input"]
    assert recipes(fp8dist.prepare(_tied(), overrides={"a": "high", "b": RowwiseScaling()}))["b"] == RowwiseScaling()


def _linears(count: int) -> list[nn.Module]:
    return [nn.Linear(32, 32) for _ in range(count)]


def _transformer() -> nn.Module:
    """Two stacks, the outer one with a nested list, and Linears outside of them."""
    layers = {"mlp": nn.ModuleList(_linears(2)), "norm": nn.LayerNorm(32)}
    return nn.ModuleDict(
        {
            "embed": nn.Linear(32, 32),
            "blocks": nn.ModuleList(nn.ModuleDict(copy.deepcopy(layers)) for _ in range(4)),
            "decoder": nn.ModuleDict({"layers": nn.ModuleList(_linears(3))}),
            "norms": nn.ModuleList(nn.LayerNorm(32) for _ in range(2)),
            "head": nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 16)),
        }
    )


class DistributedDataParallel(nn.Module):
    """A wrapper: patterns have the names that ``prepare`` uses."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._orig_mod = module


def _tower() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Sequential(*_linears(2)), nn.Linear(32, 32), nn.ReLU())


@pytest.mark.parametrize(
    ("model", "counts", "expected"),
    [
        (_transformer, (), ["blocks.0.*", "blocks.3.*", "decoder.layers.0", "decoder.layers.2"]),
        (_transformer, (2, 0), ["blocks.0.*", "blocks.1.*", "decoder.layers.0", "decoder.layers.1"]),
        (_transformer, (0, 0), []),
        (lambda: DistributedDataParallel(_transformer()), (0, 1), ["blocks.3.*", "decoder.layers.2"]),
        (_tower, (), ["0", "3"]),
        (_tower, (0, 2), ["2.*", "3"]),
        (lambda: nn.ModuleDict({"tower": _tower(), "other": nn.Linear(32, 32)}), (), ["tower.0", "tower.3"]),
        (lambda: nn.ModuleList(_linears(3)), (1, 2), ["0", "1", "2"]),
    ],
)
def test_first_and_last(model: Any, counts: tuple[int, ...], expected: list[str]) -> None:
    of = model()
    high = first_and_last(of, *counts)
    assert high == dict.fromkeys(expected, "high")
    if model is _transformer:
        fp8dist.prepare(of, CurrentScaling(), overrides=high)
        assert ("blocks.0.mlp.0" in converted(of)) == (not expected)
        assert {"embed", "blocks.2.mlp.1", "head.0"} <= {*converted(of)}


def test_first_and_last_without_layers_or_with_too_few() -> None:
    for model in (make_net(), nn.ModuleList([nn.LayerNorm(32)])):
        with pytest.raises(ConfigurationError, match=r"the model has no nn\.ModuleList or nn\.Sequential of Linears"):
            first_and_last(model)
    for first, last in ((2, 2), (4, 0), (-1, 1), (1, -1)):
        with pytest.raises(ConfigurationError, match=f"cannot take {first} and {last} of 3 layers"):
            first_and_last(nn.ModuleList(_linears(3)), first, last)


def test_each_module_of_a_model_is_cast_by_its_recipe() -> None:
    """With three recipes in one model, each module multiplies what the oracle of its recipe says."""
    model, of = make_net(), {"branch": RowwiseScaling(), **MIXED}
    fp8dist.prepare(model, RowwiseScaling(), overrides=MIXED)
    tensors: dict[str, list[Any]] = {}

    def note(name: str, module: nn.Module, x: Tensor, y: Tensor) -> None:
        tensors[name] = [numbers(x), numbers(module.weight)]
        y.register_hook(lambda grad: tensors[name].append(numbers(grad)))

    for name in of:
        hook = partial(note, name)
        model.get_submodule(name).register_forward_hook(lambda module, args, y, hook=hook: hook(module, args[0], y))
    with Gemms() as gemms:
        x, labels = batch(0, 0)
        (model(x) - labels).square().mean().backward()
    order = [
        *(("first", "fprop"), ("branch", "fprop"), ("last", "fprop")),
        *(("last", "dgrad"), ("last", "wgrad"), ("branch", "dgrad"), ("branch", "wgrad")),
        ("first", "wgrad"),  # The batch needs no gradient.
    ]
    for gemm, (name, product) in zip(gemms.seen, order, strict=True):
        recipe: Any = of[name]
        by: Any = "mx down" if isinstance(recipe, MXFP8Scaling) else recipe.by
        expected = fp8_oracle.operands(*tensors[name], by, recipe.format, recipe.power_of_two)
        assert_gemm(gemm, expected[product], f"{name} {product}")


def job(recipe: Recipe, overrides: Any = None, seed: int = 0, steps: int = 0) -> SmallJob:
    adam = partial(torch.optim.AdamW, lr=0.01)
    of = SmallJob(recipe, make_net(seed), wrap=unwrapped, optimizer=adam, overrides=overrides)
    trained(of, *range(steps))
    return of


def trained(of: SmallJob, *indexes: int) -> list[float]:
    """Train on these batches. Return the losses."""
    return [of.step(index) for index in indexes]


@pytest.mark.slow
def test_each_recipe_trains_another_way() -> None:
    """Every option affects the losses, except options that must not."""
    assert len({tuple(trained(job(recipe), *range(4))) for recipe in RECIPES}) == len(RECIPES)


def test_recipes_compare_hash_print_and_can_be_copied() -> None:
    for recipe in RECIPES:
        others = [other for other in RECIPES if other is not recipe]
        copies = [copy.copy(recipe), copy.deepcopy(recipe), pickle.loads(pickle.dumps(recipe)), eval(repr(recipe))]
        copies.append(Recipe.from_description(json.loads(json.dumps(recipe.describe()))))
        for same in copies:
            assert same == recipe
            assert hash(same) == hash(recipe)
            assert repr(same) == repr(recipe)
            assert same.describe() == recipe.describe()
            assert type(same) is type(recipe)
        assert all(other != recipe and repr(other) != repr(recipe) for other in others)
    assert RowwiseScaling() != BlockScaling()  # Of equal fields.
    for given in (("wgrad", "fprop"), ["fprop", "wgrad", "wgrad"], {"wgrad", "fprop"}):
        assert CurrentScaling(high_precision=given) == CurrentScaling(high_precision=("fprop", "wgrad"))


def test_strange_descriptions_are_refused() -> None:
    """Bad values of fields are in ``tests/state/test_recipe.py``."""
    cases: list[tuple[dict[Any, Any], str]] = [
        ({}, "there is no recipe None"),
        ({"recipe": "MXScaling"}, "there is no recipe 'MXScaling'; the recipes are DelayedScaling, CurrentScaling"),
        ({"recipe": "Recipe"}, "there is no recipe 'Recipe'"),
        ({"recipe": ["CurrentScaling"]}, "there is no recipe"),
        ({"recipe": "CurrentScaling", "margin": 0}, "CurrentScaling has no field margin"),
        ({"recipe": "CurrentScaling", 3: 4}, "CurrentScaling has no field 3"),
        ({"recipe": "CurrentScaling", "format": ["hybrid"]}, "format must be one of"),
        ({"recipe": "BlockScaling", "high_precision": [["fprop"]]}, "high_precision must be a tuple of"),
        (DelayedScaling(amax_algo=lambda windows: windows[:, 0]).describe(), "amax_algo must be one of"),
    ]
    for description, message in cases:
        with pytest.raises(ConfigurationError, match=message):
            Recipe.from_description(description)


@pytest.mark.parametrize("recipe", [RECIPES[0], NVFP4Scaling()], ids=repr)
def test_a_resume_of_a_mixed_model_is_bitwise(recipe: Recipe) -> None:
    """Also where the recipe draws random numbers."""
    straight, resumed = job(recipe, MIXED, steps=3), job(recipe, MIXED, seed=5)
    for part in ("net", "optimizer", "manager"):
        getattr(resumed, part).load_state_dict(copy.deepcopy(getattr(straight, part).state_dict()))
    assert trained(resumed, 3, 4, 5) == trained(straight, 3, 4, 5)
    assert parameter_bits(resumed.net) == parameter_bits(straight.net)
    assert state_bits(resumed.manager) == state_bits(straight.manager)


@pytest.mark.parametrize("recipe", RECIPES[3::4], ids=repr)
def test_between_delayed_scaling_and_a_recipe_without_state(recipe: Recipe) -> None:
    """The state that delayed scaling saved is ignored: losses equal those of a run that loaded none. The other way,
    there are no scales: refused, unless the caller asks for a conversion."""
    delayed, losses = job(RECIPES[0], steps=3), []
    for load in (False, True):
        other = job(recipe)
        other.net.load_state_dict(copy.deepcopy(delayed.net.state_dict()))
        if load:
            other.manager.load_state_dict(delayed.manager.state_dict())
            assert other.manager.steps == 3
        losses.append(trained(other, 3, 4))
    assert losses[0] == losses[1]
    before = state_bits(delayed.manager)
    with pytest.raises(CheckpointError, match=rf"recipe is '{type(recipe).__name__}' there and 'DelayedScaling' here"):
        delayed.manager.load_state_dict(other.manager.state_dict())
    assert state_bits(delayed.manager) == before
    delayed.manager.load_state_dict(other.manager.state_dict(), convert=True)
    assert all(map(math.isfinite, trained(delayed, 3, 4, 5)))


def test_an_override_more_or_less_is_another_recipe() -> None:
    """One module switches from delayed scaling, another switches to it; unchanged modules are loaded."""
    mixed, plain = job(RECIPES[0], MIXED, steps=3), job(RECIPES[0], steps=3)
    scale = float(plain.manager.slot("branch", "input").scale)
    mixed.manager.load_state_dict(plain.manager.state_dict())
    assert float(mixed.manager.slot("branch", "input").scale) == scale
    with pytest.raises(CheckpointError, match="recipe is 'MXFP8Scaling' there and 'DelayedScaling' here"):
        plain.manager.load_state_dict(mixed.manager.state_dict())


def test_a_default_that_no_module_has_synchronises_nothing() -> None:
    manager = fp8dist.prepare(make_net(), DelayedScaling(), overrides={"*": CurrentScaling()})
    assert [sync.arena.recipe for sync in manager._syncs] == [CurrentScaling()]
    alone = fp8dist.prepare(nn.Sequential(nn.ReLU()), DelayedScaling())
    assert [sync.arena.recipe for sync in alone._syncs] == [DelayedScaling()]

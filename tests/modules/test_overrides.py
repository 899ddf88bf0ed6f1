"""Recipes of single modules: which pattern wins, several recipes in one model and process, and what is saved."""

from __future__ import annotations

import copy
import json
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8dist
from fp8dist import BlockScaling, CurrentScaling, DelayedScaling, Recipe, RowwiseScaling, StateManager, first_and_last
from fp8dist.errors import CheckpointError, ConfigurationError
from fp8dist.modules.fp8_linear import FP8Linear
from fp8dist.modules.overrides import High
from fp8dist.state.storage import from_bytes
from tests.support import fp8_oracle
from tests.support.gemms import Gemms, assert_gemm, numbers
from tests.support.training import batch, bits, make_net, parameter_bits, state_bits

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
)

ONE_OF_EACH = (CurrentScaling(), RowwiseScaling(format="hybrid", high_precision=("fprop",)), BlockScaling())
"""Settings of recipes without state."""

MIXED: dict[str, Recipe | High] = {"first": CurrentScaling(power_of_two=True), "last": BlockScaling(format="hybrid")}
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


def test_a_pattern_that_matches_nothing_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    fp8dist.prepare(make_net(), overrides={"frist": CurrentScaling(), "*": RowwiseScaling(), "blocks.*": "high"})
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", "fp8dist: overrides: no module with a matmul weight matches 'frist' (nearest: 'first'), 'blocks.*'")
    ]


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
        (_transformer, (0, 1), ["blocks.3.*", "decoder.layers.2"]),
        (_transformer, (0, 0), []),
        (
            lambda: DistributedDataParallel(_transformer()),
            (),
            ["blocks.0.*", "blocks.3.*", "decoder.layers.0", "decoder.layers.2"],
        ),
        (_tower, (), ["0", "3"]),
        (_tower, (0, 2), ["2.*", "3"]),
        (lambda: nn.ModuleDict({"tower": _tower(), "other": nn.Linear(32, 32)}), (), ["tower.0", "tower.3"]),
        (lambda: nn.ModuleList(_linears(3)), (1, 2), ["0", "1", "2"]),
    ],
)
def test_first_and_last(model: Any, counts: tuple[int, ...], expected: list[str]) -> None:
    assert first_and_last(model(), *counts) == dict.fromkeys(expected, "high")


def test_first_and_last_stay_in_high_precision(caplog: pytest.LogCaptureFixture) -> None:
    model = _transformer()
    fp8dist.prepare(model, CurrentScaling(), overrides=first_and_last(model))
    inside = [f"blocks.{i}.mlp.{j}" for i in (1, 2) for j in (0, 1)]
    assert converted(model) == ["embed", *inside, "decoder.layers.1", "head.0", "head.1"]
    model = nn.ModuleList(_linears(3))
    fp8dist.prepare(model, overrides=first_and_last(model, 1, 2))
    assert not converted(model)
    assert "no Linear of this model is eligible" in caplog.text


def test_first_and_last_without_layers_or_with_too_few() -> None:
    for model in (make_net(), nn.ModuleList([nn.LayerNorm(32)])):
        with pytest.raises(ConfigurationError, match=r"the model has no nn\.ModuleList or nn\.Sequential of Linears"):
            first_and_last(model)
    for first, last in ((2, 2), (4, 0), (-1, 1), (1, -1)):
        with pytest.raises(ConfigurationError, match=f"cannot take {first} and {last} of 3 layers"):
            first_and_last(nn.ModuleList(_linears(3)), first, last)


class Watched:
    """Records the inputs and gradients of each Linear of a model."""

    def __init__(self, model: nn.Module) -> None:
        self.tensors: dict[str, dict[str, Tensor]] = {}
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                self.tensors[name] = {}
                module.register_forward_hook(self._hook(self.tensors[name]))

    @staticmethod
    def _hook(seen: dict[str, Tensor]) -> Any:
        def hook(module: nn.Linear, args: tuple[Tensor], y: Tensor) -> None:
            seen["input"], seen["weight"] = args[0].detach(), module.weight.detach().clone()
            y.register_hook(lambda grad: seen.update(grad_output=grad.detach()))

        return hook


def test_each_module_of_a_model_is_cast_by_its_recipe() -> None:
    """With three recipes in one model, each module multiplies what the oracle of its recipe says. The delayed recipe
    takes its scales from earlier steps."""
    model = make_net()
    default = DelayedScaling(history_len=4)
    manager = fp8dist.prepare(model, default, overrides=MIXED)
    watched = Watched(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    manager.attach(model, optimizer=optimizer)
    scales: dict[str, Any] = {}
    for step in range(3):
        with Gemms() as gemms:
            inputs, labels = batch(0, step)
            (model(inputs) - labels).square().mean().backward()
        for role in ("input", "weight", "grad_output"):
            # Weights have attach's scales before the first step; other slots are cold.
            if step > 0 or role == "weight":
                scales[role] = numbers(manager.slot("branch", role).scale).copy()
            else:
                amax = abs(numbers(watched.tensors["branch"][role])).max()
                scales[role] = fp8_oracle.current_scale(amax, fp8_oracle.formats("hybrid")[role], False)
        expected = {}
        for name, recipe in {"branch": default, **MIXED}.items():
            assert recipe is not None
            x, weight, grad = (numbers(watched.tensors[name][role]) for role in scales)
            given = scales if recipe.delayed else None
            expected[name] = fp8_oracle.operands(x, weight, grad, recipe.by, recipe.format, recipe.power_of_two, given)
        order = [
            *(("first", "fprop"), ("branch", "fprop"), ("last", "fprop")),
            *(("last", "dgrad"), ("last", "wgrad"), ("branch", "dgrad"), ("branch", "wgrad")),
            ("first", "wgrad"),  # The batch needs no gradient.
        ]
        for gemm, (name, product) in zip(gemms.seen, order, strict=True):
            assert_gemm(gemm, expected[name][product], f"step {step}: {name} {product}")
        optimizer.step()
        optimizer.zero_grad()


class Job:
    """A model and its training, step by step."""

    def __init__(self, recipe: Recipe, overrides: dict[str, Recipe | High] | None = None, seed: int = 0) -> None:
        self.model = make_net(seed)
        self.manager = fp8dist.prepare(self.model, recipe, overrides=overrides)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.manager.attach(self.model, optimizer=self.optimizer)
        self.losses: list[bytes] = []

    def steps(self, *indexes: int) -> Job:
        for index in indexes:
            x, y = batch(0, index)
            loss = (self.model(x) - y).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.losses.append(bits(loss))
        return self

    def everything(self) -> Any:
        return self.losses, parameter_bits(self.model), state_bits(self.manager)


@pytest.mark.parametrize("second", [RECIPES[1], *ONE_OF_EACH], ids=repr)
def test_two_managers_with_other_recipes_do_not_see_each_other(second: Recipe) -> None:
    """Trained in turn, each gives the losses, parameters and state of training alone, bit for bit."""
    alone = [Job(RECIPES[0]).steps(*range(4)), Job(second, seed=1).steps(*range(4))]
    both = [Job(RECIPES[0]), Job(second, seed=1)]
    for index in range(4):
        for job in both if index % 2 else reversed(both):
            job.steps(index)
    assert [job.everything() for job in both] == [job.everything() for job in alone]
    assert alone[0].losses != alone[1].losses


@pytest.mark.slow
def test_each_recipe_trains_another_way() -> None:
    """Every option affects the losses, except options that must not."""
    assert len({tuple(Job(recipe).steps(*range(4)).losses) for recipe in RECIPES}) == len(RECIPES)


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
        for other in others:
            assert other != recipe
            assert repr(other) != repr(recipe)
        assert len({recipe, *copies}) == 1
        assert repr(recipe).startswith(f"{type(recipe).__name__}(")


def test_what_makes_recipes_equal() -> None:
    assert RowwiseScaling() != BlockScaling()
    assert len({RowwiseScaling(), BlockScaling(), CurrentScaling(format="e4m3")}) == 3
    for given in (("wgrad", "fprop"), ["fprop", "wgrad", "wgrad"], {"wgrad", "fprop"}):
        assert CurrentScaling(high_precision=given) == CurrentScaling(high_precision=("fprop", "wgrad"))


@pytest.mark.parametrize(("recipe", "overrides"), [*((recipe, {}) for recipe in RECIPES), (RECIPES[0], MIXED)])
def test_recipes_come_back_from_a_checkpoint(recipe: Recipe, overrides: Any) -> None:
    manager = fp8dist.prepare(make_net(), recipe, overrides=overrides)
    (blob,) = manager.state_dict().values()
    saved, _ = from_bytes(blob, "a test")
    made = [Recipe.from_description(description) for description in saved["recipes"]]
    found = {fqn: made[place] for (fqn, _), place in zip(saved["slots"], saved["recipe_of"])}
    assert found == recipes(manager) == {**dict.fromkeys(("first", "branch", "last"), recipe), **overrides}


def _median(windows: Tensor) -> Tensor:
    return windows.median(1).values


def test_strange_descriptions_are_refused() -> None:
    cases = [
        ({}, "there is no recipe None"),
        ({"recipe": "MXScaling"}, "there is no recipe 'MXScaling'; the recipes are DelayedScaling, CurrentScaling"),
        ({"recipe": "Recipe"}, "there is no recipe 'Recipe'"),
        ({"recipe": ["CurrentScaling"]}, "there is no recipe"),
        ({"recipe": "CurrentScaling", "margin": 0}, "CurrentScaling has no field margin"),
        ({"recipe": "CurrentScaling", "format": "e5m2"}, "format must be one of"),
        ({"recipe": "DelayedScaling", "history_len": 2.0}, "history_len must be an integer"),
        ({"recipe": "BlockScaling", "high_precision": ["fprop", "bgrad"]}, "high_precision must be a tuple of"),
        ({"recipe": "BlockScaling", "high_precision": "fprop"}, "high_precision must be a tuple of"),
        ({"recipe": "RowwiseScaling", "power_of_two": 1}, "power_of_two must be True or False"),
        (DelayedScaling(amax_algo=_median).describe(), "amax_algo must be one of"),
        ({"recipe": "BlockScaling", "high_precision": [["fprop"]]}, "high_precision must be a tuple of"),
        ({"recipe": "CurrentScaling", 3: 4}, "CurrentScaling has no field 3"),
        ({"recipe": "CurrentScaling", "format": ["hybrid"]}, "format must be one of"),
    ]
    for description, message in cases:
        with pytest.raises(ConfigurationError, match=message):
            Recipe.from_description(description)


def test_a_resume_of_a_mixed_model_is_bitwise() -> None:
    straight = Job(RECIPES[0], MIXED).steps(*range(6))
    first = Job(RECIPES[0], MIXED).steps(*range(3))
    resumed = Job(RECIPES[0], MIXED, seed=5)
    saved = copy.deepcopy((first.model.state_dict(), first.optimizer.state_dict(), first.manager.state_dict()))
    for part, state in zip((resumed.model, resumed.optimizer, resumed.manager), saved):
        part.load_state_dict(state)
    resumed.steps(*range(3, 6))
    assert resumed.losses == straight.losses[3:]
    assert resumed.everything()[1:] == straight.everything()[1:]


@pytest.mark.parametrize("recipe", ONE_OF_EACH, ids=repr)
def test_between_delayed_scaling_and_a_recipe_without_state(recipe: Recipe) -> None:
    """The state that delayed scaling saved is ignored: losses equal those of a run that loaded none. The other way,
    there are no scales: refused, unless the caller asks for a conversion."""
    delayed, losses = Job(RECIPES[0]).steps(*range(3)), []
    for load in (False, True):
        job = Job(recipe)
        job.model.load_state_dict(copy.deepcopy(delayed.model.state_dict()))
        if load:
            job.manager.load_state_dict(delayed.manager.state_dict())
            assert job.manager.steps == 3
        losses.append(job.steps(3, 4).losses)
    assert losses[0] == losses[1]
    before = state_bits(delayed.manager)
    with pytest.raises(CheckpointError, match=rf"recipe is '{type(recipe).__name__}' there and 'DelayedScaling' here"):
        delayed.manager.load_state_dict(job.manager.state_dict())
    assert state_bits(delayed.manager) == before
    delayed.manager.load_state_dict(job.manager.state_dict(), convert=True)
    delayed.steps(3, 4)
    assert all(bool(torch.isfinite(p).all()) for p in delayed.model.parameters())


def test_an_override_more_or_less_is_another_recipe() -> None:
    """One module switches from delayed scaling, another switches to it; unchanged modules are loaded."""
    mixed, plain = Job(RECIPES[0], MIXED).steps(0, 1, 2), Job(RECIPES[0]).steps(0, 1, 2)
    scale = float(plain.manager.slot("branch", "input").scale)
    mixed.manager.load_state_dict(plain.manager.state_dict())
    assert float(mixed.manager.slot("branch", "input").scale) == scale
    with pytest.raises(CheckpointError, match="recipe is 'CurrentScaling' there and 'DelayedScaling' here"):
        plain.manager.load_state_dict(mixed.manager.state_dict())


def test_a_default_that_no_module_has_synchronises_nothing() -> None:
    manager = fp8dist.prepare(make_net(), DelayedScaling(), overrides={"*": CurrentScaling()})
    assert [sync.arena.recipe for sync in manager._syncs] == [CurrentScaling()]
    alone = fp8dist.prepare(nn.Sequential(nn.ReLU()), DelayedScaling())
    assert [sync.arena.recipe for sync in alone._syncs] == [DelayedScaling()]

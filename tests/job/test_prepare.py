"""Which modules prepare() converts, and which it leaves alone."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import fp8dist
from fp8dist.errors import ConfigurationError
from fp8dist.modules.fp8_linear import FP8Linear
from tests.support.linear import inputs, linear
from tests.support.training import parameter_bits


class MyLinear(nn.Linear):
    """A subclass of nn.Linear that computes something else."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class Zoo(nn.Module):
    """One Linear to convert, and many modules to leave alone."""

    def __init__(self) -> None:
        super().__init__()
        self.good = nn.Linear(32, 48)
        self.narrow = nn.Linear(24, 32)
        self.odd = nn.Linear(32, 33)
        self.mine = MyLinear(32, 32)
        self.attention = nn.MultiheadAttention(32, 4)
        self.spectral = torch.nn.utils.spectral_norm(nn.Linear(32, 32))
        self.parametrized = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(32, 32))
        self.lm_head = nn.Linear(32, 64)
        self.lora_down = nn.Linear(32, 16)
        self.unwanted = nn.Linear(32, 32)


def test_ineligible_modules_are_left_with_a_reason(caplog: pytest.LogCaptureFixture) -> None:
    zoo = Zoo()
    with caplog.at_level(logging.INFO, "fp8dist"):
        manager = fp8dist.prepare(zoo, filter_fn=lambda module, fqn: fqn != "unwanted")
    converted = [name for name, module in zoo.named_modules() if isinstance(module, FP8Linear)]
    assert converted == ["good"]
    assert {slot.fqn for slot in manager.slots} == {"good"}
    said = {record.getMessage().split()[1]: record.getMessage() for record in caplog.records}
    for name, reason in {
        "narrow": "24 x 32 are not multiples of 16",
        "odd": "32 x 33 are not multiples of 16",
        "mine": "MyLinear",
        "attention": "nn.MultiheadAttention multiplies with its input projections itself",
        "attention.out_proj": "nn.MultiheadAttention multiplies with its weight itself",
        "spectral": "spectral_norm",
        "parametrized": "ParametrizedLinear",
        "lm_head": "skip",
        "lora_down": "skip",
        "unwanted": "filter_fn",
    }.items():
        assert reason in said.pop(name)
    assert said.pop("1") == "fp8dist: 1 Linears are FP8Linears now"
    assert list(said) == ["FP8:"]  # See test_coverage for the warning.


@pytest.mark.parametrize(
    ("skip", "expected"),
    [
        ((), ["good", "unwanted"]),
        (("g*",), ["unwanted"]),
        ("g*", ["unwanted"]),  # Not the patterns "g" and "*".
        (["nothing"], ["good", "unwanted"]),
        (iter(["g*", "unwanted"]), []),
        (None, ["good", "lm_head", "lora_down", "unwanted"]),
        (("!*lm_head",), ["good", "lm_head", "unwanted"]),
        ("!*lora_*", ["good", "lora_down", "unwanted"]),
        (("!lora_*", "!lm_head", "unwanted"), ["good", "lm_head", "lora_down"]),
        (("*", "!good"), ["good"]),  # The last pattern that matches counts.
        (("!good", "*"), []),
        (("!l*", "lm_*"), ["good", "lora_down", "unwanted"]),
    ],
)
def test_skip_adds_to_the_default_patterns(skip: Any, expected: list[str]) -> None:
    zoo = Zoo()
    fp8dist.prepare(zoo, skip=skip)
    assert [name for name, module in zoo.named_modules() if isinstance(module, FP8Linear)] == expected


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ({"skip": "unwnted"}, "skip: no module with a matmul weight matches 'unwnted' (nearest: 'unwanted')"),
        ({"skip": ("!godo", "mine")}, "skip: no module with a matmul weight matches '!godo' (nearest: 'good')"),
        ({"groups": {"narow": None}}, "groups: no module with a matmul weight matches 'narow' (nearest: 'narrow')"),
        ({"overrides": {"*.out_prj": "high"}}, "matches '*.out_prj' (nearest: 'attention.out_proj')"),
        (
            {"overrides": {"attentio?.*": "high", "xyz": "high"}},
            "overrides: no module with a matmul weight matches 'xyz'",
        ),
        (
            {"overrides": {"g*": "high", "good": "high"}},
            "overrides: 'good' has no effect: an earlier pattern matches all",
        ),
        ({"overrides": {"spectral.weight": "high"}}, "matches 'spectral.weight' (nearest: 'spectral')"),
    ],
)
def test_a_pattern_that_matches_nothing_is_one_warning(
    argument: dict[str, Any], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    fp8dist.prepare(Zoo(), **argument)
    (text,) = [text for _, _, text in caplog.record_tuples if "FP8: " not in text]
    assert said in text


def test_a_pattern_of_a_block_is_told_its_modules(caplog: pytest.LogCaptureFixture) -> None:
    fp8dist.prepare(nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(32, 32), nn.Linear(32, 32)])}), skip="blocks")
    assert "matches 'blocks' (its modules are 'blocks.*')" in caplog.text


def test_patterns_that_match_ineligible_modules_and_unused_defaults_are_no_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fp8dist.prepare(nn.Sequential(nn.Linear(32, 32)))
    fp8dist.prepare(Zoo(), skip=("odd", "narrow", "attention", "mine", "spectral"), overrides={"parametrized": "high"})
    assert all("FP8: " in text for _, _, text in caplog.record_tuples)


def test_filter_fn_is_asked_about_eligible_modules_only() -> None:
    asked = []

    def filter_fn(module: nn.Module, fqn: str) -> bool:
        asked.append((type(module), fqn))
        return True

    fp8dist.prepare(Zoo(), filter_fn=filter_fn)
    assert asked == [(nn.Linear, "good"), (nn.Linear, "unwanted")]


def test_prepare_changes_neither_keys_nor_parameters_nor_hooks() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16, bias=False))
    keys = list(model.state_dict())
    parameters = dict(model.named_parameters())
    modules = list(model.modules())
    calls = []
    model[0].register_forward_hook(lambda *_: calls.append(1))
    before = parameter_bits(model)
    fp8dist.prepare(model)
    assert list(model.state_dict()) == keys
    assert list(model.modules()) == modules
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert not list(model.buffers())
    model(inputs(4, 32))
    assert calls == [1]
    assert parameter_bits(model) == before
    assert isinstance(model[0], nn.Linear)
    fp8dist.restore(model)
    assert type(model[0]) is type(model[2]) is nn.Linear
    assert list(model.state_dict()) == keys
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())


def test_a_model_is_prepared_once() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    fp8dist.prepare(model)
    for again in (model, nn.Sequential(model), model[0]):
        with pytest.raises(ConfigurationError, match="prepared already"):
            fp8dist.prepare(again)


class Locked(nn.Linear):
    """Refuses new attributes, as modules do that guard their configuration."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "fp8_slots":
            raise AttributeError("this module is locked")
        super().__setattr__(name, value)


@pytest.mark.parametrize("fails", ["module", "log"])
def test_a_model_is_prepared_or_as_it_was(
    fails: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Ctrl-C may come while prepare() logs what it did."""
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), (Locked if fails == "module" else nn.Linear)(32, 32))
    before = [(type(module), set(vars(module))) for module in model.modules()]
    state, x = parameter_bits(model), inputs(8, 32)
    expected = model(x)

    def interrupt(record: logging.LogRecord) -> bool:
        raise KeyboardInterrupt

    if fails == "log":
        monkeypatch.setattr(logging.getLogger("fp8dist"), "filters", [interrupt])
    error = AttributeError if fails == "module" else KeyboardInterrupt
    with caplog.at_level(logging.INFO, "fp8dist"), pytest.raises(error):
        fp8dist.prepare(model)
    assert [(type(module), set(vars(module))) for module in model.modules()] == before
    assert parameter_bits(model) == state
    assert torch.equal(model(x), expected)
    monkeypatch.undo()
    assert isinstance(fp8dist.prepare(model, skip="2"), fp8dist.StateManager)


def test_moving_a_model_after_its_state_was_placed_is_refused() -> None:
    module, manager = linear()
    module(inputs(4, 48))
    module.to("meta")
    with pytest.raises(ConfigurationError, match="meta"):
        module(inputs(4, 48).to("meta"))
    with pytest.raises(ConfigurationError, match="the model moved from cpu to cuda"):
        manager._syncs[0].arena.place(torch.device("cuda", 0))


def test_a_model_may_change_its_dtype_after_its_state_was_placed() -> None:
    module, manager = linear()
    module(inputs(4, 48).requires_grad_()).sum().backward()
    manager.step()
    scale = float(manager.slot("", "input").scale)
    module.bfloat16()
    assert module(inputs(4, 48).bfloat16()).dtype == torch.bfloat16
    assert manager.slot("", "input").scale.dtype == torch.float32
    assert float(manager.slot("", "input").scale) == scale


def test_a_model_may_swap_the_contents_of_its_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch swaps no parameter that has a weak reference: neither right after prepare() nor between steps."""
    results = []
    for swaps in (False, True):
        monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", swaps)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32))
        model[2].weight = model[0].weight
        manager = fp8dist.prepare(model)
        model.double().float()
        model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        manager.attach(optimizer=optimizer)
        losses = []
        for step in range(4):
            loss = model(inputs(8, 32, seed=step)).square().mean()
            loss.backward()
            losses.append(loss.item())
            if step % 2:  # With gradients, torch would lose them.
                optimizer.step()
                optimizer.zero_grad()
                model.double().float()
                model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()})
        results.append((losses, parameter_bits(model)))
    assert results[0] == results[1]


def test_rowwise_scaling_has_no_fp8_all_gather() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    with pytest.raises(ConfigurationError, match="1: fp8_all_gather=True does not work with RowwiseScaling"):
        fp8dist.prepare(model, overrides={"1": fp8dist.RowwiseScaling()}, fp8_all_gather=True)
    assert type(model[1]) is nn.Linear
    fp8dist.prepare(model, overrides={"1": fp8dist.BlockScaling()}, fp8_all_gather=True)


def test_a_group_of_one_rank_shares_its_state_with_nobody() -> None:
    """The manager may step without attach."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        net = nn.Linear(48, 32)
        manager = fp8dist.prepare(net, group=dist.group.WORLD)
        net(inputs(16, 48)).sum().backward()
        manager.step()
        assert manager.steps == 1
    finally:
        dist.destroy_process_group()

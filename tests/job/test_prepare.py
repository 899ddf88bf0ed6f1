"""Which modules prepare() converts, and which it leaves alone."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import fp8dist
from fp8dist.errors import ConfigurationError
from fp8dist.modules.fp8_linear import FP8Linear
from tests.support.linear import inputs, linear
from tests.support.ranks import on_ranks
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
    """The reasons themselves are in test_coverage.py."""
    zoo, asked = Zoo(), []

    def filter_fn(module: nn.Module, fqn: str) -> bool:
        asked.append((type(module), fqn))
        return fqn != "unwanted"

    with caplog.at_level(logging.INFO, "fp8dist"):
        manager = fp8dist.prepare(zoo, filter_fn=filter_fn)
    assert asked == [(nn.Linear, "good"), (nn.Linear, "unwanted")]  # It is asked about eligible modules only.
    assert [name for name, module in zoo.named_modules() if isinstance(module, FP8Linear)] == ["good"]
    assert {slot.fqn for slot in manager.slots} == {"good"}
    said = {record.getMessage().split()[1]: record.getMessage() for record in caplog.records}
    assert said.pop("1") == "fp8dist: 1 Linears are FP8Linears now"
    assert "FP8:" in said.pop("FP8:")
    reasons = {row.fqn: row.reason for row in manager.coverage() if not row.fp8}
    assert said.keys() == reasons.keys()
    assert all(reasons[name] in text for name, text in said.items())


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


@pytest.mark.parametrize("gather", [False, True])
@on_ranks(4)
def test_going_back_to_fewer_ranks_is_refused_with_an_fp8_all_gather(gather: bool) -> None:
    net = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32))
    manager = fp8dist.prepare(net, group=dist.group.WORLD, fp8_all_gather=gather)
    for layer in net:
        fully_shard(layer, reshard_after_forward=2)
    text = "reshard_after_forward=<number> does not go with fp8_all_gather=True"
    with pytest.raises(ConfigurationError, match=text) if gather else contextlib.nullcontext():
        manager.attach(fully_shard(net))
        net(torch.ones(2, 32)).sum().backward()

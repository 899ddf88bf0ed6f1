"""Export of experts: a tensor per expert under the names of checkpoints, with the bytes of an eval forward."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8dist
from fp8dist import BlockScaling, ConfigurationError, DelayedScaling
from tests.support.parallel import same_on_all_ranks
from tests.support.ranks import on_ranks
from tests.support.serving import NATIVE, RECIPES, Multiplied, served, spread, watched_products
from tests.support.sharded_experts import Job, Routed, build, routed_batch, step
from tests.support.training import bits

INNER = 128
"""Rows of gate and of up: a whole block."""


def _multiplied(called: nn.Module, x: Tensor, interleaved: bool = False) -> Multiplied:
    """Return what an eval forward multiplies with, for each Linear of a served expert."""
    with watched_products() as seen, torch.no_grad():
        called.eval()(x)
    called.train()
    found: Multiplied = {}
    of_experts = {fqn: factors for fqn, factors in seen.items() if factors[0].ndim == 3}  # The inlet is a Linear.
    for fqn, (weights, scales) in of_experts.items():
        for expert, (weight, scale) in enumerate(zip(weights, scales)):
            each = spread(scale, weight.shape)
            parts = {"down_proj": (weight, each)}
            if fqn.endswith("gate_up"):
                rows = [slice(i, None, 2) if interleaved else slice(i * INNER, (i + 1) * INNER) for i in (0, 1)]
                parts = {name: (weight[of], each[of]) for name, of in zip(("gate_proj", "up_proj"), rows)}
            for name, (part, factors) in parts.items():
                found[f"experts.{expert}.{name}"] = bits(part.contiguous()), bits(factors.contiguous())
    return found


def _trained(recipe: str, **options: Any) -> tuple[Routed, fp8dist.StateManager]:
    torch.manual_seed(0)
    model = Routed(inner=INNER, **options)
    manager = fp8dist.prepare(model, RECIPES[recipe])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    manager.attach(model, optimizer=optimizer)
    for index in range(3):
        model(routed_batch(0, index, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, manager


def _of_experts(tensors: dict[str, Tensor]) -> Multiplied:
    return {name: each for name, each in served(tensors).items() if name.startswith("experts.")}


LAYOUTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "transposed": {"transposed": True, "bias": True},
    "interleaved": {"interleaved": True, "bias": True},
}


CASES = [(recipe, layout) for recipe in RECIPES for layout in LAYOUTS if (recipe, layout) != ("block", "interleaved")]


@pytest.mark.parametrize(("recipe", "layout"), CASES)
def test_an_eval_forward_multiplies_with_the_exported_bytes_and_scales(recipe: str, layout: str) -> None:
    model, manager = _trained(recipe, **LAYOUTS[layout])
    for format in (NATIVE[recipe], "block"):
        if recipe == "rowwise" and format == "block":
            continue
        tensors = dict(fp8dist.exported(manager, format=format))
        assert _of_experts(tensors) == _multiplied(model, routed_batch(0, 9, 4), layout == "interleaved")
        if LAYOUTS[layout].get("bias"):
            biases = model.experts.gate_up_proj_bias[3]
            halves = (biases[::2], biases[1::2]) if layout == "interleaved" else biases.chunk(2)
            assert torch.equal(tensors["experts.3.up_proj.bias"], halves[1])
            assert torch.equal(tensors["experts.3.gate_proj.bias"], halves[0])
        assert not any("gate_up" in name for name in tensors)


def test_input_scales_are_shared_by_gate_and_up() -> None:
    _, manager = _trained("delayed")
    tensors = dict(fp8dist.exported(manager))
    for expert in range(4):
        for name, fqn in (("gate_proj", "gate_up"), ("up_proj", "gate_up"), ("down_proj", "down")):
            expected = 1 / manager.slot(f"experts.{fqn}.{expert}", "input").scale.reshape(1)
            assert bits(tensors[f"experts.{expert}.{name}.input_scale"]) == bits(expected)


def test_experts_in_high_precision_are_exported_one_by_one() -> None:
    model, manager = _trained("delayed")
    manager.set_precision("experts.*", "high")
    tensors = dict(fp8dist.exported(manager))
    for expert in range(4):
        gate, up = model.experts.gate_up_proj[expert].chunk(2)
        assert torch.equal(tensors[f"experts.{expert}.gate_proj.weight"], gate)
        assert torch.equal(tensors[f"experts.{expert}.up_proj.weight"], up)
    assert _of_experts(tensors) == {}


def test_names_of_mixtral() -> None:
    model = nn.Module()
    model.config = types.SimpleNamespace(model_type="mixtral")  # type: ignore[assignment]
    model.layer = nn.ModuleDict({"mlp": Routed(inner=INNER)})
    manager = fp8dist.prepare(model)
    names = {name for name, _ in fp8dist.exported(manager)}
    weights = {f"layer.block_sparse_moe.experts.2.{each}.weight" for each in ("w1", "w2", "w3")}
    assert weights | {f"{name}_scale" for name in weights} <= names
    assert not any(".mlp." in name for name in names)


def test_what_is_refused(tmp_path: Any) -> None:
    model, manager = _trained("delayed")
    manager.set_precision("experts.down.2", "high")
    with pytest.raises(
        ConfigurationError, match=r"of 8 products of experts, 1 are in high precision: experts\.down\.2"
    ):
        fp8dist.exported(manager)
    manager.set_precision("experts.down.2", "fp8")
    for kind, why in (
        ("odd", ""),
        ("gpt_oss", r" \(Transformers 5\.23 reads no FP8 experts with biases, and .* only\)"),
    ):
        model.config = types.SimpleNamespace(model_type=kind)  # type: ignore[assignment]
        with pytest.raises(
            ConfigurationError, match=f"which names servers read for the experts of '{kind}'{why}: leave"
        ):
            fp8dist.export(manager, tmp_path / "served")
    alone = Routed().experts
    with pytest.raises(ConfigurationError, match="the model is a mixture itself, which has no name"):
        fp8dist.exported(fp8dist.prepare(alone))
    for cut in (Routed(inner=192), Routed(interleaved=True)):
        other = fp8dist.prepare(cut, BlockScaling())
        with pytest.raises(ConfigurationError, match="has rows of gate and of up"):
            fp8dist.exported(other, format="block")
    whole = Routed(inner=256)
    other = fp8dist.prepare(whole, overrides={"experts": BlockScaling()})
    with pytest.raises(ConfigurationError, match=r"experts\.down: its weights have one scale for each 128 x 128"):
        fp8dist.exported(other)
    tied = nn.ModuleList([Routed(), Routed()])
    tied[1].experts.down_proj = tied[0].experts.down_proj
    with pytest.raises(ConfigurationError, match="is the same tensor as"):
        fp8dist.exported(fp8dist.prepare(tied))


def test_an_own_gate_of_another_width() -> None:
    model, wide = Routed(inner=INNER), Routed(inner=INNER)
    for each in (model, wide):
        each.experts._apply_gate = lambda rows: rows[:, :INNER] * rows[:, INNER : 2 * INNER]
    wide.experts.gate_up_proj = nn.Parameter(torch.randn(4, 3 * INNER, 32))
    assert "experts.3.up_proj.weight" in dict(fp8dist.exported(fp8dist.prepare(model)))
    with pytest.raises(ConfigurationError, match="experts: its first product is no gate and up of the width that"):
        fp8dist.exported(fp8dist.prepare(wide))
    fp8dist.restore(wide)
    stored = dict(fp8dist.exported(fp8dist.prepare(wide, skip="experts")))
    assert torch.equal(stored["experts.gate_up_proj"], wide.experts.gate_up_proj)


def test_a_weight_that_a_hook_renames_is_missed() -> None:
    model, manager = _trained("delayed")

    def renames(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        state[f"{prefix}packed"] = state.pop(f"{prefix}down_proj")

    model.experts.register_state_dict_post_hook(renames)
    with pytest.raises(ConfigurationError, match=r"experts is in FP8, but state_dict\(\) has no experts\.down_proj"):
        fp8dist.exported(manager)


SHARDED = {
    "high": Job(inner=INNER, fp8_all_gather=False, experts=3),
    "rows, high": Job(inner=INNER, fp8_all_gather=False, dim=1),
    "experts": Job(inner=INNER, experts=3),
    "rows": Job(inner=INNER, dim=1),
    "transposed": Job(inner=INNER, options={"transposed": True}),
    "blocks": Job(inner=INNER, recipe=BlockScaling(), settings={"overrides": {"inlet": DelayedScaling()}}),
}


@pytest.mark.slow
@pytest.mark.parametrize("job", SHARDED.values(), ids=SHARDED)
@on_ranks(2)
def test_sharded_experts_are_exported_whole(job: Job) -> None:
    _, called, manager, optimizer = build(job)
    for index in range(2):
        step(job, called, optimizer, index)
    format = "block" if isinstance(job.recipe, BlockScaling) else "compressed-tensors"
    tensors = {name: tensor.clone() for name, tensor in fp8dist.exported(manager, called, format=format)}
    exported = _of_experts(tensors)
    assert exported == _multiplied(called, routed_batch(0, 9, job.experts))
    same_on_all_ranks(exported)
    assert len(exported) == 3 * job.experts

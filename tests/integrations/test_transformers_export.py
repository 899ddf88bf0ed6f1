"""Exported models in Transformers and compressed-tensors, on a CPU: bytes, scales and results of a tiny Llama."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import fp8dist
from fp8dist.modules.fp8_linear import FP8Linear
from fp8dist.modules.linear_slots import LinearSlots
from tests.integrations.contract import needs
from tests.support.serving import RECIPES, read, served, spread
from tests.support.training import bits

pytestmark = [
    *needs("transformers"),
    *needs("compressed_tensors"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]

EPSILON = 2.0**-24
"""Largest relative error of one rounding to float32."""

TOKENS = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(5))


def _trained(recipe: str, tied: bool = False, **settings: Any) -> tuple[nn.Module, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    size = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(**size, vocab_size=64, max_position_embeddings=16, tie_word_embeddings=tied)
    model = LlamaForCausalLM(config)
    manager = fp8dist.prepare(model, RECIPES[recipe], **settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    manager.attach(optimizer=optimizer)
    for _ in range(4):
        model(TOKENS, labels=TOKENS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval(), manager


def _loaded(folder: Path, **options: Any) -> nn.Module:
    from transformers import AutoModelForCausalLM

    loaded: nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
    return loaded.eval()


def _logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(TOKENS).logits
    return logits


@pytest.mark.parametrize("format", ["compressed-tensors", "compressed-tensors-channel"])
@pytest.mark.parametrize("recipe", ["delayed", "delayed 2^n", "current", "rowwise"])
def test_compressed_tensors_loads_the_bytes_and_scales(tmp_path: Path, recipe: str, format: str) -> None:
    """Compared before the first forward, which turns them to float32."""
    model, manager = _trained(recipe)
    fp8dist.export(manager, tmp_path / "out", format=format)
    exported = read(tmp_path / "out")
    loaded = _loaded(tmp_path / "out")
    theirs = loaded.state_dict()
    assert theirs.keys() == exported.keys()
    assert {name: bits(value) for name, value in theirs.items()} == {name: bits(v) for name, v in exported.items()}
    assert sum(value.dtype == torch.float8_e4m3fn for value in theirs.values()) == 14
    assert theirs["lm_head.weight"].dtype == torch.float32
    static = recipe.startswith("delayed")
    assert ("model.layers.0.mlp.up_proj.input_scale" in theirs) == static
    _assert_products(model, loaded)
    if recipe == "delayed 2^n":
        # A product by a power of two rounds nothing, so both cast inputs to the same values. Both then multiply the
        # same float32 tensors in the same order.
        assert bits(_logits(loaded)) == bits(_logits(model))


def _assert_products(model: nn.Module, loaded: nn.Module) -> None:
    """Assert that each Linear of ``loaded`` computes what ours does from the same inputs, up to rounding.

    Both weights are the same, ŵ. Ours casts x·s, theirs x/(1/s); with scales from amaxes they also round the scale
    itself. So the numbers that are rounded to FP8 differ by at most 4 roundings, and so do the dequantised inputs x̂,
    unless a number lies as close to a tie between two FP8 values: then x̂ may differ by the step at x̂, at most an eighth
    of its magnitude or the step of subnormals, 2**-9. Sums of n products differ by at most 2 (n + 2) roundings of
    Σ|x̂||ŵ|.
    """
    calls = list(_calls(model))
    assert len(calls) == 14
    _logits(loaded)  # Decompresses the weights.
    for name, x, y, fp8, inv_scale in calls:
        theirs = loaded.get_submodule(name)
        w, x_hat = theirs.weight.double().abs(), (fp8 * inv_scale).abs()
        exact = x / inv_scale
        at_tie = _distance_to_tie(exact) <= 4 * EPSILON * exact.abs()
        step = torch.clamp(fp8.abs() / 8, min=2.0**-9) * inv_scale
        delta = torch.where(at_tie, step, 4 * EPSILON * x_hat)
        bound = delta @ w.t() + 2 * (x.shape[1] + 2) * EPSILON * (x_hat @ w.t())
        with torch.no_grad():
            difference = (_of_tokens(theirs, x) - y).abs()
        assert bool((difference <= bound).all()), name


def _of_tokens(linear: nn.Module, x: Tensor) -> Tensor:
    """Return the Linear's output. compressed-tensors tells tokens by the first two of three dims."""
    y: Tensor = linear(x.float().reshape(*TOKENS.shape, -1))
    return y.reshape(x.shape[0], -1).double()


def _distance_to_tie(x: Tensor) -> Tensor:
    """Return the distance of each number to the nearest middle of two neighbouring E4M3 values."""
    magnitude = x.abs().clamp(max=448.0)
    exponent = torch.floor(torch.log2(magnitude.clamp(min=2.0**-6)))
    step = torch.exp2(exponent - 3)
    place = magnitude / step
    return (place - (torch.floor(place) + 0.5)).abs() * step


def _calls(model: nn.Module) -> Iterator[tuple[str, Tensor, Tensor, Tensor, Tensor]]:
    """Yield (name, input, output, FP8 input, inverse scales of its elements) of each Linear in FP8, in an eval forward:
    float64 [tokens, features]."""
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    original = LinearSlots.matmul

    def matmul(self: LinearSlots, a: tuple[Tensor, Tensor], *rest: Any) -> Tensor | None:
        seen[self.fqn] = a[0].double(), a[1].double()
        return original(self, a, *rest)

    kept: dict[str, tuple[Tensor, Tensor]] = {}
    handles = [
        module.register_forward_hook(lambda module, args, y, name=name: kept.update({name: (args[0], y)}))
        for name, module in model.named_modules()
        if isinstance(module, FP8Linear)
    ]
    with mock.patch.object(LinearSlots, "matmul", matmul):
        _logits(model)
    for handle in handles:
        handle.remove()
    for name, (x, y) in kept.items():
        fp8, inv_scale = seen[name]
        if inv_scale.numel() > 1 and inv_scale.shape[1] > 1:  # One for each 1 x 128.
            inv_scale = inv_scale.repeat_interleave(128, 1)[:, : fp8.shape[1]]
        yield name, x.reshape(fp8.shape).double(), y.reshape(-1, y.shape[-1]).double(), fp8, inv_scale


def test_dequantised_by_transformers(tmp_path: Path) -> None:
    """``dequantize=True`` drops ``input_scale``. The weights are FP8 times scale, in float32."""
    from transformers import CompressedTensorsConfig

    _, manager = _trained("delayed")
    fp8dist.export(manager, tmp_path / "out")
    exported = read(tmp_path / "out")
    loaded = _loaded(tmp_path / "out", quantization_config=CompressedTensorsConfig(dequantize=True)).state_dict()
    assert not any(name.endswith("scale") for name in loaded)
    _assert_dequantised(exported, loaded, "weight_scale")


def _assert_dequantised(exported: dict[str, Tensor], loaded: dict[str, Tensor], suffix: str) -> None:
    count = 0
    for name, value in loaded.items():
        stored = exported[name]
        if stored.dtype == torch.float8_e4m3fn:
            count += 1
            scale = exported[name.removesuffix("weight") + suffix]
            stored = stored.float() * spread(scale, stored.shape)
        assert bits(value) == bits(stored), name
    assert count == 14


@pytest.mark.parametrize("recipe", ["delayed", "current", "block"])
def test_the_block_layout_in_transformers(tmp_path: Path, recipe: str) -> None:
    """Transformers dequantises it on a CPU. Results differ from ours by what our inputs lose in FP8, and by rounding:
    |y' - y| <= Σ|x - x̂||ŵ| + 2 (n + 2) roundings of Σ(|x| + |x̂|)|ŵ|."""
    model, manager = _trained(recipe)
    fp8dist.export(manager, tmp_path / "out", format="block")
    exported = read(tmp_path / "out")
    loaded = _loaded(tmp_path / "out")
    _assert_dequantised(exported, loaded.state_dict(), "weight_scale_inv")
    for name, x, y, fp8, inv_scale in _calls(model):
        theirs = loaded.get_submodule(name)
        w, x_hat = theirs.weight.double().abs(), fp8 * inv_scale
        rounding = 2 * (x.shape[1] + 2) * EPSILON * ((x.abs() + x_hat.abs()) @ w.t())
        with torch.no_grad():
            difference = (_of_tokens(theirs, x) - y).abs()
        assert bool((difference <= (x - x_hat).abs() @ w.t() + rounding).all()), name


def test_transformers_makes_room_for_the_block_layout(tmp_path: Path) -> None:
    """The parameters of its FP8Linears have the names, shapes and dtypes that are exported."""
    from transformers import AutoConfig, AutoModelForCausalLM, FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear

    _, manager = _trained("block")
    manager.set_precision("model.layers.1.*", "high")
    fp8dist.export(manager, tmp_path / "out", format="block")
    config = AutoConfig.from_pretrained(tmp_path / "out")
    described = FineGrainedFP8Config.from_dict(config.quantization_config)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)
    empty = replace_with_fp8_linear(
        empty,
        modules_to_not_convert=described.modules_to_not_convert,
        quantization_config=described,
        pre_quantized=True,
    )
    room = {name: (tuple(p.shape), p.dtype) for name, p in empty.state_dict().items()}
    found = {name: (tuple(t.shape), t.dtype) for name, t in read(tmp_path / "out").items()}
    assert room == found


def test_a_tied_head_is_loaded(tmp_path: Path) -> None:
    model, manager = _trained("delayed 2^n", tied=True)
    fp8dist.export(manager, tmp_path / "out")
    assert "lm_head.weight" not in read(tmp_path / "out")
    loaded = _loaded(tmp_path / "out")
    assert bits(_logits(loaded)) == bits(_logits(model))


def test_modules_in_high_precision_are_ignored(tmp_path: Path) -> None:
    _, manager = _trained("delayed 2^n", overrides={"model.layers.1.*": fp8dist.RowwiseScaling(power_of_two=True)})
    manager.set_precision("model.layers.0.mlp.*", "high")
    fp8dist.export(manager, tmp_path / "out")
    loaded = _loaded(tmp_path / "out")
    assert {n for n, v in loaded.state_dict().items() if v.dtype == torch.float8_e4m3fn} == {
        f"{name}.weight" for name in served(read(tmp_path / "out"))
    }
    assert loaded.get_submodule("model.layers.0.mlp.up_proj").weight.dtype == torch.float32

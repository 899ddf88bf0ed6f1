"""The experts of Transformers' mixtures in FP8: every layout of its interface, against its own products."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import fp8dist
from fp8dist import BlockScaling, DelayedScaling
from tests.integrations.contract import needs
from tests.support.training import bits

pytestmark = needs("transformers")

COMMON = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = {**COMMON, "num_key_value_heads": 2}
INNER = {"moe_intermediate_size": 48, "num_experts_per_tok": 2}
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {**GROUPED, "intermediate_size": 128, "num_local_experts": 8}),
    "qwen2": (
        "Qwen2Moe",
        {**GROUPED, **INNER, "intermediate_size": 64, "shared_expert_intermediate_size": 64, "num_experts": 8},
    ),
    "qwen3": ("Qwen3Moe", {**GROUPED, **INNER, "intermediate_size": 64, "num_experts": 8, "head_dim": 16}),
    "deepseek": (
        "DeepseekV3",
        {
            **COMMON,
            **INNER,
            **{"intermediate_size": 64, "num_key_value_heads": 4, "n_routed_experts": 8, "n_group": 2, "topk_group": 1},
            **{"first_k_dense_replace": 1, "q_lora_rank": 32, "kv_lora_rank": 32, "v_head_dim": 16},
            **{"qk_rope_head_dim": 16, "qk_nope_head_dim": 16},
        },
    ),
    "gpt-oss": (
        "GptOss",
        {**GROUPED, "intermediate_size": 48, "num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 16},
    ),
}


def _model(kind: str, implementation: str | None = None) -> nn.Module:
    import transformers

    import fp8dist.integrations.transformers  # noqa: F401  # Registers "fp8dist".

    name, size = MIXTURES[kind]
    config = getattr(transformers, f"{name}Config")(**size)
    config._experts_implementation = implementation
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, f"{name}ForCausalLM")(config)
    return model


def _loss(model: nn.Module) -> Tensor:
    tokens = torch.randint(0, 64, (2, 24), generator=torch.Generator().manual_seed(1))
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


@pytest.mark.parametrize("kind", MIXTURES)
@pytest.mark.parametrize("recipe", [None, BlockScaling()], ids=["delayed", "block"])
def test_gradients_are_near_those_in_high_precision(kind: str, recipe: Any) -> None:
    """All layouts: a wrong transpose, gate or bias would make gradients as different as random ones (cosine 0)."""
    model, prepared = _model(kind), _model(kind)
    manager = fp8dist.prepare(prepared, recipe)
    manager.attach(prepared)
    assert manager.coverage().share > 0.95
    assert any(slot.fqn.endswith(".mlp.experts.gate_up.3") for slot in manager.slots)
    losses = [_loss(each) for each in (model, prepared)]
    assert float(losses[0].detach()) == pytest.approx(float(losses[1].detach()), abs=1e-2)
    for loss in losses:
        loss.backward()
    for (name, high), low in zip(model.named_parameters(), prepared.parameters()):
        if ".experts." in name:
            assert high.grad is not None
            assert low.grad is not None
            # E5M2 gradients have 3 bits of precision; a few routes of 48 tokens may flip between close experts.
            assert float(nn.functional.cosine_similarity(high.grad.flatten(), low.grad.flatten(), 0)) > 0.9, name


@pytest.mark.parametrize("kind", ["mixtral", "gpt-oss"])
def test_high_precision_is_their_own_product(kind: str) -> None:
    """Switched off, under no_fp8(), and with all modules in high precision, the loss is that of ``grouped_mm``."""
    expected = bits(_loss(_model(kind, "grouped_mm")))
    assert bits(_loss(_model(kind, "fp8dist"))) == expected
    changes: list[Callable[[Any], Any]] = [lambda manager: manager.set_precision("*", "high"), lambda manager: None]
    for change, enabled in zip(changes, (True, False)):
        model = _model(kind, "fp8dist")
        manager = fp8dist.prepare(model, DelayedScaling(), enabled=enabled)
        if enabled:
            with manager.no_fp8():
                assert bits(_loss(model)) == expected
            assert bits(_loss(model)) != expected
        change(manager)
        assert bits(_loss(model)) == expected


def test_registered_name_runs_the_fp8_forward() -> None:
    from fp8dist.integrations.transformers import experts_forward

    model = _model("mixtral", "fp8dist")
    experts = next(module for module in model.modules() if type(module).__name__ == "MixtralExperts")
    x, index = torch.randn(8, 64), torch.arange(16).view(8, 2) % 8
    weights = torch.ones(8, 2)
    high = bits(experts_forward(experts, x, index, weights))
    fp8dist.prepare(model)
    low = bits(experts_forward(experts, x, index, weights))
    assert low == bits(experts(x, index, weights))
    assert low != high


@pytest.mark.parametrize("kind", MIXTURES)
def test_exported_names_are_those_of_checkpoints(kind: str, tmp_path: Path) -> None:
    """Transformers splits experts when it saves a model, as export() does."""
    model = _model(kind)
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    saved = load_file(tmp_path / "model.safetensors")
    manager = fp8dist.prepare(model)
    if kind == "gpt-oss":  # Its checkpoints hold MXFP4, or whole stacks.
        with pytest.raises(fp8dist.ConfigurationError, match="which names servers read for the experts of 'gpt_oss'"):
            fp8dist.exported(manager)
        return
    exported = {name: tensor for name, tensor in fp8dist.exported(manager) if not name.endswith("_scale")}
    assert exported.keys() == saved.keys()
    for name, tensor in exported.items():
        assert tensor.shape == saved[name].shape, name
        if tensor.dtype == saved[name].dtype:
            assert bits(tensor) == bits(saved[name]), name

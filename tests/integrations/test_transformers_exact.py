"""Exact arithmetic in models of transformers, as they are: shards of a batch add up to the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fp8dist.exact import arithmetic, to_residues
from fp8dist.exact.field import P
from tests.integrations.contract import needs

pytestmark = needs("transformers")

SIZES = {
    "vocab_size": 50, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 16,
}  # fmt: skip

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", {"vocab_size": 50, "n_positions": 16, "n_embd": 24, "n_layer": 2, "n_head": 4}),
    "llama": ("LlamaForCausalLM", SIZES),
    "qwen3": ("Qwen3ForCausalLM", {**SIZES, "head_dim": 8}),
    "gemma2": ("Gemma2ForCausalLM", {**SIZES, "head_dim": 8, "attn_implementation": "eager"}),
    "mixtral": ("MixtralForCausalLM", {**SIZES, "num_local_experts": 4}),
    "bert": ("BertForMaskedLM", SIZES),
}


@pytest.mark.filterwarnings("ignore")  # About the configurations.
@pytest.mark.parametrize("name", MODELS)
def test_shards_of_a_batch_add_up(name: str) -> None:
    import transformers

    kind, sizes = MODELS[name]
    torch.manual_seed(2)
    model = getattr(transformers, kind)
    model = model(model.config_class(**sizes, bos_token_id=1, eos_token_id=2, pad_token_id=0))
    to_residues(model)

    def gradients(tokens: Tensor, scale: float) -> list[Tensor]:
        model.zero_grad()
        with arithmetic():
            (model(input_ids=tokens, labels=tokens).loss * scale).backward()
        return [parameter.grad.double() for parameter in model.parameters() if parameter.grad is not None]

    tokens = torch.randint(3, 50, (4, 8))
    whole = gradients(tokens, 1.0)
    for expected, first, second in zip(whole, gradients(tokens[:2], 0.5), gradients(tokens[2:], 0.5)):
        assert torch.equal(expected, (first + second) % P)
    assert len(whole) > 20

"""Teach a small GPT of Megatron-Core to count, in FP8, with tensor parallelism. On GPUs: Megatron-Core needs them.

NPROC=2 launch/torchrun.sh launch/examples/with_megatron.py
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from fp8dist.integrations.megatron import attach, prepare

VOCABULARY, LENGTH, BATCH = 256, 32, 8


def forward_step(random: Any, model: Any) -> tuple[Tensor, Any]:
    """Return the losses of a microbatch, and the function of their mean. Each token is the one before it, plus one."""
    first = torch.randint(VOCABULARY, (BATCH, 1), generator=random)
    places = torch.arange(LENGTH).expand(BATCH, LENGTH)
    tokens = (first + places) % VOCABULARY
    losses = model(tokens.cuda(), places.cuda(), None, labels=((tokens + 1) % VOCABULARY).cuda())
    return losses, lambda output: (output.mean(), {"loss": output.mean().item()})


def build(tensor_parallel: int) -> Any:
    """Return a model."""
    config = TransformerConfig(
        num_layers=2,
        hidden_size=128,
        num_attention_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=tensor_parallel,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        bf16=True,
        finalize_model_grads_func=finalize_model_grads,
    )
    return GPTModel(config, get_gpt_layer_local_spec(), vocab_size=VOCABULARY, max_sequence_length=LENGTH)


def main() -> None:
    """Train, and print the losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    ranks = dist.get_world_size()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks, create_gloo_process_groups=False)
    model_parallel_cuda_manual_seed(3)
    gpt = build(ranks)
    manager = prepare(gpt)
    wrapped = DistributedDataParallel(
        gpt.config,
        DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True),
        Float16Module(gpt.config, gpt.cuda()),
    )
    settings = OptimizerConfig(optimizer="adam", lr=3e-3, bf16=True, use_distributed_optimizer=True)
    optimizer = get_megatron_optimizer(settings, [wrapped], use_gloo_process_groups=False)
    attach(manager, optimizer)
    train = get_forward_backward_func()
    random = torch.Generator().manual_seed(0)
    for step in range(options.steps):
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        losses = train(
            forward_step_func=forward_step,
            data_iterator=random,
            model=wrapped,
            num_microbatches=2,
            seq_length=LENGTH,
            micro_batch_size=BATCH,
            forward_only=False,
        )
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {sum(each['loss'] for each in losses) / len(losses):.3f}")
    if dist.get_rank() == 0:
        print(f"FP8: {manager.coverage().summary}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Megatron-Core on a CPU with gloo: stand-ins for what it takes from GPUs, and a small GPT.

Megatron allocates on "cuda" by name, forks the GPU's random state, and leaves LayerNorm under sequence parallelism to
Apex or TransformerEngine. Weights are drawn from one seed on the CPU and cut by tensor parallelism, and there is no
dropout: models of the same pipeline stage hold the same parameters in any layout, apart from experts.

``python -m tests.support.megatron PROGRAM FLAGS…`` runs a program with the stand-ins.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import runpy
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

LENGTH, VOCABULARY = 16, 64


def with_stand_ins(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, which runs with the stand-ins."""

    @functools.wraps(function)
    def inside(*args: Any) -> Any:
        with _stand_ins():
            return function(*args)

    return inside


@contextlib.contextmanager
def _stand_ins() -> Iterator[None]:
    cuda = {"current_device": lambda: "cpu", "synchronize": lambda device=None: None}
    with mock.patch.multiple(torch.cuda, **cuda), _OnCPU():
        from megatron.core.dist_checkpointing.strategies import filesystem_async
        from megatron.core.tensor_parallel import random
        from megatron.core.transformer.moe import moe_utils

        with (
            mock.patch.object(random.CudaRNGStatesTracker, "fork", return_value=contextlib.nullcontext()),
            mock.patch.object(random.CudaRNGStatesTracker, "add"),
            mock.patch.multiple(random, _get_cuda_rng_state=mock.Mock(), _set_cuda_rng_state=mock.Mock()),
            # Release 0.16.1 reads the name where TransformerEngine is not installed, too.
            mock.patch.object(moe_utils, "te_general_gemm", None, create=True),
            # A process for a queue is started once and kept. It ends with the last reference to the queue.
            mock.patch.object(filesystem_async, "_results_queue", None),
            # Checkpoints are written by child processes, which the daemons of a RankPool must not have.
            mock.patch.dict(multiprocessing.current_process()._config, {"daemon": False}),  # type: ignore[attr-defined]
        ):
            yield


class _OnCPU(TorchFunctionMode):
    """Tensors that are asked for on "cuda" are on the CPU, and say that their type is one of CUDA."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is Tensor.cuda:
            return args[0]
        if kwargs.get("device") == "cuda":
            kwargs = {**kwargs, "device": "cpu"}
        result = function(*args, **kwargs)
        return (
            result.replace("torch.", "torch.cuda.") if function is Tensor.type and isinstance(result, str) else result
        )


def initialize(tp: int = 1, pp: int = 1, **sizes: Any) -> None:
    """Make Megatron's groups anew: ``tp`` x ``pp`` ranks hold the model, the others are data-parallel. COLLECTIVE.

    ``sizes``: as ``parallel_state.initialize_model_parallel`` takes them, such as ``expert_model_parallel_size``.
    """
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tp, pp, create_gloo_process_groups=False, **sizes)


class _Norm(nn.LayerNorm):
    """LayerNorm whose parameters are marked for the reduction of their gradients, as Apex's are."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def gpt(
    *,
    sequence_parallel: bool = False,
    experts: int = 0,
    tied: bool = True,
    seed: int = 5,
    layers: int = 2,
    vp_stage: int | None = None,
    **config: Any,
) -> Any:
    """Return the part of a GPT that this rank holds, of Megatron's local layers. Local.

    ``initialize`` decides the layout. ``tied``: embeddings and output layer share their weight. ``vp_stage``: which
    chunk of this rank, with virtual pipeline stages. ``config``: further fields of TransformerConfig.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.manual_seed(seed)
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    virtual = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    given = {
        "num_layers": layers, "hidden_size": 64, "num_attention_heads": 4, "hidden_dropout": 0.0,
        "attention_dropout": 0.0, "use_cpu_initialization": True, "gradient_accumulation_fusion": False,
        "params_dtype": torch.float32, "pipeline_dtype": torch.float32, "sequence_parallel": sequence_parallel,
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": stages,
        "virtual_pipeline_model_parallel_size": virtual,
        "batch_p2p_comm": False,  # With two stages, both neighbours are one rank: gloo would match the wrong pairs.
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
        "num_moe_experts": experts or None, "add_bias_linear": not experts,
    }  # fmt: skip
    layer = get_gpt_layer_local_spec(num_experts=experts or None, moe_grouped_gemm=False)
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = _Norm
    return GPTModel(
        TransformerConfig(**{**given, **config}),
        TransformerBlockSubmodules([layer] * (layers // stages // (virtual or 1)), layer_norm=_Norm),
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        vp_stage=vp_stage,
        share_embeddings_and_output_weights=tied,
    )


def causal_mask() -> Tensor:
    """Return the causal mask, of shape [1, 1, LENGTH, LENGTH]. True: hidden."""
    return torch.ones(1, 1, LENGTH, LENGTH).triu(1).bool()


def optimized(chunks: list[Any], wraps: dict[str, Any], **options: Any) -> tuple[list[Any], Any]:
    """Return the chunks in Megatron's DDP, and Megatron's optimizer of them.

    Args:
        wraps: fields of DistributedDataParallelConfig.
        options: fields of OptimizerConfig.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    distributed = options.get("use_distributed_optimizer", False)
    config = DistributedDataParallelConfig(use_distributed_optimizer=distributed, **wraps)
    chunks = [DistributedDataParallel(chunk.config, config, chunk) for chunk in chunks]
    for chunk in chunks:
        chunk.config.finalize_model_grads_func = finalize_model_grads
    given = OptimizerConfig(**{"optimizer": "adam", "weight_decay": 0.0, "clip_grad": 0.0, **options})
    return chunks, get_megatron_optimizer(given, chunks, use_gloo_process_groups=False)


def forward(model: Any, place: int) -> Tensor:
    """Return the losses of microbatch ``place`` of this rank's data: those of a tensor-parallel group or a pipeline are
    the same."""
    from megatron.core import parallel_state

    made = torch.Generator().manual_seed(1000 * place + parallel_state.get_data_parallel_rank())
    tokens = (torch.randint(VOCABULARY, (2, 1), generator=made) + torch.arange(LENGTH + 1)) % VOCABULARY
    return model(tokens[:, :-1], torch.arange(LENGTH).expand(2, LENGTH), causal_mask(), labels=tokens[:, 1:])


def gradients(chunks: list[Any], optimizer: Any, places: range) -> list[float]:
    """Make gradients of these microbatches with Megatron's schedule, and let Megatron finalize them. Return the losses
    of this rank's microbatches. COLLECTIVE."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    found = get_forward_backward_func()(
        forward_step_func=_forward_step,
        data_iterator=[iter(places) for _ in chunks] if len(chunks) > 1 else iter(places),
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=len(places),
        seq_length=LENGTH,
        micro_batch_size=2,
        forward_only=False,
    )
    return [each["loss"] for each in found]


def _forward_step(places: Iterator[int], model: Any) -> tuple[Tensor, Any]:
    def loss(output: Tensor) -> tuple[Tensor, dict[str, float]]:
        mean = output.float().mean()
        return mean, {"loss": mean.item()}

    return forward(model, next(places)), loss


if __name__ == "__main__":
    del sys.argv[0]
    with _stand_ins():
        runpy.run_path(sys.argv[0], run_name="__main__")

"""Megatron-Core: which ranks hold copies of a parameter, from Megatron's attributes and its ``parallel_state``.

Megatron keeps shards as plain parameters, and marks them with attributes:

- ``tensor_model_parallel``: tensor parallelism splits the parameter.
- ``allreduce=False``: the parameter is of an expert, which expert parallelism places on some ranks only.
- ``shared_embedding``: it is a copy of the word embeddings on another pipeline stage.

Any other parameter has a copy on each rank of its pipeline stage, also with ``sequence_parallel``, where each rank
computes a part of its gradient.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fp8dist.state.groups import has_base

# Labels of Megatron's groups, the same on all ranks of the job.
STAGE, DATA, TENSOR = "Megatron's stage", "Megatron's data parallel ranks", "Megatron's tensor parallel ranks"
EXPERT_DATA, EXPERT_TENSOR = "Megatron's expert data parallel ranks", "Megatron's expert tensor parallel ranks"
TIED = "Megatron's tied embeddings"

_SPLIT = (
    ("ColumnParallelLinear", "weight"),
    ("RowParallelLinear", "weight"),
    ("VocabParallelEmbedding", "weight"),
    ("GroupedMLP", "weight1"),
    ("GroupedMLP", "weight2"),
)
"""(class, parameter) that tensor parallelism splits. Megatron does not mark them if ``perform_initialization`` is off.
"""

NOT_GATHERED = (
    "that the next forward gathers (overlap_param_gather): call disable_forward_pre_hook() of Megatron's DDP before "
    "the check, and enable_forward_pre_hook() after it"
)
NOT_SAVED = "that Megatron does not save, such as counts of a rank's own tokens"
REDUCED_IN_PARTS = "of which Megatron's distributed optimizer reduces another part on each rank"


@dataclass(frozen=True)
class Copies:
    """Where copies of one parameter are.

    ``parameter``: labels of the groups whose ranks hold the same parameter. ``gradient``: of those that hold the same
    gradient, once Megatron has reduced all gradients (``finalize_model_grads``). ``gathers``: True if the parameter is
    complete only during a forward. ``master``: the optimizer's float32 copy, if each rank has all of it; else None.
    """

    parameter: Sequence[str]
    gradient: Sequence[str]
    gathers: bool
    master: Tensor | None


def is_megatron(module: nn.Module) -> bool:
    """True if the module has parts or parameters of Megatron's, and ``parallel_state`` is initialized. Local."""
    state = _state()
    return (
        state is not None
        and state.model_parallel_is_initialized()
        and (
            any(has_base(part, "MegatronModule") for part in module.modules())
            or any(hasattr(parameter, "tensor_model_parallel") for parameter in module.parameters())
        )
    )


def groups() -> Mapping[str, Any]:
    """Return Megatron's process groups by label, in the same order on all ranks; None where this rank is in no such
    group. Local."""
    state = _state()
    return {
        STAGE: state.get_tensor_and_data_parallel_group(with_context_parallel=True),
        DATA: state.get_data_parallel_group(with_context_parallel=True),
        TENSOR: state.get_tensor_model_parallel_group(),
        EXPERT_DATA: state.get_expert_data_parallel_group(check_initialized=False),
        EXPERT_TENSOR: state.get_expert_tensor_parallel_group(check_initialized=False),
        TIED: state.get_embedding_group(check_initialized=False),
    }


def coordinates() -> dict[str, int]:
    """Return this rank's place on each of Megatron's axes, if several ranks are along it. Local."""
    state = _state()
    axes = {
        "pp": (state.get_pipeline_model_parallel_rank, state.get_pipeline_model_parallel_world_size),
        "dp": (state.get_data_parallel_rank, state.get_data_parallel_world_size),
        "cp": (state.get_context_parallel_rank, state.get_context_parallel_world_size),
        "ep": (state.get_expert_model_parallel_rank, state.get_expert_model_parallel_world_size),
        "tp": (state.get_tensor_model_parallel_rank, state.get_tensor_model_parallel_world_size),
    }
    return {axis: rank() for axis, (rank, size) in axes.items() if size() > 1}


def copies_of(module: nn.Module) -> dict[int, Copies]:
    """Return where copies of each parameter of a Megatron model are, by the parameter's id. Local."""
    wrapped = {
        id(parameter): wrapper
        for wrapper in module.modules()
        if has_base(wrapper, "_BaseDataParallel")
        for parameter in wrapper.parameters()
    }
    split = {
        id(getattr(part, name, None)) for part in module.modules() for kind, name in _SPLIT if has_base(part, kind)
    }
    return {
        id(parameter): _copies(
            parameter,
            getattr(parameter, "tensor_model_parallel", False) or id(parameter) in split,
            wrapped.get(id(parameter)),
        )
        for parameter in module.parameters()
    }


def _copies(parameter: Tensor, split: bool, wrapper: Any) -> Copies:
    """Return where copies of a parameter are. ``split``: tensor parallelism splits it. ``wrapper``: Megatron's DDP
    around it, or None."""
    if getattr(parameter, "allreduce", True):
        tensor, everywhere = TENSOR, [DATA if split else STAGE]
    else:
        tensor, everywhere = EXPERT_TENSOR, [EXPERT_DATA] if split else [EXPERT_DATA, EXPERT_TENSOR]
    if getattr(parameter, "shared_embedding", False):
        everywhere.append(TIED)
    gathers = parameter.requires_grad and bool(getattr(wrapper, "remove_forward_pre_hook_handles", None))
    if wrapper is not None and wrapper.ddp_config.use_distributed_optimizer:
        # Each data parallel rank reduces another part of the gradients, and holds another part of the float32 copies.
        return Copies(everywhere, [] if split else [tensor], gathers, None)
    return Copies(everywhere, everywhere, gathers, getattr(parameter, "main_param", None))


def local_buffers(module: nn.Module) -> set[int]:
    """Return the ids of the buffers that are not persistent, so no checkpoint has them. Local."""
    return {
        id(part._buffers[name])
        for part in module.modules()
        for name in part._non_persistent_buffers_set
        if name in part._buffers
    }


def gradient_of(parameter: Tensor) -> Tensor | None:
    """Return the gradient of a parameter: ``main_grad``, where Megatron's DDP keeps it, else ``grad``. Local."""
    gradient: Tensor | None = getattr(parameter, "main_grad", None)
    return parameter.grad if gradient is None else gradient


def _state() -> Any:
    """Return the module ``megatron.core.parallel_state``; None: the program has not imported it."""
    return sys.modules.get("megatron.core.parallel_state")

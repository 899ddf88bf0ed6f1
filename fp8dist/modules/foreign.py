"""Modules of other libraries that compute what nn.Linear computes, by name: importing the libraries takes seconds."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

__all__ = ["gathered_input", "is_parallel", "is_transposed", "linear_base"]

_CONV1D = ("transformers.pytorch_utils", "Conv1D")
_PARALLEL = (
    ("megatron.core.tensor_parallel.layers", "ColumnParallelLinear"),
    ("megatron.core.tensor_parallel.layers", "RowParallelLinear"),
)


def linear_base(kind: type[nn.Module]) -> type[nn.Module] | None:
    """Return the class in the bases of ``kind`` whose product FP8Linear can stand for: nn.Linear, transformers' Conv1D,
    or one of Megatron-Core's parallel Linears. None: there is none."""
    bases = kind.__mro__
    return next((base for base in bases if base is nn.Linear or is_transposed(base) or is_parallel(base)), None)


def is_transposed(base: type) -> bool:
    """True if weights of the class are stored as [in_features, out_features]."""
    return (base.__module__, base.__name__) == _CONV1D


def is_parallel(base: type) -> bool:
    """True if the class is one of Megatron-Core's parallel Linears. Their ``forward`` gives the input and this rank's
    part of the weight to ``_forward_impl``, and reduces or gathers what that returns."""
    return (base.__module__, base.__name__) in _PARALLEL


def gathered_input(input: Tensor, allreduce_dgrad: bool, sequence_parallel: bool, group: Any) -> Tensor:
    """Return the input that ``_forward_impl`` multiplies: [tokens of all ranks, …, in_features]. COLLECTIVE over
    ``group`` with ``sequence_parallel``, and in the backward, which reduces the input's gradient.

    Args:
        allreduce_dgrad, sequence_parallel: how Megatron-Core calls ``_forward_impl``; at most one of them is true.
    """
    if not (sequence_parallel or allreduce_dgrad):
        return input
    from megatron.core.tensor_parallel import mappings

    result: Tensor
    if sequence_parallel:
        result = mappings.gather_from_sequence_parallel_region(input, tensor_parallel_output_grad=True, group=group)
    else:
        result = mappings.copy_to_tensor_model_parallel_region(input, group=group)
    return result

"""Modules of other libraries that compute what nn.Linear or FP8Experts computes. They are recognised without importing
the libraries, which takes seconds."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

__all__ = ["expert_products", "gate_fits", "gathered_input", "is_parallel", "is_transposed", "linear_base"]

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


def expert_products(module: nn.Module) -> tuple[str, str] | None:
    """Return the names of a mixture's weights, first and second product, if the module has the attributes of
    Transformers' experts interface; else None.

    These are ``has_gate``, ``has_bias`` and ``is_transposed``, parameters ``gate_up_proj`` (without a gate ``up_proj``)
    and ``down_proj`` with three dims, and ``act_fn``, or ``_apply_gate`` with a gate. Attributes that may be missing:
    ``is_concatenated`` (True), ``has_post_expert_norm`` (False), ``_apply_gate`` (act_fn(gate) * up).
    """
    given = [getattr(module, name, None) for name in ("has_gate", "has_bias", "is_transposed")]
    if not all(isinstance(value, bool) for value in given):
        return None
    has_gate, has_bias, _ = given
    names = "gate_up_proj" if has_gate else "up_proj", "down_proj"
    wanted = {name: 3 for name in names} | ({f"{name}_bias": 2 for name in names} if has_bias else {})
    for name, dims in wanted.items():
        parameter = module._parameters.get(name)
        if parameter is None or parameter.ndim != dims:
            return None
    gated = hasattr(module, "act_fn") or (has_gate and hasattr(module, "_apply_gate"))
    return names if gated else None


def gate_fits(module: Any) -> bool:
    """True if the first product of a mixture makes what the second one takes: gate and up, each as wide, or up alone.
    A mixture with an ``_apply_gate`` of its own need not."""
    first, second = (module._parameters[name].shape for name in expert_products(module) or ())
    made, taken = (first[2], second[1]) if module.is_transposed else (first[1], second[2])
    return bool(made == (2 * taken if module.has_gate else taken))


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

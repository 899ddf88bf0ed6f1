"""Recognises modules of other libraries that compute what nn.Linear or FP8Experts computes: by the names of their
classes or attributes, because importing the libraries takes seconds."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

_CONV1D = ("transformers.pytorch_utils", "Conv1D")
_PARALLEL = (
    ("megatron.core.tensor_parallel.layers", "ColumnParallelLinear"),
    ("megatron.core.tensor_parallel.layers", "RowParallelLinear"),
)


def linear_base(kind: type[nn.Module]) -> type[nn.Module] | None:
    """Return the base class of ``kind`` (or ``kind`` itself) that FP8Linear can replace: nn.Linear, Transformers'
    Conv1D, or one of Megatron-Core's parallel Linears. None: there is none."""
    bases = kind.__mro__
    return next((base for base in bases if base is nn.Linear or is_transposed(base) or is_parallel(base)), None)


def is_transposed(base: type) -> bool:
    """True if weights of the class are stored as [in_features, out_features]."""
    return (base.__module__, base.__name__) == _CONV1D


def is_parallel(base: type) -> bool:
    """True if the class is one of Megatron-Core's parallel Linears. Their ``forward`` calls ``_forward_impl`` with the
    input and this rank's part of the weight, and reduces or gathers the result."""
    return (base.__module__, base.__name__) in _PARALLEL


def expert_products(module: nn.Module) -> tuple[str, str] | None:
    """Return the names of the weights of the first and the second product, if the module is a mixture-of-experts layer
    ("mixture") with the attributes of Transformers' experts interface; else None.

    Required are the bools ``has_gate``, ``has_bias`` and ``is_transposed``; the parameters ``gate_up_proj`` (without a
    gate: ``up_proj``) and ``down_proj`` with three dims, and with ``has_bias`` their ``…_bias`` with two; ``act_fn``,
    or with a gate ``_apply_gate``. Optional, with their defaults: ``is_concatenated`` (True), ``has_post_expert_norm``
    (False), ``_apply_gate`` (act_fn(gate) * up).
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
    """True if the first product of a mixture is as wide as the second one's input; with a gate, twice as wide (gate and
    up). A mixture whose own ``_apply_gate`` changes the width returns False here, and is valid nevertheless."""
    first, second = (module._parameters[name].shape for name in expert_products(module) or ())
    made, taken = (first[2], second[1]) if module.is_transposed else (first[1], second[2])
    return bool(made == (2 * taken if module.has_gate else taken))


def gathered_input(input: Tensor, allreduce_dgrad: bool, sequence_parallel: bool, group: Any) -> Tensor:
    """Return the input that a Megatron-Core Linear multiplies: [tokens, …, in_features], with ``sequence_parallel``
    gathered along dim 0.

    COLLECTIVE over ``group``: with ``sequence_parallel`` one all-gather in the forward; with either flag the backward
    reduces the input's gradient.

    Args:
        input: this rank's input.
        allreduce_dgrad, sequence_parallel: arguments of ``_forward_impl``; at most one of them is True.
        group: the tensor-parallel process group.
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

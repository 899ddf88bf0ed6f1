"""grouped_linear: multiplies the rows of each expert with the weight of that expert in FP8; each has its own state."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8dist.errors import ConfigurationError
from fp8dist.modules.fp8_product import product_of
from fp8dist.modules.grouped_slots import GroupedSlots
from fp8dist.modules.high_precision import in_high_precision
from fp8dist.modules.unsupported import require_floating
from fp8dist.state.groups import is_dtensor


def grouped_linear(
    x: Tensor, weight: Tensor, offsets: Tensor, slots: GroupedSlots, bias: Tensor | None = None
) -> Tensor:
    """Return x W[e]ᵀ + b[e] for the rows of each expert e: [tokens, out_features] in the input's dtype (under
    torch.autocast, in the autocast dtype). Local; commits a pending sync; does not wait for the device.

    Rows from ``offsets[-1]`` on belong to no expert, as under expert parallelism: they are not read, and are zeros in
    the output and in the gradient of ``x``. Gradients of experts without rows are zeros; their amaxes are not recorded.

    Args:
        x: [tokens, in_features], sorted by expert.
        weight: [E, out_features, in_features], any strides: a parameter of the module that ``slots`` belong to, or its
            transpose.
        offsets: int32[E] on the device: the ends of the experts' rows.
        slots: ``module.fp8_products[name]`` of an FP8Experts.
        bias: [E, out_features].

    Raises:
        ConfigurationError: shapes or dtypes that do not fit, a DTensor, a transform that FP8 does not support, or
            ``attach`` must be called first.
    """
    _require_shapes(x, weight, offsets, slots, bias)
    owner = None if slots.owner is None else slots.owner()
    if owner is None:
        raise ConfigurationError(f"{slots.fqn}: its FP8Experts module does not exist any more")
    if not slots.job.enabled:
        return in_high_precision(x, weight, bias, offsets)
    parameter = owner._parameters.get(slots.name)
    stored = weight if parameter is None else parameter
    return product_of(owner, slots, x, stored, slots.choice(weight.device), offsets)(x, weight, bias)


def _require_shapes(x: Tensor, weight: Tensor, offsets: Tensor, slots: GroupedSlots, bias: Tensor | None) -> None:
    fqn, experts = slots.fqn, len(slots.experts)
    require_floating(x, fqn)
    if is_dtensor(weight) or is_dtensor(x):
        raise ConfigurationError(f"{fqn}: grouped products take no DTensors: tensor parallel experts are not supported")
    if weight.ndim != 3 or len(weight) != experts:
        raise ConfigurationError(
            f"{fqn}: expected a weight of {experts} experts [E, out, in], as it was when prepare() was called, got "
            f"{tuple(weight.shape)}"
        )
    if x.ndim != 2 or x.shape[1] != weight.shape[2]:
        raise ConfigurationError(f"{fqn}: expected rows [tokens, {weight.shape[2]}], got {tuple(x.shape)}")
    if offsets.shape != (experts,) or offsets.dtype != torch.int32:
        raise ConfigurationError(
            f"{fqn}: offsets must be int32 [{experts}], the ends of the experts' rows, got {offsets.dtype} "
            f"{tuple(offsets.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:2]:
        raise ConfigurationError(f"{fqn}: expected a bias {tuple(weight.shape[:2])}, got {tuple(bias.shape)}")

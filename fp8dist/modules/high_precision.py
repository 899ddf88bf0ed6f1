"""Products in high precision: of a Linear, or of each expert with its own rows."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fp8dist.modules.fp8_weight import FP8Weight, dequantised
from fp8dist_kernels.reference.grouped_shares import expert_of_rows


def in_high_precision(x: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor | None = None) -> Tensor:
    """Return x Wᵀ + b in the input's dtype, or in autocast's, whatever the weight's dtype. Differentiable.

    Args:
        x: [..., in_features], or [tokens, in_features] sorted by expert.
        weight: [out_features, in_features], or [E, out_features, in_features].
        bias: [out_features], or [E, out_features].
        offsets: int32[E], the ends of the experts' rows. Rows from ``offsets[-1]`` on give zeros. None: of a Linear.
    """
    compute: Callable[..., Tensor] = _of_linear if offsets is None else _of_experts
    if not isinstance(weight, FP8Weight):
        return compute(x, weight, bias, offsets)
    # Recompute the dequantised weight in backward: saved for all layers, these would be a whole unsharded model.
    return checkpoint(_dequantising, compute, x, weight, bias, offsets, use_reentrant=False, preserve_rng_state=False)


def _dequantising(
    compute: Callable[..., Tensor], x: Tensor, weight: FP8Weight, bias: Tensor | None, offsets: Tensor | None
) -> Tensor:
    return compute(x, dequantised(weight), bias, offsets)


def _of_linear(x: Tensor, weight: Tensor, bias: Tensor | None, offsets: None) -> Tensor:
    """F.linear in the input's dtype, whatever the weight's dtype, as in FP8: a fallback must accept mixed dtypes."""
    if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
        weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    return F.linear(x, weight, bias)


def _of_experts(x: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor) -> Tensor:
    x = in_autocast(x)
    # Rows after the last expert's: grouped_mm leaves their gradient uninitialised, and torch.where makes it zero.
    return product(torch.where(_has_expert(x, offsets), x, 0), weight, bias, offsets)


def in_autocast(x: Tensor) -> Tensor:
    """Return x in autocast's dtype if autocast is enabled for its device; else x itself."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


def product(x: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor | None) -> Tensor:
    """Return x Wᵀ + b in the dtype of x: see ``in_high_precision``."""
    weight = weight.to(x.dtype)
    if offsets is None:
        return F.linear(x, weight, bias)
    if x.dtype is torch.float64:
        *parts, beyond = _split(x, offsets)
        made = [part @ matrix.mT for part, matrix in zip(parts, weight)]
        output = torch.cat([*made, beyond.new_zeros(len(beyond), weight.shape[1])])
    else:
        output = F.grouped_mm(_dense(x), _dense(weight).mT, offs=offsets)
    if bias is not None:
        output = output + of_rows(bias.to(x.dtype), x, offsets)
    return torch.where(_has_expert(x, offsets), output, 0)


def weight_gradient(grad_output: Tensor, x: Tensor, offsets: Tensor | None) -> Tensor:
    """Return dyᵀ x: [out_features, in_features], or for experts [E, out_features, in_features].

    Args:
        grad_output: dy, [tokens, out_features].
        x: [tokens, in_features], in the same dtype.
        offsets: int32[E], the ends of the experts' rows. None: of a Linear.
    """
    if offsets is None:
        return grad_output.t() @ x
    if x.dtype is torch.float64:
        parts = list(zip(_split(grad_output, offsets), _split(x, offsets)))[:-1]
        return torch.stack([left.mT @ right for left, right in parts])
    return F.grouped_mm(_dense(grad_output).t(), _dense(x), offs=offsets)


def of_rows(of_experts: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    """Return, for each row of x, the entry of ``of_experts`` [E, …] of its expert. Rows after the last expert's get the
    last entry, which callers must not use."""
    return of_experts[expert_of_rows(len(x), offsets).clamp(max=len(offsets) - 1)]


def _split(x: Tensor, offsets: Tensor) -> tuple[Tensor, ...]:
    """Return the rows of each expert, and last the rows that belong to none. Waits for the device. Used for float64
    only, which grouped_mm does not support."""
    return torch.tensor_split(x, offsets.tolist())


def _dense(x: Tensor) -> Tensor:
    """Return x [..., m, n] with strides that grouped_mm takes. It refuses those of expanded and of strided tensors."""
    return x if x.is_contiguous() or x.mT.is_contiguous() else x.contiguous()


def _has_expert(x: Tensor, offsets: Tensor) -> Tensor:
    """Return bool[tokens, 1]: True for rows that belong to an expert, False for rows from ``offsets[-1]`` on."""
    return (torch.arange(len(x), device=offsets.device) < offsets[-1])[:, None]

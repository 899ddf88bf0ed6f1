"""Functions that exact arithmetic replaces as a whole, because their backward uses a law of real numbers that residues
do not have (``exp(a - b) = exp(a) / exp(b)``), or several kernels compute them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.attention import SDPBackend, sdpa_kernel


def logsumexp(x: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    """Return ``m + log(sum(exp(x - m)))``, ``m`` being the maximum."""
    most = x.detach().amax(dim, keepdim=True)
    total = (x - most).exp().sum(dim, keepdim=True).log() + most
    return total if keepdim else total.squeeze(dim)


def log_softmax(x: Tensor, dim: Any, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Tensor:
    """Return ``x - logsumexp(x)``, as vocabulary-parallel losses written by hand do."""
    x = x if dtype is None else x.to(dtype)
    shifted = x - x.detach().amax(dim, keepdim=True)
    return shifted - shifted.exp().sum(dim, keepdim=True).log()


def nll_loss(
    logs: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
) -> Tensor:
    """``torch.nn.functional.nll_loss``."""
    dim = 1 if logs.dim() > 1 else 0
    target = _like(target, logs)
    kept = target != ignore_index
    classes = torch.where(kept, target, 0)
    weights = kept.to(logs.dtype) if weight is None else kept * weight[classes]
    numbers = _like(_along(torch.arange(logs.shape[dim], device=logs.device), logs, dim), logs)
    losses = -(logs * (numbers == classes.unsqueeze(dim))).sum(dim) * weights  # No gather: the classes may be sharded.
    return _joined(losses, weights, reduction)


def cross_entropy(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """``torch.nn.functional.cross_entropy``, of classes or of probabilities."""
    dim = 1 if x.dim() > 1 else 0
    logs = log_softmax(x, dim)
    target = _like(target, x)
    if target.is_floating_point():
        target = target * (1 - label_smoothing) + label_smoothing / x.shape[dim]
        losses = -(logs * target if weight is None else logs * target * _along(weight, x, dim)).sum(dim)
        return losses.sum() / (losses.numel() or 1) if reduction == "mean" else _joined(losses, losses, reduction)
    loss = nll_loss(logs, target, weight, None, ignore_index, None, reduction)
    if not label_smoothing:
        return loss
    kept = (target != ignore_index).to(logs.dtype)
    weights = kept if weight is None else kept * weight[torch.where(target != ignore_index, target, 0)]
    smooth = -(logs if weight is None else logs * _along(weight, x, dim)).sum(dim) * kept
    return loss * (1 - label_smoothing) + _joined(smooth, weights, reduction) * (label_smoothing / x.shape[dim])


def _like(target: Tensor, x: Tensor) -> Tensor:
    """Return the target as a replicated DTensor if ``x`` is a DTensor, as ``loss_parallel`` does."""
    if isinstance(x, DTensor) and not isinstance(target, DTensor):
        return DTensor.from_local(target, x.device_mesh, [Replicate()] * x.device_mesh.ndim, run_check=False)
    return target


def _along(weight: Tensor, x: Tensor, dim: int) -> Tensor:
    return weight.reshape([-1 if d == dim else 1 for d in range(x.dim())])


def _joined(losses: Tensor, weights: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / weights.sum()


def mse_loss(
    x: Tensor,
    target: Tensor,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
    weight: Tensor | None = None,
) -> Tensor:
    """``torch.nn.functional.mse_loss``."""
    losses = (x - target) * (x - target)
    losses = losses if weight is None else losses * weight
    return losses if reduction == "none" else losses.sum() if reduction == "sum" else losses.mean()


def attention(*args: Any, **kwargs: Any) -> Tensor:
    """``scaled_dot_product_attention`` by its plain ops."""
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*args, **kwargs)


SURROGATES: Mapping[Callable[..., Any], Callable[..., Any]] = MappingProxyType(
    {
        F.cross_entropy: cross_entropy,
        F.nll_loss: nll_loss,
        F.mse_loss: mse_loss,
        F.log_softmax: log_softmax,
        torch.log_softmax: log_softmax,
        Tensor.log_softmax: log_softmax,
        torch.logsumexp: logsumexp,
        Tensor.logsumexp: logsumexp,
        F.scaled_dot_product_attention: attention,
    }
)
"""What replaces a function of torch."""

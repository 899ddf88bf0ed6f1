"""Functions that exact arithmetic replaces as a whole, because their backward uses a law of real numbers that residues
do not have (``exp(a - b) = exp(a) / exp(b)``), or several kernels compute them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.attention import SDPBackend, sdpa_kernel

from fp8dist.errors import ConfigurationError


def layer_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any
) -> Tensor:
    """``torch.nn.functional.layer_norm``, op by op: so autograd finds the backward."""
    centred = input - input.mean(list(range(-len(normalized_shape), 0)), keepdim=True)
    out = rms_norm(centred, normalized_shape, weight, eps)
    return out if bias is None else out + bias


def rms_norm(input: Tensor, normalized_shape: Sequence[int], weight: Any = None, eps: float | None = None) -> Tensor:
    """``torch.nn.functional.rms_norm``. Without ``eps`` the same in float32 and float64."""
    squares = (input * input).mean(list(range(-len(normalized_shape), 0)), keepdim=True)
    out = input * (squares + (torch.finfo(torch.float32).eps if eps is None else eps)).rsqrt()
    return out if weight is None else out * weight


def logsumexp(input: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    """Return ``m + log(sum(exp(x - m)))``, ``m`` being the maximum."""
    most = input.detach().amax(dim, keepdim=True)
    total = (input - most).exp().sum(dim, keepdim=True).log() + most
    return total if keepdim else total.squeeze(dim)


def log_softmax(input: Tensor, dim: Any, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Tensor:
    """Return ``x - logsumexp(x)``, as vocabulary-parallel losses written by hand do."""
    x = input if dtype is None else input.to(dtype)
    shifted = x - x.detach().amax(dim, keepdim=True)
    return shifted - shifted.exp().sum(dim, keepdim=True).log()


def cross_entropy(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """``torch.nn.functional.cross_entropy``, of classes or of probabilities."""
    return nll_loss(log_softmax(input, 1 if input.dim() > 1 else 0), *args, **kwargs)


def nll_loss(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """``torch.nn.functional.nll_loss``, and what ``cross_entropy`` does with the logarithms."""
    dim = 1 if input.dim() > 1 else 0
    shape = [-1 if d == dim else 1 for d in range(input.dim())]
    target = _like(target, input)
    kept = counts = None
    if not target.is_floating_point():
        kept = target != ignore_index
        classes = torch.where(kept, target, 0)
        counts = kept.to(input.dtype) if weight is None else kept * weight[classes]
        numbers = _like(torch.arange(input.shape[dim], device=input.device).reshape(shape), input)
        target = (numbers == classes.unsqueeze(dim)).to(input.dtype)  # No gather: the classes may be sharded.
    if label_smoothing:
        target = target * (1 - label_smoothing) + label_smoothing / input.shape[dim]
    weighted = input * target if weight is None else input * target * weight.reshape(shape)
    losses = -weighted.sum(dim) if kept is None else -weighted.sum(dim) * kept
    if reduction != "mean":
        return losses if reduction == "none" else losses.sum()
    if counts is None:
        return losses.sum() / (losses.numel() or 1)
    if type(counts) is Tensor and not counts.is_meta and not counts.any():
        raise ConfigurationError(
            "exact arithmetic cannot compute with the mean loss of no targets, which is nan: divide a sum by the "
            "targets of the whole step."
        )
    return losses.sum() / counts.sum()


def _like(target: Tensor, x: Tensor) -> Tensor:
    """Return the target as a replicated DTensor if ``x`` is a DTensor, as ``loss_parallel`` does."""
    if isinstance(x, DTensor) and not isinstance(target, DTensor):
        return DTensor.from_local(target, x.device_mesh, [Replicate()] * x.device_mesh.ndim, run_check=False)
    return target


def mse_loss(
    input: Tensor,
    target: Tensor,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
    weight: Tensor | None = None,
) -> Tensor:
    """``torch.nn.functional.mse_loss``."""
    losses = (input - target) * (input - target)
    losses = losses if weight is None else losses * weight
    return losses if reduction == "none" else losses.sum() if reduction == "sum" else losses.mean()


def attention(*args: Any, **kwargs: Any) -> Tensor:
    """``scaled_dot_product_attention`` by its plain ops."""
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*args, **kwargs)


def clamp(x: Tensor, min: Any = None, max: Any = None, **options: Any) -> Tensor:
    """Return ``x``, if a number caps floats: residues have no size, and all gradients would be zero. Zeros, such as a
    count's, still become ``min`` if it is the only bound."""
    if isinstance(max, (int, float)) and x.is_floating_point() and not options:
        return x * 1
    return torch.clamp(x, min, max, **options)


SURROGATES: Mapping[Callable[..., Any], Callable[..., Any]] = MappingProxyType(
    {
        **dict.fromkeys((F.layer_norm, torch.layer_norm), layer_norm),
        **dict.fromkeys((F.rms_norm, torch.rms_norm), rms_norm),
        F.cross_entropy: cross_entropy,
        F.nll_loss: nll_loss,
        F.mse_loss: mse_loss,
        **dict.fromkeys((F.log_softmax, torch.log_softmax, Tensor.log_softmax), log_softmax),
        **dict.fromkeys((torch.logsumexp, Tensor.logsumexp), logsumexp),
        F.scaled_dot_product_attention: attention,
        **dict.fromkeys((torch.clamp, torch.clip, Tensor.clamp, Tensor.clip), clamp),
        **dict.fromkeys((torch.clamp_max, Tensor.clamp_max), lambda x, max: clamp(x, None, max)),
    }
)
"""What replaces a function of torch."""

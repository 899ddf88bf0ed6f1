"""Linears whose weight is a DTensor: products of local tensors under tensor parallelism.

``parallelize_module`` turns a Linear's parameters into DTensors, and its input into a DTensor that fits them. Each rank
then multiplies its local tensors. Supported placements, for ``y = x Wᵀ`` on one mesh axis:

============= ================ ================= =============================================
weight        input            output            called
============= ================ ================= =============================================
Shard(0)      Replicate        Shard(last)       column-wise; the input's gradient is a partial sum
Shard(1)      Shard(last)      Partial           row-wise; the bias is added by one rank
Replicate     any but Partial  as the input      the weight's gradient is a partial sum if tokens are sharded
============= ================ ================= =============================================

DTensor's own hooks reduce partial results. FP8 adds no communication here, because all ranks of the axis have the same
scales.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fp8dist.errors import ConfigurationError
from fp8dist.state.groups import is_dtensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Multiply = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""A function of (x, W, b) that returns x Wᵀ + b, as F.linear does."""


def parallel_linear(multiply: Multiply, fqn: str, input: Tensor, weight: DTensor, bias: Tensor | None) -> DTensor:
    """Apply ``multiply`` to this rank's tensors, and return the result as a DTensor [..., out_features]. Local itself:
    a partial result is reduced by whoever uses it.

    Args:
        fqn: the Linear's fully qualified name, for errors.
        input: a DTensor [..., in_features].
        weight: [out_features, in_features].

    Raises:
        ConfigurationError: the placements are not in the table above.
    """
    # Imported here because it takes half a second. A caller with a DTensor has imported it already.
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    of_weight, of_input = _placements(input, weight, fqn)
    mesh, last = weight.device_mesh, input.ndim - 1
    column_wise, row_wise = of_weight.is_shard(0), of_weight.is_shard(1)
    partial_input_grad = [Partial()] if column_wise else None
    partial_weight_grad = [Partial()] if of_weight.is_replicate() and of_input.is_shard() else None
    x = input.to_local(grad_placements=partial_input_grad)  # type: ignore[attr-defined]
    w = weight.to_local(grad_placements=partial_weight_grad)
    b = None if bias is None else _local_bias(bias, w, partial_weight_grad, fqn)
    if row_wise:
        y = multiply(x, w, None)
        if b is not None:
            y = _AddOnce.apply(y, b, mesh.get_local_rank() == 0)
        placement: Any = Partial()
    else:
        y = multiply(x, w, b)
        placement = Shard(last) if column_wise else Replicate() if of_input.is_replicate() else of_input
    shape = torch.Size((*input.shape[:-1], weight.shape[0]))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(y, mesh, [placement], run_check=False, shape=shape, stride=stride)


def _placements(input: Tensor, weight: DTensor, fqn: str) -> tuple[Any, Any]:
    """Return the (weight, input) placements on the mesh axis. Raise ConfigurationError unless in the table above."""
    if not is_dtensor(input):
        raise ConfigurationError(
            f"{fqn}: its weight is a DTensor, but its input is a plain tensor: let parallelize_module prepare the input"
        )
    if weight.device_mesh.ndim != 1:
        raise ConfigurationError(
            f"{fqn}: its weight lies on a mesh of {weight.device_mesh.ndim} axes, expected one axis"
        )
    of_weight, of_input = weight.placements[0], input.placements[0]
    by_features = of_input.is_shard(input.ndim - 1)
    column_wise = of_weight.is_shard(0) and of_input.is_replicate()
    row_wise = of_weight.is_shard(1) and by_features
    replicated = of_weight.is_replicate() and not of_input.is_partial() and not by_features
    if not (column_wise or row_wise or replicated):
        raise ConfigurationError(f"{fqn}: a weight placed {of_weight} cannot be multiplied with an input {of_input}")
    return of_weight, of_input


def _local_bias(bias: Tensor, weight: Tensor, grad_placements: Any, fqn: str) -> Tensor:
    """Return this rank's part of the bias.

    Args:
        weight: this rank's part of the weight.
        grad_placements: placements of the bias's gradient; None: those of the bias.
    """
    local = bias.to_local(grad_placements=grad_placements) if is_dtensor(bias) else bias
    if local.shape != weight.shape[:1]:
        raise ConfigurationError(
            f"{fqn}: the local bias has {local.shape[0]} elements, expected {weight.shape[0]}: place the bias like the "
            "weight"
        )
    return local


class _AddOnce(torch.autograd.Function):
    """``y + bias`` on one rank of a partial sum, ``y`` on the others, so that the sum contains the bias once. In the
    backward each rank gets the gradient of the whole sum, and computes the bias's full gradient from it."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, bias: Tensor, here: bool) -> Tensor:
        ctx.dtype = bias.dtype
        return y + bias.to(y.dtype) if here else y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad, grad.reshape(-1, grad.shape[-1]).sum(0).to(ctx.dtype), None

"""Checks for what FP8 modules do not support: dtypes and layouts of inputs, transforms of torch.func, double
backward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from fp8dist.common.text import dtype_name
from fp8dist.errors import ConfigurationError

FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""The dtypes of inputs that need no conversion."""


def require_floating(input: Tensor, fqn: str) -> None:
    """Raise ConfigurationError if the dtype of an input is not in ``FLOATING``. Under autocast other floating dtypes
    are accepted, because autocast converts them. Local."""
    dtype = input.dtype
    if dtype in FLOATING or (dtype.is_floating_point and torch.is_autocast_enabled(input.device.type)):
        return
    raise ConfigurationError(
        f"{fqn}: expected an input in {', '.join(map(dtype_name, FLOATING))}, got "
        f"{dtype_name(dtype)}: convert it first, for example with input.float(); the module casts to "
        "FP8 itself"
    )


def require_eager(input: Tensor, weight: Tensor, module: nn.Module, fqn: str) -> None:
    """Raise ConfigurationError for inputs and transforms that FP8 products do not support. Local. Do not call it in
    compiled code: Dynamo raises its own errors."""
    what = None
    if input.layout is not torch.strided or input.is_nested:
        what = f"inputs with layout {'nested' if input.is_nested else dtype_name(input.layout)}"
    elif torch._C._functorch.peek_interpreter_stack() is not None:
        what = "torch.vmap and the transforms of torch.func"
    elif forward_ad._current_level >= 0:
        tensors = input, weight, getattr(module, "bias", None), *module._parameters.values()
        if any(isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in tensors):
            what = "forward-mode differentiation"
    if what is not None:
        raise _refusal(fqn, what)


def _refusal(fqn: str, what: str) -> ConfigurationError:
    return ConfigurationError(
        f"{fqn}: FP8 does not support {what}: compute this inside `with manager.no_fp8():`, or keep the module in high "
        "precision with prepare(skip=…)"
    )


def differentiable_once(backward: Callable[[Any, Tensor], tuple[Tensor | None, ...]]) -> Any:
    """Decorate the backward of an autograd function so that it raises ConfigurationError if the caller wants to
    differentiate its result again (``create_graph=True``), or runs it on a batch of gradients. ``ctx.slots.fqn`` is the
    module's name in the error.

    torch's ``once_differentiable`` raises only in the second backward. An ``autograd.grad`` for given inputs does not
    even run the node that raises: a part of its result is then missing without an error.
    """

    @functools.wraps(backward)
    def wrapper(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        if torch.compiler.is_compiling():
            with torch.no_grad():
                return backward(ctx, grad_output)
        if torch.is_grad_enabled():
            raise _refusal(ctx.slots.fqn, "gradients of gradients (create_graph=True), such as a gradient penalty")
        kinds = torch._C._functorch
        if kinds.is_batchedtensor(grad_output) or kinds.is_legacy_batchedtensor(grad_output):
            raise _refusal(ctx.slots.fqn, "batches of gradients (is_grads_batched=True, jacobian(vectorize=True))")
        return backward(ctx, grad_output)  # Grad is off already.

    return wrapper

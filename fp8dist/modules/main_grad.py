"""MainGrad: the buffer to which a module of Megatron-Core adds the gradient of its weight."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

__all__ = ["MainGrad", "fuses"]


def fuses(module: nn.Module) -> bool:
    """True if the module is one of Megatron-Core's that adds the gradient of its weight to ``main_grad``."""
    return bool(getattr(module, "gradient_accumulation_fusion", False))


class MainGrad:
    """``main_grad`` of a weight, under ``gradient_accumulation_fusion``. Keeps the contract of Megatron-Core's layers:

    - The backward adds the gradient to ``main_grad``, and sets ``grad_added_to_main_grad``.
    - Autograd gets a tensor of the weight's shape without a meaning, so the hooks on the weight run. Megatron's DDP
      starts reductions in them, and does not add what is marked as added; with ``zero_out_wgrad`` it adds zeros.

    DDP takes the mark for all gradients of a step. So gradients of high precision are added here as well.
    """

    def __init__(self, weight: Any) -> None:
        self._weight = weight

    @staticmethod
    def of(weight: Tensor) -> MainGrad | None:
        """Return the buffer of a weight that gets a gradient; None if it has no buffer."""
        wanted = torch.is_grad_enabled() and weight.requires_grad and getattr(weight, "main_grad", None) is not None
        return MainGrad(weight) if wanted else None

    @property
    def total(self) -> Tensor:
        """The buffer, of the weight's shape."""
        total: Tensor = self._weight.main_grad
        return total

    def added(self) -> Tensor | None:
        """Mark the gradient as added, and return what autograd gets."""
        if not hasattr(self._weight, "grad_added_to_main_grad"):
            return None
        self._weight.grad_added_to_main_grad = True
        zeros = getattr(self._weight, "zero_out_wgrad", False)
        return torch.zeros_like(self._weight) if zeros else torch.empty_like(self._weight)

    def add(self, gradient: Tensor) -> Tensor | None:
        """Add a gradient, and return what autograd gets."""
        self.total.add_(gradient)
        return self.added()

    def through(self, weight: Tensor) -> Tensor:
        """Return the weight, for a computation whose gradient of it is added."""
        result: Tensor = _Added.apply(weight, self)
        return result


class _Added(torch.autograd.Function):
    """Identity whose backward adds the gradient to a ``MainGrad``."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, main_grad: MainGrad) -> Tensor:
        ctx.main_grad = main_grad
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None]:
        return ctx.main_grad.add(gradient), None

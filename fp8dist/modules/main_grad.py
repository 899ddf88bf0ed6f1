"""MainGrad: adds a weight's gradient to the buffer ``weight.main_grad``, as modules of Megatron-Core do."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


def fuses(module: nn.Module) -> bool:
    """True if the module is a Megatron-Core module with ``gradient_accumulation_fusion``, which uses ``main_grad``."""
    return bool(getattr(module, "gradient_accumulation_fusion", False))


class MainGrad:
    """The ``main_grad`` buffer of a weight. Follows the contract of Megatron-Core's fused layers:

    - The backward adds the gradient to ``weight.main_grad``, and sets ``weight.grad_added_to_main_grad``.
    - Autograd gets a tensor of the weight's shape whose values do not matter, so that the hooks on the weight run.
      Megatron's DDP starts its reductions in these hooks, and ignores the tensor because of the mark. If the weight has
      ``zero_out_wgrad`` set, DDP adds the tensor, which must then be zeros.

    DDP reads the mark once for all gradients of a step. So gradients computed in high precision are added here, too.
    """

    def __init__(self, weight: Any) -> None:
        self._weight = weight

    @staticmethod
    def of(weight: Tensor) -> MainGrad | None:
        """Return the MainGrad of a weight. None: the weight gets no gradient in this forward, or has no buffer."""
        wanted = torch.is_grad_enabled() and weight.requires_grad and getattr(weight, "main_grad", None) is not None
        return MainGrad(weight) if wanted else None

    @property
    def total(self) -> Tensor:
        """The buffer, of the weight's shape."""
        total: Tensor = self._weight.main_grad
        return total

    def added(self) -> Tensor | None:
        """Mark the gradient as added, and return the tensor that autograd gets in its place. None: the weight has no
        such mark."""
        if not hasattr(self._weight, "grad_added_to_main_grad"):
            return None
        self._weight.grad_added_to_main_grad = True
        zeros = getattr(self._weight, "zero_out_wgrad", False)
        return torch.zeros_like(self._weight) if zeros else torch.empty_like(self._weight)

    def add(self, gradient: Tensor) -> Tensor | None:
        """Add a gradient to the buffer, mark it as added, and return the tensor that autograd gets in its place."""
        self.total.add_(gradient)
        return self.added()

    def through(self, weight: Tensor) -> Tensor:
        """Return the weight as a view. Autograd then adds the view's gradient to the buffer."""
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

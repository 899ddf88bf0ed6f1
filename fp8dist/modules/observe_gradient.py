"""observe_gradient: records the amax of a gradient that no product in FP8 takes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8dist.modules.casters import ExpertMask, count_tokens
from fp8dist.modules.linear_slots import LinearSlots
from fp8dist.state.arena import SlotViews

__all__ = ["observe_gradient"]


class _ObserveGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, offsets: Tensor | None, of: tuple[LinearSlots, SlotViews, ExpertMask]) -> Tensor:
        ctx.of = of
        ctx.save_for_backward(offsets)
        return torch.ops.aten._unsafe_view(y, y.shape)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
        (offsets,), (slots, state, recorded) = ctx.saved_tensors, ctx.of
        slots.monitor.note_backward()
        if offsets is not None and slots.job.measuring:
            count_tokens(offsets, state)
        slots.caster.observe(grad_output.detach(), state, recorded, offsets)
        return grad_output, None, None


def observe_gradient(
    y: Tensor, slots: LinearSlots, state: SlotViews, recorded: ExpertMask = True, offsets: Tensor | None = None
) -> Tensor:
    """Return ``y``. The backward records the amax of its gradient.

    Args:
        y: a product in high precision, [tokens, features].
        state: of the slot of the gradient, or of the run of slots of experts.
        recorded: of experts, whose amaxes.
        offsets: int32[E], the ends of the experts' rows. None: y is a Linear's.
    """
    observed: Tensor = _ObserveGradient.apply(y, offsets, (slots, state, recorded))
    return observed

"""Detection of tensors that no longer fit their slot's scale. They are cast with their own amax instead.

A tensor's *overflow ratio* is amax * scale / (largest number of the FP8 format): above 1, its cast saturates. A slot is
*cold* while it has no scale, and *hot* afterwards.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from fp8dist.state.arena import SlotViews
from fp8dist.state.recipe import Recipe
from fp8dist_kernels.formats import Role
from fp8dist_kernels.reference.magnitude import amax_bits
from fp8dist_kernels.scaling import scale_from_amax

OUTGROWN = 1.25
"""Overflow ratio above which a weight is cast with its own amax, in training as well. Measured: a weight that grew by a
factor of 1.3 and saturates makes the product 11 % wrong, a factor of 8 makes it 82 % wrong. A weight that shrank does
little harm."""

SHRUNK = 2.0**-17
"""Overflow ratio below which a written weight is cast with its own amax, too: E4M3 would flush it to zero. Measured: at
a ratio of 1e-4 the product is 4 % wrong."""


class Outgrown(NamedTuple):
    """Conditions under which the tensors of a forward are cast with their own amaxes.

    Attributes:
        weight: overflow ratio above which the weight is cast with its own amax. None: never.
        others: the same for input and gradient. Set for a copied module whose weight was written to: a copy has no
            boundaries at which the scales could follow. Set for gradients of evaluations. None: never.
        written: True if the weight was written to.
        upstream: 0-d bool on the device, True if another module's weight has outgrown its scale. This module's input
            and gradient are computed from that module's results, so they may not fit their scales either. None: no
            module has reported.
        once: True in eval mode.
        scale: cast the weight with this scale, chosen for the whole weight. None: the cast chooses.
    """

    weight: float | None
    others: float | None = None
    written: bool = False
    upstream: Tensor | None = None
    once: bool = False
    scale: Tensor | None = None


class Growth:
    """Records whether weights of modules have outgrown their scales since a boundary, as bools on the device.

    Every module asks about all *other* modules. For that, two bools suffice: one of the first module that reported, one
    of all the rest. Modules are identified by the id of their ``WritePolicy``; references to it would be cycles.
    """

    def __init__(self, boundaries: int) -> None:
        self.boundaries = boundaries
        self._first: int | None = None
        self._of_first: Tensor | None = None
        self._of_rest: Tensor | None = None

    def add(self, module: int, grown: Tensor) -> None:
        """Add a report of a module. ``grown``: 0-d bool, ORed with the module's earlier reports."""
        if self._first is None or self._first == module:
            self._first, self._of_first = module, either(self._of_first, grown)
        else:
            self._of_rest = either(self._of_rest, grown)

    def of_others(self, module: int) -> Tensor | None:
        """Return 0-d bool: True if another module than this one reported a weight that outgrew its scale. None: no
        other module has reported."""
        if self._first is None or self._first == module:
            return self._of_rest
        assert self._of_first is not None
        return either(self._of_rest, self._of_first)


def either(one: Tensor | None, other: Tensor) -> Tensor:
    """Return ``one | other``; ``other`` if ``one`` is None.

    Dispatch modes are switched off for it. Selective checkpointing is such a mode: it counts the operations of a
    forward and of its repetition, and ``one`` may be None in only one of the two.
    """
    if one is None:
        return other
    if torch._C._len_torch_dispatch_stack() == 0:
        return one | other
    with _disable_current_modes():
        return one | other


def limits_of(recipe: Recipe) -> tuple[float | None, float | None]:
    """Return the overflow ratios above which a weight is cast with its own amax: (in training, in eval mode and for an
    export). The second is lower, because no later step corrects such a cast: it allows only values that would round to
    the format's largest number anyway. (None, None) if the recipe has no delayed scales."""
    if not recipe.delayed:
        return None, None
    format, saturating = recipe.format_of(Role.WEIGHT), meant_to_saturate(recipe)
    return OUTGROWN * saturating, format.rounds_to_max / format.max * saturating


def meant_to_saturate(recipe: Recipe) -> float:
    """Return the overflow ratio of a tensor that fits its scale, if that is above 1: a recipe with a negative margin
    chooses scales 2 ** -margin times too large on purpose. 1.0 for other recipes."""
    return float(2.0 ** max(0, -recipe.margin))


def unfit_for(amax: Tensor, state: SlotViews, recipe: Recipe, upstream: Tensor) -> Tensor:
    """Return bool (0-d or [E]): True if ``upstream`` is True and the tensor overflows its scale by more than a quarter.

    Args:
        amax: float32, 0-d for the tensor of one slot, or [E] for those of E slots.
    """
    used, counts = _used(amax, state)
    return upstream & counts & (used > OUTGROWN * meant_to_saturate(recipe))


def scale_for(amax: Tensor, state: SlotViews, recipe: Recipe, limit: float | None) -> Tensor:
    """Return the scale with which to cast a weight, as the cast of a whole weight chooses it: its slot's, or that of
    its amax, if the slot is cold or the weight has outgrown its scale. Float32, 0-d or [E].

    Args:
        amax: the amax of the whole weight, with its parts on other ranks: float32, 0-d, or [E] for experts.
        limit: the overflow ratio above which the weight has outgrown its scale. None: always derive the scale from
            ``amax``.
    """
    scale = state.scale
    largest = torch.full_like(scale, state.format.max)
    amax = amax.to(scale.device)
    own = scale_from_amax(amax, torch.ones_like(scale), largest, recipe.margin, recipe.power_of_two)
    if limit is None:
        return own
    beyond = (amax * scale > torch.full_like(scale, limit * state.format.max)) & (amax < torch.inf)
    return torch.where(state.cold | beyond, own, scale)


def shrunk(amax: Tensor, state: SlotViews, recipe: Recipe) -> Tensor:
    """Return bool (0-d or [E]): True if a weight is so small for its slot's scale that the cast would flush it to zero.

    Args:
        amax: the weight's amax, float32, 0-d or [E].
    """
    used, counts = _used(amax, state)
    return counts & (used < SHRUNK * 2.0 ** -max(0, recipe.margin))


def amax_of(x: Tensor) -> Tensor:
    """Return the amax of a tensor: 0-d float32."""
    return amax_bits(x.detach()).view(torch.float32)


def _used(amax: Tensor, state: SlotViews) -> tuple[Tensor, Tensor]:
    """Return a tensor's overflow ratio, and a bool that is True if that ratio means something: the slot is hot, and the
    amax is neither 0 nor infinite nor NaN. Both 0-d or [E]."""
    amax = amax.to(state.scale.device)
    return amax * state.scale / state.format.max, (amax > 0) & (amax < torch.inf) & ~state.cold

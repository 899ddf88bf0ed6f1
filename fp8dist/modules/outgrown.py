"""Detection of tensors that no longer fit their slot's scale. They are cast with their own amax instead."""

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

__all__ = [
    "OUTGROWN",
    "Growth",
    "Outgrown",
    "amax_of",
    "either",
    "limits_of",
    "meant_to_saturate",
    "scale_for",
    "shrunk",
    "unfit_for",
]

OUTGROWN = 1.25
"""Overflow ratio above which a weight is cast with its own amax, whoever changed it. A saturated weight that grew by
1.3 makes the product 11 % wrong, one that grew by 8 makes it 82 % wrong. A weight that shrank does little harm."""

SHRUNK = 2.0**-17
"""Ratio below which a written weight is cast with its own amax, too: E4M3 would flush it to zero. At 1e-4 it is 4 %
wrong."""


class Outgrown(NamedTuple):
    """Conditions under which the tensors of a forward are cast with their own amaxes.

    ``weight``: the overflow ratio for the weight; None: never. ``others``: the ratio for input and gradient, in a
    written copy, for which no boundary will come at which their scales could follow. ``written``: True if the weight
    was written to. ``upstream``: 0-d bool on the device: True if another module's weight has outgrown its scale, so
    that the module's outputs may not fit scales either; None: nobody looked. ``once``: True in eval mode. ``scale``:
    what the weight is cast with, chosen for all parts of it; None: the cast chooses.
    """

    weight: float | None
    others: float | None = None
    written: bool = False
    upstream: Tensor | None = None
    once: bool = False
    scale: Tensor | None = None


class Growth:
    """Records which modules' weights have outgrown their scales since a boundary. Known on the device only.

    The first module is kept apart from the rest, so that every module can ask about the others. Modules are identified
    by the ids of their slots, because references would be cyclic: slots hold the job state that holds this.
    """

    def __init__(self, boundaries: int) -> None:
        self.boundaries = boundaries
        self._first: int | None = None
        self._of_first: Tensor | None = None
        self._of_rest: Tensor | None = None

    def add(self, slots: int, grown: Tensor) -> None:
        """Record the cast, or a new scale, of a written weight. ``grown``: 0-d bool, ORed with earlier ones."""
        if self._first is None or self._first == slots:
            self._first, self._of_first = slots, either(self._of_first, grown)
        else:
            self._of_rest = either(self._of_rest, grown)

    def of_others(self, slots: int) -> Tensor | None:
        """Return 0-d bool: True if another module's written weight has outgrown its scale. None: there is none."""
        if self._first is None or self._first == slots:
            return self._of_rest
        assert self._of_first is not None
        return either(self._of_rest, self._of_first)


def either(one: Tensor | None, other: Tensor) -> Tensor:
    """Return ``one | other``, or ``other`` if there is no other. No dispatch mode sees it: selective checkpointing
    counts operations, and which reports there are already depends on other modules."""
    if one is None:
        return other
    if torch._C._len_torch_dispatch_stack() == 0:
        return one | other
    with _disable_current_modes():
        return one | other


def limits_of(recipe: Recipe) -> tuple[float | None, float | None]:
    """Return the overflow ratios above which a weight is cast with its own amax: in training, and in eval mode and for
    an export. There no later step corrects a cast, so values beyond the format's range must round to its largest
    number. None: the recipe has no delayed scales."""
    if not recipe.delayed:
        return None, None
    format, saturating = recipe.format_of(Role.WEIGHT), meant_to_saturate(recipe)
    return OUTGROWN * saturating, format.rounds_to_max / format.max * saturating


def meant_to_saturate(recipe: Recipe) -> float:
    """Return the factor by which a recipe with a negative margin saturates on purpose."""
    return float(2.0 ** max(0, -recipe.margin))


def unfit_for(amax: Tensor, state: SlotViews, recipe: Recipe, upstream: Tensor) -> Tensor:
    """Return bool: True if ``upstream`` is, and a tensor exceeds its scale by more than a quarter.

    Args:
        amax: float32, of a slot's tensor, 0-d, or those of a run of slots, [E].
    """
    used, counts = _used(amax, state)
    return upstream & counts & (used > OUTGROWN * meant_to_saturate(recipe))


def scale_for(amax: Tensor, state: SlotViews, recipe: Recipe, limit: float | None) -> Tensor:
    """Return the scale with which to cast a weight, as the cast of a whole weight chooses it: its slot's, or that of
    its amax, if the slot is cold or the weight has outgrown its scale. Float32, 0-d or [E].

    Args:
        amax: of the whole weight, also of parts on other ranks: float32, 0-d, or [E] of experts.
        limit: the overflow ratio. None: take the scale of the amax in any case.
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
    """Return bool: True if a weight with this amax is so far below its scale that the cast would flush it to zero."""
    used, counts = _used(amax, state)
    return counts & (used < SHRUNK * 2.0 ** -max(0, recipe.margin))


def amax_of(x: Tensor) -> Tensor:
    """Return the amax of a tensor: 0-d float32."""
    return amax_bits(x.detach()).view(torch.float32)


def _used(amax: Tensor, state: SlotViews) -> tuple[Tensor, Tensor]:
    """Return the share of the format's range that a tensor uses with its slot's scale; True if the tensor is neither
    zero nor infinite and the slot is hot."""
    amax = amax.to(state.scale.device)
    return amax * state.scale / state.format.max, (amax > 0) & (amax < torch.inf) & ~state.cold

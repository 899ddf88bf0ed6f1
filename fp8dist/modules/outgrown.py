"""When a tensor is cast with its own amax although its slot has a scale: it does not fit that scale any more."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fp8dist.recipe import Recipe
from fp8dist.state.arena import SlotState
from fp8dist_kernels.reference.magnitude import amax_bits

__all__ = [
    "OUTGROWN",
    "OUTGROWN_COPY",
    "OUTGROWN_WRITTEN",
    "Growth",
    "Outgrown",
    "meant_to_saturate",
    "shrunk",
    "unfit_for",
]

OUTGROWN, OUTGROWN_WRITTEN = 2.0, 1.25
"""Beyond its scale by these factors a weight is cast with its own amax: any weight, and one that was written to. A
weight that grew by 1.3 and saturates makes a product 11 % wrong, one that grew by 8 makes it 82 % wrong; one that
shrank does little harm."""

OUTGROWN_COPY = 1.0
"""The same for a written weight of a model that was copied: no boundary is to come that its scale could follow."""

SHRUNK = 2.0**-17
"""So far below its scale, a written weight is as well: E4M3 would flush it to zero. At 1e-4 it is 4 % wrong."""


class Outgrown(NamedTuple):
    """When the tensors of a forward are cast with their own amaxes.

    ``weight``: the factor beyond its scale from which the weight is; None: never. ``others``: the same of input and
    gradient, in a written copy. ``written``: the weight was written to. ``upstream``: 0-d bool on the device: True if
    another module's written weight has outgrown its scale, so what it makes may not fit scales either; None: no other
    was written to.
    """

    weight: float | None
    others: float | None = None
    written: bool = False
    upstream: Tensor | None = None


class Growth:
    """Which modules' written weights have outgrown their scales since a boundary: the device knows, the host does not.

    One module is kept apart from the rest, so that each can be told of the others. Modules are known by ids of their
    slots: the job state that holds this is held by them.
    """

    def __init__(self, boundaries: int) -> None:
        self.boundaries = boundaries
        self._first: int | None = None
        self._of_first: Tensor | None = None
        self._of_rest: Tensor | None = None

    def add(self, slots: int, grown: Tensor) -> None:
        """A written weight was cast, or its scale derived anew. ``grown``: 0-d bool; what was said before stays."""
        if self._first is None or self._first == slots:
            self._first, self._of_first = slots, grown if self._of_first is None else self._of_first | grown
        else:
            self._of_rest = grown if self._of_rest is None else self._of_rest | grown

    def of_others(self, slots: int) -> Tensor | None:
        """Whether the weight of another module has; None: none was written to."""
        if self._first is None or self._first == slots:
            return self._of_rest
        assert self._of_first is not None
        return self._of_first if self._of_rest is None else self._of_first | self._of_rest


def meant_to_saturate(recipe: Recipe) -> float:
    """The factor by which a recipe with a negative margin cuts off on purpose."""
    return float(2.0 ** max(0, -recipe.margin))


def unfit_for(x: Tensor, state: SlotState, recipe: Recipe, upstream: Tensor | None) -> Tensor | None:
    """0-d bool: whether x is more than a quarter beyond its scale, where ``upstream`` gives reason to look."""
    if upstream is None or not recipe.delayed:
        return None
    used, counts = _used(x, state)
    return upstream & counts & (used > OUTGROWN_WRITTEN * meant_to_saturate(recipe))


def shrunk(weight: Tensor, state: SlotState, recipe: Recipe) -> Tensor:
    """0-d bool: whether a weight is so far below its scale that nothing would be left of it."""
    used, counts = _used(weight, state)
    return counts & (used < SHRUNK * 2.0 ** -max(0, recipe.margin))


def _used(x: Tensor, state: SlotState) -> tuple[Tensor, Tensor]:
    """0-d: the share of the format's range that x takes with its slot's scale; whether x is neither zero nor infinite
    and the slot is hot."""
    amax = amax_bits(x.detach()).view(torch.float32).to(state.scale.device)
    return amax * state.scale / state.format.max, (amax > 0) & (amax < torch.inf) & ~state.cold

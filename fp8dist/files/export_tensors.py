"""ExportedTensor: one tensor of an exported model. ExportPart: several of them that come from one cast. Scheme: how a
server multiplies with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fp8dist.state.recipe import Recipe

__all__ = ["ExportPart", "ExportedTensor", "Inputs", "Scheme", "Strategy"]

Strategy = Literal["tensor", "channel", "block"]
"""Which part of a weight has a scale of its own: all of it, a row, or a block."""

Inputs = Literal["static", "tensor", "token"]
"""How inputs are cast: with a fixed scale, or with a scale from the amax of each tensor or token."""


class Scheme(NamedTuple):
    """How a server multiplies with a module's weight."""

    strategy: Strategy
    inputs: Inputs


@dataclass(frozen=True)
class ExportedTensor:
    """One tensor of an exported model.

    ``role``: "weight" (FP8), "weight_scale" and "input_scale" (float32 factors by which a server multiplies), or "high"
    (any other tensor, as it is stored). ``module``: name of the module that holds it.
    """

    name: str
    role: Literal["weight", "weight_scale", "input_scale", "high"]
    module: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class ExportPart:
    """Tensors that come from one cast.

    Args:
        read: returns them in order. COLLECTIVE if they are sharded.
        linears: names of the modules whose weights are among them, if these are in FP8 or of experts.
        scheme, recipe: of these modules; None: they are in high precision.
    """

    tensors: tuple[ExportedTensor, ...]
    read: Callable[[], Sequence[Tensor]]
    linears: tuple[str, ...] = ()
    scheme: Scheme | None = None
    recipe: Recipe | None = None

"""ExportedTensor: one tensor of an exported model. ExportPart: the exported tensors that come from one cast. Scheme:
how an inference server multiplies with a weight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fp8dist.state.recipe import Recipe

__all__ = ["ExportPart", "ExportedTensor", "Inputs", "Scheme", "Strategy"]

Strategy = Literal["tensor", "channel", "block", "group"]
"""The part of a weight that has a scale of its own: the whole weight, a row, a block of 128 x 128, or of 1 x 32."""

Inputs = Literal["static", "tensor", "token", "group"]
"""How a server casts inputs: with the fixed scale of the export, or with a scale from the amax of each tensor, each
token, or each 1 x 32 elements. In the format "block", servers always take a scale per 1 x 128 elements."""


class Scheme(NamedTuple):
    """How a server multiplies with a module's weight."""

    strategy: Strategy
    inputs: Inputs


@dataclass(frozen=True)
class ExportedTensor:
    """One tensor of an exported model.

    Attributes:
        role: "weight" (FP8), "weight_scale" or "input_scale" (factors by which a server multiplies the FP8 numbers:
            float32, or E8M0 as uint8), or "high" (any other tensor, exported as the model stores it).
        module: name of the module that the tensor belongs to.
        dtype, shape: those of the exported, whole tensor.
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
        tensors: the tensors, without their data.
        read: returns their data in the same order. COLLECTIVE if they are sharded.
        linears: names of the modules whose weights are among the tensors, if these are in FP8 or belong to experts.
        scheme, recipe: those of these modules. None: the modules are in high precision.
    """

    tensors: tuple[ExportedTensor, ...]
    read: Callable[[], Sequence[Tensor]]
    linears: tuple[str, ...] = ()
    scheme: Scheme | None = None
    recipe: Recipe | None = None

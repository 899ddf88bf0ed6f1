"""ExportedTensor: one tensor of an exported model. ExportPart: several of them that come from one cast."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

__all__ = ["ExportPart", "ExportedTensor"]


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
    """Tensors that come from one cast. ``read`` returns them in order. COLLECTIVE if they are sharded."""

    tensors: tuple[ExportedTensor, ...]
    read: Callable[[], Sequence[Tensor]]

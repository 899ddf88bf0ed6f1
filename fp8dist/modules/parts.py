"""Part: one FP8 weight of a model, with the module that holds it and the object that has its FP8 state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from fp8dist.modules.fp8_module import FP8Module
from fp8dist.modules.linear_slots import LinearSlots
from fp8dist.modules.weight_notes import stored_parameters


class Part(NamedTuple):
    """One FP8 weight: that of an FP8Linear, or one of the weights [E, …] of an FP8Experts."""

    module: nn.Module
    slots: LinearSlots

    @property
    def weight(self) -> Any:
        """The weight as the module shows it now. A parametrization computes it at each access."""
        return getattr(self.module, self.slots.name)

    @property
    def stored(self) -> tuple[Tensor, ...]:
        """The parameters that store the weight."""
        return stored_parameters(self.module, self.slots.name)

    @property
    def fqn(self) -> str:
        """The fully qualified name of the Linear, or of the product in the FP8Experts."""
        return self.slots.fqn


def fp8_parts(model: nn.Module) -> Iterator[Part]:
    """Iterate over the FP8 weights of a model, in the order of ``model.modules()``."""
    for module in model.modules():
        if isinstance(module, FP8Module):
            for slots in module.fp8_weights:
                yield Part(module, slots)

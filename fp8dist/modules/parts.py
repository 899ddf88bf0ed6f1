"""Parts: the weights of a model that are in FP8, each with the module that holds it and with its slots."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from fp8dist.modules.fp8_module import FP8Module
from fp8dist.modules.linear_slots import LinearSlots
from fp8dist.modules.weight_notes import stored_parameters

__all__ = ["Part", "fp8_parts"]


class Part(NamedTuple):
    """One weight in FP8: of an FP8Linear, or of a grouped product of an FP8Experts."""

    module: nn.Module
    slots: LinearSlots

    @property
    def weight(self) -> Any:
        """The weight as the module has it now."""
        return getattr(self.module, self.slots.name)

    @property
    def stored(self) -> tuple[Tensor, ...]:
        """The parameters that store the weight."""
        return stored_parameters(self.module, self.slots.name)

    @property
    def fqn(self) -> str:
        """The fqn of the Linear or of the product."""
        return self.slots.fqn


def fp8_parts(model: nn.Module) -> Iterator[Part]:
    """Iterate over the FP8 weights of a model, in the order of its modules."""
    for module in model.modules():
        if isinstance(module, FP8Module):
            for slots in module.fp8_weights:
                yield Part(module, slots)

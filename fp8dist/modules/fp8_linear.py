"""FP8Linear, and the conversion of nn.Linear modules to FP8Linear.

Conversion is in place: only the module's class changes, and a ``LinearSlots`` is attached. So parameters, state_dict
keys, hooks and references to the module stay valid.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from fp8dist.errors import ConfigurationError
from fp8dist.modules.foreign import gathered_input, is_parallel, is_transposed, linear_base
from fp8dist.modules.fp8_module import FP8Module, convert_to
from fp8dist.modules.fp8_product import product_of
from fp8dist.modules.linear_slots import LinearSlots
from fp8dist.modules.main_grad import MainGrad
from fp8dist.modules.modes import CHOICES
from fp8dist.modules.tensor_parallel import Multiply, parallel_linear
from fp8dist.modules.unsupported import FLOATING, require_floating
from fp8dist.modules.weight_notes import stored_parameters
from fp8dist.state.groups import is_dtensor

__all__ = ["FP8Linear", "convert", "fp8_linears"]


class FP8Linear(FP8Module, nn.Linear):
    """nn.Linear whose three GEMMs run in FP8. Created by ``fp8dist.prepare``; do not construct it yourself.

    Takes [..., in_features] and returns [..., out_features] in the input's dtype (under torch.autocast, in the autocast
    dtype). Accepts any number of tokens. The weight's gradient has the weight's dtype. Records no amaxes in ``eval()``
    or with grad disabled. Does not support double backward.

    A module of another class than nn.Linear gets a class that inherits from both, so ``isinstance`` still holds.
    ``transposed``: its weight is stored as [in_features, out_features].
    """

    fp8_slots: LinearSlots
    converted_from: ClassVar[type[nn.Module]] = nn.Linear
    fp8_added: ClassVar[tuple[str, ...]] = ("fp8_slots",)
    transposed: ClassVar[bool] = False

    @property
    def fp8_weights(self) -> tuple[LinearSlots, ...]:
        """See ``FP8Module``."""
        return (self.fp8_slots,)

    @staticmethod
    def fp8_members(original: type[nn.Module]) -> dict[str, Any]:
        """See ``FP8Module``."""
        base = linear_base(original)
        assert base is not None
        members: dict[str, Any] = {"transposed": is_transposed(base)}
        if not issubclass(original, nn.Linear):
            members["fp8_added"] = ("fp8_slots", "in_features", "out_features")
        if is_parallel(base):
            members |= {"forward": original.forward, "_forward_impl": _parallel_forward}
        return members

    def forward(self, input: Tensor) -> Tensor:
        """Return x Wᵀ + b: [..., in_features] to [..., out_features]. Local; commits a pending sync.

        Raises:
            ConfigurationError: the input does not fit the weight, or ``attach`` must be called first. Names the module.
        """
        if not self.fp8_slots.job.enabled:
            return F.linear(input, self.weight.t() if self.transposed else self.weight, self.bias)
        multiply, weight = self._product(input)
        return multiply(input, weight, self.bias)

    def _product(self, input: Tensor, main_grad: MainGrad | None = None) -> tuple[Multiply, Tensor]:
        """Return the function that computes this forward from the input, the weight and the bias, and the weight
        [out_features, in_features]. Local; commits a pending sync.

        Args:
            main_grad: where the weight's gradient goes. None: to autograd.
        """
        slots = self.fp8_slots
        if input.dtype not in FLOATING:
            require_floating(input, slots.fqn)
        weight = self.weight  # Read once: a parametrization recomputes it at each access.
        multiply = product_of(self, slots, input, weight, CHOICES[slots.precision.high], main_grad=main_grad)
        if is_dtensor(weight):
            multiply = functools.partial(parallel_linear, multiply, slots.fqn)
        elif is_dtensor(input):
            raise ConfigurationError(
                f"{slots.fqn}: its input is a DTensor, its weight is not: parallelize the Linear, too"
            )
        return multiply, weight.t() if self.transposed else weight


def fp8_linears(model: nn.Module) -> Iterator[FP8Linear]:
    """Iterate over all FP8Linears of a model."""
    return (module for module in model.modules() if isinstance(module, FP8Linear))


def convert(module: nn.Module, slots: LinearSlots) -> None:
    """Convert an nn.Linear, or a module that computes the same, to an FP8Linear, in place."""
    module.fp8_slots = slots  # type: ignore[assignment]  # Before the class: another thread may look for FP8Linears.
    if not isinstance(module, nn.Linear):
        shape, base = stored_parameters(module)[0].shape, linear_base(type(module))
        assert base is not None
        module.out_features, module.in_features = reversed(shape) if is_transposed(base) else shape  # type: ignore[assignment]
    convert_to(FP8Linear, module)


def _parallel_forward(
    self: FP8Linear,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    **given: Any,
) -> Tensor:
    """``_forward_impl`` of Megatron-Core's parallel Linears: x Wᵀ + b with this rank's part of the weight. COLLECTIVE,
    see ``gathered_input``.

    Args:
        given: what Megatron-Core calls it with beside. With ``gradient_accumulation_fusion`` the weight's gradient is
            added to ``main_grad``, if there is one. torch.compile leaves such a module out of its graphs: a compiled
            backward cannot mark the weight.
    """
    slots = self.fp8_slots
    if not slots.job.enabled:
        return self.converted_from._forward_impl(self, input, weight, bias, **given)  # type: ignore[attr-defined]
    if weight is not self.weight:
        raise ConfigurationError(
            f"{slots.fqn}: it was called with the weight of another module, for which it has no scale: name it in skip="
        )
    input = gathered_input(input, given["allreduce_dgrad"], given["sequence_parallel"], given["tp_group"])
    if not given.get("gradient_accumulation_fusion", False):
        multiply, weight = self._product(input)
        return multiply(input, weight, bias)
    return (_multiply_in_eager if torch.compiler.is_compiling() else _multiply_fused)(self, input, bias)


def _multiply_fused(linear: FP8Linear, input: Tensor, bias: Tensor | None) -> Tensor:
    multiply, weight = linear._product(input, MainGrad.of(linear.weight))
    return multiply(input, weight, bias)


_multiply_in_eager = _disable_dynamo(_multiply_fused)

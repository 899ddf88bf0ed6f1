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


class FP8Linear(FP8Module, nn.Linear):
    """nn.Linear whose three GEMMs run in FP8. Created by ``fp8dist.prepare``; do not construct it yourself.

    Takes [..., in_features] and returns [..., out_features] in the input's dtype (under torch.autocast, in the autocast
    dtype). Accepts any number of tokens. The weight's gradient has the weight's dtype. Records no amaxes in ``eval()``
    or with grad disabled. Does not support double backward.

    A module of another class than nn.Linear gets a class that inherits from FP8Linear and from its original class, so
    ``isinstance`` with either holds. ``transposed``: True if the weight is stored as [in_features, out_features].
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
        """Return x Wᵀ + b: [..., in_features] to [..., out_features]. Commits a pending sync. Local, but COLLECTIVE in
        eval mode under tensor parallelism: ranks with parts of one weight then agree on a scale.

        Raises:
            ConfigurationError: the input does not fit the weight, or ``attach`` must be called first. Names the module.
        """
        if not self.fp8_slots.job.enabled:
            return F.linear(input, self.weight.t() if self.transposed else self.weight, self.bias)
        if self.fp8_slots.caster.draws and torch.compiler.is_compiling():
            return _multiply_in_eager(self, input, self.bias, False)  # The host counts what random numbers are for.
        multiply, weight = self._product(input)
        return multiply(input, weight, self.bias)

    def _product(self, input: Tensor, main_grad: MainGrad | None = None) -> tuple[Multiply, Tensor]:
        """Return (function f(input, weight, bias) that computes this forward, weight [out_features, in_features]).
        Local; commits a pending sync.

        Args:
            main_grad: the buffer to which the weight's gradient is added. None: autograd gets the gradient.
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
    """Replacement for ``_forward_impl`` of Megatron-Core's parallel Linears: return x Wᵀ + b for this rank's part of
    the weight. COLLECTIVE, see ``gathered_input``.

    Args:
        given: Megatron-Core's other keyword arguments. With ``gradient_accumulation_fusion`` the weight's gradient is
            added to ``weight.main_grad``, if there is one. torch.compile leaves such a module out of its graphs,
            because a compiled backward cannot set the mark on the weight.

    Raises:
        ConfigurationError: ``weight`` is not this module's own.
    """
    slots = self.fp8_slots
    if not slots.job.enabled:
        return self.converted_from._forward_impl(self, input, weight, bias, **given)  # type: ignore[attr-defined]
    if weight is not self.weight:
        raise ConfigurationError(
            f"{slots.fqn}: it was called with the weight of another module, for which it has no scale: name it in skip="
        )
    input = gathered_input(input, given["allreduce_dgrad"], given["sequence_parallel"], given["tp_group"])
    fused = given.get("gradient_accumulation_fusion", False)
    outside = torch.compiler.is_compiling() and (fused or slots.caster.draws)
    return (_multiply_in_eager if outside else _multiply)(self, input, bias, fused)


def _multiply(linear: FP8Linear, input: Tensor, bias: Tensor | None, fused: bool) -> Tensor:
    multiply, weight = linear._product(input, MainGrad.of(linear.weight) if fused else None)
    return multiply(input, weight, bias)


_multiply_in_eager = _disable_dynamo(_multiply)

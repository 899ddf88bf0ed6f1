"""FP8Linear, and the conversion of nn.Linear modules to FP8Linear and back.

Conversion is in place: only the module's class changes, and a ``LinearSlots`` is attached. So parameters, state_dict
keys, hooks and references to the module stay valid.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from fp8dist.errors import ConfigurationError
from fp8dist.modules.foreign import gathered_input, is_parallel, is_transposed, linear_base
from fp8dist.modules.fp8_product import product_of
from fp8dist.modules.linear_slots import LinearSlots
from fp8dist.modules.main_grad import MainGrad
from fp8dist.modules.modes import CHOICES
from fp8dist.modules.tensor_parallel import parallel_linear
from fp8dist.modules.unsupported import FLOATING, require_floating
from fp8dist.modules.weight_notes import stored_parameters
from fp8dist.state.groups import is_dtensor
from fp8dist_kernels.formats import Role

__all__ = ["FP8Linear", "convert", "fp8_linears", "require_revertible", "revert"]


class FP8Linear(nn.Linear):
    """nn.Linear whose three GEMMs run in FP8. Created by ``fp8dist.prepare``; do not construct it yourself.

    Takes [..., in_features] and returns [..., out_features] in the input's dtype (under torch.autocast, in the autocast
    dtype). Accepts any number of tokens. The weight's gradient has the weight's dtype. Records no amaxes in ``eval()``
    or with grad disabled. Does not support double backward.

    A module of another class than nn.Linear gets a class that inherits from both, so ``isinstance`` still holds.
    ``converted_from`` is the class that it had. ``transposed``: its weight is stored as [in_features, out_features].
    """

    fp8_slots: LinearSlots
    converted_from: ClassVar[type[nn.Module]] = nn.Linear
    transposed: ClassVar[bool] = False

    def forward(self, input: Tensor) -> Tensor:
        """Return x Wᵀ + b: [..., in_features] to [..., out_features]. Local; commits a pending sync.

        Raises:
            ConfigurationError: the input does not fit the weight, or ``attach`` must be called first. Names the module.
        """
        if not self.fp8_slots.job.enabled:
            return F.linear(input, self.weight.t() if self.transposed else self.weight, self.bias)
        return self._multiply(input, self.bias)

    def _multiply(self, input: Tensor, bias: Tensor | None, main_grad: MainGrad | None = None) -> Tensor:
        """Return x Wᵀ + ``bias`` as the state of the job wants it. Local; commits a pending sync.

        Args:
            main_grad: where the weight's gradient goes. None: to autograd.
        """
        slots = self.fp8_slots
        if slots.job.awaits_attach:
            raise ConfigurationError(
                f"{slots.fqn}: with fp8_all_gather=True attach() must come before the first forward"
            )
        if input.dtype not in FLOATING:
            require_floating(input, slots.fqn)
        weight = self.weight  # Read once: a parametrization recomputes it at each access.
        compute = product_of(self, slots, input, weight, CHOICES[slots.precision.high], main_grad=main_grad)
        weight = weight.t() if self.transposed else weight
        if is_dtensor(weight):
            return parallel_linear(compute, input, weight, bias, slots.fqn)
        if is_dtensor(input):
            raise ConfigurationError(
                f"{slots.fqn}: its input is a DTensor, its weight is not: parallelize the Linear, too"
            )
        return compute(input, weight, bias)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Load as nn.Module does. Also marks the weight as written, because FSDP may have replaced the parameter."""
        self.fp8_slots.note.sample_before_load(self, self.fp8_slots.job.loads)
        super()._load_from_state_dict(*args, **kwargs)
        self.fp8_slots.note.mark_written()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Save as nn.Module does. Also notes that the weight may be written to."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not keep_vars:
            names = (name for name in self._parameters if name.startswith("weight"))
            self.fp8_slots.note.hand_out(destination[prefix + name] for name in names if prefix + name in destination)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.fp8_slots.note.belong_to(self)

    def train(self, mode: bool = True) -> FP8Linear:
        """Same as nn.Module.train. Also invalidates cached weight casts."""
        self.fp8_slots.job.invalidate_casts()
        return super().train(mode)


def fp8_linears(model: nn.Module) -> Iterator[FP8Linear]:
    """Iterate over all FP8Linears of a model."""
    return (module for module in model.modules() if isinstance(module, FP8Linear))


def convert(module: nn.Module, slots: LinearSlots) -> None:
    """Convert an nn.Linear, or a module that computes the same, to an FP8Linear, in place."""
    module.fp8_slots = slots  # type: ignore[assignment]  # Before the class: another thread may look for FP8Linears.
    made = _fp8_class(type(module))  # type: ignore[arg-type]
    if not isinstance(module, nn.Linear):
        shape = stored_parameters(module)[0].shape
        module.out_features, module.in_features = reversed(shape) if made.transposed else shape  # type: ignore[assignment]
    module.__class__ = made
    slots.note.remember(stored_parameters(module))


@functools.cache
def _fp8_class(original: type[nn.Module]) -> type[FP8Linear]:
    """Return the class of converted modules of a class, the same one for all of them."""
    if original is nn.Linear:
        return FP8Linear
    base = linear_base(original)
    assert base is not None

    def reduce(self: FP8Linear, protocol: Any) -> Any:
        """Pickle by the original class: this one has no importable name."""
        reduced: Any = super(FP8Linear, self).__reduce_ex__(protocol)
        return _without_init, (original,), *reduced[2:]

    members: dict[str, Any] = {"converted_from": original, "transposed": is_transposed(base)}
    members |= {"__reduce_ex__": reduce, "__module__": __name__}
    if is_parallel(base):
        members |= {"forward": original.forward, "_forward_impl": _parallel_forward}
    return types.new_class(f"FP8{original.__name__}", (FP8Linear, original), {}, lambda body: body.update(members))


def _parallel_forward(
    self: FP8Linear,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    tp_group: Any,
    gradient_accumulation_fusion: bool = False,
    **options: Any,
) -> Tensor:
    """``_forward_impl`` of Megatron-Core's parallel Linears: x Wᵀ + b with this rank's part of the weight. COLLECTIVE,
    see ``gathered_input``.

    Args:
        gradient_accumulation_fusion: add the weight's gradient to ``main_grad``, if there is one. torch.compile leaves
            such a module out of its graphs: a compiled backward cannot mark the weight.
        options: what Megatron-Core calls it with beside that.
    """
    slots = self.fp8_slots
    if not slots.job.enabled:
        linked = {"allreduce_dgrad": allreduce_dgrad, "sequence_parallel": sequence_parallel, "tp_group": tp_group}
        linked["gradient_accumulation_fusion"] = gradient_accumulation_fusion
        return self.converted_from._forward_impl(self, input, weight, bias, **linked, **options)  # type: ignore[attr-defined]
    if weight is not self.weight:
        raise ConfigurationError(
            f"{slots.slots[Role.INPUT].fqn}: it was called with the weight of another module, for which it has no "
            "scale: name it in skip="
        )
    input = gathered_input(input, allreduce_dgrad, sequence_parallel, tp_group)
    if not gradient_accumulation_fusion:
        return self._multiply(input, bias)
    return (_multiply_in_eager if torch.compiler.is_compiling() else _multiply_fused)(self, input, bias)


def _multiply_fused(linear: FP8Linear, input: Tensor, bias: Tensor | None) -> Tensor:
    return linear._multiply(input, bias, MainGrad.of(linear.weight))


_multiply_in_eager = _disable_dynamo(_multiply_fused)


def _without_init(original: type[nn.Module]) -> FP8Linear:
    made = _fp8_class(original)  # type: ignore[arg-type]
    return made.__new__(made)


def require_revertible(module: FP8Linear) -> None:
    """Raise ConfigurationError if another tool has subclassed FP8Linear for this module, as parametrizations do."""
    if type(module) is not _fp8_class(module.converted_from):  # type: ignore[arg-type]
        raise ConfigurationError(f"{type(module).__name__} is a subclass of FP8Linear: undo that before restore()")


def revert(module: FP8Linear) -> None:
    """Convert an FP8Linear back to the class that it had, in place."""
    del module.fp8_slots
    if not issubclass(module.converted_from, nn.Linear):
        del module.in_features, module.out_features
    module.__class__ = module.converted_from  # type: ignore[assignment]

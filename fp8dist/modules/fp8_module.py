"""FP8Module: base class of FP8Linear and FP8Experts, and the in-place conversion of modules to them and back."""

from __future__ import annotations

import functools
import types
from typing import Any, ClassVar

from torch import nn

from fp8dist.errors import ConfigurationError
from fp8dist.modules.linear_slots import LinearSlots
from fp8dist.modules.weight_notes import stored_parameters


class FP8Module(nn.Module):
    """A module with weights whose products run in FP8: an FP8Linear or an FP8Experts.

    ``converted_from`` is the module's class before the conversion. A converted class inherits from it, too. So most
    names here begin with ``fp8``, and cannot clash with names of that class.
    """

    converted_from: ClassVar[type[nn.Module]]
    fp8_added: ClassVar[tuple[str, ...]]
    """The attributes that a conversion sets."""

    @staticmethod
    def fp8_members(original: type[nn.Module]) -> dict[str, Any]:
        """Return members (name: value) to put into the class of modules converted from ``original``."""
        raise NotImplementedError

    @property
    def fp8_weights(self) -> tuple[LinearSlots, ...]:
        """The FP8 state of each weight."""
        raise NotImplementedError

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Load as nn.Module does. Also marks the weights as written, because FSDP may have replaced the parameters."""
        for slots in self.fp8_weights:
            slots.note.sample_before_load(self, slots.job.loads)
        super()._load_from_state_dict(*args, **kwargs)
        for slots in self.fp8_weights:
            slots.note.mark_written()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Save as nn.Module does. Also watches the saved tensors, which share memory with the weights, for writes."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for slots in () if keep_vars else self.fp8_weights:
            stored = set(map(id, stored_parameters(self, slots.name)))
            names = (prefix + name for name, parameter in self._parameters.items() if id(parameter) in stored)
            slots.note.hand_out(destination[name] for name in names if name in destination)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for slots in self.fp8_weights:
            slots.belong_to(self)

    def train(self, mode: bool = True) -> FP8Module:
        """Same as nn.Module.train. Also invalidates cached weight casts."""
        for slots in self.fp8_weights:
            slots.job.invalidate_casts()
        return super().train(mode)


def convert_to(kind: type[FP8Module], module: nn.Module) -> None:
    """Convert a module to an FP8Linear or FP8Experts in place. The module must have the attributes of ``kind`` already:
    another thread may find it as soon as its class has changed."""
    module.__class__ = _converted_class(kind, type(module))  # type: ignore[arg-type]
    assert isinstance(module, FP8Module)
    for slots in module.fp8_weights:
        slots.belong_to(module)
        slots.note.remember(stored_parameters(module, slots.name))


@functools.cache
def _converted_class(kind: type[FP8Module], original: type[nn.Module]) -> type[FP8Module]:
    """Return the class for modules of class ``original`` that are converted to ``kind`` (FP8Linear or FP8Experts). It
    inherits from both, and is made once per pair."""
    if kind.__dict__.get("converted_from") is original:
        return kind

    def reduce(self: FP8Module, protocol: Any) -> Any:
        """Pickle by the original class: this one has no importable name."""
        reduced: Any = super(kind, self).__reduce_ex__(protocol)
        return _without_init, (kind, original), *reduced[2:]

    members = {"converted_from": original, "__reduce_ex__": reduce, "__module__": kind.__module__}
    members |= kind.fp8_members(original)
    return types.new_class(f"FP8{original.__name__}", (kind, original), {}, lambda body: body.update(members))


def _without_init(kind: type[FP8Module], original: type[nn.Module]) -> FP8Module:
    made = _converted_class(kind, original)  # type: ignore[arg-type]
    return made.__new__(made)


def require_revertible(module: FP8Module) -> None:
    """Raise ConfigurationError if another tool has subclassed the converted class, as parametrizations do."""
    if "converted_from" not in vars(type(module)):
        kind = "FP8Linear" if isinstance(module, nn.Linear) else "FP8Experts"
        raise ConfigurationError(f"{type(module).__name__} is a subclass of {kind}: undo that before restore()")


def revert(module: FP8Module) -> None:
    """Convert a module back to its original class, in place."""
    for name in module.fp8_added:
        delattr(module, name)
    module.__class__ = module.converted_from  # type: ignore[assignment]

"""Slots: the names of scaled tensors."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import NamedTuple

from fp8dist.errors import ConfigurationError
from fp8dist.names import require_choice
from fp8dist_kernels.formats import Format, Role

__all__ = ["Slot", "SlotSpec", "clean_fqn", "parse_role", "sorted_specs"]

_WRAPPER_PREFIXES = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})


class Slot(NamedTuple):
    """One scaled tensor of one module. Sorts by fqn, then role. ``str()`` is for output only and never parsed."""

    fqn: str
    role: str

    def __str__(self) -> str:
        return f"{self.fqn}:{self.role}"


class SlotSpec(NamedTuple):
    """A slot and the format it is cast to."""

    slot: Slot
    format: Format


def clean_fqn(fqn: str) -> str:
    """Return the fqn without the components that DDP, FSDP1, torch.compile and checkpoint wrappers add."""
    return ".".join(part for part in fqn.split(".") if part not in _WRAPPER_PREFIXES)


def parse_role(role: str) -> Role:
    """Return the role with this name.

    Raises:
        ConfigurationError: no role has this name.
    """
    # A high cutoff, because "output" does not mean "grad_output".
    return Role(require_choice("role", role, [known.value for known in Role], cutoff=0.75))


def sorted_specs(specs: Iterable[SlotSpec]) -> tuple[SlotSpec, ...]:
    """Return the specs in slot order: by fqn, in which numbers count as numbers, then by role. So the experts of a
    product follow each other, and each of their roles is an evenly strided run.

    Raises:
        ConfigurationError: two slots have the same name.
    """
    ordered = tuple(sorted(specs, key=_place))
    for first, second in itertools.pairwise(ordered):
        if first.slot == second.slot:
            raise ConfigurationError(f"two slots are called {first.slot}")
    return ordered


def _place(spec: SlotSpec) -> tuple[object, ...]:
    parts = spec.slot.fqn.split(".")
    numbered = tuple((0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts)
    return numbered, spec.slot

"""Slots: the names of scaled tensors."""

from __future__ import annotations

import collections
from collections.abc import Collection, Iterable
from typing import NamedTuple

from fp8dist.common.names import require_choice
from fp8dist.errors import ConfigurationError
from fp8dist_kernels.formats import Format, Role

_WRAPPER_PREFIXES = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})


class Slot(NamedTuple):
    """One scaled tensor of one module. Sorts by fqn, then role. ``str()`` is for output only and never parsed."""

    fqn: str
    role: str

    def __str__(self) -> str:
        return f"{self.fqn}:{self.role}"


class SlotSpec(NamedTuple):
    """A slot and the format it is cast to. ``expert``: of a grouped product, whose fqn is the slot's without the last
    part; None: of any other module."""

    slot: Slot
    format: Format
    expert: int | None = None


def clean_fqn(fqn: str) -> str:
    """Return the fqn without the components that DDP, FSDP1, torch.compile and checkpoint wrappers add."""
    return ".".join(part for part in fqn.split(".") if part not in _WRAPPER_PREFIXES)


def plain_fqn(fqn: str, wrapped: Collection[str] = ()) -> str:
    """Return the fqn with the parts that the program gave: unlike ``clean_fqn`` with those called "module", too, but at
    the start and in a DDP module. ``wrapped``: fqns of DDP modules within, as this function returns them."""
    found: list[str] = []
    for part in fqn.split("."):
        of_wrapper = part == "module" and (not found or ".".join(found) in wrapped)
        if not of_wrapper and (part == "module" or part not in _WRAPPER_PREFIXES):
            found.append(part)
    return ".".join(found)


def parse_role(role: str) -> Role:
    """Return the role with this name.

    Raises:
        ConfigurationError: no role has this name.
    """
    # A high cutoff, because "output" does not mean "grad_output".
    return Role(require_choice("role", role, [known.value for known in Role], cutoff=0.75))


def sorted_specs(specs: Iterable[SlotSpec]) -> tuple[SlotSpec, ...]:
    """Return the specs in slot order: by fqn, then by role. The experts of a product have its place, by role, then by
    number, so that kernels find one role of all of them in one run.

    Raises:
        ConfigurationError: two slots have the same name.
    """
    ordered = tuple(sorted(specs, key=_place))
    names = collections.Counter(spec.slot for spec in ordered)
    for slot, count in names.items():
        if count > 1:
            raise ConfigurationError(f"two slots are called {slot}")
    return ordered


def _place(spec: SlotSpec) -> tuple[str, str, int]:
    fqn, role = spec.slot
    return (fqn, role, -1) if spec.expert is None else (fqn.rpartition(".")[0], role, spec.expert)

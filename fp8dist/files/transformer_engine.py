"""Import the FP8 state of TransformerEngine: match its entries to modules of this model, and convert them.

In the code, "ours" is this model, and "theirs" the model of TransformerEngine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from fp8dist.common.text import first_few
from fp8dist.errors import CheckpointError, ConfigurationError
from fp8dist.files.extra_states import Gemms, SavedSlot, read_extra_state
from fp8dist.job.manager import Internals, StateManager
from fp8dist.state import overwrites
from fp8dist.state.arena import Arena, unchanged_on_failure
from fp8dist.state.slots import Slot, SlotSpec, clean_fqn
from fp8dist_kernels.arrays import TAKEN
from fp8dist_kernels.formats import E4M3, E5M2, Role
from fp8dist_kernels.scaling import amax_behind_scale

Theirs = str | tuple[str, int]
NameMap = Mapping[str, Theirs] | Callable[[str], Theirs | None]
"""Maps the fqn of a module of this model to the fqn of a TransformerEngine module, or to (fqn, number of the GEMM) if
that module has two GEMMs."""

_KEY = "_extra_state"


@dataclass(frozen=True)
class ImportReport:
    """Result of ``load_transformer_engine``.

    Args:
        matched: (slot, source) of each slot that was written. The source is a TransformerEngine fqn, followed by the
            number of the GEMM if there are two.
        missing: fqns of this model without an entry, or whose entry has no FP8 state.
        unused: TransformerEngine fqns whose entry matches no module.
        stateless: TransformerEngine fqns whose entry matches a module but has no FP8 state.
        converted: (slot, reason) of each scale that was computed anew with this model's recipe.
    """

    matched: tuple[tuple[Slot, str], ...]
    missing: tuple[str, ...]
    unused: tuple[str, ...]
    stateless: tuple[str, ...]
    converted: tuple[tuple[Slot, str], ...]

    def __str__(self) -> str:
        modules = list(dict.fromkeys(f"{slot.fqn} from {theirs}" for slot, theirs in self.matched))
        lines = [
            f"FP8 state of TransformerEngine: {len(self.matched)} slots",
            f"  matched: {len(modules)} modules: {first_few(modules)}",
            f"  missing there: {len(self.missing)} modules: {first_few(self.missing)}",
            f"  unused from there: {len(self.unused)} entries: {first_few(self.unused)}",
            f"  without FP8 state: {len(self.stateless)} entries: {first_few(self.stateless)}",
        ]
        for reason in sorted({why for _, why in self.converted}):
            slots = [slot for slot, why in self.converted if why == reason]
            lines.append(f"  scales derived anew, because {reason}: {len(slots)}: {first_few(slots)}")
        return "\n".join(lines)


def load_transformer_engine(
    manager: StateManager, state_dict: Mapping[str, object], name_map: NameMap | None = None
) -> ImportReport:
    """Load the FP8 state of TransformerEngine's modules: the ``_extra_state`` entries of their state_dict.

    Local; call it on all ranks alike. Nothing inside a pickle is imported or called. Amaxes that were recorded since
    the last boundary are dropped.

    Of a history that is longer than this recipe's, the newest entries are kept. Amaxes that are not finite are dropped.
    A slot is cold if its entry has neither a scale nor an amax. Saved scales are kept, unless this model computes
    scales by another rule (another format or margin, powers of two), or TransformerEngine had not yet computed a scale
    from the newest amax. Then the scale is computed anew from the amax history, or, if that is empty, from the amax
    that gives the saved scale under TransformerEngine's rule. The step counter does not change.

    Args:
        manager: the StateManager of this model.
        state_dict: entries by name; keys other than ``_extra_state`` are ignored.
        name_map: by fqn of a module of this model, the name in TransformerEngine's model: a mapping, or a function of
            the fqn. A value is a name, or (name, number of the GEMM) for a module with two GEMMs, such as LayerNormMLP:
            ``{"mlp.fc2": ("layernorm_mlp", 1)}``; a value of None: the module has no entry. Modules that a mapping
            lacks have the same name in both models. None: all have.

    Returns:
        A report of the slots and modules that matched, and of the modules that did not.

    Raises:
        ConfigurationError: ``name_map`` is invalid, or names a module, entry or GEMM that does not exist.
        CheckpointError: an entry that is needed is damaged, or contains more than data. After either error, the state
            is unchanged.
    """
    cycle = Internals(manager).cycle
    cycle.require("loading state")
    cycle.state.settle()
    arenas = [sync.arena for sync in cycle.syncs if sync.arena.recipe.delayed]
    entries = _entries(state_dict)
    ours: dict[str, list[Slot]] = {}
    for slot in sorted(slot for arena in arenas for slot in arena.index):
        ours.setdefault(slot.fqn, []).append(slot)
    names = _names(list(ours), entries, name_map)
    wanted = dict.fromkeys(name for name, _ in names.values() if name is not None)
    states = {name: read_extra_state(f"{name}.{_KEY}", entries[name]) for name in wanted}
    origins, saved = _matched(names, states)
    slots = {slot: of[Role(slot.role)] for fqn, of in saved.items() for slot in ours[fqn]}
    with unchanged_on_failure(arenas):
        converted = [found for arena in arenas for found in _write(arena, slots)]
    for sync in cycle.syncs:
        sync.abandon()
    cycle.state_loaded(sorted(slots))
    return ImportReport(
        matched=tuple((slot, origins[slot.fqn]) for slot in sorted(slots)),
        missing=tuple(fqn for fqn in names if fqn not in origins),
        unused=tuple(sorted(entries.keys() - states.keys())),
        stateless=tuple(sorted(name for name, gemms in states.items() if gemms is None)),
        converted=tuple(sorted(converted)),
    )


def _entries(state_dict: Mapping[str, object]) -> dict[str, object]:
    """Return the values of ``_extra_state`` keys, by the fqn of the module without prefixes of wrappers. Raise
    CheckpointError if two have one fqn."""
    found: dict[str, object] = {}
    for key, value in state_dict.items():
        prefix, _, last = str(key).rpartition(".")
        if last != _KEY:
            continue
        fqn = clean_fqn(prefix)
        if fqn in found:
            raise CheckpointError(f"two entries are called {fqn}.{_KEY} without the prefixes of wrappers")
        found[fqn] = value
    return found


def _names(
    ours: Sequence[str], entries: Mapping[str, object], name_map: NameMap | None
) -> dict[str, tuple[str | None, int]]:
    """Return by our fqn: (TransformerEngine fqn, or None for a module without an entry; number of the GEMM)."""
    named = {fqn: _parsed(fqn, value) for fqn, value in _mapped(ours, name_map).items()}
    absent = sorted({name for name, _ in named.values() if name is not None and name not in entries})
    if absent:
        raise ConfigurationError(
            f"name_map: there is no {_KEY} of {first_few(absent)}; there are {first_few(sorted(entries))}"
        )
    return {fqn: named.get(fqn, (fqn if fqn in entries else None, 0)) for fqn in ours}


def _matched(
    names: Mapping[str, tuple[str | None, int]], states: Mapping[str, Gemms | None]
) -> tuple[dict[str, str], dict[str, dict[Role, SavedSlot]]]:
    """Return two mappings by our fqn: the source of the state as text, and the state. Modules without a saved state are
    left out."""
    origins, saved = {}, {}
    for fqn, (name, gemm) in names.items():
        gemms = None if name is None else states[name]
        if name is None or gemms is None:
            continue
        if not 0 <= gemm < len(gemms):
            raise ConfigurationError(f"name_map: {name} has {len(gemms)} GEMMs, and {fqn} asks for number {gemm}")
        origins[fqn] = f"{name} (GEMM {gemm})" if len(gemms) > 1 else name
        saved[fqn] = gemms[gemm]
    return origins, saved


def _mapped(ours: Sequence[str], name_map: NameMap | None) -> Mapping[str, object]:
    """Return the values of ``name_map`` by our fqn."""
    if callable(name_map):
        return {fqn: name_map(fqn) for fqn in ours}
    if name_map is not None and not isinstance(name_map, Mapping):
        raise ConfigurationError(f"name_map must be a mapping or a function, got {type(name_map).__name__}")
    given = {clean_fqn(str(fqn)): value for fqn, value in (name_map or {}).items()}
    if strangers := sorted(given.keys() - set(ours)):
        raise ConfigurationError(f"name_map: this model has no FP8 modules called {first_few(strangers)}")
    return given


def _parsed(fqn: str, value: object) -> tuple[str | None, int]:
    """Return a value of ``name_map`` as (fqn or None, number of the GEMM). Raise ConfigurationError if it is wrong."""
    if value is None:
        return None, 0
    name, gemm = value if isinstance(value, tuple) and len(value) == 2 else (value, 0)
    if not isinstance(name, str) or type(gemm) is not int:
        raise ConfigurationError(
            f"name_map: {fqn} is mapped to {value!r}, expected a name, or (name, number of the GEMM)"
        )
    return clean_fqn(name), gemm


def _write(arena: Arena, slots: Mapping[Slot, SavedSlot]) -> list[tuple[Slot, str]]:
    """Write the saved states to the arena's slots. Return (slot, reason) of the scales that were computed anew."""
    specs = [spec for spec in arena.specs if spec.slot in slots]
    found = [slots[spec.slot] for spec in specs]
    scale = torch.tensor([one.scale for one in found], dtype=torch.float32, device="cpu")
    length = arena.ring.length
    history = torch.zeros(len(found), length, dtype=torch.float32, device="cpu")
    for row, one in zip(history, found):
        newest = one.history[-length:]
        row[length - len(newest) :] = newest
    positive = history > 0
    seen = positive.any(1)
    first, last = positive.int().argmax(1), length - 1 - positive.flip(1).int().argmax(1)
    amax = history.gather(1, last[:, None])[:, 0]
    cold = ~seen & (scale == 1)
    counters = torch.zeros(len(arena.counters), len(found), dtype=torch.int64, device="cpu")
    counters[TAKEN] = torch.where(seen, length - first, 0)
    index = torch.tensor([arena.index[spec.slot] for spec in specs], dtype=torch.int64, device=arena.device)
    overwrites.load_slots(arena, index, *(t.to(arena.device) for t in (scale, amax, cold, counters, history)))

    reasons = [
        None if is_cold else _reason(arena, spec, one) for is_cold, spec, one in zip(cold.tolist(), specs, found)
    ]
    if any(reasons):
        largest = [_largest(arena, spec, one) for spec, one in zip(specs, found)]
        stood_for = amax_behind_scale(scale, torch.tensor(largest, dtype=torch.float32, device="cpu"))
        where, amaxes = torch.zeros_like(arena.cold), torch.zeros_like(arena.amax)
        where[index] = torch.tensor([why is not None for why in reasons], device=arena.device)
        amaxes[index] = stood_for.to(arena.device)
        overwrites.convert_scales(arena, where, amaxes)
    return [(spec.slot, why) for spec, why in zip(specs, reasons) if why is not None]


def _reason(arena: Arena, spec: SlotSpec, found: SavedSlot) -> str | None:
    """Return the reason why the saved scale must be computed anew; None if it can be kept."""
    recipe = arena.recipe
    if found.fp8_max is None and spec.format.max != (E5M2 if spec.slot.role == Role.GRAD_OUTPUT else E4M3).max:
        return "its format is not known, and is not the usual one here"
    if found.fp8_max not in (None, spec.format.max):
        return f"its format goes up to {found.fp8_max:g} there and {spec.format.max:g} here"
    if found.margin not in (None, recipe.margin):
        return f"margin is {found.margin} there and {recipe.margin} here"
    if recipe.power_of_two:
        return "scales are powers of two here"
    return "its newest amax was not in the scale yet" if found.due else None


def _largest(arena: Arena, spec: SlotSpec, found: SavedSlot) -> float:
    """Return the FP8 value to which TransformerEngine's scale maps the amax: the format's largest, over 2**margin."""
    margin = arena.recipe.margin if found.margin is None else found.margin
    return (found.fp8_max or spec.format.max) / 2.0**margin

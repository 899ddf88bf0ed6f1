"""Show the contents of a checkpoint to a person."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from fp8dist.checks.contents import Digester
from fp8dist.common.text import aligned
from fp8dist.files.comparison import SourceContent, bytes_in
from fp8dist.files.entries import STATE, SavedEntry, Source
from fp8dist.files.failures import one_line
from fp8dist.state.slots import Slot
from fp8dist.state.storage import read_file

__all__ = ["Inspection", "inspect_source"]

_KINDS = ("scale", "amax", "cold", "history")
_SLOT_COLUMNS = ("slot", "scale", "amax", "window max", "cold", "taken", "non-finite", "saturated")


@dataclass(frozen=True)
class Inspection:
    """A table of slots or tensors, with facts about the whole. ``str()`` shows both.

    ``states``: inspections of the FP8 states inside a checkpoint.
    """

    facts: Mapping[str, Any]
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    states: tuple[Inspection, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        states = {"fp8 states": [state.to_json() for state in self.states]} if self.states else {}
        return {**self.facts, "entries": [dict(zip(self.columns, map(_plain, row))) for row in self.rows], **states}

    def __str__(self) -> str:
        cells = [self.columns, *(tuple(map(_text, row)) for row in self.rows)]
        whole = "\n".join([*(f"{name}: {value}" for name, value in self.facts.items()), *aligned(cells)])
        return "\n\n".join([whole, *map(str, self.states)])


def _plain(value: Any) -> Any:
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value


def _text(value: Any) -> str:
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def inspect_source(source: Source) -> Inspection:
    """Return the slots of FP8 state with scales and amaxes, or the names, shapes and digests of any other checkpoint,
    with the FP8 state in it.

    Raises:
        CheckpointError: the checkpoint cannot be read.
    """
    if source.family == STATE:
        return _state_file(source.path)
    tensors = _tensors(_part(source, lambda entry: entry.kind == "parameter"))
    return replace(tensors, states=tuple(_states_inside(source)))


def _part(source: Source, belongs: Callable[[SavedEntry], bool]) -> Source:
    items = ((entry, partial(source.read, i)) for i, entry in enumerate(source.entries) if belongs(entry))
    return Source(source.path, source.family, items)


def _state_file(path: str) -> Inspection:
    state, info = read_file(path)
    rows = [
        _slot_row(str(Slot(*slot)), {**{kind: state[kind][i] for kind in _KINDS}, "counters": state["counters"][:, i]})
        for i, slot in enumerate(state["slots"])
    ]
    facts = {
        "file": path,
        "version": state["version"],
        "step": int(state["step"]),
        "slots": len(rows),
        "cold": int(state["cold"].sum()),
        "history length": state["history"].shape[1],
        "recipes": state["recipes"],
        "precision": state["precision"],
        "settings": info.get("settings"),
    }
    return Inspection(facts, _SLOT_COLUMNS, tuple(rows))


def _states_inside(source: Source) -> Iterator[Inspection]:
    places = [entry.name.removesuffix("step") for entry in source.entries if entry.kind == "step"]
    for place in places:
        inner = [other for other in places if other.startswith(place) and other != place]
        yield _state_inside(_part(source, partial(_is_state_at, place, inner)), place)


def _is_state_at(place: str, inner: Sequence[str], entry: SavedEntry) -> bool:
    here = entry.kind != "parameter" and entry.name.startswith(place)
    return here and not any(entry.name.startswith(other) for other in inner)


def _state_inside(source: Source, place: str) -> Inspection:
    step = 0
    slots: dict[str, dict[str, Tensor]] = {}
    for i, entry in enumerate(source.entries):
        if entry.kind == "step":
            step = int(source.read(i))
        else:
            slots.setdefault(entry.name.removeprefix(place), {})[entry.kind] = source.read(i)
    facts = {
        "FP8 state": one_line(place.removesuffix(".")),
        "step": step,
        "slots": len(slots),
        "cold": sum(bool(found["cold"]) for found in slots.values()),
    }
    rows = [_slot_row(one_line(slot), found) for slot, found in slots.items()]
    return Inspection(facts, _SLOT_COLUMNS, tuple(rows))


def _slot_row(name: str, state: Mapping[str, Tensor]) -> tuple[Any, ...]:
    shown = (state["scale"], state["amax"], state["history"].max(), state["cold"])
    return (name, *map(Tensor.item, shown), *state["counters"].tolist())


def _hexadecimal(digest: list[int]) -> str:
    return "".join(f"{lane & (1 << 64) - 1:016x}" for lane in digest)


def _tensors(source: Source) -> Inspection:
    digests = SourceContent(source, lambda read: None).digests(Digester()).tolist()
    rows = [
        (one_line(entry.name), entry.dtype, "x".join(map(str, entry.shape)) or "scalar", _hexadecimal(digest))
        for entry, digest in zip(source.entries, digests)
    ]
    facts = {"file": source.path, "tensors": len(rows), "bytes": bytes_in(source)}
    return Inspection(facts, ("name", "dtype", "shape", "digest"), tuple(rows))

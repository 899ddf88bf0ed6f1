"""fp8dist's own state files, slot by slot."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from torch import Tensor

from fp8dist.offline.entries import STATE, Entry, Item, Source, dtype_name
from fp8dist.state.slots import Slot
from fp8dist.state.storage import read_file, validated_slots

__all__ = ["state_source"]


def state_source(path: str) -> Source:
    """A state file. Its checksum covers all of it, so it is read as a whole."""
    state, _ = read_file(path)
    slots = validated_slots(state, values=False)  # Damaged ones are what a check is for.
    return Source(path, STATE, _items(state, slots))


def _items(state: dict[str, Tensor], slots: list[Slot]) -> Iterator[Item]:
    def item(name: str, kind: str, values: Tensor) -> Item:
        return Entry(name, kind, tuple(values.shape), dtype_name(values.dtype)), partial(values.clone)

    yield item("step", "step", state["step"])
    by_slot = {kind: state[kind] for kind in ("scale", "amax", "cold", "history")}
    by_slot["counters"] = state["counters"].t()
    for place, slot in enumerate(slots):
        for kind, values in by_slot.items():
            yield item(str(slot), kind, values[place])

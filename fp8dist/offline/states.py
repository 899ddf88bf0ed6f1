"""fp8dist's own state, slot by slot: in files of its own, or as bytes in any other checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from fp8dist.offline.entries import STATE, Entry, Item, Source, dtype_name
from fp8dist.state.storage import from_bytes, read_file, validated_slots

__all__ = ["state_items", "state_source"]


def state_source(path: str) -> Source:
    """A state file. Its checksum covers all of it, so it is read as a whole."""
    state, _ = read_file(path)
    return Source(path, STATE, _items(state, ""))


def state_items(data: bytes, place: str) -> list[Item]:
    """The entries of a state that is a value of a checkpoint, called ``place`` there. All of it stays in memory.

    Raises:
        CheckpointError: it is damaged; names the place.
    """
    state, _ = from_bytes(data, place)
    return list(_items(state, f"{place}."))


def _items(state: Mapping[str, Any], prefix: str) -> Iterator[Item]:
    def item(name: str, kind: str, values: Tensor) -> Item:
        return Entry(f"{prefix}{name}", kind, tuple(values.shape), dtype_name(values.dtype)), partial(values.clone)

    slots = validated_slots(state, values=False)  # Damaged ones are what a check is for.
    yield item("step", "step", state["step"])
    by_slot = {kind: state[kind] for kind in ("scale", "amax", "cold", "history")}
    by_slot["counters"] = state["counters"].t()
    for number, slot in enumerate(slots):
        for kind, values in by_slot.items():
            yield item(str(slot), kind, values[number])

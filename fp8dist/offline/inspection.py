"""What a file holds, for a person."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fp8dist.consistency.contents import Digester
from fp8dist.offline.comparison import SourceContent, bytes_in
from fp8dist.offline.entries import STATE, Source
from fp8dist.offline.failures import one_line
from fp8dist.state.slots import slot_key
from fp8dist.state.storage import read_file

__all__ = ["Inspection", "inspect_source"]


@dataclass(frozen=True)
class Inspection:
    """A table of slots or tensors, and a few facts about the whole. ``str()`` prints both."""

    facts: Mapping[str, Any]
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**self.facts, "entries": [dict(zip(self.columns, map(_plain, row))) for row in self.rows]}

    def __str__(self) -> str:
        cells = [self.columns, *(tuple(map(_text, row)) for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*cells)]
        table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in cells]
        return "\n".join([*(f"{name}: {value}" for name, value in self.facts.items()), *table])


def _plain(value: Any) -> Any:
    finite = not isinstance(value, float) or (value == value and abs(value) != float("inf"))
    return value if finite else repr(value)


def _text(value: Any) -> str:
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def inspect_source(source: Source) -> Inspection:
    """Slots with scales and amaxes of FP8 state; names, shapes and digests of any other checkpoint.

    Raises:
        CheckpointError: it cannot be read.
    """
    return _slots(source.path) if source.family == STATE else _tensors(source)


def _slots(path: str) -> Inspection:
    state, info = read_file(path)
    scale, amax, cold, counters, history = (state[n] for n in ("scale", "amax", "cold", "counters", "history"))
    largest: Tensor = history.amax(1)
    facts = {
        "file": path,
        "version": state["version"],
        "step": int(state["step"]),
        "slots": len(state["slots"]),
        "cold": int(cold.sum()),
        "history length": history.shape[1],
        "recipe": info.get("recipe"),
        "settings": info.get("settings"),
    }
    columns = ("slot", "scale", "amax", "window max", "cold", "taken", "non-finite", "saturated")
    rows: Sequence[tuple[Any, ...]] = [
        (slot_key(*slot), *map(Tensor.item, (scale[i], amax[i], largest[i], cold[i])), *counters[:, i].tolist())
        for i, slot in enumerate(state["slots"])
    ]
    return Inspection(facts, columns, tuple(rows))


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

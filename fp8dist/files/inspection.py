"""The contents of a checkpoint as a table, for ``fp8dist inspect``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fp8dist.checks.contents import Digester
from fp8dist.common.divergence import plain_values
from fp8dist.common.text import aligned
from fp8dist.files.comparison import SourceContent, bytes_in
from fp8dist.files.entries import STATE, Source
from fp8dist.files.failures import one_line
from fp8dist.state.slots import Slot

_SLOT_COLUMNS = ("slot", "scale", "amax", "window max", "cold", "taken", "non-finite", "saturated")


@dataclass(frozen=True)
class Inspection:
    """A table of the slots or tensors of a checkpoint. ``str()`` is the facts, the table, and the ``states``.

    Attributes:
        facts: by name, facts about the checkpoint as a whole.
        columns, rows: the table.
        states: the tables of the FP8 states inside a checkpoint.
    """

    facts: Mapping[str, Any]
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    states: tuple[Inspection, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        states = {"fp8 states": [state.to_json() for state in self.states]} if self.states else {}
        return {**self.facts, "entries": [plain_values(dict(zip(self.columns, row))) for row in self.rows], **states}

    def __str__(self) -> str:
        cells = [self.columns, *(tuple(map(_text, row)) for row in self.rows)]
        whole = "\n".join([*(f"{name}: {value}" for name, value in self.facts.items()), *aligned(cells)])
        return "\n\n".join([whole, *map(str, self.states)])


def _text(value: Any) -> str:
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def inspect_source(source: Source) -> Inspection:
    """Return the table of a checkpoint. Of an fp8dist state file: slots with scales and amaxes. Of any other: names,
    dtypes, shapes and digests of tensors, and a table for each FP8 state inside. Reads all tensors.

    Raises:
        CheckpointError: the checkpoint cannot be read.
    """
    if source.family == STATE:
        ((state, info),) = source.states.values()
        more = {"recipes": state["recipes"], "precision": state["precision"], "settings": info.get("settings")}
        facts = {"file": source.path, "version": state["version"], **_counts(state)}
        return _slots({**facts, "history length": state["history"].shape[1], **more}, state)
    parts = ((entry, partial(source.read, i)) for i, entry in enumerate(source.entries) if entry.kind == "parameter")
    states = (
        _slots({"FP8 state": one_line(key), **_counts(state)}, state) for key, (state, _) in source.states.items()
    )
    return replace(_tensors(Source(source.path, source.family, parts)), states=tuple(states))


def _counts(state: Mapping[str, Any]) -> dict[str, int]:
    return {"step": int(state["step"]), "slots": len(state["slots"]), "cold": int(state["cold"].sum())}


def _slots(facts: Mapping[str, Any], state: Mapping[str, Any]) -> Inspection:
    numbers = (state["scale"], state["amax"], state["history"].amax(1), state["cold"], *state["counters"])
    names = (str(Slot(*slot)) for slot in state["slots"])
    return Inspection(facts, _SLOT_COLUMNS, tuple(zip(map(one_line, names), *(each.tolist() for each in numbers))))


def _tensors(source: Source) -> Inspection:
    digests = SourceContent(source, lambda read: None).digests(Digester()).numpy().astype(">i8")
    rows = [
        (one_line(entry.name), entry.dtype, "x".join(map(str, entry.shape)) or "scalar", digest.tobytes().hex())
        for entry, digest in zip(source.entries, digests)
    ]
    facts = {"file": source.path, "tensors": len(rows), "bytes": bytes_in(source)}
    return Inspection(facts, ("name", "dtype", "shape", "digest"), tuple(rows))

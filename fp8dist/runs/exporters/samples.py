"""The numbers of a step or an event, as tools with labels take them, and as tools with plain names do."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from fp8dist.runs.exporters.slots import by_role, headroom
from fp8dist.runs.run_numbers import Kind, Number, number_of
from fp8dist.state.statistics import SlotStatistics

KINDS = (
    *("start", "nonfinite", "saturated", "fallback", "jump", "diverged", "checked", "saved", "spike"),
    *("nonfinite_loss", "replayed", "end"),
)
"""Kinds of events that are counted by name. All others count as "other", so that their number is bounded."""

OF_SLOTS: Mapping[str, Number] = MappingProxyType(
    {
        "saturated": Number("saturated", "Largest share of a tensor that its cast saturated", "ratio"),
        "underflow": Number("underflow", "Largest share of a tensor that its cast flushed to zero", "ratio"),
        "headroom": Number("headroom", "Least number of doublings before a tensor saturates", "doublings"),
    }
)
"""By the field of ``RoleNumbers``."""

OF_ONE_SLOT: Mapping[str, Number] = MappingProxyType(
    {
        "amax": Number("slot_amax", "Largest magnitude of the tensor"),
        "scale": Number("slot_scale", "Scale of the cast"),
        "saturated": Number("slot_saturated", "Share of the tensor that its cast saturated", "ratio"),
        "underflow": Number("slot_underflow", "Share of the tensor that its cast flushed to zero", "ratio"),
        "headroom": Number("slot_headroom", "Number of doublings before the tensor saturates", "doublings"),
    }
)
"""By the field of ``SlotStatistics``, and the headroom."""

EVENTS = Number("events", "Events of the run", kind=Kind.AMOUNT)
ACTIVE = Number("run_active", "1 from the start of the run, 0 after its regular end")
LAST_STEP = Number("last_step", "Newest step of the run")
LAST_STEP_TIME = Number("last_step_timestamp", "Unix time at which the newest step was recorded", "s")


class Sample(NamedTuple):
    """A value of a number, in the unit of the run. ``label``: name and value of its label, if it has one."""

    number: Number
    value: float
    label: tuple[str, str] | None = None


def step_samples(step: int, numbers: Mapping[str, float], slots: Sequence[SlotStatistics]) -> Iterator[Sample]:
    """Yield what an exporter's ``write`` is given."""
    yield Sample(LAST_STEP, step)
    yield Sample(LAST_STEP_TIME, time.time())
    for name, value in _known(numbers):
        yield Sample(number_of(name), value)
    for role, of_role in by_role(slots).items():
        for field, number in OF_SLOTS.items():
            value = getattr(of_role, field)
            if value is not None:
                yield Sample(number, value, ("role", role))


def slot_samples(slots: Sequence[SlotStatistics]) -> Iterator[Sample]:
    """Yield the numbers of each slot."""
    for one in slots:
        values = {**one._asdict(), "headroom": headroom(one)}
        for field, number in OF_ONE_SLOT.items():
            if values[field] is not None:
                yield Sample(number, values[field], ("slot", str(one.slot)))


def event_samples(event: Mapping[str, Any]) -> Iterator[Sample]:
    """Yield what an event changes."""
    kind = kind_of(event)
    yield Sample(EVENTS, 1, ("kind", kind))
    if kind == "start" or ended(event):
        yield Sample(ACTIVE, kind == "start")


def no_events() -> Iterator[Sample]:
    """Yield the counters of events at 0, because an alert on a counter's growth needs its value before."""
    for kind in (*KINDS, "other"):
        yield Sample(EVENTS, 0, ("kind", kind))


def flat_numbers(numbers: Mapping[str, float], slots: Sequence[SlotStatistics]) -> dict[str, float]:
    """Return what ``write`` is given, by names as in metrics.jsonl, and ``fp8/<role>/…`` for numbers of slots."""
    found = dict(_known(numbers))
    for role, of_role in by_role(slots).items():
        found |= _known({f"fp8/{role}/{field}": getattr(of_role, field) for field in OF_SLOTS})
    return found


def ended(event: Mapping[str, Any]) -> bool:
    """True for the event of a regular end. A run that an error has ended tells the error."""
    return event.get("kind") == "end" and "error" not in event


def kind_of(event: Mapping[str, Any]) -> str:
    """Return the kind, "other" if it is none of KINDS."""
    kind = event.get("kind")
    return kind if kind in KINDS else "other"


def event_text(event: Mapping[str, Any], longest: int) -> str:
    """Return the event as JSON, with at most this many characters."""
    text = json.dumps(dict(event), default=str)
    return text if len(text) <= longest else text[: longest - 1] + "…"


def _known(numbers: Mapping[str, float | None]) -> Iterator[tuple[str, float]]:
    """Yield the numbers, without those that are None."""
    for name, value in numbers.items():
        if value is not None:
            yield name, float(value)

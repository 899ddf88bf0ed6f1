"""Checked: what a check without a difference compared. The manager keeps it, and a run's events.jsonl records it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from fp8dist.common.divergence import Divergence, compared_text
from fp8dist.common.text import first_few, plural

_NAMED = 4
"""The most tensors with NaN or infinity whose names are written."""


class Checked(NamedTuple):
    """A check that found no difference.

    Attributes:
        step: number of optimizer steps before the check.
        compared: number of compared things by kind, such as {"parameter": 72}. None: unknown, because an older version
            of this library recorded the event.
        compared_bytes: their bytes by kind, as far as they are known.
        unverified: kinds of which nothing could be compared, with the reason.
        nonfinite: names of tensors with NaN or infinity.
        partial: kinds of which only a part was compared, with a text such as "1 of 6 parameters".
        compared_by: bytes by the way in which they were compared, see ``DivergenceReport``.
    """

    step: int
    compared: Mapping[str, int] | None
    compared_bytes: Mapping[str, int] = MappingProxyType({})
    unverified: Mapping[str, str] = MappingProxyType({})
    nonfinite: tuple[str, ...] = ()
    partial: Mapping[str, str] = MappingProxyType({})
    compared_by: Mapping[str, int] = MappingProxyType({})

    @classmethod
    def of(cls, step: int, report: Divergence) -> Checked:
        """Return what the report of a check after ``step`` compared."""
        return cls(step, **{name: getattr(report, name) for name in cls._fields[1:]})

    @classmethod
    def read(cls, event: Mapping[str, Any]) -> Checked:
        """Return what an event of kind "checked" holds, a line of events.jsonl as a dict. Malformed fields count as
        absent."""
        compared, sizes, ways = (_counts(event.get(name)) for name in ("compared", "compared_bytes", "compared_by"))
        unverified, partial = (_texts(event.get(name)) for name in ("unverified", "partial"))
        names = event.get("nonfinite")
        nonfinite = tuple(map(str, names)) if isinstance(names, list) else ()
        return cls(event["step"], compared, sizes or {}, unverified, nonfinite, partial, ways or {})

    def fields(self) -> dict[str, Any]:
        """Return the event's fields, as JSON values. Without the step, which each event has anyway."""
        return {
            "compared": None if self.compared is None else dict(self.compared),
            "compared_bytes": dict(self.compared_bytes),
            "unverified": dict(self.unverified),
            "nonfinite": list(self.nonfinite[:_NAMED]),
            "partial": dict(self.partial),
            "compared_by": dict(self.compared_by),
        }

    @property
    def finite(self) -> bool:
        """True if the check looked for NaN and infinity, and found none."""
        return self.compared is not None and not self.nonfinite

    @property
    def verified(self) -> bool:
        """True if all parameters were compared, and are finite: a checkpoint of this step is good. Frozen parameters
        beside trainable ones do not count."""
        return self._compared_parameters and "parameter" not in self.partial

    @property
    def part(self) -> str:
        """How many parameters were compared, such as "1 of 6 parameters", if all are finite; "" if all or none were
        compared."""
        return self.partial.get("parameter", "") if self._compared_parameters else ""

    @property
    def _compared_parameters(self) -> bool:
        """True if at least some parameters were compared, and all values are finite."""
        return self.finite and bool((self.compared or {}).get("parameter")) and "parameter" not in self.unverified

    @property
    def covers(self) -> bool:
        """True if the check is ``verified``, or if what it compared is unknown (an older version's event)."""
        return self.verified or self.compared is None

    @property
    def text(self) -> str:
        """What was compared, in words that complete "a check found"."""
        if self.compared is None:
            return "equal what it compared (the run does not say what)"
        parts = [f"{compared_text(self.compared, self.compared_bytes) or 'nothing'} equal"]
        parts += [f"compared only {text}" for text in self.partial.values()]
        if self.unverified:
            parts.append(f"{' and '.join(map(plural, self.unverified))} not verifiable")
        if self.nonfinite:
            parts.append(f"NaN or infinity in {first_few(self.nonfinite, _NAMED)}")
        return ", ".join(parts)


def _texts(value: Any) -> dict[str, str]:
    """Return texts by name; empty if it is something else."""
    return {str(kind): str(text) for kind, text in value.items()} if isinstance(value, Mapping) else {}


def _counts(value: Any) -> dict[str, int] | None:
    """Return numbers by name; None if it is something else."""
    if not isinstance(value, Mapping):
        return None
    return {str(kind): count for kind, count in value.items() if type(count) is int and 0 <= count < 1 << 63}

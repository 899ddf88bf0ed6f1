"""What a check looked at that found no difference: kept by the manager, written to events.jsonl, read from there."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from fp8dist.common.divergence import Divergence, compared_text
from fp8dist.common.text import first_few, plural

__all__ = ["Checked"]

_NAMED = 4
"""Tensors that are not finite, of which a sentence has the names."""


class Checked(NamedTuple):
    """A check after ``step`` that found no difference.

    ``compared``: number of compared things by kind; None: the run's folder does not say it, because an older version
    wrote it. ``compared_bytes``: their bytes by kind, as far as they are known. ``unverified``: kinds of which nothing
    could be compared, with the reason. ``nonfinite``: names of tensors with NaN or infinity. ``partial``: kinds of
    which only some were compared, with how many of how many.
    """

    step: int
    compared: Mapping[str, int] | None
    compared_bytes: Mapping[str, int] = MappingProxyType({})
    unverified: Mapping[str, str] = MappingProxyType({})
    nonfinite: tuple[str, ...] = ()
    partial: Mapping[str, str] = MappingProxyType({})

    @classmethod
    def of(cls, step: int, report: Divergence) -> Checked:
        """Return what the report of a check after ``step`` says."""
        return cls(step, report.compared, report.compared_bytes, report.unverified, report.nonfinite, report.partial)

    @classmethod
    def read(cls, event: Mapping[str, Any]) -> Checked:
        """Return what an event of kind "checked" says. Malformed fields count as absent."""
        compared, sizes = (_counts(event.get(name)) for name in ("compared", "compared_bytes"))
        unverified, partial = (_texts(event.get(name)) for name in ("unverified", "partial"))
        names = event.get("nonfinite")
        nonfinite = tuple(map(str, names)) if isinstance(names, list) else ()
        return cls(event["step"], compared, sizes or {}, unverified, nonfinite, partial)

    def fields(self) -> dict[str, Any]:
        """Return all but the step, as JSON values."""
        return {
            "compared": None if self.compared is None else dict(self.compared),
            "compared_bytes": dict(self.compared_bytes),
            "unverified": dict(self.unverified),
            "nonfinite": list(self.nonfinite[:_NAMED]),
            "partial": dict(self.partial),
        }

    @property
    def finite(self) -> bool:
        """True if the check looked for values that are not finite, and found none."""
        return self.compared is not None and not self.nonfinite

    @property
    def verified(self) -> bool:
        """True if all parameters were compared, and are finite: a checkpoint of this step is good. Of a model with
        trainable parameters only these count."""
        return self._some and "parameter" not in self.partial

    @property
    def part(self) -> str:
        """How many of the parameters were compared, and all are finite; "" if all or none were compared."""
        return self.partial.get("parameter", "") if self._some else ""

    @property
    def _some(self) -> bool:
        return self.finite and bool((self.compared or {}).get("parameter")) and "parameter" not in self.unverified

    @property
    def covers(self) -> bool:
        """True if the check is ``verified``, or of an older run, which does not say what it compared."""
        return self.verified or self.compared is None

    @property
    def text(self) -> str:
        """What was compared, in words that follow "a check found"."""
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
    return {str(kind): str(text) for kind, text in value.items()} if isinstance(value, Mapping) else {}


def _counts(value: Any) -> dict[str, int] | None:
    """Return numbers by name; None if it is something else."""
    if not isinstance(value, Mapping):
        return None
    return {str(kind): count for kind, count in value.items() if type(count) is int and 0 <= count < 1 << 63}

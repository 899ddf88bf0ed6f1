"""Divergences as plain data and as text for people. ``DivergenceReport`` (``consistency.report``) also raises."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import Any

from fp8dist.text import aligned, plural, ranks_text

__all__ = ["Divergence", "Finding", "Participant"]

_WHAT: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("scale", "history"), "FP8 state"),
        "manifest": "set-ups",
        "step": "steps",
        "parameter": "parameters",
        "gradient": "gradients",
        "optimizer": "optimizer states",
        "layout": "the tensors",
        "error": "the outcomes",
    }
)

SHOWN_ROWS = 32
"""Findings that a printed report shows. All of them are in ``report.findings``."""

SHOWN_REPAIRS = 8
"""Repairs that are listed before the rest is only counted."""


@dataclass(frozen=True)
class Participant:
    """A participant of a comparison: a rank and where it runs, or a file."""

    rank: int
    host: str = ""
    local_rank: int | None = None
    device: str = ""
    coords: dict[str, int] | None = None


@dataclass(frozen=True)
class Finding:
    """One thing that differs between ranks. All ranks are global.

    If a majority agrees, ``ranks`` are deviating ranks that agree with each other, and ``reference_rank`` is the lowest
    rank of the majority. Without a majority, ``reference_rank`` is None, and ``ranks`` lists all participants: none can
    be blamed. ``sides`` are the sets of ranks that agree, the largest first.

    ``kind``: "manifest", "step", "scale" (scale, inv_scale, cold flags), "history" (amaxes and their counters),
    "parameter", "gradient", "optimizer", "layout" (which tensors ranks hold, not their content), or "error" (a rank
    could not build its part).

    ``index`` is the index of the first differing element. ``value`` is the element on the lowest of ``ranks`` (without
    a majority: on the lowest rank of the second side), ``expected`` the element on the reference rank (on the lowest
    rank of the first side). ``ulp`` is their distance in units in the last place, None if undefined (NaN, bool,
    complex).

    ``step`` is the step in which the difference was found. ``last_good_step``, if known, is the last number of
    optimizer steps after which things of this kind were compared and equal: a checkpoint of that step, or an earlier
    one, is good.
    ``hosts``, ``mesh_coords``, ``local_ranks`` and ``devices`` belong to ``ranks``, in the same order.
    """

    step: int
    kind: str
    name: str
    ranks: tuple[int, ...]
    reference_rank: int | None
    hosts: tuple[str, ...] = ()
    mesh_coords: tuple[dict[str, int] | None, ...] = ()
    detail: str = ""
    last_good_step: int | None = None
    sides: tuple[tuple[int, ...], ...] = ()
    local_ranks: tuple[int | None, ...] = ()
    devices: tuple[str, ...] = ()
    field: str = ""
    index: tuple[int, ...] | None = None
    value: Any = None
    expected: Any = None
    ulp: int | None = None

    def located(self, participants: Iterable[Participant]) -> Finding:
        """Return a copy with the hosts, coordinates and devices of its ranks."""
        by_rank = {p.rank: p for p in participants}
        odd = [by_rank[rank] for rank in self.ranks]
        return replace(
            self,
            hosts=tuple(p.host for p in odd),
            mesh_coords=tuple(p.coords for p in odd),
            local_ranks=tuple(p.local_rank for p in odd),
            devices=tuple(p.device for p in odd),
        )


@dataclass(frozen=True)
class Divergence:
    """The data of a ``DivergenceReport``, which documents the attributes."""

    findings: tuple[Finding, ...] = ()
    compared: Mapping[str, int] = field(default_factory=dict, hash=False)
    skipped: tuple[str, ...] = ()
    repaired: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    noun: str = "rank"

    @property
    def consistent(self) -> bool:
        """True if nothing differs, or if all differences were repaired."""
        return not self.findings or bool(self.repaired)

    @property
    def reporting_rank(self) -> int:
        """The rank that prints the report: the lowest rank of the majority, or the lowest of all without one."""
        odd = {rank for f in self.findings if f.reference_rank is not None for rank in f.ranks}
        majority = {f.reference_rank for f in self.findings if f.reference_rank is not None}
        agreeing = {rank for f in self.findings for side in f.sides for rank in side}
        everyone = {rank for f in self.findings for rank in f.ranks} | majority | agreeing
        return min(everyone - odd or everyone or {0})

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {"consistent": self.consistent, **_plain({**asdict(self), "compared": tuple(self.compared.items())})}

    def summary(self) -> str:
        """Return the first findings as text for an error message."""
        if not self.findings:
            return str(self)
        lines = [_sentence(finding, self.noun) for finding in self.findings[:3]]
        if len(self.findings) > 3:
            lines.append(f"and {len(self.findings) - 3} more findings")
        return f"{self._headline()}: " + "; ".join(lines)

    def _headline(self) -> str:
        what = list(dict.fromkeys(_WHAT.get(f.kind, "what was compared") for f in self.findings))
        return f"{' and '.join(what)} differ{'s' if what == ['FP8 state'] else ''} between {self.noun}s"

    def __str__(self) -> str:
        compared = ", ".join(f"{count} {kind if count == 1 else plural(kind)}" for kind, count in self.compared.items())
        notes = [f"not compared: {text}" for text in self.skipped]
        if not self.findings:
            return "\n".join([f"consistent ({compared or 'nothing was compared'})", *notes])
        if self.repaired:
            texts = list(dict.fromkeys(self.repaired))
            more = f"; and {len(texts) - SHOWN_REPAIRS} more" if len(texts) > SHOWN_REPAIRS else ""
            notes += ["repaired, and checked again: " + "; ".join(texts[:SHOWN_REPAIRS]) + more]
        notes += self.notes
        return "\n".join(
            [self._headline(), *_table(self.findings, self.noun), *_where(self.findings, self.noun), *notes]
        )


def _table(findings: tuple[Finding, ...], noun: str) -> list[str]:
    cells = [_cells(f, noun) for f in findings[:SHOWN_ROWS]]
    columns = [name for name in cells[0] if any(row[name] for row in cells)]
    rows = [columns, *([row[name] for name in columns] for row in cells)]
    lines = aligned(rows)
    if len(findings) > SHOWN_ROWS:
        lines.append(f"… and {len(findings) - SHOWN_ROWS} more")
    return lines


def _cells(f: Finding, noun: str) -> dict[str, str]:
    """Return a row of the table, by column. Columns that are empty in all rows are not shown."""
    of_ranks, located = noun == "rank", f.index is not None
    return {
        "step": str(f.step) if of_ranks else "",
        "last good": ("-" if f.last_good_step is None else str(f.last_good_step)) if of_ranks else "",
        "kind": f.kind,
        "name": _printable(f.name),
        f"{noun}s": ranks_text(f.ranks),
        "reference": "no majority" if f.reference_rank is None else str(f.reference_rank),
        "index": ", ".join(map(str, f.index or ())),
        "value": repr(f.value) if located else "",
        "expected": repr(f.expected) if located else "",
        "ULP": "" if f.ulp is None else str(f.ulp),
        "what": _what(f),
    }


def _where(findings: tuple[Finding, ...], noun: str) -> list[str]:
    places: dict[int, str] = {}
    for f in findings:
        for rank, place in zip(f.ranks, _places(f)):
            places.setdefault(rank, place)
    lines = [f"  {noun} {rank}: {place}" for rank, place in sorted(places.items()) if place]
    return [*lines[:SHOWN_ROWS], *([f"  … and {len(lines) - SHOWN_ROWS} more"] if len(lines) > SHOWN_ROWS else [])]


def _what(f: Finding) -> str:
    """Return the field if other columns show the rest, else the detail, which pairs ranks with values."""
    known = f.reference_rank is not None and f.detail.startswith(f"{f.field}: ") and ", " not in f.detail
    return f.field if known else f.detail


def _places(f: Finding) -> list[str]:
    return [_place(*place) for place in zip(f.hosts, f.local_ranks, f.devices, f.mesh_coords)]


def _place(host: str, local_rank: int | None, device: str, coords: dict[str, int] | None) -> str:
    parts = [f"host {host}" if device else host]
    if local_rank is not None:
        parts.append(f"local rank {local_rank}")
    if device:
        parts.append(device)
    if coords:
        parts.append("mesh " + " ".join(f"{axis}={place}" for axis, place in coords.items()))
    return ", ".join(part for part in parts if part)


def _sentence(f: Finding, noun: str) -> str:
    who = f"{noun}{'s' if len(f.ranks) > 1 else ''} {ranks_text(f.ranks)}"
    against = "no majority" if f.reference_rank is None else f"against {noun} {f.reference_rank}"
    where = next((f" ({place})" for place in _places(f) if place), "")
    values = ""
    if f.index is not None:
        at = f" at [{', '.join(map(str, f.index))}]" if f.index else ""
        values = f", {f.field or 'element'} {f.value!r} against {f.expected!r}{at}"
    good = "" if f.last_good_step is None else f", last good step {f.last_good_step}"
    detail = f" ({f.detail})" if f.detail and f.index is None else ""
    step = f", step {f.step}" if noun == "rank" else ""
    return f"{f.kind} {_printable(f.name)} of {who}{where}, {against}{values}{step}{good}{detail}"


def _printable(name: str) -> str:
    """Return the name with unprintable characters escaped. Names from files may contain anything."""
    return name if name.isprintable() else name.encode("unicode_escape").decode("ascii")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    no_json = isinstance(value, complex) or (isinstance(value, float) and not math.isfinite(value))
    return repr(value) if no_json else value  # JSON has no NaN and no infinity.

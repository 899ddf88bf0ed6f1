"""Divergences as plain data and as text for people. ``DivergenceReport`` (``consistency.report``) also raises."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from fp8dist.common.text import columns, first_few, plural, printable, ranks_text, size_text, wrapped

__all__ = ["MORE", "Divergence", "Finding", "Participant", "compared_text", "plain_values", "word_for"]

MORE = "…"
"""Name of a finding that counts the things that are not named."""

ALL_NAMES = "names, shapes, dtypes"
"""Name of a finding about layouts that are too many to be compared one by one."""

_WHAT: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("scale", "history"), "FP8 state"),
        "manifest": "set-ups",
        "step": "steps",
        "parameter": "parameters",
        "gradient": "gradients",
        "buffer": "buffers",
        "optimizer": "optimizer states",
        "computation": "results of equal computations",
        "audit": "repeated results",
        "layout": "the tensors",
        "error": "the outcomes",
    }
)

WIDTH = 100
"""Columns of a printed report."""

LEAST_DETAIL = 24
"""A column of details that would be narrower than this is left out, and the details stand below their rows."""

SHOWN_ROWS = 32
"""Findings that a printed report shows. All of them are in ``report.findings``."""

SHOWN_REPAIRS = 8
"""Repairs that are listed before the rest is only counted."""

SHOWN_NOT_FINITE = 4
"""Tensors with NaN or infinity that are named."""

SHOWN_SIDES = 4
"""Sides whose values a sentence shows."""


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
    "parameter", "gradient", "optimizer", "buffer", "computation" (a cast or product of ``check(compute=True)``),
    "audit" (a cast or product of training that was repeated, ``prepare(audit_every=…)``), "layout" (which tensors ranks
    hold, not their content), or "error" (a rank could not build its part).

    ``index`` is the index of the first differing element. ``value`` is the element on the lowest of ``ranks`` (without
    a majority: on the next side that has another value there than the first), ``expected`` the element on the reference
    rank (on the lowest rank of the first side). ``ulp`` is their distance in units in the last place, None if undefined
    (NaN, bool, complex). ``values``, only without a majority: the element, or what else differs, on each of the first
    sides, in their order; empty if it is unknown.

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
    values: tuple[Any, ...] = ()

    @property
    def subject(self) -> str:
        """What differs, as text: "parameter '2.weight'", "scale of 'blocks.0.fc:input'"."""
        if self.name == MORE:
            return self.detail
        name = _quoted(self)
        if self.name == self.kind:
            return name
        of = " of" if self.kind in ("scale", "history", "gradient", "layout") else ""
        return f"{'optimizer state' if self.kind == 'optimizer' else self.kind}{of} {name}"

    @property
    def who(self) -> str:
        """``ranks`` as text: "rank 3", "ranks 0, 1"."""
        return _who(self.ranks, "rank")

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
    compared_bytes: Mapping[str, int] = field(default_factory=dict, hash=False)
    unverified: Mapping[str, str] = field(default_factory=dict, hash=False)
    nonfinite: tuple[str, ...] = ()
    partial: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def diverged(self) -> bool:
        """True if something differs, and was not repaired."""
        return bool(self.findings) and not self.repaired

    @property
    def consistent(self) -> bool:
        """True if something was compared, nothing differs (or all was repaired), and nothing is ``unverified``."""
        return not self.diverged and any(self.compared.values()) and not self.unverified

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
        return {
            "consistent": self.consistent,
            "diverged": self.diverged,
            **plain_values({**asdict(self), "compared": tuple(self.compared.items())}),
        }

    def summary(self) -> str:
        """Return the first findings, and the notes, as text for an error message."""
        if not self.findings:
            return str(self)
        lines = [_sentence(finding, self.noun) for finding in self.findings[:3]]
        if len(self.findings) > 3:
            lines.append(f"and {len(self.findings) - 3} more findings")
        return f"{self._headline()}: " + "; ".join([*lines, *self.notes])

    def _headline(self) -> str:
        what = list(dict.fromkeys(_WHAT.get(f.kind, "what was compared") for f in self.findings))
        return f"{' and '.join(what)} differ{'s' if what == ['FP8 state'] else ''} between {self.noun}s"

    def _clean_headline(self) -> str:
        compared = compared_text(self.compared, self.compared_bytes)
        if self.consistent:
            return f"consistent ({compared})"
        if not compared:
            return "not verified: nothing was compared"
        return f"not verified: {' and '.join(map(plural, self.unverified))} (equal: {compared})"

    def __str__(self) -> str:
        notes = [f"not finite: {first_few(self.nonfinite, SHOWN_NOT_FINITE)}"] if self.nonfinite else []
        notes += [f"compared only {text}" for text in self.partial.values()]
        notes += [f"not compared: {text}" for text in dict.fromkeys((*self.unverified.values(), *self.skipped))]
        if not self.findings:
            return "\n".join([self._clean_headline(), *notes])
        if self.repaired:
            texts = list(dict.fromkeys(self.repaired))
            more = f"; and {len(texts) - SHOWN_REPAIRS} more" if len(texts) > SHOWN_REPAIRS else ""
            notes += ["repaired, and checked again: " + "; ".join(texts[:SHOWN_REPAIRS]) + more]
        notes += self.notes
        below = [line for text in (*_where(self.findings, self.noun), *notes) for line in _hanging(text)]
        return "\n".join([*_hanging(self._headline()), *_table(self.findings, self.noun), *below])


def compared_text(compared: Mapping[str, int], sizes: Mapping[str, int]) -> str:
    """Return what was compared as text: "72 parameters of 1.2 MB, 30 slots of 12 kB"; "" for nothing.

    Args:
        compared: number of things by kind.
        sizes: their bytes by kind, as far as they are known.
    """
    return ", ".join(
        f"{count} {kind if count == 1 else plural(kind)}{f' of {size_text(sizes[kind])}' if kind in sizes else ''}"
        for kind, count in compared.items()
        if count
    )


def _hanging(text: str) -> list[str]:
    """Return a line as lines, the further ones indented. Words stay whole: a path can be copied."""
    return textwrap.wrap(text, WIDTH, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)


def _table(findings: tuple[Finding, ...], noun: str) -> list[str]:
    shown = [_rows(f, noun) for f in findings[:SHOWN_ROWS]]
    names = [name for name in shown[0][0] if any(row.get(name) for rows in shown for row in rows)]
    cells = [names, *([row.get(name, "") for name in names] for rows in shown for row in rows)]
    widths, lines = columns(cells, WIDTH)
    below = names[-1] == "what" and widths[-1] < min(LEAST_DETAIL, max(len(row[-1]) for row in cells))
    if below:
        _, lines = columns([row[:-1] for row in cells], WIDTH)
    head, *blocks = lines
    for rows in shown:
        head += [line for _ in rows for line in blocks.pop(0)]
        if below and (what := rows[0]["what"]):
            head += [f"    {line}" for line in wrapped(what, WIDTH - 4)]
    if len(findings) > SHOWN_ROWS:
        head.append(f"… and {len(findings) - SHOWN_ROWS} more")
    return head


def _rows(f: Finding, noun: str) -> list[dict[str, str]]:
    """Return the rows of a finding, by column: without a majority one per side, if their values are known. Columns that
    are empty in all rows are not shown."""
    of_ranks, located, by_side = noun == "rank", f.index is not None, f.reference_rank is None and bool(f.values)
    ranks, value = f"{noun}s", "value"
    first = {
        "step": str(f.step) if of_ranks else "",
        "last good": ("-" if f.last_good_step is None else str(f.last_good_step)) if of_ranks else "",
        "kind": f.kind,
        "name": _quoted(f),
        ranks: ranks_text(f.ranks),
        "reference": "no majority" if f.reference_rank is None else str(f.reference_rank),
        "index": ", ".join(map(str, f.index or ())),
        value: word_for(f.value) if located else "",
        "expected": word_for(f.expected) if located and not by_side else "",
        "ULP": "" if f.ulp is None else str(f.ulp),
        "what": _what(f),
    }
    if not by_side:
        return [first]
    sides = [{ranks: ranks_text(side), value: word_for(one)} for side, one in zip(f.sides, f.values)]
    others = sorted(rank for side in f.sides[len(f.values) :] for rank in side)
    return [{**first, **sides[0]}, *sides[1:], *([{ranks: ranks_text(others), value: "…"}] if others else [])]


def word_for(value: Any) -> str:
    """Return an element as text. Words that were compared, such as shapes, are text already. A number that is one of
    float32 has as many digits as tell it from all others of float32."""
    if isinstance(value, float):
        with np.errstate(over="ignore"):
            single = np.float32(value)
        value = float(str(single)) if float(single) == value else value
    return value if isinstance(value, str) else repr(value)


def _where(findings: tuple[Finding, ...], noun: str) -> list[str]:
    """Return where the ranks are. If there are many, the first ranks of each side come first."""
    places: dict[int, str] = {}
    turn: dict[int, int] = {}
    for f in findings:
        for rank, place in zip(f.ranks, _places(f)):
            places.setdefault(rank, place)
        for side in f.sides or (f.ranks,):
            for i, rank in enumerate(side):
                turn[rank] = min(i, turn.get(rank, i))
    known = sorted((rank for rank, place in places.items() if place), key=lambda rank: (turn.get(rank, 0), rank))
    lines = [f"  {noun} {rank}: {places[rank]}" for rank in sorted(known[:SHOWN_ROWS])]
    return [*lines, *([f"  … and {len(known) - SHOWN_ROWS} more"] if len(known) > SHOWN_ROWS else [])]


def _what(f: Finding) -> str:
    """Return the field, unless it is called as the kind, if other columns show the rest; else the detail, which pairs
    ranks with values."""
    if f.kind in ("computation", "audit"):  # The bits tell which gate of the device is wrong; a verdict is words.
        return f.detail
    lone = f.detail.startswith(f"{f.field or 'first element'}: ") and ", " not in f.detail
    if f.reference_rank is None:
        lone = len(set(map(word_for, f.values))) > 1 and (lone or f.index is None)
    return f.detail if not lone else "" if f.field == f.kind else f.field


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
    places = dict(zip(f.ranks, _places(f)))
    at = f" at [{', '.join(map(str, f.index))}]" if f.index else ""
    step = f", step {f.step}" if noun == "rank" else ""
    good = "" if f.last_good_step is None else f", last good step {f.last_good_step}"
    if f.reference_rank is None and f.values:
        sides = [
            f"{word_for(value)} on {_who(side, noun)}{_in_brackets(places.get(side[0]))}"
            for side, value in zip(f.sides[:SHOWN_SIDES], f.values)
        ]
        more = f"; and {len(f.sides) - SHOWN_SIDES} more values" if len(f.sides) > SHOWN_SIDES else ""
        field = f" {f.field}" if f.field else ""
        return f"{f.subject}, no majority:{field} {'; '.join(sides)}{more}{at}{step}{good}"
    against = "no majority" if f.reference_rank is None else f"against {noun} {f.reference_rank}"
    where = _in_brackets(next((place for place in places.values() if place), ""))
    values = (
        "" if f.index is None else f", {f.field or 'element'} {word_for(f.value)} against {word_for(f.expected)}{at}"
    )
    detail = f" ({f.detail})" if f.detail and f.index is None else ""
    return f"{f.subject} of {_who(f.ranks, noun)}{where}, {against}{values}{step}{good}{detail}"


def _who(ranks: tuple[int, ...], noun: str) -> str:
    return f"{noun}{'s' if len(ranks) > 1 else ''} {ranks_text(ranks)}"


def _in_brackets(place: str | None) -> str:
    return f" ({place})" if place else ""


def _quoted(f: Finding) -> str:
    """Return the name in quotes, unless it is a phrase."""
    return f.name if f.kind == "error" or f.name in (f.kind, MORE, ALL_NAMES) else f"'{printable(f.name)}'"


def plain_values(value: Any) -> Any:
    """Return a value as JSON values: tuples as lists, NaN, infinities and complex numbers as text."""
    if isinstance(value, dict):
        return {str(key): plain_values(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_values(item) for item in value]
    no_json = isinstance(value, complex) or (isinstance(value, float) and not math.isfinite(value))
    return repr(value) if no_json else value  # JSON has no NaN and no infinity.

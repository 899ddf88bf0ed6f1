"""Divergence: which ranks (or files) differ in what, as plain data and as text for people. Imports no torch.

``DivergenceReport`` (fp8dist/checks/report.py) is a Divergence that can raise. Ranks that hold the same are a *side*. A
side with more than half of the ranks is the majority. Its lowest rank is the *reference*; ranks of other sides are
*odd*.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from fp8dist.common.text import columns, first_few, plural, printable, ranks_text, size_text, wrapped

MORE = "…"
"""Name of the finding that counts differing things beyond those that have a finding each."""

ALL_NAMES = "names, shapes, dtypes"
"""Name of a finding that ranks hold different lists of tensors, too many to be compared name by name."""

DUPLICATE = "duplicate"
"""Kind of a finding that ranks have the same value, of which each must have its own."""

COHERENCE = "coherence"
"""Kind of a finding that two tensors of one rank, such as a weight and its master copy, do not belong together."""

_WITHOUT_REFERENCE = (DUPLICATE, COHERENCE)
"""Kinds of findings in which no rank is compared with a reference."""

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
        "value": "values",
    }
)
"""What differs, by the kind of a finding, for the headline "… differ between ranks"."""

WIDTH = 100
"""Characters in a line of a printed report."""

LEAST_DETAIL = 24
"""Least width of the table's column of details, in characters. If it would be narrower, the details stand below their
rows instead."""

SHOWN_ROWS = 32
"""The most findings that a printed report shows. ``report.findings`` has all."""

SHOWN_REPAIRS = 8
"""The most repairs that a printed report lists. The rest is counted."""

SHOWN_NOT_FINITE = 4
"""The most tensors with NaN or infinity that a printed report names."""

SHOWN_SIDES = 4
"""The most sides whose values a sentence shows."""


@dataclass(frozen=True)
class Participant:
    """A rank that takes part in a comparison, and where it runs; or a file, with its number as ``rank``.

    ``local_rank``: on its host. ``device``: of its tensors. ``coords``: its place on each axis of the mesh.
    """

    rank: int
    host: str = ""
    local_rank: int | None = None
    device: str = ""
    coords: dict[str, int] | None = None


@dataclass(frozen=True)
class Finding:
    """One thing that differs between ranks. All ranks are global.

    If a majority of the ranks agrees, there is one finding per odd side. Without a majority there is one finding about
    all ranks, because none can be blamed.

    Attributes:
        step: the step in which the difference was found.
        kind: "manifest" (set-up), "step", "scale" (scale, inv_scale, cold flags), "history" (amaxes and their
            counters), "parameter", "gradient", "optimizer", "buffer", "computation" (a cast or product of
            ``check(compute=True)``), "audit" (a cast or product of training that another rank repeated,
            ``prepare(audit_every=…)``), "coherence" (a tensor that does not fit another one of its own rank), "value"
            and "duplicate" (of ``check_values``), "layout" (which tensors ranks hold, not their content), or "error" (a
            rank could not read what it compares).
        name: of the parameter, slot or other thing.
        ranks: the ranks of the odd side; without a majority, all ranks.
        reference_rank: the lowest rank of the majority; None: there is no majority.
        hosts, mesh_coords, local_ranks, devices: of ``ranks``, in the same order.
        detail: text for people, such as how many elements differ.
        last_good_step: the last number of optimizer steps after which things of this kind were compared and equal: a
            checkpoint of that step, or an earlier one, is good. None: unknown.
        sides: the sets of ranks that agree, the largest first.
        field: which tensor of a slot, or which result of a computation, differs; "": the thing is one tensor.
        index: of the first differing element; None: no element was found.
        value: this element on the lowest of ``ranks``; without a majority, on the first side that has another value
            there than the largest side.
        expected: this element on the reference rank; without a majority, on the lowest rank of the largest side.
        ulp: distance of ``value`` and ``expected`` in units in the last place; None if undefined (NaN, bool, complex).
        values: only without a majority: the element, or what else differs, on each of the first sides, in their order;
            empty if unknown.
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
        of = " of" if self.kind in ("scale", "history", "gradient", "layout", COHERENCE) else ""
        return f"{'optimizer state' if self.kind == 'optimizer' else self.kind}{of} {name}"

    @property
    def who(self) -> str:
        """``ranks`` as text: "rank 3", "ranks 0, 1"."""
        return _who(self.ranks, "rank")

    def located(self, participants: Iterable[Participant]) -> Finding:
        """Return a copy with the hosts, mesh coordinates, local ranks and devices of its ranks."""
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
    """The data of a report. ``DivergenceReport`` in fp8dist/checks/report.py documents the attributes."""

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
    compared_by: Mapping[str, int] = field(default_factory=dict, hash=False)

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
        """The rank that logs the report: the lowest rank that no finding calls odd; if there is none, the lowest."""
        odd = {rank for f in self.findings if f.reference_rank is not None for rank in f.ranks}
        majority = {f.reference_rank for f in self.findings if f.reference_rank is not None}
        agreeing = {rank for f in self.findings for side in f.sides for rank in side}
        everyone = {rank for f in self.findings for rank in f.ranks} | majority | agreeing
        return min(everyone - odd or everyone or {0})

    def to_json(self) -> dict[str, Any]:
        """Return all attributes as JSON values."""
        return {
            "consistent": self.consistent,
            "diverged": self.diverged,
            **plain_values({**asdict(self), "compared": tuple(self.compared.items())}),
        }

    def summary(self) -> str:
        """Return the first three findings, and the notes, as text for an error message."""
        if not self.findings:
            return str(self)
        lines = [_sentence(finding, self.noun) for finding in self.findings[:3]]
        if len(self.findings) > 3:
            lines.append(f"and {len(self.findings) - 3} more findings")
        return f"{self._headline()}: " + "; ".join([*lines, *self.notes])

    def _headline(self) -> str:
        if all(f.kind == DUPLICATE for f in self.findings):
            return f"values that each {self.noun} must have for itself are equal on several"
        what = list(dict.fromkeys(_WHAT.get(f.kind, "what was compared") for f in self.findings if f.kind != COHERENCE))
        if not what:
            return f"tensors of a {self.noun} that must belong together differ"
        return f"{' and '.join(what)} differ{'s' if what == ['FP8 state'] else ''} between {self.noun}s"

    def _clean_headline(self) -> str:
        """Return the headline of a report without findings."""
        compared = compared_text(self.compared, self.compared_bytes)
        if self.consistent:
            return f"consistent ({compared})"
        if not compared:
            return "not verified: nothing was compared"
        return f"not verified: {' and '.join(map(plural, self.unverified))} (equal: {compared})"

    def __str__(self) -> str:
        notes = [f"not finite: {first_few(self.nonfinite, SHOWN_NOT_FINITE)}"] if self.nonfinite else []
        notes += [f"compared only {text}" for text in self.partial.values()]
        if len(self.compared_by) > 1:
            notes.append(f"bytes by way: {', '.join(f'{way} {size_text(n)}' for way, n in self.compared_by.items())}")
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
    """Return a text as lines of a report, all but the first indented. Words stay whole, so that paths can be copied."""
    return textwrap.wrap(text, WIDTH, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)


def _table(findings: tuple[Finding, ...], noun: str) -> list[str]:
    """Return the lines of the table of findings. Columns that are empty in all rows are left out."""
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
    """Return the rows of a finding, each as text by column. A finding has one row; without a majority one per side, if
    the sides' values are known."""
    of_ranks, located, by_side = noun == "rank", f.index is not None, f.reference_rank is None and bool(f.values)
    ranks, value = f"{noun}s", "value"
    first = {
        "step": str(f.step) if of_ranks else "",
        "last good": ("-" if f.last_good_step is None else str(f.last_good_step)) if of_ranks else "",
        "kind": f.kind,
        "name": _quoted(f),
        ranks: ranks_text(f.ranks),
        "reference": "" if f.kind in _WITHOUT_REFERENCE else _reference(f),
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


def _reference(f: Finding) -> str:
    return "no majority" if f.reference_rank is None else str(f.reference_rank)


def word_for(value: Any) -> str:
    """Return an element as text. A number that float32 can hold exactly gets the fewest digits that distinguish it from
    all other float32 numbers. Text, such as a shape, stays as it is."""
    if isinstance(value, float):
        with np.errstate(over="ignore"):
            single = np.float32(value)
        value = float(str(single)) if float(single) == value else value
    return value if isinstance(value, str) else repr(value)


def _where(findings: tuple[Finding, ...], noun: str) -> list[str]:
    """Return lines that say where ranks run. If there are too many ranks, the first ones of each side are shown."""
    places: dict[int, str] = {}
    turn: dict[int, int] = {}  # The lowest position of a rank in a side.
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
    """Return the text of the last column: the detail, unless the other columns show all that it says. Then it is the
    field, or nothing if the field has the kind's name."""
    if f.kind in ("computation", "audit"):  # The detail has bits, which may show what is wrong with the device.
        return f.detail
    # True if the detail is about one element, which other columns show.
    lone = f.detail.startswith(f"{f.field or 'first element'}: ") and ", " not in f.detail
    if f.reference_rank is None:
        lone = len(set(map(word_for, f.values))) > 1 and (lone or f.index is None)
    return f.detail if not lone else "" if f.field == f.kind else f.field


def _places(f: Finding) -> list[str]:
    """Return where each of the finding's ranks runs, as text."""
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
    """Return a finding as one sentence, for an error message."""
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
    if f.kind in _WITHOUT_REFERENCE:
        where = _in_brackets(next(iter(places.values()), ""))
        return f"{f.subject} on {_who(f.ranks, noun)}{where}{step} ({f.detail})"
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
    """Return the name in quotes, unless it is words of this library and not the name of a thing."""
    return f.name if f.kind == "error" or f.name in (f.kind, MORE, ALL_NAMES) else f"'{printable(f.name)}'"


def plain_values(value: Any) -> Any:
    """Return a value as JSON values: tuples become lists; NaN, infinities and complex numbers become text."""
    if isinstance(value, dict):
        return {str(key): plain_values(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_values(item) for item in value]
    no_json = isinstance(value, complex) or (isinstance(value, float) and not math.isfinite(value))
    return repr(value) if no_json else value  # JSON has no NaN and no infinity.

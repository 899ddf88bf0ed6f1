"""Make findings from the differences between ranks or files. Local."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from fp8dist.checks.computations import KIND
from fp8dist.checks.contents import FINDING_KINDS, Key
from fp8dist.checks.differences import Difference
from fp8dist.checks.report import Sender, sides_of, split
from fp8dist.common.divergence import MORE, Finding

__all__ = [
    "MAX_SIDES",
    "Differing",
    "Seen",
    "explained",
    "findings_of_values",
    "from_senders",
    "is_odd",
    "layout_findings",
    "named_only",
    "reference_of",
]

MAX_SIDES = 8
"""Odd sides of one thing whose values are shown."""


class Differing(NamedTuple):
    """A thing that differs within a set: its place in ``keys`` on this rank, and the sides of ranks that agree."""

    place: int
    key: Key
    sides: tuple[tuple[int, ...], ...]


class Seen(NamedTuple):
    """The first difference that a rank found in a field of a thing. ``at``: index of the element. ``name``, ``kind``:
    those of the field."""

    thing: int
    field: int
    at: tuple[int, ...]
    difference: Difference
    name: str
    kind: str


def findings_of_values(kind: str, values: Mapping[int, str], noun: str = "rank") -> list[Finding]:
    """Return findings for a value that differs between ranks, such as a digest. ``values``: its text, by rank."""
    sides = sides_of(values)
    reference, odd = split(sides)
    shown = "; ".join(f"{noun} {side[0]}: {values[side[0]]}" for side in sides[:MAX_SIDES][::-1])
    known = tuple(values[side[0]] for side in sides[: MAX_SIDES + 1]) if reference is None else ()
    return [Finding(0, kind, kind, ranks, reference, detail=shown, sides=sides, values=known) for ranks in odd]


def from_senders(findings: Iterable[Finding], senders: Sequence[Sender]) -> list[Finding]:
    """Return findings with what is known of the ranks that took part: their newest step, the last good one, hosts and
    places in the mesh."""
    step, everyone = max(sender.step for sender in senders), [sender.participant for sender in senders]
    last_good = [sender.last_good for sender in senders]
    return [replace(f, step=step, last_good_step=_last_good_step(f, last_good)).located(everyone) for f in findings]


def _last_good_step(finding: Finding, last_good: Sequence[Mapping[str, int | None]]) -> int | None:
    """Return the last number of updates after which things like those of a finding were good on all ranks; None if
    there is none.

    Args:
        last_good: by rank, see ``Sender``.
    """
    kind = finding.kind
    if kind in ("manifest", "step"):  # Every check compares them.
        steps = [max((step for step in good.values() if step is not None), default=None) for good in last_good]
    elif kind in ("layout", "error") or finding.name == MORE:  # May be about things of any kind.
        steps = [None if None in good.values() else min(good.values(), default=None) for good in last_good]  # type: ignore[type-var]
    else:
        steps = [good.get({"scale": "slot", "history": "slot"}.get(kind, kind)) for good in last_good]
    known = [step for step in steps if step is not None]
    return min(known) if known and len(known) == len(steps) else None


def layout_findings(
    layouts: Sequence[tuple[Sequence[int], Mapping[tuple[str, str], Key]]], noun: str = "rank"
) -> list[Finding]:
    """Return findings for things that only some ranks hold, or hold with another shape or dtype.

    ``layouts``: ranks, and their keys by name and kind.
    """
    findings = []
    for name, kind in sorted({name for _, keys in layouts for name in keys}):
        looks = [(ranks, _look(keys.get((name, kind)))) for ranks, keys in layouts]
        if len({look for _, look in looks}) > 1:
            values = {rank: look for ranks, look in looks for rank in ranks}
            findings += [replace(f, name=name) for f in findings_of_values("layout", values, noun)]
    return findings


def _look(key: Key | None) -> str:
    return "absent" if key is None else f"{key.dtype}{list(key.shape)}"


def reference_of(thing: Differing) -> int:
    """Return the lowest rank of the largest side. All other ranks are compared with it."""
    return thing.sides[0][0]


def is_odd(rank: int, thing: Differing) -> bool:
    """True if ``rank`` represents one of the first ``MAX_SIDES`` sides that differ from the reference."""
    return rank in {side[0] for side in thing.sides[1 : MAX_SIDES + 1]}


def explained(thing: Differing, by_rank: Mapping[int, list[Seen]], noun: str = "rank") -> list[Finding]:
    """Return one finding per kind and odd side of a thing; without a majority, one per kind.

    Args:
        by_rank: the first differences that the lowest rank of each odd side found.
        noun: "rank" or "file", for the texts.
    """
    reference, odd = split(thing.sides)
    findings = []
    kinds = {one.field: one.kind for seen in by_rank.values() for one in seen}
    for kind in dict.fromkeys(kinds[field] for field in sorted(kinds)):
        seen_by = {side[0]: [one for one in by_rank[side[0]] if one.kind == kind] for side in thing.sides[1:]}
        reporting = [side[0] for side in thing.sides[1:] if seen_by[side[0]]]
        if not reporting:
            continue
        if reference is None:
            findings.append(_finding(thing, odd[0], None, {r: seen_by[r] for r in reporting}, noun))
        else:
            findings += [
                _finding(thing, side, reference, {side[0]: seen_by[side[0]]}, noun) for side in odd if seen_by[side[0]]
            ]
    named = {rank for finding in findings for rank in finding.ranks}
    # Name the other sides, too, without values.
    return findings + [finding for finding in named_only(thing, "") if not named.issuperset(finding.ranks)]


def _finding(
    thing: Differing,
    ranks: tuple[int, ...],
    reference: int | None,
    seen_by: Mapping[int, list[Seen]],
    noun: str,
) -> Finding:
    """Return the finding about the fields of one kind. ``seen_by``: what each side's rank saw of them."""
    source = reference_of(thing)
    texts, shown = [], []  # Of each field: the text, and by rank what was seen of its first element.
    # The first element of a field that differs on any side. A side that reports a later one has the reference's there.
    for place in sorted({one.field for seen in seen_by.values() for one in seen}):
        by_rank = {rank: one for rank, seen in seen_by.items() for one in seen if one.field == place}
        first = min(by_rank.values(), key=lambda one: one.difference.place)
        differ = {r: one for r, one in by_rank.items() if one.difference.place == first.difference.place}
        shown.append(differ)
        name, in_bits = first.name, first.kind == KIND
        if reference is None or (name and not in_bits):
            values = "; ".join(f"{noun} {r}: {_shown(differ.get(r, first), r not in differ, in_bits)}" for r in seen_by)
            texts.append(f"{name or 'first element'}: {values}; {noun} {source}: {_shown(first, 1, in_bits)}")
        else:
            of = f"{name}: " if name else ""
            texts.append(f"{of}{first.difference.extent()}, {' against '.join(first.difference.bits)}")
    differ = shown[0]
    first = next(iter(differ.values()))
    expected = first.difference.expected
    known = [side[0] for side in thing.sides[1 : MAX_SIDES + 1]] if reference is None else []
    on_sides = [differ[r].difference.value if r in differ else expected for r in known]
    return Finding(
        step=0,
        kind=first.kind,
        name=thing.key.name,
        ranks=ranks,
        reference_rank=reference,
        detail=", ".join(texts),
        sides=thing.sides,
        field=first.name,
        index=first.at,
        value=first.difference.value,
        expected=expected,
        ulp=first.difference.ulp,
        values=(expected, *on_sides) if known else (),
    )


def _shown(one: Seen, which: int, in_bits: bool) -> str:
    difference = one.difference
    value = (difference.value, difference.expected)[which]
    same_text = difference.value == difference.expected or difference.value != difference.value
    if same_text or in_bits:  # With the same text, only the bits tell them apart.
        return f"{value!r} ({difference.bits[which]})"
    return repr(value)


def named_only(thing: Differing, why: str) -> list[Finding]:
    """Return findings without values, for a thing whose elements were not compared."""
    kind = FINDING_KINDS.get(thing.key.kind, thing.key.kind)
    reference, odd = split(thing.sides)
    return [Finding(0, kind, thing.key.name, ranks, reference, detail=why, sides=thing.sides) for ranks in odd]

"""Findings: what a report says about differences between ranks, or between files. All functions are local.

A *thing* has one digest: a parameter, a slot of FP8 state. Its *sides* are the sets of ranks that hold the same, the
largest first. The *reference* is the lowest rank of a majority (more than half of the ranks), and ranks of other sides
are *odd*. Files that are compared count as ranks, with numbers instead of names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from fp8dist.checks.computations import KIND
from fp8dist.checks.contents import FINDING_KINDS, Key
from fp8dist.checks.differences import Difference
from fp8dist.checks.report import Sender, sides_of, split
from fp8dist.common.divergence import MORE, Finding

MAX_SIDES = 8
"""The most odd sides of a thing whose values are shown."""


class Differing(NamedTuple):
    """A thing that differs between ranks. ``place``: its index in this rank's keys. ``sides``: the ranks that agree."""

    place: int
    key: Key
    sides: tuple[tuple[int, ...], ...]


class Seen(NamedTuple):
    """The first difference that a rank found in a field (a tensor) of a thing.

    ``thing``, ``field``: indices. ``at``: index of the element. ``name``, ``kind``: the field's.
    """

    thing: int
    field: int
    at: tuple[int, ...]
    difference: Difference
    name: str
    kind: str


def findings_of_values(kind: str, values: Mapping[int, str], noun: str = "rank", name: str = "") -> list[Finding]:
    """Return findings about a value that is no tensor, such as a step: one per odd side; without a majority, one; none
    if all are equal.

    Args:
        kind: of the findings.
        values: the value as text, by rank.
        noun: "rank" or "file", for the texts.
        name: of the findings; "": the kind.
    """
    sides = sides_of(values)
    if len(sides) < 2:
        return []
    reference, odd = split(sides)
    shown = "; ".join(f"{noun} {side[0]}: {values[side[0]]}" for side in sides[:MAX_SIDES][::-1])
    known = tuple(values[side[0]] for side in sides[: MAX_SIDES + 1]) if reference is None else ()
    name = name or kind
    return [Finding(0, kind, name, ranks, reference, detail=shown, sides=sides, values=known) for ranks in odd]


def from_senders(findings: Iterable[Finding], senders: Sequence[Sender]) -> list[Finding]:
    """Return the findings with the step, the last good step, and hosts, devices and mesh coordinates of their ranks.
    Says of parameters that DDP does not reduce them. ``senders``: all ranks that took part."""
    step, everyone = max(sender.step for sender in senders), [sender.participant for sender in senders]
    last_good = [sender.last_good for sender in senders]
    late = {name for sender in senders for name in sender.late}
    located = []
    for f in findings:
        of_late = f.kind in ("parameter", "gradient") and f.name in late
        detail = "; ".join(filter(None, [_LATE, f.detail])) if of_late else f.detail
        last = _last_good_step(f, last_good)
        located.append(replace(f, step=step, last_good_step=last, detail=detail).located(everyone))
    return located


_LATE = "DDP was made before this parameter, and does not reduce its gradient"


def _last_good_step(finding: Finding, last_good: Sequence[Mapping[str, int | None]]) -> int | None:
    """Return the number of optimizer steps after which things of the finding's kind were last equal on all ranks. None:
    unknown, or never.

    Args:
        last_good: of each rank, see ``Sender``.
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
    """Return findings about things that only some ranks hold, or hold with another shape or dtype.

    Args:
        layouts: for each distinct layout, its ranks and their keys by (name, kind).
        noun: "rank" or "file", for the texts.
    """
    findings = []
    for name, kind in sorted({name for _, keys in layouts for name in keys}):
        looks = [(ranks, _look(keys.get((name, kind)))) for ranks, keys in layouts]
        if len({look for _, look in looks}) > 1:  # Few looks, of many ranks.
            values = {rank: look for ranks, look in looks for rank in ranks}
            findings += findings_of_values("layout", values, noun, name)
    return findings


def _look(key: Key | None) -> str:
    """Return dtype and shape as text."""
    return "absent" if key is None else f"{key.dtype}{list(key.shape)}"


def reference_of(thing: Differing) -> int:
    """Return the rank with which the others are compared: the lowest of the largest side, majority or not."""
    return thing.sides[0][0]


def is_odd(rank: int, thing: Differing) -> bool:
    """True if ``rank`` compares its values for an odd side: the lowest rank of one of the first ``MAX_SIDES``."""
    return rank in {side[0] for side in thing.sides[1 : MAX_SIDES + 1]}


def explained(thing: Differing, by_rank: Mapping[int, list[Seen]], noun: str = "rank") -> list[Finding]:
    """Return the findings about a thing, with its differing elements: one per kind and odd side; without a majority,
    one per kind. Kinds are those of its fields: a slot has "scale" and "history".

    Args:
        by_rank: the first differences that the lowest rank of each side found; empty for the reference.
        noun: "rank" or "file", for the texts.
    """
    reference, odd = split(thing.sides)
    findings = []
    kinds = {one.field: one.kind for seen in by_rank.values() for one in seen}  # By field.
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
    # Sides beyond ``MAX_SIDES`` have compared nothing. Name them without values.
    return findings + [finding for finding in named_only(thing, "") if not named.issuperset(finding.ranks)]


def _finding(
    thing: Differing,
    ranks: tuple[int, ...],
    reference: int | None,
    seen_by: Mapping[int, list[Seen]],
    noun: str,
) -> Finding:
    """Return the finding about the fields of one kind.

    Args:
        ranks: of the finding. ``reference``: None: there is no majority.
        seen_by: the first differences in these fields, by the rank that compared for its side.
    """
    source = reference_of(thing)
    texts, shown = [], []  # For each field: a text, and by rank what it has at the field's first differing element.
    # Sides may differ first at different elements. The lowest one is shown for all. A side that differs first at a
    # later element has the reference's value at this one.
    for place in sorted({one.field for seen in seen_by.values() for one in seen}):
        by_rank = {rank: one for rank, seen in seen_by.items() for one in seen if one.field == place}
        first = min(by_rank.values(), key=lambda one: one.difference.place)
        differ = {r: one for r, one in by_rank.items() if one.difference.place == first.difference.place}
        shown.append(differ)
        name, in_bits = first.name, first.kind == KIND
        if reference is None or (name and not in_bits):
            of_sides = {r: _shown(differ.get(r, first), r in differ, in_bits) for r in seen_by}
            values = "; ".join(f"{noun} {r}: {text}" for r, text in of_sides.items())
            texts.append(f"{name or 'first element'}: {values}; {noun} {source}: {_shown(first, False, in_bits)}")
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


def _shown(one: Seen, own: bool, in_bits: bool) -> str:
    """Return a value of a difference as text: the rank's own, or the reference's. ``in_bits``: with its bits."""
    difference = one.difference
    value, bits = (difference.value, difference.bits[0]) if own else (difference.expected, difference.bits[1])
    same_text = difference.value == difference.expected or difference.value != difference.value
    # Only the bits distinguish 0.0 from -0.0, and NaNs from each other.
    return f"{value!r} ({bits})" if same_text or in_bits else repr(value)


def named_only(thing: Differing, why: str) -> list[Finding]:
    """Return findings about a thing without its elements: one per odd side; without a majority, one. ``why``: their
    detail."""
    kind = FINDING_KINDS.get(thing.key.kind, thing.key.kind)
    reference, odd = split(thing.sides)
    return [Finding(0, kind, thing.key.name, ranks, reference, detail=why, sides=thing.sides) for ranks in odd]

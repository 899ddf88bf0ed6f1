"""Compare traces of a step: find the first place that is not the same in all, and the other facts that differ.

A place is an output of a module, or a gradient of an output (``Place`` in ``fp8dist/checks/outputs.py``).
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from fp8dist.checks.report import DivergenceReport, sides_of, split
from fp8dist.common.divergence import Finding, Participant
from fp8dist.common.text import ranks_text
from fp8dist.errors import CheckpointError
from fp8dist.files.failures import one_line
from fp8dist.files.traces import Head, TraceRow, open_trace
from fp8dist.state.groups import SyncGroup

_SHOWN_DIGITS = 8
_SHOWN_SIDES = 4
_INPUTS = "inputs at the start"
_SO = (
    "other data came in beside these, or an op is not deterministic, a module hides state, or a device computes wrongly"
)
_OTHER_DATA = "the inputs differ, as they do on ranks that share out a batch: compare the same rank of two runs"


def compare_traces(paths: Sequence[str]) -> DivergenceReport:
    """Compare traces place by place, with one row of each in memory. In the report, a "rank" is an index into
    ``paths``.

    Raises:
        CheckpointError: a trace cannot be read, or is damaged anywhere: all are read to their ends.
    """
    opened = [open_trace(path) for path in paths]
    first: tuple[int, dict[int, TraceRow | None]] | None = None
    compared: Counter[str] = Counter()
    nonfinite: dict[int, TraceRow] = {}
    for index, rows in enumerate(itertools.zip_longest(*(rows for _, rows in opened))):
        for n, row in enumerate(rows):
            if row is not None and row.nonfinite:
                nonfinite.setdefault(n, row)
        if first is None:
            if rows[0] is not None:
                compared[rows[0].place.what] += 1
            if len(set(rows)) > 1:
                first = index, dict(enumerate(rows))
    participants = [Participant(n, path) for n, path in enumerate(paths)]
    return _report(first, compared, {n: head for n, (head, _) in enumerate(opened)}, nonfinite, participants, "file")


def compare_traces_of_ranks(path: str, group: SyncGroup) -> DivergenceReport:
    """Compare the traces of the ranks of a group. Each rank gives the ``path`` of its own trace. COLLECTIVE. The report
    is the same on all ranks.

    Raises:
        CheckpointError: on all ranks, if the trace of one rank cannot be read.
    """
    head, rows, error = None, list[TraceRow](), ""
    try:
        head, found = open_trace(path)
        rows = list(found)
    except CheckpointError as failure:
        error = str(failure)
    nonfinite = next((row for row in rows if row.nonfinite), None)
    gathered = group.gather((head, nonfinite, error, len(rows)))
    failed = [f"rank {rank}: {text}" for rank, (_, _, text, _) in zip(group.ranks, gathered) if text]
    if failed:
        raise CheckpointError(failed[0])
    index = _first_difference(rows, max(length for *_, length in gathered), group)
    first = None
    if index is not None:
        mine = rows[index] if index < len(rows) else None
        first = index, dict(zip(group.ranks, group.gather(mine)))
        rows = rows[: index + 1]
    heads = {rank: head for rank, (head, *_) in zip(group.ranks, gathered)}
    odd = {rank: row for rank, (_, row, *_) in zip(group.ranks, gathered) if row is not None}
    compared = Counter(row.place.what for row in rows)
    return _report(first, compared, heads, odd, [Participant(rank) for rank in group.ranks], "rank")


def _first_difference(rows: Sequence[TraceRow], longest: int, group: SyncGroup) -> int | None:
    """Return the index of the first row that is not the same on all ranks. COLLECTIVE: two all-reduces."""
    hashes = b"".join(hashlib.blake2b(repr(row).encode(errors="surrogatepass"), digest_size=8).digest() for row in rows)
    # A row that this rank does not have counts as 0.
    least = torch.zeros(longest, dtype=torch.int64, device="cpu")
    least[: len(rows)] = torch.from_numpy(np.frombuffer(hashes, "<i8").astype(np.int64))
    most = least.clone()
    dist.all_reduce(least, dist.ReduceOp.MIN, group=group.process_group)
    dist.all_reduce(most, dist.ReduceOp.MAX, group=group.process_group)
    differ = (least != most).nonzero().flatten()
    return int(differ[0]) if len(differ) else None


def traces_text(report: DivergenceReport) -> str:
    """Return a report of this module as text: the sentence of its findings, then a line for each note."""
    return "\n".join([report.findings[0].detail if report.findings else str(report), *report.notes])


def _report(
    first: tuple[int, Mapping[int, TraceRow | None]] | None,
    compared: Mapping[Any, int],
    heads: Mapping[int, Head],
    nonfinite: Mapping[int, TraceRow],
    participants: Sequence[Participant],
    noun: str,
) -> DivergenceReport:
    """Return the report. ``first``: the index of the first difference, and each trace's row there (None: the trace has
    ended). ``nonfinite``: the first row of each trace that has a NaN or an infinity."""
    notes = [
        f"the first value that is not finite: {_many(side, noun)}: {_place(nonfinite[side[0]])}"
        for side in sides_of({n: row.place for n, row in nonfinite.items()})
    ]
    differing = _differing(heads)
    notes += [f"{name}: {_by_side(values, noun)}" for name, values in differing.items()]
    findings: list[Finding] = []
    if first is not None:
        findings = [finding.located(participants) for finding in _findings(*first, noun)]
        if _INPUTS in differing:
            notes.append(_OTHER_DATA)
        elif differing.keys() <= {"rank", "ranks", "host"}:
            notes.append(f"the same in all: {', '.join([*_known(heads), 'versions, flags'])}. So {_SO}")
    places = [f"{noun} {one.rank}: {one.host}" for one in participants if one.host and (findings or notes)]
    return DivergenceReport(tuple(findings), dict(compared), notes=tuple([*notes, *places]), noun=noun)


def _findings(index: int, rows: Mapping[int, TraceRow | None], noun: str) -> list[Finding]:
    """Return a finding for each group of traces that deviates. All have the same sentence as their detail."""
    somewhere = next(row for row in rows.values() if row is not None)
    field, what, words = _difference(rows)
    place = f"place {index + 1} of the step"
    where = f" at {place}" if field == "module" else f" in the {_place(somewhere)} ({place})"
    sides = sides_of(rows)
    reference, odd = split(sides)
    everyone = sorted(rank for side in odd for rank in side)
    who, verb = "the traces", "part"
    if reference is not None:
        who, verb = _many(everyone, noun), "parts" if len(everyone) == 1 else "part"
    others = "" if reference is None else f" from {_many(sides[0], noun)}"
    sentence = f"{who} first {verb}{others}{where}: {what}: {_by_side(words, noun)}"
    row = somewhere.place
    kind = "layout" if field != "digest" else row.what
    values = tuple(words[side[0]] for side in sides)
    return [
        Finding(
            0,
            kind,
            row.module,
            ranks,
            reference,
            detail=sentence,
            sides=sides,
            field=field,
            value=words[ranks[0]] if reference is not None else values[1],
            expected=values[0],
            values=() if reference is not None else values,
        )
        for ranks in odd
    ]


def _difference(rows: Mapping[int, TraceRow | None]) -> tuple[str, str, dict[int, str]]:
    """Return (field of the finding, text that says what differs, {trace: its value as text})."""
    if len({None if row is None else row.place[:4] for row in rows.values()}) > 1:
        words = {n: "the end" if row is None else _place(row) for n, row in rows.items()}
        return "module", "other modules run", words
    known = {n: row for n, row in rows.items() if row}
    if len({row.place for row in known.values()}) > 1:
        words = {n: f"{row.place.dtype}{list(row.place.shape)}" for n, row in known.items()}
        return "layout", "shape or dtype differs", words
    return "digest", "the bits differ", {n: row.digest + " (not finite)" * row.nonfinite for n, row in known.items()}


def _place(row: TraceRow) -> str:
    """Return a place as text, such as "output of 'blocks.0.fc1', call 1"."""
    place = row.place
    part = f", part {place.part}" if place.part else ""
    name = f"'{one_line(place.module)}'" if place.module else "the model"
    return f"{place.what} of {name}, call {place.call + 1}{part}"


def _many(ranks: Sequence[int], noun: str) -> str:
    """Return ranks or files as text, such as "ranks 0, 3"."""
    return f"{noun}{'s' if len(ranks) > 1 else ''} {ranks_text(ranks)}"


def _by_side(words: Mapping[int, str], noun: str) -> str:
    """Return the values of all traces as text, with traces of one value together."""
    sides = sides_of(words)
    shown = [f"{_short(words[side[0]])} on {_many(side, noun)}" for side in sides[:_SHOWN_SIDES]]
    return "; ".join(shown) + (f"; and {len(sides) - _SHOWN_SIDES} more" if len(sides) > _SHOWN_SIDES else "")


def _short(word: str) -> str:
    """Return the text with each digest cut to its first digits."""
    return re.sub(r"\b[0-9a-f]{32}\b", lambda digest: f"{digest[0][:_SHOWN_DIGITS]}…", word)


def _differing(heads: Mapping[int, Head]) -> dict[str, dict[int, str]]:
    """Return the facts that are not the same in all heads: {name: {trace: its value as text}}."""
    facts = {n: _facts(head) for n, head in heads.items()}
    names = dict.fromkeys(name for of in facts.values() for name in of)
    found = {name: {n: of.get(name, "none") for n, of in facts.items()} for name in names}
    parts = {n: one_line(head.likeness).split("; ") for n, head in heads.items()}
    common = set.intersection(*map(set, parts.values()))
    found["machine"] = {n: ", ".join(part for part in of if part not in common) or "none" for n, of in parts.items()}
    return {name: words for name, words in found.items() if len(set(words.values())) > 1}


def _facts(head: Head) -> dict[str, str]:
    start = {_at_start(name): value for name, value in head.start.items()}
    known = {"rank": head.rank, "ranks": head.ranks, "host": head.host, **start, **head.settings}
    return {one_line(name): "none" if value is None else one_line(str(value)) for name, value in known.items()}


def _at_start(name: str) -> str:
    return f"{name} at the start"


def _known(heads: Mapping[int, Head]) -> list[str]:
    """Return the names of the digests that all heads have."""
    first, *others = heads.values()
    return [one_line(name) for name in first.start if all(head.start.get(name) for head in (first, *others))]

"""Tier 1: whether what ranks hold is equal. Everything here is COLLECTIVE.

An all-reduce per distinct set of ranks says whether anything differs. Tiers 2 and 3, on a mismatch, are in
``localisation``.

Nobody may be left alone in a collective. So a step of local work that may fail comes first, its failure is told to the
others in place of its result, and all ranks go on, or stop, by what all of them know.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fp8dist.consistency.contents import Digester
from fp8dist.consistency.findings import MAX_SIDES, Differing
from fp8dist.consistency.holdings import Holdings, ReplicaSet, participant
from fp8dist.consistency.localisation import localise_set
from fp8dist.consistency.report import DivergenceReport, Finding, Participant, sides_of, split
from fp8dist.errors import Fp8DistError
from fp8dist.groups import SyncGroup

__all__ = ["Compared", "check_replicas"]

logger = logging.getLogger("fp8dist")

_PAIRS = ("manifest", "step", "layout")

_FAILED = 2
"""What a rank that could not build its part sends; 1: it knows of a difference already."""


class Compared(NamedTuple):
    """What ``check_replicas`` found, and the differing things of each set, for a repair."""

    report: DivergenceReport
    differing: list[tuple[ReplicaSet, list[Differing]]]


def check_replicas(anchor: SyncGroup, build: Callable[[], Holdings], known: Sequence[Finding] = ()) -> Compared:
    """Compare what the ranks hold. COLLECTIVE over ``anchor``, which contains the ranks of all sets.

    One all-reduce when the anchor is all there is; with further sets one for each, and a last one that tells all ranks
    whether any of them differs. ``build`` is local; a rank where it raises is reported by all. ``known``: findings that
    this rank has already, of a failed sync say; all ranks report them.
    """
    error: Exception | None = None
    digests: list[Tensor] = []
    try:
        mine = build()
        digester = Digester()
        digests = [s.digests(digester) for s in mine.sets]
    except Exception as raised:
        logger.exception("fp8dist: rank %d could not build its part of the consistency check", anchor.rank)
        mine, error = Holdings((ReplicaSet("", anchor, ()),)), raised
    words = [mine.manifest, mine.step, mine.layout]
    agree, news = _agree(anchor, [_word(word) for word in words], digests[0] if digests else None, bool(known))
    findings = _union(anchor, known) if news else []
    if news == _FAILED:
        return Compared(_report(mine, findings + _errors(anchor, mine, error)), [])
    findings += _differing_words(anchor, mine, words, [n for n, same in zip(_PAIRS, agree) if not same])
    # Ranks that disagree about the sets would wait for each other: then only the anchor's own is looked into.
    others = sorted(range(1, len(mine.sets)), key=lambda i: tuple(sorted(mine.sets[i].group.ranks)))
    mismatched = [] if agree[-1] else [0]
    if agree[2] and mine.layout:
        mismatched += [i for i in others if not _agree(mine.sets[i].group, [], digests[i])[0][-1]]
        bad = torch.tensor([bool(mismatched)], dtype=torch.int32, device=anchor.device)
        dist.all_reduce(bad, dist.ReduceOp.MAX, group=anchor.process_group)
        found = [(mine.sets[i], *localise_set(mine.sets[i], digests[i], mine)) for i in mismatched]
        if int(bad):
            findings += _union(anchor, [f for _, own, _ in found for f in own])
    else:
        found = [(mine.sets[i], *localise_set(mine.sets[i], digests[i], mine)) for i in mismatched]
        findings += [f for _, own, _ in found for f in own]
    return Compared(_report(mine, findings), [(s, differing) for s, _, differing in found])


def _report(mine: Holdings, findings: list[Finding]) -> DivergenceReport:
    return DivergenceReport(tuple(findings), mine.compared, mine.skipped)


def _union(anchor: SyncGroup, mine: Sequence[Finding]) -> list[Finding]:
    """What all ranks have found, each thing once, in an order of its own. COLLECTIVE."""
    distinct = {repr(f): f for part in anchor.gather(list(mine)) for f in part}
    return sorted(distinct.values(), key=lambda f: (f.kind, f.name, f.ranks))


def _word(value: Hashable) -> int:
    digest = hashlib.blake2b(repr(value).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _agree(group: SyncGroup, words: list[int], digests: Tensor | None, knows: bool = False) -> tuple[list[bool], int]:
    """(for each word, and at last for the digests, whether all ranks have the same; whether a rank has failed, or
    knows of something already).

    COLLECTIVE: one MAX over pairs (w, ~w), which agree iff ``max(w) == ~max(~w)``. ``digests`` None: this rank has
        failed.
    """
    numbers = torch.tensor(words, dtype=torch.int64)
    total = torch.zeros(2, dtype=torch.int64) if digests is None else digests.sum(0)
    numbers = torch.cat([numbers, total, torch.tensor([digests is not None and len(digests)])])
    news = _FAILED if digests is None else int(knows)
    message = torch.cat([numbers, ~numbers, torch.tensor([news])]).to(group.device)
    if group.size > 1:
        dist.all_reduce(message, dist.ReduceOp.MAX, group=group.process_group)
    *pairs, news = message.tolist()
    count = len(numbers)
    same = [pairs[i] == ~pairs[count + i] for i in range(count)]
    return [*same[:-3], all(same[-3:])], news


def _errors(anchor: SyncGroup, mine: Holdings, error: Exception | None) -> list[Finding]:
    named = isinstance(error, Fp8DistError)  # Says what is wrong without the name of its type.
    text = "" if error is None else str(error) if named else f"{type(error).__name__}: {error}"
    told: list[tuple[Participant, str, int]] = anchor.gather((participant(anchor, mine), text, mine.step))
    step = max(step for *_, step in told)
    everyone = [p for p, *_ in told]
    return [
        Finding(step, "error", "building its part of the check", (p.rank,), None, detail=text).located(everyone)
        for p, text, _ in told
        if text
    ]


def _differing_words(anchor: SyncGroup, mine: Holdings, words: list[Any], names: list[str]) -> list[Finding]:
    """Findings for manifest, step and layout. COLLECTIVE if ``names`` is not empty, which is the same on all ranks."""
    if not names:
        return []
    told: list[tuple[Participant, list[Any]]] = anchor.gather((participant(anchor, mine), words))
    everyone = [p for p, _ in told]
    findings = []
    for name in names:
        place = _PAIRS.index(name)
        values = {p.rank: repr(theirs[place]) for p, theirs in told}
        sides = sides_of(values)
        reference, odd = split(sides)
        shown = "; ".join(f"rank {side[0]}: {values[side[0]]}" for side in sides[:MAX_SIDES][::-1])
        step = max(theirs[1] for _, theirs in told)
        findings += [
            Finding(
                step, name, name, ranks, reference, detail=shown, last_good_step=mine.last_good_step, sides=sides
            ).located(everyone)
            for ranks in odd
        ]
    return findings

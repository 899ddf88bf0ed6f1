"""Tier 1: whether what ranks hold is equal. Everything here is COLLECTIVE.

An all-reduce per distinct set of ranks says whether anything differs. Tiers 2 and 3, on a mismatch, are in
``localisation``.

Nobody may be left alone in a collective. So a step of local work that may fail comes first, its failure is told to the
others in place of its result, and all ranks go on, or stop, by what all of them know.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fp8dist.consistency.contents import Digester
from fp8dist.consistency.findings import Differing, findings_of_values
from fp8dist.consistency.inventory import Holdings, ReplicaSet
from fp8dist.consistency.localisation import localise_set
from fp8dist.consistency.report import DivergenceReport
from fp8dist.divergence import Finding, Participant
from fp8dist.errors import Fp8DistError
from fp8dist.sync.groups import SyncGroup

__all__ = ["Compared", "check_replicas"]

logger = logging.getLogger("fp8dist")

_FAILED = 2
"""What a rank that could not build its part sends; 1: it knows of a difference already."""


class Compared(NamedTuple):
    """What ``check_replicas`` found, and the differing things of each set, for a repair.

    ``nothing``: there are several ranks, none of them has anything to compare with another, and nothing is known to
    differ. The same on all ranks."""

    report: DivergenceReport
    differing: list[tuple[ReplicaSet, list[Differing]]]
    nothing: bool = False


def check_replicas(
    anchor: SyncGroup, build: Callable[[], Holdings], known: Sequence[Finding] = (), everything: bool = False
) -> Compared:
    """Compare what the ranks hold. COLLECTIVE over ``anchor``, which contains the ranks of all sets.

    One all-reduce when the anchor is all there is. With further sets one for each, one before these that says whether
    all ranks mean the same ranks by their names, and one after that tells all of them whether any set differs.

    Args:
        build: what this rank holds. Local; a rank where it raises is reported by all.
        known: findings that this rank has already, of a failed sync say; all ranks report them.
        everything: tell all differing things apart, however many they are.
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
    words = {"manifest": mine.manifest, "step": mine.step, "layout": mine.layout}
    agree, news = _agree(anchor, list(map(_word, words.values())), digests[0] if digests else None, bool(known))
    findings = _union(anchor, known) if news else []
    if news == _FAILED:
        return Compared(_report(mine, findings + _errors(anchor, mine, error)), [])
    differs = [name for name, same in zip(words, agree) if not same]
    findings += _differing_words(anchor, mine, words, differs)
    differing: list[tuple[ReplicaSet, list[Differing]]] = []
    if not agree[-1]:
        found, things = localise_set(mine.sets[0], digests[0], mine, everything)
        findings += found
        differing.append((mine.sets[0], things))
    anything = bool(mine.compared)  # The same on all ranks, if the anchor's set is all there is and nothing differs.
    # Ranks that disagree about the sets would wait for each other.
    if "layout" not in differs and mine.layout:
        disputed = _disputed_memberships(anchor, mine)
        findings += disputed
        if not disputed:
            found, further, anything = _check_further_sets(anchor, mine, digests, everything)
            findings += found
            differing += further
    return Compared(_report(mine, findings), differing, anchor.size > 1 and not (findings or anything))


def _check_further_sets(
    anchor: SyncGroup, mine: Holdings, digests: list[Tensor], everything: bool
) -> tuple[list[Finding], list[tuple[ReplicaSet, list[Differing]]], bool]:
    """(findings of all sets of all ranks, differing things of this rank's sets, whether any rank has compared
    anything). COLLECTIVE."""
    places = range(1, len(mine.sets))
    # One order on any two ranks that share sets.
    ordered = sorted(places, key=lambda i: (sorted(mine.sets[i].group.ranks), mine.sets[i].label))
    bad = [i for i in ordered if not _agree(mine.sets[i].group, [], digests[i])[0][-1]]
    outcome = 2 if bad else int(bool(mine.compared))
    anywhere = torch.tensor([outcome], dtype=torch.int32, device=anchor.device)
    dist.all_reduce(anywhere, dist.ReduceOp.MAX, group=anchor.process_group)
    if int(anywhere) < 2:
        return [], [], int(anywhere) > 0
    told: list[Finding] = []
    differing = []
    for i in bad:
        findings, things = localise_set(mine.sets[i], digests[i], mine, everything)
        differing.append((mine.sets[i], things))
        if anchor.rank == min(mine.sets[i].group.ranks):  # One speaks for its set.
            told += findings
    return _union(anchor, told), differing, True


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
    """(for each word, and at last for the digests, whether all ranks have the same; whether a rank has failed, or knows
    of something already).

    COLLECTIVE: one MAX over pairs (w, ~w), which agree iff ``max(w) == ~max(~w)``. ``digests`` None: this rank has
    failed.
    """
    total = [0, 0, -1] if digests is None else [*digests.sum(0).tolist(), len(digests)]
    numbers = torch.tensor([*words, *total], dtype=torch.int64, device="cpu")
    news = torch.tensor([_FAILED if digests is None else int(knows)], device="cpu")
    message = torch.cat([numbers, ~numbers, news]).to(group.device)
    if group.size > 1:
        dist.all_reduce(message, dist.ReduceOp.MAX, group=group.process_group)
    *pairs, heard = message.tolist()
    count = len(numbers)
    same = [pairs[i] == ~pairs[count + i] for i in range(count)]
    return [*same[:-3], all(same[-3:])], heard


def _disputed_memberships(anchor: SyncGroup, mine: Holdings) -> list[Finding]:
    """Findings if some ranks mean other ranks by the name of a set. COLLECTIVE: one SUM.

    All of a set of n ranks send a word that stands for it, the lowest of them times 1 - n: what all send adds up to 0.
    """
    balance = sum(
        _word((m.label, m.ranks)) * (1 - len(m.ranks) if anchor.rank == min(m.ranks) else 1)
        for m in mine.memberships
        if set(m.ranks) <= set(anchor.ranks)
    )
    wrapped = (balance + (1 << 63)) % (1 << 64) - (1 << 63)
    total = torch.tensor([wrapped], dtype=torch.int64, device=anchor.device)
    dist.all_reduce(total, dist.ReduceOp.SUM, group=anchor.process_group)
    if not int(total):
        return []
    views = {"layout": tuple((m.label, m.view or m.ranks) for m in mine.memberships)}
    return _differing_words(anchor, mine, views, ["layout"])


def _errors(anchor: SyncGroup, mine: Holdings, error: Exception | None) -> list[Finding]:
    named = isinstance(error, Fp8DistError)  # Says what is wrong without the name of its type.
    text = "" if error is None else str(error) if named else f"{type(error).__name__}: {error}"
    told: list[tuple[Participant, str, int]] = anchor.gather((mine.participant(anchor), text, mine.step))
    step = max(step for *_, step in told)
    everyone = [p for p, *_ in told]
    good = min((p.rank for p, text, _ in told if not text), default=None)
    return [
        Finding(step, "error", "building its part of the check", (p.rank,), good, detail=text).located(everyone)
        for p, text, _ in told
        if text
    ]


def _differing_words(
    anchor: SyncGroup, mine: Holdings, words: Mapping[str, Any], names: Sequence[str]
) -> list[Finding]:
    """Findings for these of the words. COLLECTIVE if ``names`` is not empty, which is the same on all ranks."""
    if not names:
        return []
    shown = {name: repr(words[name]) for name in names}
    told = anchor.gather((mine.participant(anchor), shown, mine.step, mine.last_good_step))
    everyone = [p for p, *_ in told]
    step = max(step for *_, step, _ in told)
    good = min((good for *_, good in told if good is not None), default=None)
    findings = []
    for name in names:
        values = {p.rank: theirs[name] for p, theirs, *_ in told}
        findings += [
            replace(f, step=step, last_good_step=good).located(everyone) for f in findings_of_values(name, values)
        ]
    return findings

"""Tier 1: compare what the ranks hold. COLLECTIVE.

One all-reduce per distinct set of ranks shows if anything differs. On a mismatch, tiers 2 and 3 follow (see
``localisation``).

No rank may be left waiting in a collective. So local work that may fail comes first. A rank where it fails sends the
failure in place of the result, and all ranks decide by the same information how to continue.
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

from fp8dist.checks.computations import KIND
from fp8dist.checks.contents import Digester
from fp8dist.checks.findings import Differing, findings_of_values, from_senders
from fp8dist.checks.inventory import Holdings, ReplicaSet
from fp8dist.checks.localisation import localise_computed, localise_set
from fp8dist.checks.report import DivergenceReport, sides_of
from fp8dist.common.divergence import Finding
from fp8dist.common.text import plural
from fp8dist.errors import Fp8DistError
from fp8dist.state.groups import SyncGroup

__all__ = ["Compared", "check_replicas", "word_of"]

logger = logging.getLogger("fp8dist")

_FAILED = 2
"""Sent by a rank that could not build its part. A rank that already knows of a difference sends 1."""

_NOT_FINITE = 2
"""Sent by the highest rank if it holds NaN or infinity; by lower ones, one more each: the lowest one counts. A rank
that compares only some of its parameters sends 1."""

_MAY_BE_UNVERIFIED = (KIND, "buffer", "optimizer", "gradient", "parameter")
"""Kinds that a rank may have to compare, and nothing to compare with. The most important one is last."""

_ELSEWHERE = "on another rank"


class Compared(NamedTuple):
    """Result of ``check_replicas``, with the differing things of each set for a repair.

    ``holdings``: what this rank has brought; nothing, if it failed.
    ``nonfinite_rank``: the lowest rank that holds NaN or infinity; None: none does.
    ``nothing``: True if there are several ranks, none has anything to compare with another, and no difference is known.
    The same on all ranks."""

    report: DivergenceReport
    holdings: Holdings
    differing: list[tuple[ReplicaSet, list[Differing]]]
    nothing: bool = False
    nonfinite_rank: int | None = None


def check_replicas(
    anchor: SyncGroup, build: Callable[[], Holdings], known: Sequence[Finding] = (), everything: bool = False
) -> Compared:
    """Compare what the ranks hold. COLLECTIVE over ``anchor``, which contains the ranks of all sets.

    The anchor's set takes one all-reduce. Further sets take one each, one before them to confirm that all ranks mean
    the same ranks by each label, and one after them to tell all ranks if any set differs.

    Args:
        build: returns what this rank holds. Local. If it raises on a rank, all ranks report the error.
        known: findings that this rank already has, for example from a failed sync. All ranks report them.
        everything: determine the odd ranks of all differing things, for a repair.
    """
    error: Exception | None = None
    digests: list[Tensor] = []
    try:
        mine = build()
        digester = Digester()
        digests = [s.digests(digester) for s in mine.all_sets]
    except Exception as raised:
        mine, error = Holdings((ReplicaSet("", anchor, ()),)), raised
    words = {"manifest": mine.manifest, "step": mine.step, "layout": mine.layout}
    lacking = max((1 + _MAY_BE_UNVERIFIED.index(kind) for kind in mine.alone.unverified), default=0)
    ranks = sorted(anchor.ranks, reverse=True)
    doubt = _NOT_FINITE + ranks.index(anchor.rank) if mine.alone.nonfinite else int(bool(mine.alone.partial))
    news_of_mine = [_FAILED if error is not None else int(bool(known)), lacking, doubt]
    agree, (news, lacking, doubt) = _agree(
        anchor, list(map(word_of, words.values())), digests[0] if digests else None, news_of_mine
    )
    nonfinite_rank = ranks[doubt - _NOT_FINITE] if doubt >= _NOT_FINITE else None
    mine = _as_others_are(mine, lacking, doubt == 1, nonfinite_rank)
    findings = _union(anchor, known) if news else []
    if news == _FAILED:
        errors = _errors(anchor, mine, error)
        if error is not None and len(errors) < anchor.size:  # A mistake of all ranks needs no traceback.
            text = "fp8dist: rank %d could not build its part of the consistency check"
            logger.error(text, anchor.rank, exc_info=error)
        return Compared(_report(mine, findings + errors), mine, [], nonfinite_rank=nonfinite_rank)
    differs = [name for name, same in zip(words, agree) if not same]
    findings += _differing_words(anchor, mine, words, differs)
    differing: list[tuple[ReplicaSet, list[Differing]]] = []
    if not agree[-1]:
        found, things = localise_set(mine.sets[0], digests[0], mine, everything)
        findings += found
        differing.append((mine.sets[0], things))
    anything = bool(mine.compared)  # Equal on all ranks, if there are no further sets and nothing differs.
    # Ranks that disagree about the sets would wait for each other.
    if "layout" not in differs and mine.memberships:
        disputed = _disputed_memberships(anchor, mine)
        findings += disputed
        if not disputed:
            found, further, anything = _check_further_sets(anchor, mine, digests, everything)
            findings += found
            differing += further
    if "layout" not in differs and mine.computed is not None:
        found, mine, computed = _check_computed(anchor, mine, mine.computed, digests[-1])
        findings += found
        anything |= computed
    nothing = anchor.size > 1 and not (findings or anything)
    return Compared(_report(mine, findings), mine, differing, nothing, nonfinite_rank)


def _check_further_sets(
    anchor: SyncGroup, mine: Holdings, digests: list[Tensor], everything: bool
) -> tuple[list[Finding], list[tuple[ReplicaSet, list[Differing]]], bool]:
    """Return (findings of all sets of all ranks, differing things of this rank's sets, True if any rank has compared
    anything). COLLECTIVE."""
    places = range(1, len(mine.sets))
    # The same order on all ranks that share sets, or they would deadlock.
    ordered = sorted(places, key=lambda i: (sorted(mine.sets[i].group.ranks), mine.sets[i].label))
    bad = [i for i in ordered if not _agree(mine.sets[i].group, [], digests[i])[0][-1]]
    outcome = 2 if bad else int(bool(mine.compared))
    anywhere = torch.tensor([outcome], dtype=torch.int32, device=anchor.device)
    dist.all_reduce(anywhere, dist.ReduceOp.MAX, group=anchor.process_group)
    if int(anywhere) < 2:
        return [], [], int(anywhere) > 0
    found: list[Finding] = []
    differing = []
    for i in bad:
        findings, things = localise_set(mine.sets[i], digests[i], mine, everything)
        differing.append((mine.sets[i], things))
        if anchor.rank == min(mine.sets[i].group.ranks):  # One rank reports for the set.
            found += findings
    return _union(anchor, found), differing, True


def _check_computed(
    anchor: SyncGroup, mine: Holdings, computed: ReplicaSet, digests: Tensor
) -> tuple[list[Finding], Holdings, bool]:
    """Compare what the ranks have computed, each with those that have its label. COLLECTIVE: one MAX; one gather more
    if not all ranks have the same label, and further collectives if ranks differ.

    Returns:
        The findings of all ranks, ``mine`` without computations that no other rank repeats, and True if any ranks have
        compared some.
    """
    label = word_of(computed.label)
    alike, same = _agree(anchor, [label], digests)[0]
    if alike and same:
        return [], mine, len(digests) > 0
    by_rank = dict(zip(anchor.ranks, anchor.gather((label, (*digests.sum(0).tolist(), len(digests))))))
    kinds = sides_of({rank: of for rank, (of, _) in by_rank.items()})
    differing = [kind for kind in kinds if len({by_rank[rank][1] for rank in kind}) > 1]
    findings = localise_computed(anchor, mine, computed, digests, differing) if differing else []
    lone = [kind[0] for kind in kinds if len(kind) == 1 and by_rank[kind[0]][1][-1]]
    if anchor.rank in lone:
        excuse = f"{len(digests)} {plural(KIND)} that no other rank repeats on equal hardware, versions and shapes"
        unverified = {**mine.alone.unverified, KIND: excuse}
        alone = replace(mine.alone, skipped=(*mine.alone.skipped, excuse), unverified=unverified)
        mine = replace(mine, computed=None, alone=alone)
    elif lone:
        mine = _as_others_are(mine, 1 + _MAY_BE_UNVERIFIED.index(KIND))
    return findings, mine, any(len(kind) > 1 and by_rank[kind[0]][1][-1] for kind in kinds)


def _report(mine: Holdings, findings: list[Finding]) -> DivergenceReport:
    return replace(mine.alone, findings=tuple(findings), compared=mine.compared, compared_bytes=mine.compared_bytes)


def _as_others_are(mine: Holdings, lacking: int, partial: bool = False, nonfinite: int | None = None) -> Holdings:
    """Return the holdings with what is true of another rank: a report is consistent on all ranks or on none."""
    report = mine.alone
    if lacking and (kind := _MAY_BE_UNVERIFIED[lacking - 1]) not in report.unverified:
        report = replace(report, unverified={**report.unverified, kind: f"{plural(kind)} {_ELSEWHERE}"})
    if partial and not report.partial and "parameter" not in report.unverified:
        report = replace(report, partial={"parameter": f"not all parameters {_ELSEWHERE}"})
    if nonfinite is not None and not report.nonfinite:
        report = replace(report, nonfinite=(f"tensors of rank {nonfinite}",))
    return replace(mine, alone=report)


def _union(anchor: SyncGroup, mine: Sequence[Finding]) -> list[Finding]:
    """Return the findings of all ranks without duplicates, sorted. COLLECTIVE."""
    distinct = {repr(f): f for part in anchor.gather(list(mine)) for f in part}
    return sorted(distinct.values(), key=lambda f: (f.kind, f.name, f.ranks))


def word_of(value: Hashable) -> int:
    """Return 64 bits that are equal for equal values, as an int64 for a message."""
    digest = hashlib.blake2b(repr(value).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _agree(
    group: SyncGroup, words: list[int], digests: Tensor | None, news: Sequence[int] = (0,)
) -> tuple[list[bool], list[int]]:
    """Return (for each word, and last for the digests: True if equal on all ranks; the highest of each of the news).

    ``digests`` None: this rank has failed. COLLECTIVE: one MAX over pairs (w, ~w). All ranks have the same w iff
    ``max(w) == ~max(~w)``.
    """
    total = [0, 0, -1] if digests is None else [*digests.sum(0).tolist(), len(digests)]
    numbers = torch.tensor([*words, *total], dtype=torch.int64, device="cpu")
    message = torch.cat([numbers, ~numbers, torch.tensor(news, dtype=torch.int64, device="cpu")]).to(group.device)
    if group.communicates:
        dist.all_reduce(message, dist.ReduceOp.MAX, group=group.process_group)
    count = len(numbers)
    pairs = message.tolist()
    same = [pairs[i] == ~pairs[count + i] for i in range(count)]
    return [*same[:-3], all(same[-3:])], pairs[2 * count :]


def _disputed_memberships(anchor: SyncGroup, mine: Holdings) -> list[Finding]:
    """Return findings if ranks mean different ranks by the label of a set, or only some have something in it.
    COLLECTIVE: one SUM.

    Each of a set's n ranks sends a hash of label, ranks and "has something", the lowest of them times 1 - n. If all
    agree, the sum is 0.
    """
    held = {s.label for s in mine.sets}
    balance = sum(
        word_of((m.label, m.ranks, m.label in held)) * (1 - len(m.ranks) if anchor.rank == min(m.ranks) else 1)
        for m in mine.memberships
        if set(m.ranks) <= set(anchor.ranks)
    )
    wrapped = (balance + (1 << 63)) % (1 << 64) - (1 << 63)
    total = torch.tensor([wrapped], dtype=torch.int64, device=anchor.device)
    dist.all_reduce(total, dist.ReduceOp.SUM, group=anchor.process_group)
    if not int(total):
        return []
    if findings := _held_by_some(anchor, mine, held):
        return findings
    views = {"layout": tuple((m.label, m.view or m.ranks) for m in mine.memberships)}
    return _differing_words(anchor, mine, views, ["layout"])


def _held_by_some(anchor: SyncGroup, mine: Holdings, held: set[str]) -> list[Finding]:
    """Return a finding for each set in which only some of its ranks have something to compare. COLLECTIVE."""
    sets = {m.label: (tuple(m.ranks), m.label in held) for m in mine.memberships}
    by_rank, senders = mine.gather(anchor, sets, last_good=False)
    by_set: dict[tuple[str, tuple[int, ...]], dict[int, str]] = {}
    for rank, theirs in by_rank.items():
        for label, (ranks, has) in theirs.items():
            what = f"{'something' if has else 'nothing'} to compare"
            by_set.setdefault((label, ranks), {})[rank] = what
    findings = [
        replace(f, name=label)
        for (label, ranks), values in sorted(by_set.items())
        if len(values) == len(ranks) and len(set(values.values())) > 1
        for f in findings_of_values("layout", values)
    ]
    return from_senders(findings, senders)


def _errors(anchor: SyncGroup, mine: Holdings, error: Exception | None) -> list[Finding]:
    named = isinstance(error, Fp8DistError)  # Its message is clear without the name of its type.
    text = "" if error is None else str(error) if named else f"{type(error).__name__}: {error}"
    by_rank, senders = mine.gather(anchor, text, last_good=False)
    good = min((rank for rank, text in by_rank.items() if not text), default=None)
    what = "building its part of the check"
    findings = [Finding(0, "error", what, (rank,), good, detail=text) for rank, text in by_rank.items() if text]
    return from_senders(findings, senders)


def _differing_words(
    anchor: SyncGroup, mine: Holdings, words: Mapping[str, Any], names: Sequence[str]
) -> list[Finding]:
    """Return findings for the words ``names``. COLLECTIVE if ``names``, equal on all ranks, is not empty."""
    if not names:
        return []
    by_rank, senders = mine.gather(anchor, {name: repr(words[name]) for name in names})
    findings = []
    for name in names:
        findings += findings_of_values(name, {rank: of[name] for rank, of in by_rank.items()})
    return from_senders(findings, senders)

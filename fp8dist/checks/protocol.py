"""Tier 1 of a check: one all-reduce of digests for each set of ranks shows if anything differs. COLLECTIVE.

If something does, tiers 2 and 3 find it (``localisation``). The *anchor* is the ranks that call the check. It is one
set; the others, such as the replicas along a mesh axis, are parts of it.

No rank may be left waiting in a collective. So local work that may fail comes first. A rank where it fails sends that
in place of a digest, and all ranks decide by the same information how to continue.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fp8dist.checks.coherence import merged
from fp8dist.checks.computations import KIND
from fp8dist.checks.contents import Digester, word_of
from fp8dist.checks.findings import Differing, findings_of_values, from_senders
from fp8dist.checks.inventory import Holdings, ReplicaSet
from fp8dist.checks.localisation import localise_computed, localise_set, localise_tied
from fp8dist.checks.report import DivergenceReport, sides_of
from fp8dist.common.divergence import Finding
from fp8dist.common.text import plural
from fp8dist.errors import Fp8DistError
from fp8dist.state.groups import SyncGroup

logger = logging.getLogger("fp8dist")

_FAILED = 2
"""First number of ``news``: sent by a rank that could not build its part. A rank that already knows of a difference
sends 1, any other 0. The ranks get the maximum."""

_NOT_FINITE = 2
"""Third number of ``news``: the highest rank sends this if it holds NaN or infinity, the next lower rank 1 more, and so
on. So the maximum names the lowest such rank. A rank that compares only some of its parameters sends 1, any other 0."""

_MAY_BE_UNVERIFIED = (KIND, "buffer", "optimizer", "gradient", "parameter")
"""Kinds of which a rank may have been asked to compare things, and can compare none. The second number of ``news`` is 1
and the index of one, so the most important kind is last."""

_LEAST = torch.iinfo(torch.int64).min

_ELSEWHERE = "on another rank"
"""End of a reason that another rank gave."""


class Compared(NamedTuple):
    """The result of ``check_replicas``.

    ``holdings``: what this rank brought; empty if it could not build its part. ``differing``: of each set, the things
    that differ, for a repair. ``nothing``: True if there are several ranks, none has anything to compare with another,
    and no difference is known; the same on all ranks. ``nonfinite_rank``: the lowest rank that holds NaN or infinity;
    None: there is none. ``further``: True if some rank has sets beside the anchor's; the same on all ranks.
    """

    report: DivergenceReport
    holdings: Holdings
    differing: list[tuple[ReplicaSet, list[Differing]]]
    nothing: bool = False
    nonfinite_rank: int | None = None
    further: bool = False


def check_replicas(
    anchor: SyncGroup, build: Callable[[], Holdings], known: Sequence[Finding] = (), everything: bool = False
) -> Compared:
    """Compare what the ranks hold. COLLECTIVE over ``anchor``.

    The anchor's set takes one all-reduce. If there are further sets, there is one more before them (do all ranks mean
    the same ranks by each label?), one for each of them, and one after them (does any set differ?).

    Args:
        anchor: the ranks that check. It has all ranks of the other sets.
        build: returns what this rank holds. Local. If it raises on some ranks, the reports of all ranks have the error
            as a finding.
        known: differences that this rank already knows, such as those of the last sync. All ranks report them.
        everything: find the odd ranks of all differing things, for a repair, not only of the first ones.
    """
    error: Exception | None = None
    digests: list[Tensor] = []
    try:
        mine = build()
        digester = Digester()
        digests = [s.digests(digester) for s in mine.all_sets]
        known = [*known, *mine.inside_findings]
    except Exception as raised:
        mine, error = Holdings((ReplicaSet("", anchor, ()),)), raised
    repairs = ("repair",) if everything else ()
    layout = (*mine.layout, *repairs)
    words = {"manifest": mine.manifest, "step": mine.step, "layout": layout}  # Must be equal on all ranks.
    lacking = max((1 + _MAY_BE_UNVERIFIED.index(kind) for kind in mine.alone.unverified), default=0)
    ranks = sorted(anchor.ranks, reverse=True)
    doubt = _NOT_FINITE + ranks.index(anchor.rank) if mine.alone.nonfinite else int(bool(mine.alone.partial))
    news_of_mine = [_FAILED if error is not None else int(bool(known)), lacking, doubt]
    agree, (news, lacking, doubt) = _agree(
        anchor, list(map(word_of, words.values())), digests[0] if digests else None, news_of_mine
    )
    nonfinite_rank = ranks[doubt - _NOT_FINITE] if doubt >= _NOT_FINITE else None
    mine = _as_others_are(mine, lacking, doubt == 1, nonfinite_rank)
    findings = merged(_union(anchor, known)) if news else []
    if news == _FAILED:
        errors = _errors(anchor, mine, error)
        if error is not None and len(errors) < anchor.size:  # A mistake of all ranks needs no traceback.
            text = "fp8dist: rank %d could not build its part of the consistency check"
            logger.error(text, anchor.rank, exc_info=error)
        return Compared(_report(mine, findings + errors), mine, [], nonfinite_rank=nonfinite_rank)
    differs = [name for name, same in zip(words, agree) if not same]
    shares = bool(mine.memberships)
    if "layout" in differs and _agree(anchor, [word_of((*mine.asked, *repairs))], None)[0][0]:
        differs.remove("layout")  # Only the sets have other names, as in stages of a pipeline: their ranks must agree.
        shares = True
    findings += _differing_words(anchor, mine, words, differs)
    differing: list[tuple[ReplicaSet, list[Differing]]] = []
    if not agree[-1]:
        found, things = localise_set(mine.sets[0], digests[0], mine, everything)
        findings += found
        differing.append((mine.sets[0], things))
    anything = bool(mine.compared)  # Equal on all ranks, if there are no further sets and nothing differs.
    # Ranks that disagree about the sets would wait for each other.
    if "layout" not in differs and shares:
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
    return Compared(_report(mine, findings), mine, differing, nothing, nonfinite_rank, shares)


def _check_further_sets(
    anchor: SyncGroup, mine: Holdings, digests: list[Tensor], everything: bool
) -> tuple[list[Finding], list[tuple[ReplicaSet, list[Differing]]], bool]:
    """Compare the sets other than the anchor's. COLLECTIVE.

    Returns:
        The findings of all sets of all ranks; the differing things of the sets that this rank is in; True if any rank
        has compared anything.
    """
    places = range(1, len(mine.sets))
    # Ranks that share several sets go through them in the same order, or they would wait for each other.
    ordered = sorted(places, key=lambda i: (sorted(mine.sets[i].group.ranks), mine.sets[i].label))
    silent = {i for i in ordered if mine.sets[i].some and not mine.sets[i].keys}
    bad = [i for i in ordered if not _agree(mine.sets[i].group, [], digests[i], silent=i in silent)[0][-1]]
    outcome = 2 if bad else int(bool(mine.compared))  # 1: this rank has compared something, and all was equal.
    anywhere = torch.tensor([outcome], dtype=torch.int32, device=anchor.device)
    dist.all_reduce(anywhere, dist.ReduceOp.MAX, group=anchor.process_group)
    if int(anywhere) < 2:
        return [], [], int(anywhere) > 0
    found: list[Finding] = []
    differing = []
    for i in bad:
        if mine.sets[i].some:
            findings = localise_tied(mine.sets[i], digests[i], mine)  # Under two names: too different for a repair.
        else:
            findings, things = localise_set(mine.sets[i], digests[i], mine, everything)
            differing.append((mine.sets[i], things))
        if anchor.rank == min(mine.sets[i].group.ranks):  # One rank reports for the set.
            found += findings
    return _union(anchor, found), differing, True


def _check_computed(
    anchor: SyncGroup, mine: Holdings, computed: ReplicaSet, digests: Tensor
) -> tuple[list[Finding], Holdings, bool]:
    """Compare the results of computations between ranks with equal labels: only these must compute the same bits.
    COLLECTIVE: one MAX. One gather more if not all ranks have the same label, and more collectives if results differ.

    Args:
        computed: what this rank has computed. ``digests``: of its results.

    Returns:
        The findings of all ranks; ``mine``, without computations of a rank whose label no other rank has; True if any
        two ranks have compared computations.
    """
    label = word_of(computed.label)
    alike, same = _agree(anchor, [label], digests)[0]
    if alike and same and anchor.communicates:
        return [], mine, len(digests) > 0
    by_rank = dict(zip(anchor.ranks, anchor.gather((label, (*digests.sum(0).tolist(), len(digests))))))
    kinds = sides_of({rank: of for rank, (of, _) in by_rank.items()})  # A kind: the ranks with one label.
    differing = [kind for kind in kinds if len({by_rank[rank][1] for rank in kind}) > 1]
    findings = localise_computed(anchor, mine, computed, digests, differing) if differing else []
    # Ranks that have computed something, and are alone with their label.
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
    """Return this rank's report: the findings, and what ``mine`` says without other ranks."""
    return replace(
        mine.alone,
        findings=tuple(findings),
        compared=mine.compared,
        compared_bytes=mine.compared_bytes,
        compared_by=mine.ways,
    )


def _as_others_are(mine: Holdings, lacking: int, partial: bool = False, nonfinite: int | None = None) -> Holdings:
    """Return the holdings with what other ranks have sent, so that a report is consistent on all ranks or on none.

    Args:
        lacking: second number of ``news``; 0: no rank has an unverified kind.
        partial: True if a rank compares only some of its parameters.
        nonfinite: the lowest rank that holds NaN or infinity.
    """
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


def _agree(
    group: SyncGroup, words: list[int], digests: Tensor | None, news: Sequence[int] = (0,), silent: bool = False
) -> tuple[list[bool], list[int]]:
    """Compare words and digests over a group. COLLECTIVE: one MAX over pairs (w, ~w), unless the group has one rank.
    All ranks have the same w exactly if ``max(w) == ~max(~w)``.

    Args:
        words: int64 each.
        digests: int64[n, 2]; None: this rank has failed, which differs from any digests.
        news: numbers of which the ranks need the maximum.
        silent: this rank takes part, and agrees with whatever the others hold.

    Returns:
        For each word, and last for the digests, True if equal on all ranks; and the maximum of each of the news.
    """
    # The sum of all digests, and their number. Digests contain names, so the sum does not depend on the order.
    total = [0, 0, -1] if digests is None else [*digests.sum(0).tolist(), len(digests)]
    numbers = torch.tensor([*words, *total], dtype=torch.int64, device="cpu")
    message = torch.cat([numbers, ~numbers, torch.tensor(news, dtype=torch.int64, device="cpu")])
    if silent:
        message.fill_(_LEAST)
    message = message.to(group.device)
    if group.communicates:
        dist.all_reduce(message, dist.ReduceOp.MAX, group=group.process_group)
    count = len(numbers)
    pairs = message.tolist()
    # If all ranks are silent, both maxima are the least number.
    same = [pairs[i] == ~pairs[count + i] or pairs[i] == pairs[count + i] == _LEAST for i in range(count)]
    return [*same[:-3], all(same[-3:])], pairs[2 * count :]


def _disputed_memberships(anchor: SyncGroup, mine: Holdings) -> list[Finding]:
    """Return findings if ranks mean different ranks by the label of a set, or if only some of its ranks have something
    to compare in it. COLLECTIVE: one SUM over the anchor; if it is not 0, a gather.

    For each set, its ranks send a hash of its label, its ranks, and whether they have something in it. The lowest of
    the n ranks sends the hash times 1 - n. So if all hashes of a set are equal, they add up to 0.
    """
    held = {s.label for s in mine.sets}
    everyone = set(anchor.ranks)
    sets = {
        m.label: (tuple(m.ranks), m.label in held, m.view) for m in mine.memberships if everyone.issuperset(m.ranks)
    }
    balance = sum(
        word_of((label, ranks, has)) * (1 - len(ranks) if anchor.rank == min(ranks) else 1)
        for label, (ranks, has, _) in sets.items()
    )
    wrapped = (balance + (1 << 63)) % (1 << 64) - (1 << 63)  # As int64, whose sums wrap around.
    total = torch.tensor([wrapped], dtype=torch.int64, device=anchor.device)
    dist.all_reduce(total, dist.ReduceOp.SUM, group=anchor.process_group)
    if not int(total):
        return []
    by_rank, senders = mine.gather(anchor, sets, last_good=False)
    by_set: dict[tuple[str, tuple[int, ...]], dict[int, str]] = {}
    for rank, theirs in by_rank.items():
        for label, (ranks, has, _) in theirs.items():
            what = f"{'something' if has else 'nothing'} to compare"
            by_set.setdefault((label, ranks), {})[rank] = what
    whole = {of: values for of, values in by_set.items() if len(values) == len(of[1])}
    findings = [
        f for (label, _), values in sorted(whole.items()) for f in findings_of_values("layout", values, name=label)
    ]
    if not findings:
        # The ranks that are in sets which not all of their ranks know, or see such a set as an axis of a mesh.
        broken = by_set.keys() - whole.keys()
        labels, concerned = {label for label, _ in broken}, {rank for _, ranks in broken for rank in ranks}
        views: dict[int, list[Any]] = {rank: [] for rank in concerned}
        for rank, theirs in by_rank.items():
            for label, (ranks, _, view) in theirs.items():
                if label in labels and (view or rank in concerned):
                    views.setdefault(rank, []).append((label, view or ranks))
        findings = findings_of_values("layout", {rank: repr(view) for rank, view in views.items()})
    return from_senders(findings, senders)


def _errors(anchor: SyncGroup, mine: Holdings, error: Exception | None) -> list[Finding]:
    """Return a finding for each rank that could not build its part. COLLECTIVE. ``error``: this rank's, or None."""
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
    """Return findings for the words that differ. COLLECTIVE, unless ``names`` is empty.

    Args:
        words: this rank's values.
        names: of the words that differ, the same on all ranks.
    """
    if not names:
        return []
    by_rank, senders = mine.gather(anchor, {name: repr(words[name]) for name in names})
    findings = []
    for name in names:
        findings += findings_of_values(name, {rank: of[name] for rank, of in by_rank.items()})
    return from_senders(findings, senders)

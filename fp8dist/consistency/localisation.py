"""Tiers 2 and 3: which things differ, on which ranks, and the first differing element. All COLLECTIVE over one set's
group."""

from __future__ import annotations

import hashlib
import re
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fp8dist.consistency.contents import Digester, Field, Key
from fp8dist.consistency.differences import block_of, compare_block, first_differing_block
from fp8dist.consistency.findings import (
    MORE,
    Differing,
    Seen,
    explained,
    findings_of_values,
    is_odd,
    layout_findings,
    named_only,
    reference_of,
)
from fp8dist.consistency.inventory import Holdings, ReplicaSet
from fp8dist.consistency.report import sides_of
from fp8dist.divergence import Finding, Participant
from fp8dist.sync.groups import SyncGroup
from fp8dist_kernels.reference.content import as_bytes

__all__ = ["localise_set"]

MAX_DIFFERING = 1024
"""Differing things whose ranks are told apart; the rest is counted."""

MAX_GATHERED = 1 << 20
"""Digests that a rank takes from all others together: on more than 1024 ranks fewer things are told apart."""

MAX_LAYOUTS = 8
"""Distinct layouts that are shown to each other."""

MAX_EXPLAINED = 16
"""Differing things of which the first differing element is fetched."""


def localise_set(
    s: ReplicaSet, digests: Tensor, mine: Holdings, everything: bool
) -> tuple[list[Finding], list[Differing]]:
    """Findings, and what differs, the same on all ranks. COLLECTIVE over the set's group.

    ``everything``: tell all differing things apart, not only the first ``MAX_DIFFERING``, or fewer on many ranks.
    """
    group, keys = s.group, s.keys
    layout = hashlib.sha256(repr(sorted(keys)).encode()).hexdigest()
    told: list[_Told] = group.gather(_Told(mine.participant(group), layout, mine.step, mine.last_good_step))
    layouts = sides_of({t.participant.rank: t.layout for t in told})
    findings: list[Finding] = []
    common = sorted(keys)
    if len(layouts) > 1:
        findings, common = _compare_layouts(group, common, layouts)
    common.sort(key=_as_people_count)
    place = {key: i for i, key in enumerate(keys)}
    at_most = len(common) if everything else _told_apart(group.size)
    differing, more = _differing_things(group, [place[key] for key in common], common, digests, at_most)
    if differing:
        findings += _explain(s, differing)
    ranks = tuple(sorted(group.ranks))
    if more:
        findings.append(Finding(0, "parameter", MORE, ranks, None, detail=f"{more} more things differ"))
    if not findings:
        detail = "the digests differed, and did not when they were compared one by one"
        findings.append(Finding(0, "error", "it changed during the check", ranks, None, detail=detail))
    step = max(t.step for t in told)
    good = min((t.last_good_step for t in told if t.last_good_step is not None), default=None)
    everyone = [t.participant for t in told]
    return [replace(f, step=step, last_good_step=good).located(everyone) for f in findings], differing


def _told_apart(ranks: int) -> int:
    """Of so many differing things it is found out which ranks have what."""
    return min(MAX_DIFFERING, max(MAX_EXPLAINED, MAX_GATHERED // ranks))


def _as_people_count(key: Key) -> list[Any]:
    """Layer 2 before layer 10: the first few things are looked into."""
    return [int(part) if part.isdigit() else part for part in re.split("([0-9]+)", key.name)] + [key.kind]


class _Told(NamedTuple):
    """What ranks tell each other first."""

    participant: Participant
    layout: str
    step: int
    last_good_step: int | None


def _compare_layouts(
    group: SyncGroup, mine: list[Key], layouts: tuple[tuple[int, ...], ...]
) -> tuple[list[Finding], list[Key]]:
    """Findings for what only some ranks hold or hold in another shape or dtype, and the keys that all have. COLLECTIVE.

    One rank of each distinct layout shows it. If there are too many to show, nothing is common.
    """
    if len(layouts) > MAX_LAYOUTS:
        values = {rank: f"layout {i}" for i, side in enumerate(layouts) for rank in side}
        found = findings_of_values("layout", values)
        return [replace(f, name="names, shapes, dtypes", detail=f"{len(layouts)} different layouts") for f in found], []
    shown = []
    for side in layouts:
        box: list[Any] = [mine if group.rank == side[0] else None]
        dist.broadcast_object_list(box, src=side[0], group=group.process_group)
        shown.append((side, {(key.name, key.kind): key for key in box[0]}))
    common = set(shown[0][1].values()).intersection(*(keys.values() for _, keys in shown[1:]))
    return layout_findings(shown), sorted(common)


def _differing_things(
    group: SyncGroup, order: list[int], keys: list[Key], digests: Tensor, at_most: int
) -> tuple[list[Differing], int]:
    """(what differs, as many as are told apart; how many more). COLLECTIVE.

    An all-reduce finds the things, so only the digests of those have to be gathered.
    """
    mine = digests[order]
    pairs = torch.stack([mine, ~mine]).to(group.device)
    dist.all_reduce(pairs, dist.ReduceOp.MAX, group=group.process_group)
    places = (pairs[0] != ~pairs[1]).any(1).cpu().nonzero().flatten().tolist()
    chosen = mine[places[:at_most]].to(group.device)
    gathered = [torch.empty_like(chosen) for _ in group.ranks]
    dist.all_gather(gathered, chosen, group=group.process_group)
    told = group.in_order([part.tolist() for part in gathered])
    differing = []
    for i, place in enumerate(places[:at_most]):
        sides = sides_of({rank: tuple(rows[i]) for rank, rows in zip(group.ranks, told)})
        differing.append(Differing(order[place], keys[place], sides))
    return differing, len(places) - len(differing)


# Tier 3 ------------------------------------------------------------------------------------------------


class _Want(NamedTuple):
    """A block that some odd rank wants to compare with the reference's."""

    thing: int
    field: int
    block: int


def _explain(s: ReplicaSet, differing: list[Differing]) -> list[Finding]:
    """Findings for these, with the first differing elements of the first few. COLLECTIVE."""
    group, few = s.group, differing[:MAX_EXPLAINED]
    fields: list[list[Field]] = []
    leaves: list[list[Tensor]] = []
    error = ""
    try:
        digester = Digester()
        fields = [s.fields(thing.place) for thing in few]
        leaves = [[digester.leaves(f.tensor).to(group.device) for f in part] for part in fields]
    except Exception as raised:
        error = f"rank {group.rank}: {type(raised).__name__}: {raised}"
    errors = [text for text in group.gather(error) if text]
    if errors:
        return [finding for thing in differing for finding in named_only(thing, errors[0])]
    firsts = _exchange_leaves(group, few, leaves)
    wants = sorted({want for part in group.gather(list(firsts)) for want in part})
    seen: dict[tuple[int, int], list[Seen]] = {}
    for rank, part in zip(group.ranks, group.gather(_exchange_blocks(group, few, fields, leaves, wants, firsts))):
        for one in part:
            seen.setdefault((one.thing, rank), []).append(one)
    kinds = [{i: f for i, f in enumerate(part)} for part in fields]
    findings = []
    for i, thing in enumerate(few):
        by_rank = {rank: seen.get((i, rank), []) for rank in group.ranks}
        findings += explained(thing, kinds[i], by_rank) or named_only(thing, "")
    return findings + [finding for thing in differing[MAX_EXPLAINED:] for finding in named_only(thing, "")]


def _exchange_leaves(group: SyncGroup, few: list[Differing], leaves: list[list[Tensor]]) -> dict[_Want, int]:
    """The blocks that this rank wants to see, the first of each field that differs, and how many of the field do.

    COLLECTIVE: a broadcast per reference rank.
    """
    firsts: dict[_Want, int] = {}
    for source in sorted({reference_of(thing) for thing in few}):
        own = [i for i, thing in enumerate(few) if reference_of(thing) == source]
        places = [(i, j) for i in own for j in range(len(leaves[i]))]
        theirs = torch.cat([leaves[i][j] for i, j in places])
        dist.broadcast(theirs, src=source, group=group.process_group)
        for (i, j), part in zip(places, theirs.split([len(leaves[i][j]) for i, j in places])):
            first = first_differing_block(leaves[i][j], part)
            if first is not None and is_odd(group.rank, few[i]):
                firsts[_Want(i, j, first[0])] = first[1]
    return firsts


def _exchange_blocks(
    group: SyncGroup,
    few: list[Differing],
    fields: list[list[Field]],
    leaves: list[list[Tensor]],
    wants: list[_Want],
    firsts: dict[_Want, int],
) -> list[Seen]:
    """What this rank sees in the reference's blocks. COLLECTIVE: a broadcast per block."""
    seen = []
    for want in wants:
        field = fields[want.thing][want.field]
        mine = block_of(as_bytes(field.tensor), want.block).to(group.device)
        theirs = mine.clone()
        dist.broadcast(theirs, src=reference_of(few[want.thing]), group=group.process_group)
        if want not in firsts:  # Another rank's first block.
            continue
        of_blocks = len(leaves[want.thing][want.field])
        difference = compare_block(mine.cpu(), theirs.cpu(), field.tensor.dtype, want.block, firsts[want], of_blocks)
        if difference is not None:
            seen.append(Seen(want.thing, want.field, field.locate(difference.place), difference))
    return seen

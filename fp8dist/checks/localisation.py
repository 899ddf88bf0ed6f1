"""Tiers 2 and 3: find the things that differ, their ranks, and the first differing element. COLLECTIVE.

What ranks hold is compared over the group of its set. What they have computed is compared within each kind of rank, of
which there may be several. No process group is made for a kind: that would need all ranks of the job. So all ranks of
the check take part in each collective.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fp8dist.checks.contents import Digester, Field, Key
from fp8dist.checks.differences import block_of, compare_block, first_differing_block
from fp8dist.checks.findings import (
    Differing,
    Seen,
    explained,
    findings_of_values,
    from_senders,
    is_odd,
    layout_findings,
    named_only,
    reference_of,
)
from fp8dist.checks.inventory import Holdings, ReplicaSet
from fp8dist.checks.report import sides_of
from fp8dist.common.divergence import ALL_NAMES, MORE, Finding
from fp8dist.state.groups import SyncGroup
from fp8dist_kernels.reference.content import as_bytes

__all__ = ["localise_computed", "localise_set", "localise_things"]

MAX_DIFFERING = 1024
"""Differing things whose odd ranks are determined. The rest is counted."""

MAX_GATHERED = 1 << 20
"""Digests that a rank gathers from all ranks together. So on more than 1024 ranks, fewer things are gathered."""

MAX_LAYOUTS = 8
"""Distinct layouts that the ranks send to each other."""

MAX_EXPLAINED = 16
"""Differing things whose first differing element is searched for."""

_ONLY_DIGEST = "all elements are equal in host memory: the device's digest of them was wrong, or its copy to the host"


def localise_set(
    s: ReplicaSet, digests: Tensor, mine: Holdings, everything: bool
) -> tuple[list[Finding], list[Differing]]:
    """Return (findings, differing things), the same on all ranks. COLLECTIVE over the set's group.

    ``everything``: determine the odd ranks of all differing things, not only of the first ``MAX_DIFFERING`` or fewer.
    """
    group, keys = s.group, s.keys
    layout = hashlib.sha256(repr(sorted(keys)).encode()).hexdigest()
    by_rank, senders = mine.gather(group, layout)
    layouts = sides_of(by_rank)
    findings: list[Finding] = []
    common = sorted(keys)
    if len(layouts) > 1:
        findings, common = _compare_layouts(group, common, layouts)
    found, differing = localise_things(s, digests, common, everything)
    findings += found
    if not findings:
        detail = "the sum of the digests differed, but the digests of all tensors and slots are equal"
        ranks = tuple(sorted(group.ranks))
        findings.append(Finding(0, "error", "it changed during the check", ranks, None, detail=detail))
    return from_senders(findings, senders), differing


def localise_things(
    s: ReplicaSet, digests: Tensor, common: Sequence[Key], everything: bool = False, kind: str = "parameter"
) -> tuple[list[Finding], list[Differing]]:
    """Return (findings, differing things) of a set, without steps and places. COLLECTIVE over its group.

    Args:
        common: the things that all its ranks hold.
        everything: see ``localise_set``.
        kind: of a finding that counts the things that are not named.
    """
    group, place = s.group, {key: i for i, key in enumerate(s.keys)}
    ordered = sorted(common, key=_as_people_count)
    at_most = len(ordered) if everything else _at_most(group.size)
    differing, more = _differing_things(group, [place[key] for key in ordered], ordered, digests, at_most)
    findings = list(chain.from_iterable(_explain(group, s, differing)))
    if more:
        ranks = tuple(sorted(group.ranks))
        findings.append(Finding(0, kind, MORE, ranks, None, detail=f"{more} more things differ"))
    return findings, differing


def _at_most(ranks: int) -> int:
    """Return the number of differing things whose odd ranks are determined."""
    return min(MAX_DIFFERING, max(MAX_EXPLAINED, MAX_GATHERED // ranks))


def _as_people_count(key: Key) -> list[Any]:
    """Return a sort key that puts layer 2 before layer 10. The first few things are explained in full."""
    return [int(part) if part.isdigit() else part for part in re.split("([0-9]+)", key.name)] + [key.kind]


def _compare_layouts(
    group: SyncGroup, mine: list[Key], layouts: tuple[tuple[int, ...], ...]
) -> tuple[list[Finding], list[Key]]:
    """Return (findings for things that some ranks lack or hold with other shapes or dtypes, common keys). COLLECTIVE.

    One rank of each distinct layout broadcasts its keys. With more than ``MAX_LAYOUTS`` layouts, no key is common.
    """
    if len(layouts) > MAX_LAYOUTS:
        values = {rank: f"layout {i}" for i, side in enumerate(layouts) for rank in side}
        found = findings_of_values("layout", values)
        detail = f"{len(layouts)} different layouts"
        return [replace(f, name=ALL_NAMES, detail=detail, values=()) for f in found], []
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
    """Return (the first ``at_most`` differing things, number of further ones). COLLECTIVE.

    An all-reduce finds the things that differ, so the ranks gather only the digests of these.
    """
    mine = digests[order]
    pairs = torch.stack([mine, ~mine]).to(group.device)
    dist.all_reduce(pairs, dist.ReduceOp.MAX, group=group.process_group)
    places = (pairs[0] != ~pairs[1]).any(1).cpu().nonzero().flatten().tolist()
    chosen = mine[places[:at_most]].to(group.device)
    gathered = [torch.empty_like(chosen) for _ in group.ranks]
    dist.all_gather(gathered, chosen, group=group.process_group)
    by_rank = group.in_order([part.tolist() for part in gathered])
    differing = []
    for i, place in enumerate(places[:at_most]):
        sides = sides_of({rank: tuple(rows[i]) for rank, rows in zip(group.ranks, by_rank)})
        differing.append(Differing(order[place], keys[place], sides))
    return differing, len(places) - len(differing)


def localise_computed(
    anchor: SyncGroup, mine: Holdings, computed: ReplicaSet, digests: Tensor, kinds: Sequence[tuple[int, ...]]
) -> list[Finding]:
    """Return the findings about all kinds, the same on all ranks. COLLECTIVE over ``anchor``.

    Args:
        computed: what this rank has computed, whose fields are in host memory, with its ``digests``.
        kinds: the ranks of each kind within which ranks differ.
    """
    keys = computed.keys if any(anchor.rank == kind[0] for kind in kinds) else []
    by_rank, senders = mine.gather(anchor, (keys, digests.tolist()))
    differing = []
    for kind in kinds:
        for place, key in enumerate(by_rank[kind[0]][0]):  # The first rank of a kind has sent the keys.
            sides = sides_of({rank: tuple(by_rank[rank][1][place]) for rank in kind})
            if len(sides) > 1:
                differing.append(Differing(place, key, sides))
    findings: list[Finding] = []
    for thing, about in zip(differing, _explain(anchor, computed, differing, _ONLY_DIGEST)):
        ranks = {rank for side in thing.sides for rank in side}
        findings += from_senders(about, [sender for sender in senders if sender.participant.rank in ranks])
    return findings


# Tier 3 ------------------------------------------------------------------------------------------------


class _Want(NamedTuple):
    """A block that an odd rank wants to compare with the reference's."""

    thing: int
    field: int
    block: int


def _explain(group: SyncGroup, s: ReplicaSet, differing: Sequence[Differing], unseen: str = "") -> list[list[Finding]]:
    """Return the findings about each of these things, with the first differing elements of the first few. COLLECTIVE
    over ``group``, also for ranks that do not hold a thing.

    Args:
        unseen: what is said of a thing in which no element differs.
    """
    if not differing:
        return []
    few = differing[:MAX_EXPLAINED]
    own: dict[int, list[Field]] = {}
    leaves: dict[int, list[Tensor]] = {}  # Of each field.
    error = ""
    try:
        digester = Digester()
        for t, thing in enumerate(few):
            if any(group.rank in side for side in thing.sides):
                own[t] = s.fields(thing.place)
                leaves[t] = [digester.leaves(field.tensor).cpu() for field in own[t]]
    except Exception as raised:
        error = f"rank {group.rank}: {type(raised).__name__}: {raised}"
    errors = [text for text in group.gather(error) if text]
    if errors:
        return [named_only(thing, errors[0]) for thing in differing]
    firsts = _first_blocks(group.rank, few, leaves, _from_references(group, few, leaves))
    wants = sorted({want for part in group.gather(list(firsts)) for want in part})
    blocks: dict[int, dict[_Want, Tensor]] = {t: {} for t in own}
    for want in wants:
        if want in firsts or reference_of(few[want.thing]) == group.rank:
            block = block_of(as_bytes(own[want.thing][want.field].tensor), want.block)
            blocks[want.thing][want] = block.cpu().clone()  # A view would be sent with all that it is a view of.
    right = _from_references(group, few, blocks)
    mine = []
    for want, differ in firsts.items():
        t, j, place = want
        field, of_blocks = own[t][j], len(leaves[t][j])
        difference = compare_block(blocks[t][want], right[t][want], field.tensor.dtype, place, differ, of_blocks)
        if difference is not None:
            mine.append(Seen(t, j, field.at(difference.place), difference, field.name, field.kind))
    seen = dict(zip(group.ranks, group.gather(mine)))
    found = []
    for t, thing in enumerate(few):
        by_rank = {rank: [one for one in part if one.thing == t] for rank, part in seen.items()}
        found.append(explained(thing, by_rank) if any(by_rank.values()) else named_only(thing, unseen))
    return found + [named_only(thing, "") for thing in differing[MAX_EXPLAINED:]]


def _first_blocks(
    rank: int, few: Sequence[Differing], leaves: Mapping[int, list[Tensor]], expected: Mapping[int, list[Tensor]]
) -> dict[_Want, int]:
    """Return the blocks that this rank wants, the first that differs of each field, with their field's number of
    differing blocks."""
    firsts = {}
    for t in leaves:
        for j, (mine, theirs) in enumerate(zip(leaves[t], expected[t])):
            first = first_differing_block(mine, theirs)
            if first is not None and is_odd(rank, few[t]):
                firsts[_Want(t, j, first[0])] = first[1]
    return firsts


def _from_references(group: SyncGroup, few: Sequence[Differing], mine: Mapping[int, Any]) -> dict[int, Any]:
    """Return what the reference rank of each thing has in ``mine``. COLLECTIVE: a broadcast per reference rank."""
    found: dict[int, Any] = {}
    for source in sorted({reference_of(thing) for thing in few}):
        own = {t: mine[t] for t, thing in enumerate(few) if reference_of(thing) == source and t in mine}
        box: list[Any] = [own if group.rank == source else None]
        dist.broadcast_object_list(box, src=source, group=group.process_group)
        found.update(box[0])
    return found

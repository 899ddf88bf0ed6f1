"""Tiers 2 and 3: find the things that differ, their ranks, and the first differing element. COLLECTIVE over a set's
group."""

from __future__ import annotations

import hashlib
import re
from dataclasses import replace
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
from fp8dist.checks.report import Sender, sides_of
from fp8dist.common.divergence import ALL_NAMES, MORE, Finding
from fp8dist.state.groups import SyncGroup
from fp8dist_kernels.reference.content import as_bytes

__all__ = ["localise_set"]

MAX_DIFFERING = 1024
"""Differing things whose odd ranks are determined. The rest is counted."""

MAX_GATHERED = 1 << 20
"""Digests that a rank gathers from all ranks together. So on more than 1024 ranks, fewer things are gathered."""

MAX_LAYOUTS = 8
"""Distinct layouts that the ranks send to each other."""

MAX_EXPLAINED = 16
"""Differing things whose first differing element is searched for."""


def localise_set(
    s: ReplicaSet, digests: Tensor, mine: Holdings, everything: bool
) -> tuple[list[Finding], list[Differing]]:
    """Return (findings, differing things), the same on all ranks. COLLECTIVE over the set's group.

    ``everything``: determine the odd ranks of all differing things, not only of the first ``MAX_DIFFERING`` or fewer.
    """
    group, keys = s.group, s.keys
    layout = hashlib.sha256(repr(sorted(keys)).encode()).hexdigest()
    gathered: list[tuple[Sender, str]] = group.gather((mine.sender(group), layout))
    layouts = sides_of({sender.participant.rank: of for sender, of in gathered})
    findings: list[Finding] = []
    common = sorted(keys)
    if len(layouts) > 1:
        findings, common = _compare_layouts(group, common, layouts)
    common.sort(key=_as_people_count)
    place = {key: i for i, key in enumerate(keys)}
    at_most = len(common) if everything else _at_most(group.size)
    differing, more = _differing_things(group, [place[key] for key in common], common, digests, at_most)
    if differing:
        findings += _explain(s, differing)
    ranks = tuple(sorted(group.ranks))
    if more:
        findings.append(Finding(0, "parameter", MORE, ranks, None, detail=f"{more} more things differ"))
    if not findings:
        detail = "the sum of the digests differed, but the digests of all tensors and slots are equal"
        findings.append(Finding(0, "error", "it changed during the check", ranks, None, detail=detail))
    return from_senders(findings, [sender for sender, _ in gathered]), differing


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


# Tier 3 ------------------------------------------------------------------------------------------------


class _Want(NamedTuple):
    """A block that an odd rank wants to compare with the reference's."""

    thing: int
    field: int
    block: int


def _explain(s: ReplicaSet, differing: list[Differing]) -> list[Finding]:
    """Return findings for these things, with the first differing elements of the first few. COLLECTIVE."""
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
    seen = dict(zip(group.ranks, group.gather(_exchange_blocks(group, few, fields, leaves, wants, firsts))))
    kinds = [{i: f for i, f in enumerate(part)} for part in fields]
    findings = []
    for i, thing in enumerate(few):
        by_rank = {rank: [one for one in part if one.thing == i] for rank, part in seen.items()}
        findings += explained(thing, kinds[i], by_rank) or named_only(thing, "")
    return findings + [finding for thing in differing[MAX_EXPLAINED:] for finding in named_only(thing, "")]


def _exchange_leaves(group: SyncGroup, few: list[Differing], leaves: list[list[Tensor]]) -> dict[_Want, int]:
    """Return the blocks that this rank wants (the first that differs of each field), with their field's number of
    differing blocks.

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
    """Return the differences between this rank's and the reference's blocks. COLLECTIVE: a broadcast per block."""
    seen = []
    for want in wants:
        field = fields[want.thing][want.field]
        mine = block_of(as_bytes(field.tensor), want.block).to(group.device)
        theirs = mine.clone()
        dist.broadcast(theirs, src=reference_of(few[want.thing]), group=group.process_group)
        if want not in firsts:  # Another rank wanted it.
            continue
        of_blocks = len(leaves[want.thing][want.field])
        difference = compare_block(mine.cpu(), theirs.cpu(), field.tensor.dtype, want.block, firsts[want], of_blocks)
        if difference is not None:
            seen.append(Seen(want.thing, want.field, field.locate(difference.place), difference))
    return seen

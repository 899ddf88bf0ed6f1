"""Tiers 2 and 3 of a check: find the things that differ, the ranks, and the first differing element. COLLECTIVE.

A *thing* has one digest: a parameter, a slot of FP8 state, a result of a computation. Its *sides* are the sets of ranks
with equal digests, the largest first. The *reference* is the lowest rank of the first side; ranks of other sides are
*odd*. A thing may have several *fields* (tensors), whose *leaves* are digests of blocks of 256 KiB.

A ``ReplicaSet`` is compared over its own group. Results of computations are compared between ranks of one *kind* (equal
hardware, versions and settings). A kind has no process group, because all ranks of the job would have to take part in
making one. So for these, all ranks of the check take part in each collective.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping, Sequence
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

MAX_DIFFERING = 1024
"""The most differing things whose odd ranks are found. Further things are only counted."""

MAX_GATHERED = 1 << 20
"""The most digests that one rank gathers from all ranks together. On more than 1024 ranks it allows fewer than
``MAX_DIFFERING`` things."""

MAX_LAYOUTS = 8
"""The most distinct layouts (lists of keys) that ranks send to each other."""

MAX_EXPLAINED = 16
"""The most differing things whose first differing element is searched for."""

_ONLY_DIGEST = "all elements are equal in host memory: the device's digest of them was wrong, or its copy to the host"


def localise_set(
    s: ReplicaSet, digests: Tensor, mine: Holdings, everything: bool
) -> tuple[list[Finding], list[Differing]]:
    """Find what differs in a set. COLLECTIVE over the set's group.

    Args:
        digests: of this rank's things, int64[len(s.keys), 2].
        mine: what this rank brought to the check, for its step and its name in findings.
        everything: find the odd ranks of all differing things, not only of the first ``MAX_DIFFERING`` or fewer.

    Returns:
        The findings and the differing things, both the same on all ranks except for ``Differing.place``.
    """
    group, keys = s.group, s.keys
    layout = hashlib.sha256(repr(sorted(keys)).encode()).hexdigest()
    by_rank, senders = mine.gather(group, layout)
    layouts = sides_of(by_rank)
    findings: list[Finding] = []
    common = sorted(keys)
    if len(layouts) > 1:
        findings, common = _compare_layouts(group, common, layouts)
    late = {name for sender in senders for name in sender.late}
    found, differing = localise_things(s, digests, common, everything, late=late)
    findings += found
    if not findings:
        detail = "the sum of the digests differed, but the digests of all tensors and slots are equal"
        ranks = tuple(sorted(group.ranks))
        findings.append(Finding(0, "error", "it changed during the check", ranks, None, detail=detail))
    return from_senders(findings, senders), differing


def localise_things(
    s: ReplicaSet,
    digests: Tensor,
    common: Sequence[Key],
    everything: bool = False,
    kind: str = "parameter",
    late: Collection[str] = (),
) -> tuple[list[Finding], list[Differing]]:
    """Find what differs among the things that all ranks of a set hold. COLLECTIVE over its group.

    Args:
        digests, everything: see ``localise_set``.
        common: the keys of these things.
        kind: of the finding that counts the things that are not named.
        late: names of parameters that DDP does not reduce. They explain the others, and come first.

    Returns:
        The findings, without steps, hosts and mesh coordinates; and the differing things.
    """
    group, place = s.group, {key: i for i, key in enumerate(s.keys)}
    ordered = sorted(common, key=lambda key: (key.name not in late, _as_people_count(key)))
    at_most = len(ordered) if everything else _at_most(group.size)
    differing, more = _differing_things(group, [place[key] for key in ordered], ordered, digests, at_most)
    findings = list(chain.from_iterable(_explain(group, s, differing)))
    if more:
        ranks = tuple(sorted(group.ranks))
        findings.append(Finding(0, kind, MORE, ranks, None, detail=f"{more} more things differ"))
    return findings, differing


def _at_most(ranks: int) -> int:
    """Return how many differing things are gathered from this number of ranks."""
    return min(MAX_DIFFERING, max(MAX_EXPLAINED, MAX_GATHERED // ranks))


def _as_people_count(key: Key) -> list[Any]:
    """Return a sort key that puts layer 2 before layer 10. Only the first things in this order are explained."""
    return [int(part) if part.isdigit() else part for part in re.split("([0-9]+)", key.name)] + [key.kind]


def _compare_layouts(
    group: SyncGroup, mine: list[Key], layouts: tuple[tuple[int, ...], ...]
) -> tuple[list[Finding], list[Key]]:
    """Find things that only some ranks hold, or hold with another shape or dtype. COLLECTIVE: one rank of each distinct
    layout broadcasts its keys.

    Args:
        mine: this rank's keys.
        layouts: the ranks of each distinct layout.

    Returns:
        The findings, and the keys that all ranks have. With more than ``MAX_LAYOUTS`` layouts: one finding per layout,
        without names, and no keys.
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
    """Find the things with different digests, and who agrees with whom. COLLECTIVE: an all-reduce finds the things, so
    the ranks gather only the digests of these.

    Args:
        order: this rank's indices of the things, in an order that is the same on all ranks.
        keys: of the things, in this order.
        at_most: the most things that are gathered.

    Returns:
        These differing things, and the number of further ones.
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
    """Find the computations whose results differ between ranks of one kind. COLLECTIVE over ``anchor``.

    Args:
        computed: what this rank has computed; the results are in host memory. ``digests``: of the results.
        kinds: the ranks of each kind in which results differ.

    Returns:
        The findings about all kinds, the same on all ranks.
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


def localise_tied(s: ReplicaSet, digests: Tensor, mine: Holdings) -> list[Finding]:
    """Find what differs in a set that only some ranks of its group hold, under several names. COLLECTIVE over the
    group. For the arguments see ``localise_set``. No finding has a reference rank, so no repair copies from it."""
    by_rank, senders = mine.gather(s.group, tuple(s.keys))
    held = {rank: keys for rank, keys in by_rank.items() if keys}
    layouts = sides_of(held)
    if len(layouts) > 1:
        shown = [(side, {(key.name, key.kind): key for key in held[side[0]]}) for side in layouts]
        return from_senders(layout_findings(shown), senders)
    return [replace(f, reference_rank=None) for f in localise_computed(s.group, mine, s, digests, layouts)]


# Tier 3 ------------------------------------------------------------------------------------------------


class _Want(NamedTuple):
    """A block that an odd rank asks the reference for: index of the thing, of its field, and of the block in it."""

    thing: int
    field: int
    block: int


def _explain(group: SyncGroup, s: ReplicaSet, differing: Sequence[Differing], unseen: str = "") -> list[list[Finding]]:
    """Return the findings about each of these things, with the first differing element of the first
    ``MAX_EXPLAINED``. COLLECTIVE over ``group``, also for ranks that do not hold a thing.

    One rank of each odd side compares its leaves with the reference's, and gets the first block that differs.

    Args:
        differing: things whose ranks are all in ``group``; the same on all ranks, except for ``Differing.place``.
        unseen: the detail of a finding about a thing in which no element differs.
    """
    if not differing:
        return []
    few = differing[:MAX_EXPLAINED]
    own: dict[int, list[Field]] = {}  # Of the things that this rank holds, by index in ``few``.
    leaves: dict[int, list[Tensor]] = {}  # The same: of each field.
    error = ""  # A rank that cannot read its tensors must not leave the collectives.
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
            blocks[want.thing][want] = block.cpu().clone()  # Pickle would send a view's whole storage.
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
    """Return the blocks that this rank asks for, the first that differs in each field, each with the number of blocks
    that differ in the field. Local.

    Args:
        leaves: of this rank's fields, by thing. ``expected``: of the reference's.
    """
    firsts = {}
    for t in leaves:
        for j, (mine, theirs) in enumerate(zip(leaves[t], expected[t])):
            first = first_differing_block(mine, theirs)
            if first is not None and is_odd(rank, few[t]):
                firsts[_Want(t, j, first[0])] = first[1]
    return firsts


def _from_references(group: SyncGroup, few: Sequence[Differing], mine: Mapping[int, Any]) -> dict[int, Any]:
    """Return the values that the reference rank of each thing has in ``mine``, by index of the thing in ``few``.
    COLLECTIVE: one broadcast per reference rank."""
    found: dict[int, Any] = {}
    for source in sorted({reference_of(thing) for thing in few}):
        own = {t: mine[t] for t, thing in enumerate(few) if reference_of(thing) == source and t in mine}
        box: list[Any] = [own if group.rank == source else None]
        dist.broadcast_object_list(box, src=source, group=group.process_group)
        found.update(box[0])
    return found

"""Tiers 2 and 3 for what ranks have computed: which results differ, on which ranks, and the first differing element.

Ranks are compared only with others of their kind, and there may be several kinds. No process group is made for a kind:
that would need all ranks of the job. So all ranks of the check take part in each collective. COLLECTIVE.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fp8dist.checks.computations import KIND
from fp8dist.checks.contents import Digester, Field, Key
from fp8dist.checks.differences import block_of, compare_block, first_differing_block
from fp8dist.checks.findings import Differing, Seen, explained, from_senders, is_odd, named_only, reference_of
from fp8dist.checks.inventory import Holdings, ReplicaSet
from fp8dist.checks.localisation import MAX_EXPLAINED
from fp8dist.checks.report import Sender, sides_of
from fp8dist.common.divergence import Finding
from fp8dist.state.groups import SyncGroup
from fp8dist_kernels.reference.content import as_bytes

__all__ = ["localise_computed"]

_ONLY_DIGEST = "all elements are equal in host memory: the device's digest of them was wrong, or its copy to the host"


class _Part(NamedTuple):
    """What each rank sends first. ``keys``: from the first rank of a kind only."""

    sender: Sender
    keys: list[Key]
    digests: list[list[int]]


def localise_computed(
    anchor: SyncGroup, mine: Holdings, computed: ReplicaSet, digests: Tensor, kinds: Sequence[tuple[int, ...]]
) -> list[Finding]:
    """Return the findings about all kinds, the same on all ranks. COLLECTIVE over ``anchor``.

    Args:
        computed: what this rank has computed, whose fields are in host memory, with its ``digests``.
        kinds: the ranks of each kind within which ranks differ.
    """
    keys = computed.keys if any(anchor.rank == kind[0] for kind in kinds) else []
    part = _Part(mine.sender(anchor), keys, digests.tolist())
    by_rank: dict[int, _Part] = dict(zip(anchor.ranks, anchor.gather(part)))
    differing = []
    for kind in kinds:
        for place, key in enumerate(by_rank[kind[0]].keys):
            sides = sides_of({rank: tuple(by_rank[rank].digests[place]) for rank in kind})
            if len(sides) > 1:
                differing.append(Differing(place, key, sides))
    few, findings = differing[:MAX_EXPLAINED], []
    details = _explain(anchor, computed, few)
    details += [named_only(thing, "") for thing in differing[MAX_EXPLAINED:]]
    for thing, about in zip(differing, details):
        ranks = [rank for side in thing.sides for rank in side]
        findings += from_senders(about, [by_rank[rank].sender for rank in ranks])
    return findings


def _explain(anchor: SyncGroup, computed: ReplicaSet, few: list[Differing]) -> list[list[Finding]]:
    """Return the findings about each of these things, with the first differing elements. COLLECTIVE."""
    digester = Digester()
    own = {
        t: computed.fields(thing.place)
        for t, thing in enumerate(few)
        if any(anchor.rank in side for side in thing.sides)
    }
    leaves = {t: [(field.name, digester.leaves(field.tensor)) for field in fields] for t, fields in own.items()}
    expected = _from_references(anchor, few, leaves)
    wants: dict[tuple[int, int, int], int] = {}  # Thing, field and block, with the number of differing blocks.
    for t in own:
        for j, ((_, ours), (_, theirs)) in enumerate(zip(leaves[t], expected[t])):
            first = first_differing_block(ours, theirs)
            if first is not None and is_odd(anchor.rank, few[t]):
                wants[t, j, first[0]] = first[1]
    asked = sorted({want for part in anchor.gather(list(wants)) for want in part})
    asked_of_own = {t: [(j, block) for thing, j, block in asked if thing == t] for t in own}
    contents = {
        t: {(j, block): block_of(as_bytes(own[t][j].tensor), block).clone() for j, block in places}
        for t, places in asked_of_own.items()
    }
    right = _from_references(anchor, few, contents)
    seen = dict(zip(anchor.ranks, anchor.gather(_seen(own, wants, contents, right, leaves))))
    found = []
    for t, thing in enumerate(few):
        fields = {j: Field(name, KIND, torch.empty(0), lambda place: ()) for j, (name, _) in enumerate(expected[t])}
        by_rank = {rank: [one for one in part if one.thing == t] for rank, part in seen.items()}
        found.append(explained(thing, fields, by_rank) if any(by_rank.values()) else named_only(thing, _ONLY_DIGEST))
    return found


def _seen(
    own: Mapping[int, list[Field]],
    wants: Mapping[tuple[int, int, int], int],
    contents: Mapping[int, Mapping[tuple[int, int], Tensor]],
    right: Mapping[int, Mapping[tuple[int, int], Tensor]],
    leaves: Mapping[int, Sequence[Any]],
) -> list[Seen]:
    """Return the first differences of this rank's blocks from the references'. Local."""
    found = []
    for (t, j, block), blocks in wants.items():
        field, of_blocks = own[t][j], len(leaves[t][j][1])
        blocks_of_both = contents[t][j, block], right[t][j, block]
        difference = compare_block(*blocks_of_both, field.tensor.dtype, block, blocks, of_blocks)
        if difference is not None:
            found.append(Seen(t, j, field.locate(difference.place), difference))
    return found


def _from_references(anchor: SyncGroup, few: list[Differing], mine: Mapping[int, Any]) -> dict[int, Any]:
    """Return what the reference rank of each thing has in ``mine``. COLLECTIVE: a broadcast per reference rank."""
    found: dict[int, Any] = {}
    for source in sorted({reference_of(thing) for thing in few}):
        own = {t: mine[t] for t, thing in enumerate(few) if reference_of(thing) == source and t in mine}
        box: list[Any] = [own if anchor.rank == source else None]
        dist.broadcast_object_list(box, src=source, group=anchor.process_group)
        found.update(box[0])
    return found

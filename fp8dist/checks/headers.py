"""Localise a failed sync header (tier 0): find the ranks and slots that differ.

A *sync* is the all-reduce that ends a step of one *arena* (the slots that a group of ranks shares). Its header compares
the ranks' manifests (set-ups), step counters, and a digest of all scales, but it does not show which ranks differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fp8dist.checks.contents import Content, Digester, Field, Key
from fp8dist.checks.findings import findings_of_values
from fp8dist.checks.inventory import ReplicaSet
from fp8dist.checks.localisation import localise_things
from fp8dist.checks.report import DivergenceReport, sides_of, split, this_rank
from fp8dist.common.divergence import Finding, Participant
from fp8dist.state.arena import Arena
from fp8dist.state.arena_sync import ArenaSync, Evidence
from fp8dist.state.groups import SyncGroup
from fp8dist.state.received import Received
from fp8dist_kernels.arrays import SATURATED
from fp8dist_kernels.header import WORD_MANIFEST, WORD_SCALE_LOW, WORD_STEP

_ARRAYS = ("scale", "inv_scale")
"""Rows of the scales that a rank sends."""


class Localisation(NamedTuple):
    """The result of ``localise``, the same on all ranks.

    ``step``: the highest step counter of the group. ``reference``: of one rank that the others may follow, the scales
    that it sent, float32[2, n], and its counters of saturated amaxes, int64[n]; None if no scale differs. A rank counts
    saturation by its own scales, so a damaged scale makes its counters wrong, too.
    """

    report: DivergenceReport
    step: int
    reference: tuple[Tensor, Tensor] | None


def localise(sync: ArenaSync, evidence: Evidence, differs: Sequence[str], good: int | None) -> Localisation:
    """Find the ranks and slots behind a failed header. COLLECTIVE over the sync's group.

    Compares the scales as the ranks sent them. The live scales are equal again by now, because all ranks computed new
    ones from the same amaxes.

    Args:
        evidence: what this rank sent.
        differs: what differs according to the header, of "manifest", "step" and "scale". Each gets a finding.
        good: the last step after which the ranks were equal, as far as this rank knows; None: unknown.
    """
    group = sync.group
    assert group is not None
    sent = evidence.scales
    me = this_rank(sync.arena.device, group.mesh_coordinates())
    everyone: list[_HeaderOf] = group.gather(_HeaderOf(me, tuple(evidence.words.tolist()), int(sync.arena.step), good))
    findings: list[Finding] = []
    reference = None
    for kind, place in (("manifest", WORD_MANIFEST), ("step", WORD_STEP)):
        findings += findings_of_values(kind, {e.participant.rank: repr(e.words[place]) for e in everyone})
    sides = sides_of({e.participant.rank: e.words[WORD_SCALE_LOW:] for e in everyone})
    if len(sides) > 1:
        scales = ReplicaSet("", group, (_SentScales(sync.arena, sent),))
        findings += localise_things(scales, scales.digests(Digester()), scales.keys, kind="scale")[0]
        majority, _ = split(sides)
        source = min(group.ranks) if majority is None else majority  # Without a majority any rank will do.
        reference = _from(source, group, sent), _from(source, group, sync.arena.counters[SATURATED])
    unexplained = set(differs) - {finding.kind for finding in findings}
    if sync.received is not None and "scale" in unexplained:  # Their digests were added to that of the scales.
        reported = evidence.received != sync.received.generation  # By an earlier sync, or by check_gradients().
        of_gradients = [] if reported else findings_of_gradients({tuple(group.ranks): sync.received}, group)
        findings += of_gradients
        if of_gradients or reported:
            unexplained.remove("scale")
    for kind in sorted(unexplained):
        detail = "the header differed, but the values that it was computed from are equal"
        findings.append(Finding(0, kind, kind, tuple(e.participant.rank for e in everyone), None, detail=detail))
    step = max(e.words[WORD_STEP] for e in everyone)
    known = [e.good for e in everyone if e.good is not None]  # A rank may have loaded a state alone.
    good = min(known) if len(known) == len(everyone) else None
    participants = [e.participant for e in everyone]
    located = [replace(f, step=step, last_good_step=good).located(participants) for f in findings]
    return Localisation(DivergenceReport(tuple(located)), max(e.now for e in everyone), reference)


def findings_of_gradients(received: Mapping[tuple[int, ...], Received], group: SyncGroup) -> list[Finding]:
    """Return which ranks have received other gradients than others of the same DDP module, by parameters. After a
    difference all are forgotten. COLLECTIVE over ``group``: one gather.

    Args:
        received: by DDP's ranks.
    """
    mine = {ranks: one.texts() for ranks, one in received.items()}
    gathered = dict(zip(group.ranks, group.gather((this_rank(group.device, group.mesh_coordinates()), mine))))
    found: list[Finding] = []
    for ranks in sorted({ranks for _, theirs in gathered.values() for ranks in theirs}):
        texts = {rank: gathered[rank][1].get(ranks, {}) for rank in ranks if rank in gathered}
        for name in sorted({name for theirs in texts.values() for name in theirs}):
            values = {rank: theirs.get(name, "nothing") for rank, theirs in texts.items()}
            found += findings_of_values("gradient", values, name=name)
    for one in received.values() if found else ():
        one.forget()
    return [one.located([participant for participant, _ in gathered.values()]) for one in found]


class _SentScales(Content):
    """The scale and inv_scale of each slot, as this rank sent them: float32[2, n]."""

    def __init__(self, arena: Arena, sent: Tensor) -> None:
        super().__init__([Key(str(spec.slot), "scale", (), "float32") for spec in arena.specs], sent.device)
        self._sent = sent

    def digests(self, digester: Digester) -> Tensor:
        """See ``Content``."""
        digest, pairs = digester.on(self.device), torch.stack([*self._sent], 1).view(torch.int64)
        return digest.digests(digest.row_leaves(pairs), [1] * len(self.keys), self.seeds).cpu()

    def fields(self, index: int) -> list[Field]:
        """See ``Content``."""
        return [Field(name, "scale", self._sent[row, index]) for row, name in enumerate(_ARRAYS)]


class _HeaderOf(NamedTuple):
    """What a rank sends of its header, so that all ranks see who differs."""

    participant: Participant
    words: tuple[int, ...]  # As sent by the launch that failed.
    now: int  # Step counter after the commit. CUDA graph replays may have advanced it further.
    good: int | None  # See ``localise``.


def _from(source: int, group: SyncGroup, tensor: Tensor) -> Tensor:
    """Return the values that rank ``source`` has in ``tensor``. COLLECTIVE: a broadcast."""
    theirs = tensor.to(group.device, copy=True)
    dist.broadcast(theirs, src=source, group=group.process_group)
    return theirs.to(tensor.device)

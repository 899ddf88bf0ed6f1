"""From a failed sync header to ranks and slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fp8dist.consistency.differences import ulp_distance
from fp8dist.consistency.findings import MORE, findings_of_values
from fp8dist.consistency.report import DivergenceReport, sides_of, split, this_rank
from fp8dist.divergence import Finding, Participant
from fp8dist.state.arena import SATURATED
from fp8dist.sync.arena_sync import ArenaSync, Evidence
from fp8dist.sync.groups import SyncGroup
from fp8dist_kernels.header import WORD_MANIFEST, WORD_SCALE_LOW, WORD_STEP

__all__ = ["Localisation", "localise"]

MAX_SLOTS_PER_RANK = 16
"""How many differing slots a rank tells the others of; the count is always told in full."""

_ARRAYS = ("scale", "inv_scale")


class Reference(NamedTuple):
    """What the reference rank has: the scales that it sent, float32[2, n], and its counters of saturated amaxes,
    int64[n], which each rank judged by its own scales."""

    scales: Tensor
    saturated: Tensor


@dataclass(frozen=True)
class Localisation:
    """What ``localise`` found; the same on every rank.

    ``step`` is the highest step counter of the group; ``reference`` is there where scales differ.
    """

    report: DivergenceReport
    step: int
    reference: Reference | None


def localise(sync: ArenaSync, evidence: Evidence, differs: Sequence[str]) -> Localisation:
    """Name the ranks and slots behind a failed header. COLLECTIVE over the sync's group.

    Compares what the ranks sent: the commit has made the live scales equal again, the evidence is
    in the scales as they were at launch.

    Args:
        evidence: what was sent.
        differs: the kinds that the header says differ; each gets a finding.
    """
    group = sync.group
    assert group is not None
    sent = evidence.scales
    me = this_rank(sync.arena.device, group.mesh_coordinates())
    everyone: list[_Sender] = group.gather(_Sender(me, tuple(evidence.words.tolist()), int(sync.arena.step)))
    findings, reference = [], None
    for kind, place in (("manifest", WORD_MANIFEST), ("step", WORD_STEP)):
        values = {e.participant.rank: e.words[place] for e in everyone}
        if len(set(values.values())) > 1:
            findings += findings_of_values(kind, {rank: repr(value) for rank, value in values.items()})
    if len({e.words[WORD_SCALE_LOW:] for e in everyone}) > 1:
        found, reference = _scale_findings(sync, group, sent, everyone)
        findings += found
    for kind in sorted(set(differs) - {finding.kind for finding in findings}):
        detail = "the message differed, what it was made of does not"
        findings.append(Finding(0, kind, kind, tuple(e.participant.rank for e in everyone), None, detail=detail))
    step = max(e.words[WORD_STEP] for e in everyone)
    participants = [e.participant for e in everyone]
    # Every sync proves this, so the one before was good.
    located = [replace(f, step=step, last_good_step=step - 1).located(participants) for f in findings]
    return Localisation(DivergenceReport(tuple(located)), max(e.now for e in everyone), reference)


class _Sender(NamedTuple):
    participant: Participant
    words: tuple[int, ...]  # As at the launch that failed.
    now: int  # The step counter after its commit, which replays may have taken on since.


def _scale_findings(
    sync: ArenaSync, group: SyncGroup, sent: Tensor, everyone: Sequence[_Sender]
) -> tuple[list[Finding], Reference]:
    """Slots whose scale differs, and what the reference has. COLLECTIVE: two broadcasts, two object gathers."""
    sides = sides_of({e.participant.rank: e.words[WORD_SCALE_LOW:] for e in everyone})
    reference, odd = split(sides)
    source = min(group.ranks) if reference is None else reference
    theirs = _from(source, group, sent)
    saturated = _from(source, group, sync.arena.counters[SATURATED])
    mine = (sent.view(torch.int32) != theirs.view(torch.int32)).T.nonzero().tolist()  # [slot, array]
    told: list[tuple[int, list[list[int]]]] = group.gather((len(mine), mine[:MAX_SLOTS_PER_RANK]))
    # All say what they have wherever somebody differs: who is right there is for all of them to decide.
    places = sorted({(slot, array) for _, part in told for slot, array in part})
    values: list[list[float]] = group.gather([sent[array, slot].item() for slot, array in places])
    findings = []
    for i, (slot, array) in enumerate(places):
        by_rank = {rank: row[i] for rank, row in zip(group.ranks, values)}
        findings += _slot_findings(str(sync.arena.specs[slot].slot), _ARRAYS[array], source, by_rank)
    hidden = max(count - len(part) for count, part in told)
    if hidden > 0:
        detail = f"{hidden} more slots of one rank differ"
        findings += [Finding(0, "scale", MORE, ranks, reference, detail=detail, sides=sides) for ranks in odd]
    return findings, Reference(theirs, saturated)


def _from(source: int, group: SyncGroup, tensor: Tensor) -> Tensor:
    """What ``source`` has in place of this. COLLECTIVE."""
    theirs = tensor.to(group.device, copy=True)
    dist.broadcast(theirs, src=source, group=group.process_group)
    return theirs.to(tensor.device)


def _slot_findings(name: str, array: str, source: int, values: dict[int, float]) -> list[Finding]:
    """One finding per odd side; a majority of this slot's own decides, whoever is in it."""
    sides = sides_of({rank: int(_bits(value)) for rank, value in values.items()})
    reference, odd = split(sides)
    findings = []
    for ranks in odd:
        against = source if reference is None else reference
        others = [side[0] for side in sides if against not in side] if reference is None else [ranks[0]]
        detail = f"{array}: " + "; ".join(f"rank {r}: {values[r]!r}" for r in [*others[:8], against])
        a, b = (_bits(values[rank]).view(torch.uint8) for rank in (others[0], against))
        findings.append(
            Finding(
                0,
                "scale",
                name,
                ranks,
                reference,
                detail=detail,
                sides=sides,
                field=array,
                index=(),
                value=values[others[0]],
                expected=values[against],
                ulp=ulp_distance(a, b, torch.float32),
            )
        )
    return findings


def _bits(value: float) -> Tensor:
    return torch.tensor([value], dtype=torch.float32, device="cpu").view(torch.int32)

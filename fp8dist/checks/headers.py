"""Localise a failed sync header (tier 0): find the ranks and slots that differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fp8dist.checks.differences import ulp_distance
from fp8dist.checks.findings import MAX_SIDES, findings_of_values
from fp8dist.checks.report import DivergenceReport, sides_of, split, this_rank
from fp8dist.common.divergence import MORE, Finding, Participant
from fp8dist.state.arena import SATURATED
from fp8dist.state.arena_sync import ArenaSync, Evidence
from fp8dist.state.groups import SyncGroup
from fp8dist_kernels.header import WORD_MANIFEST, WORD_SCALE_LOW, WORD_STEP

__all__ = ["Localisation", "localise"]

MAX_SLOTS_PER_RANK = 16
"""Differing slots that a rank sends to the others, in addition to their full count."""

_ARRAYS = ("scale", "inv_scale")


class ReferenceState(NamedTuple):
    """State of the reference rank: the scales that it sent, float32[2, n], and its counters of saturated amaxes,
    int64[n]. Ranks count saturation by their own scales, so a damaged scale makes the counters wrong, too."""

    scales: Tensor
    saturated: Tensor


@dataclass(frozen=True)
class Localisation:
    """Result of ``localise``, the same on all ranks.

    ``step`` is the highest step counter of the group. ``reference`` is None if no scale differs.
    """

    report: DivergenceReport
    step: int
    reference: ReferenceState | None


def localise(sync: ArenaSync, evidence: Evidence, differs: Sequence[str]) -> Localisation:
    """Name the ranks and slots behind a failed header. COLLECTIVE over the sync's group.

    Compares the scales that the ranks sent at launch, because the commit has made the live scales equal again.

    Args:
        evidence: what this rank sent.
        differs: the kinds that differ according to the header. Each gets a finding.
    """
    group = sync.group
    assert group is not None
    sent = evidence.scales
    me = this_rank(sync.arena.device, group.mesh_coordinates())
    everyone: list[_HeaderOf] = group.gather(_HeaderOf(me, tuple(evidence.words.tolist()), int(sync.arena.step)))
    findings, reference = [], None
    for kind, place in (("manifest", WORD_MANIFEST), ("step", WORD_STEP)):
        values = {e.participant.rank: e.words[place] for e in everyone}
        if len(set(values.values())) > 1:
            findings += findings_of_values(kind, {rank: repr(value) for rank, value in values.items()})
    if len({e.words[WORD_SCALE_LOW:] for e in everyone}) > 1:
        found, reference = _scale_findings(sync, group, sent, everyone)
        findings += found
    for kind in sorted(set(differs) - {finding.kind for finding in findings}):
        detail = "the header differed, but the values that it was computed from are equal"
        findings.append(Finding(0, kind, kind, tuple(e.participant.rank for e in everyone), None, detail=detail))
    step = max(e.words[WORD_STEP] for e in everyone)
    participants = [e.participant for e in everyone]
    # Every sync compares the header. That of the previous step compared the state before its update.
    good = step - 2 if step > 1 else None
    located = [replace(f, step=step, last_good_step=good).located(participants) for f in findings]
    return Localisation(DivergenceReport(tuple(located)), max(e.now for e in everyone), reference)


class _HeaderOf(NamedTuple):
    participant: Participant
    words: tuple[int, ...]  # As sent by the launch that failed.
    now: int  # Step counter after the commit. CUDA graph replays may have advanced it further.


def _scale_findings(
    sync: ArenaSync, group: SyncGroup, sent: Tensor, everyone: Sequence[_HeaderOf]
) -> tuple[list[Finding], ReferenceState]:
    """Return (findings for slots whose scale differs, reference). COLLECTIVE: two broadcasts, two object gathers."""
    sides = sides_of({e.participant.rank: e.words[WORD_SCALE_LOW:] for e in everyone})
    reference, odd = split(sides)
    source = min(group.ranks) if reference is None else reference
    theirs = _from(source, group, sent)
    saturated = _from(source, group, sync.arena.counters[SATURATED])
    mine = (sent.view(torch.int32) != theirs.view(torch.int32)).T.nonzero().tolist()  # [slot, array]
    gathered: list[tuple[int, list[list[int]]]] = group.gather((len(mine), mine[:MAX_SLOTS_PER_RANK]))
    # All ranks send their values of every slot that differs on any rank, because each slot has its own majority.
    places = sorted({(slot, array) for _, part in gathered for slot, array in part})
    values: list[list[float]] = group.gather([sent[array, slot].item() for slot, array in places])
    findings = []
    for i, (slot, array) in enumerate(places):
        by_rank = {rank: row[i] for rank, row in zip(group.ranks, values)}
        findings += _slot_findings(str(sync.arena.specs[slot].slot), _ARRAYS[array], by_rank)
    hidden = max(count - len(part) for count, part in gathered)
    if hidden > 0:
        detail = f"{hidden} more slots of one rank differ"
        findings += [Finding(0, "scale", MORE, ranks, reference, detail=detail, sides=sides) for ranks in odd]
    return findings, ReferenceState(theirs, saturated)


def _from(source: int, group: SyncGroup, tensor: Tensor) -> Tensor:
    """Return this tensor's values on rank ``source``. COLLECTIVE."""
    theirs = tensor.to(group.device, copy=True)
    dist.broadcast(theirs, src=source, group=group.process_group)
    return theirs.to(tensor.device)


def _slot_findings(name: str, array: str, values: dict[int, float]) -> list[Finding]:
    """Return one finding per odd side. The majority is that of this slot alone."""
    sides = sides_of({rank: int(_bits(value)) for rank, value in values.items()})
    reference, odd = split(sides)
    findings = []
    for ranks in odd:
        against = sides[0][0]
        others = [side[0] for side in sides[1:]] if reference is None else [ranks[0]]
        detail = f"{array}: " + "; ".join(f"rank {r}: {values[r]!r}" for r in [*others[:MAX_SIDES], against])
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
                values=tuple(values[side[0]] for side in sides[: MAX_SIDES + 1]) if reference is None else (),
            )
        )
    return findings


def _bits(value: float) -> Tensor:
    return torch.tensor([value], dtype=torch.float32, device="cpu").view(torch.int32)

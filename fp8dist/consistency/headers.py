"""From a failed sync header to ranks and slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fp8dist.consistency.differences import ulp_distance
from fp8dist.consistency.report import DivergenceReport, Finding, Participant, sides_of, split
from fp8dist.groups import SyncGroup
from fp8dist.kernels.update import WORD_MANIFEST, WORD_SCALE_LOW, WORD_STEP
from fp8dist.state.arena import SATURATED
from fp8dist.sync import ArenaSync, Evidence

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


def localise(sync: ArenaSync, evidence: Evidence | None, differs: Sequence[str]) -> Localisation:
    """Name the ranks and slots behind a failed header. COLLECTIVE over the sync's group.

    Compares what the ranks sent: the commit has made the live scales equal again, the evidence is
    in the scales as they were at launch.

    Args:
        evidence: what was sent, if it is no longer in the arena.
        differs: the kinds that the header says differ; each gets a finding.
    """
    group = sync.group
    assert group is not None
    words, sent = evidence or Evidence(sync.arena.words, sync.arena.sent)
    everyone: list[_Witness] = group.gather(_Witness.of(sync, group, words))
    findings, reference = [], None
    for kind, place in (("manifest", WORD_MANIFEST), ("step", WORD_STEP)):
        values = {e.rank: e.words[place] for e in everyone}
        if len(set(values.values())) > 1:
            findings += _findings_of_values(kind, values)
    if len({e.words[WORD_SCALE_LOW:] for e in everyone}) > 1:
        found, reference = _scale_findings(sync, group, sent, everyone)
        findings += found
    for kind in set(differs) - {finding.kind for finding in findings}:
        detail = "the message differed, what it was made of does not"
        findings.append(_finding(kind, kind, tuple(e.rank for e in everyone), None, detail))
    step = max(e.step for e in everyone)
    participants = [e.participant for e in everyone]
    # Every sync proves this, so the one before was good.
    located = [_at(f, step).located(participants) for f in findings]
    return Localisation(DivergenceReport(tuple(located)), step, reference)


@dataclass(frozen=True)
class _Witness:
    participant: Participant
    words: tuple[int, ...]

    @property
    def rank(self) -> int:
        return self.participant.rank

    @property
    def step(self) -> int:
        return self.words[WORD_STEP]

    @classmethod
    def of(cls, sync: ArenaSync, group: SyncGroup, words: Tensor) -> _Witness:
        # Manifest and scale digest as at the launch that failed; the step counter as it is now.
        numbers = words.tolist()
        numbers[WORD_STEP] = int(sync.arena.step)
        return cls(Participant.this_rank(sync.arena.device, group.mesh_coordinates()), tuple(numbers))


def _finding(kind: str, name: str, ranks: tuple[int, ...], reference: int | None, detail: str, **more: Any) -> Finding:
    return Finding(0, kind, name, ranks, reference, detail=detail, **more)


def _at(finding: Finding, step: int) -> Finding:
    return Finding(**{**finding.__dict__, "step": step, "last_good_step": step - 1})


def _findings_of_values(kind: str, values: dict[int, Any]) -> list[Finding]:
    sides = sides_of(values)
    reference, odd = split(sides)
    shown = "; ".join(f"rank {side[0]}: {values[side[0]]}" for side in sides[:8][::-1])
    return [_finding(kind, kind, ranks, reference, shown, sides=sides) for ranks in odd]


class _Example(NamedTuple):
    """An entry of this rank's scales that differs from the source's."""

    slot: int
    array: int
    mine: float
    theirs: float


def _scale_findings(
    sync: ArenaSync, group: SyncGroup, sent: Tensor, everyone: Sequence[_Witness]
) -> tuple[list[Finding], Reference]:
    """Slots whose scale differs, the reference's scales and counters. COLLECTIVE: two broadcasts, one object gather."""
    sides = sides_of({e.rank: e.words[WORD_SCALE_LOW:] for e in everyone})
    reference, _ = split(sides)
    source = min(group.ranks) if reference is None else reference
    theirs = _from(source, group, sent)
    saturated = _from(source, group, sync.arena.counters[SATURATED])
    differing: list[tuple[int, list[_Example]]] = group.gather(_differences(sent, theirs))
    by_place: dict[tuple[int, int], dict[int, _Example]] = {}
    for evidence, (_, examples) in zip(everyone, differing):
        for example in examples:
            by_place.setdefault(example[:2], {})[evidence.rank] = example
    findings = []
    for (place, array), seen in sorted(by_place.items()):
        name = str(sync.arena.specs[place].slot)
        values = {e.rank: seen[e.rank].mine if e.rank in seen else None for e in everyone}  # None: as the source.
        findings += _slot_findings(name, _ARRAYS[array], source, values, seen)
    hidden = max(count - len(examples) for count, examples in differing)
    if hidden > 0:
        reference, odd = split(sides)
        detail = f"{hidden} more slots of one rank differ"
        findings += [_finding("scale", "…", ranks, reference, detail, sides=sides) for ranks in odd]
    return findings, Reference(theirs, saturated)


def _from(source: int, group: SyncGroup, tensor: Tensor) -> Tensor:
    """What ``source`` has in place of this. COLLECTIVE."""
    theirs = tensor.to(group.device, copy=True)
    dist.broadcast(theirs, src=source, group=group.process_group)
    return theirs.to(tensor.device)


def _slot_findings(
    name: str, array: str, source: int, values: dict[int, float | None], seen: dict[int, _Example]
) -> list[Finding]:
    """One finding per odd side; a majority of this slot's own decides, whoever is in it."""
    by_bits = {rank: None if value is None else _bits(value).item() for rank, value in values.items()}
    sides = sides_of(by_bits)
    reference, odd = split(sides)
    expected = next(iter(seen.values())).theirs
    shown = {rank: expected if value is None else value for rank, value in values.items()}
    findings = []
    for ranks in odd:
        against = source if reference is None else reference
        others = [side[0] for side in sides if against not in side] if reference is None else [ranks[0]]
        first = others[0]
        detail = f"{array}: " + "; ".join(f"rank {r}: {shown[r]!r}" for r in [*others[:8], against])
        a, b = (_bits(shown[r]).view(torch.uint8) for r in (first, against))
        ulp = ulp_distance(a, b, torch.float32)
        findings.append(
            _finding(
                "scale",
                name,
                ranks,
                reference,
                detail,
                sides=sides,
                field=array,
                index=(),
                value=shown[first],
                expected=shown[against],
                ulp=ulp,
            )
        )
    return findings


def _bits(value: float) -> Tensor:
    return torch.tensor([value], dtype=torch.float32).view(torch.int32)


def _differences(mine: Tensor, theirs: Tensor) -> tuple[int, list[_Example]]:
    """(how many entries differ bitwise, the first few of them). Both float32[2, n]."""
    places = (mine.view(torch.int32) != theirs.view(torch.int32)).nonzero()
    examples = [
        _Example(slot, array, mine[array, slot].item(), theirs[array, slot].item())
        for array, slot in places[:MAX_SLOTS_PER_RANK].tolist()
    ]
    return len(places), examples

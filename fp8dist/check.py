"""What a divergence looks like to a person, and how a failed sync header is turned into names."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fp8dist.errors import DivergenceError
from fp8dist.groups import SyncGroup
from fp8dist.kernels.update import WORD_MANIFEST, WORD_SCALE_LOW, WORD_STEP
from fp8dist.sync import ArenaSync, Evidence

__all__ = ["DivergenceReport", "Finding", "Localisation", "localise"]

MAX_SLOTS_PER_RANK = 16
"""How many differing slots a rank tells the others of; the count is always told in full."""


@dataclass(frozen=True)
class Finding:
    """One thing that differs between ranks.

    ``ranks`` are the odd ones when a majority agrees (``reference_rank`` is its lowest member). With
    no majority ``reference_rank`` is None and ``ranks`` lists everyone who takes part. All ranks
    are global. ``hosts`` and ``mesh_coords`` belong to ``ranks``, in the same order.
    """

    step: int
    kind: str
    name: str
    ranks: tuple[int, ...]
    reference_rank: int | None
    hosts: tuple[str, ...] = ()
    mesh_coords: tuple[dict[str, int] | None, ...] = ()
    detail: str = ""


@dataclass(frozen=True)
class DivergenceReport:
    """Everything one check found. ``str(report)`` is a table."""

    findings: tuple[Finding, ...] = field(default=())

    @property
    def consistent(self) -> bool:
        """Whether nothing differs."""
        return not self.findings

    def raise_if_diverged(self) -> None:
        """Raise DivergenceError unless ``consistent``."""
        if self.findings:
            raise DivergenceError(self)

    def __str__(self) -> str:
        if not self.findings:
            return "FP8 state is consistent"
        rows = [("step", "kind", "name", "rank", "host", "reference", "what")]
        for finding in self.findings:
            rows.append(
                (
                    str(finding.step),
                    finding.kind,
                    finding.name,
                    ", ".join(map(str, finding.ranks)),
                    ", ".join(dict.fromkeys(finding.hosts)),
                    "no majority" if finding.reference_rank is None else f"rank {finding.reference_rank}",
                    finding.detail,
                )
            )
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
        return "FP8 state differs between ranks\n" + "\n".join(lines)


@dataclass(frozen=True)
class Localisation:
    """What ``localise`` found; the same on every rank.

    ``step`` is the highest step counter of the group; ``scales`` what the reference rank sent, float32[2, n],
    where scales differ.
    """

    report: DivergenceReport
    step: int
    scales: Tensor | None


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
    everyone: list[_Witness] = _all_gather(_Witness.of(sync, group, words), group)
    findings, scales = [], None
    for kind, place in (("manifest", WORD_MANIFEST), ("step", WORD_STEP)):
        values = {e.rank: e.words[place] for e in everyone}
        if len(set(values.values())) > 1:
            findings.append(_finding_of_values(kind, values, everyone))
    if len({e.words[WORD_SCALE_LOW:] for e in everyone}) > 1:
        found, scales = _scale_findings(sync, group, sent, everyone)
        findings += found
    for kind in set(differs) - {finding.kind for finding in findings}:
        ranks = tuple(e.rank for e in everyone)
        findings.append(
            _finding(everyone, kind, kind, ranks, None, "the message differed, what it was made of does not")
        )
    return Localisation(DivergenceReport(tuple(findings)), max(e.step for e in everyone), scales)


@dataclass(frozen=True)
class _Witness:
    rank: int
    host: str
    coords: dict[str, int] | None
    words: tuple[int, ...]

    @property
    def step(self) -> int:
        return self.words[WORD_STEP]

    @classmethod
    def of(cls, sync: ArenaSync, group: SyncGroup, words: Tensor) -> _Witness:
        # Manifest and scale digest as at the launch that failed; the step counter as it is now.
        numbers = words.tolist()
        numbers[WORD_STEP] = int(sync.arena.step)
        return cls(group.rank, socket.gethostname(), group.mesh_coordinates(), tuple(numbers))


def _all_gather(mine: Any, group: SyncGroup) -> list[Any]:
    gathered: list[Any] = [None] * group.size
    dist.all_gather_object(gathered, mine, group=group.process_group)
    return gathered


def _majority(values: dict[int, Any]) -> tuple[int | None, tuple[int, ...]]:
    """(lowest rank of a strict majority, the ranks outside it); (None, all ranks) without one."""
    (value, count), *_ = Counter(values.values()).most_common(1)
    if 2 * count <= len(values):
        return None, tuple(sorted(values))
    odd = tuple(sorted(rank for rank, v in values.items() if v != value))
    return min(rank for rank, v in values.items() if v == value), odd


def _finding_of_values(kind: str, values: dict[int, Any], everyone: Sequence[_Witness]) -> Finding:
    reference, odd = _majority(values)
    shown = "; ".join(f"rank {rank}: {values[rank]}" for rank in odd[:8])
    if reference is not None:
        shown += f"; rank {reference}: {values[reference]}"
    return _finding(everyone, kind, kind, odd, reference, shown)


def _finding(
    everyone: Sequence[_Witness],
    kind: str,
    name: str,
    ranks: tuple[int, ...],
    reference: int | None,
    detail: str,
) -> Finding:
    by_rank = {e.rank: e for e in everyone}
    return Finding(
        step=max(e.step for e in everyone),
        kind=kind,
        name=name,
        ranks=ranks,
        reference_rank=reference,
        hosts=tuple(by_rank[r].host for r in ranks),
        mesh_coords=tuple(by_rank[r].coords for r in ranks),
        detail=detail,
    )


def _scale_findings(
    sync: ArenaSync, group: SyncGroup, sent: Tensor, everyone: Sequence[_Witness]
) -> tuple[list[Finding], Tensor]:
    """Slots whose scale differs from the reference's, and the reference's scales. COLLECTIVE: one
    broadcast, one object gather."""
    digests = {e.rank: e.words[WORD_SCALE_LOW:] for e in everyone}
    reference, odd = _majority(digests)
    source = min(group.ranks) if reference is None else reference
    theirs = sent.clone()
    dist.broadcast(theirs, src=source, group=group.process_group)
    differing = _all_gather(_differences(sent, theirs), group)
    by_slot: dict[tuple[int, str], dict[int, tuple[float, float]]] = {}
    for evidence, (_, examples) in zip(everyone, differing):
        for place, which, mine, other in examples:
            by_slot.setdefault((place, which), {})[evidence.rank] = (mine, other)
    findings = []
    for (place, which), seen in sorted(by_slot.items()):
        spec = sync.arena.specs[place]
        expected = next(iter(seen.values()))[1]
        shown = "; ".join(f"rank {rank}: {mine!r}" for rank, (mine, _) in sorted(seen.items())[:8])
        ranks = tuple(sorted(seen)) if reference is not None else odd
        detail = f"{which}: {shown}; rank {source}: {expected!r}"
        findings.append(_finding(everyone, "scale", str(spec.slot), ranks, reference, detail))
    hidden = max(count - len(examples) for count, examples in differing)
    if hidden > 0:
        detail = f"{hidden} more slots of one rank differ"
        findings.append(_finding(everyone, "scale", "…", odd, reference, detail))
    return findings, theirs


def _differences(mine: Tensor, theirs: Tensor) -> tuple[int, list[tuple[int, str, float, float]]]:
    """(how many entries differ bitwise, the first few as (slot, array, mine, theirs)). Both [2, n]."""
    places = (mine.view(torch.int32) != theirs.view(torch.int32)).nonzero()
    examples = [
        (slot, ("scale", "inv_scale")[row], mine[row, slot].item(), theirs[row, slot].item())
        for row, slot in places[:MAX_SLOTS_PER_RANK].tolist()
    ]
    return len(places), examples

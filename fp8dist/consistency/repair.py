"""Copying from the majority to the others."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from fp8dist.consistency.contents import Field, bytes_of
from fp8dist.consistency.findings import MORE, Differing
from fp8dist.consistency.holdings import Holdings, ReplicaSet
from fp8dist.consistency.protocol import Compared, check_replicas
from fp8dist.consistency.report import DivergenceReport, ranks_text, split
from fp8dist.groups import SyncGroup

__all__ = ["repair"]

_AT_ONCE = 64 << 20
"""Bytes of one broadcast."""

_MAX_ROUNDS = 64
"""A round mends as much as one check tells apart."""

_BEYOND_REPAIR = frozenset({"manifest", "step", "layout", "error"})


def repair(anchor: SyncGroup, build: Callable[[], Holdings], compared: Compared) -> DivergenceReport:
    """Give the odd ranks what the majority has, and check again. COLLECTIVE over ``anchor``.

    All or nothing: where something has no majority, or ranks differ in more than content, nothing is touched. Copies
    parameters, gradients, optimizer state and whole slots, bit for bit.

    Returns:
        The report with ``repaired`` filled in if all is well now; the findings that are left otherwise.
    """
    first = compared.report
    mended: list[str] = []
    for _ in range(_MAX_ROUNDS):
        findings = [f for f in compared.report.findings if f.name != MORE]
        if any(f.reference_rank is None or f.kind in _BEYOND_REPAIR for f in findings):
            break
        for replicas, differing in compared.differing:
            for thing in differing:
                _mend(replicas, thing)
        mended += [f"{f.kind} {f.name} of {ranks_text(f.ranks)} from {f.reference_rank}" for f in findings]
        compared = check_replicas(anchor, build)
        if compared.report.consistent:
            return DivergenceReport(first.findings, first.compared, first.skipped, tuple(mended))
    return compared.report


def _mend(replicas: ReplicaSet, thing: Differing) -> None:
    """COLLECTIVE over the set's group."""
    reference, odd = split(thing.sides)
    assert reference is not None
    wrong = any(replicas.group.rank in side for side in odd)
    for field in replicas.fields(thing.place):
        _copy(replicas.group, reference, field, wrong)


def _copy(group: SyncGroup, source: int, field: Field, wrong: bool) -> None:
    content = bytes_of(field)
    received = torch.empty_like(content) if wrong else None
    for start in range(0, content.numel(), _AT_ONCE):
        part = content[start : start + _AT_ONCE].to(group.device, copy=group.rank != source)
        dist.broadcast(part, src=source, group=group.process_group)
        if received is not None:
            received[start : start + _AT_ONCE].copy_(part)
    if received is not None:
        with torch.no_grad():
            field.tensor.copy_(received.view(field.tensor.dtype).view(field.tensor.shape))

"""Repair: copies values from the majority to the odd ranks, and counts repairs that do not last.

Of a thing (a parameter, a slot of FP8 state) that differs, the *majority* is more than half of its ranks, with equal
values. The *odd* ranks are the others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from fp8dist.checks.computations import KIND
from fp8dist.checks.findings import Differing
from fp8dist.checks.inventory import Holdings, ReplicaSet
from fp8dist.checks.protocol import Compared, check_replicas
from fp8dist.checks.report import DivergenceReport, split
from fp8dist.common.divergence import COHERENCE, MORE
from fp8dist.common.text import first_few
from fp8dist.state.groups import SyncGroup, maximum
from fp8dist_kernels.reference.content import as_bytes

_AT_ONCE = 64 << 20
"""The most bytes per broadcast, to bound the memory of the copies."""

_REPEATED = 3
"""From so many repairs of a tensor in consecutive checks on, the report says that they do not last."""

_NO_LIMIT = 1 << 62

_BEYOND_REPAIR = frozenset({"manifest", "step", "layout", "error", KIND})


class Repairs:
    """Counts, for each thing, the repairs in consecutive checks. Findings are the same on all ranks, so the counts
    are, too."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], int] = {}  # By kind and name of the finding.

    def observe(self, report: DivergenceReport, kinds: Collection[str]) -> None:
        """Forget the counts of things that a check of these kinds found equal. Local."""
        found = _identities(report)
        self._counts = {of: n for of, n in self._counts.items() if of in found or of[0] not in kinds}

    def repair(
        self, report: DivergenceReport, most: int | None, mend: Callable[[], DivergenceReport], group: SyncGroup
    ) -> DivergenceReport:
        """Repair by ``mend``, unless a thing was repaired in each of the last ``most`` checks. COLLECTIVE over
        ``group``: one MAX, and ``mend``. Ranks may have made other checks before, or have other limits: the largest
        count and the least limit decide for all.

        Args:
            report: of the check that found differences.
            most: None: no limit.
            mend: repairs, and returns the report of a new check.

        Returns:
            The report of ``mend``, with a note if a thing was repaired for the third time in a row or more; or
            ``report`` with a note, if nothing was copied.
        """
        found = sorted(_identities(report))
        limit, *counts = maximum(group, [-(most or _NO_LIMIT), *(self._counts.get(of, 0) for of in found)])
        most = -limit
        if again := [of for of, count in zip(found, counts) if count >= most]:
            return replace(report, notes=(*report.notes, f"nothing was copied: {_persists(again, most)} (max_repairs)"))
        mended = mend()
        if not mended.repaired:
            return mended
        self._counts |= {of: count + 1 for of, count in zip(found, counts)}
        again = [of for of in found if self._counts[of] >= _REPEATED]
        note = [f"{_persists(again, max(self._counts[of] for of in again))}"] if again else []
        return replace(mended, notes=(*mended.notes, *note))


def _persists(again: Sequence[tuple[str, str]], times: int) -> str:
    return f"the cause persists: {first_few([name for _, name in again])} repaired in {times} checks in a row"


def _identities(report: DivergenceReport) -> set[tuple[str, str]]:
    """Return (kind, name) of all findings about one thing."""
    return {(f.kind, f.name) for f in report.findings if f.name != MORE}


def repair(anchor: SyncGroup, build: Callable[[], Holdings], compared: Compared) -> DivergenceReport:
    """Copy the majority's values to the odd ranks and check again. COLLECTIVE over ``anchor``.

    Copies parameters, gradients, buffers, optimizer state and whole slots, bit for bit. Copies nothing if any
    difference has no majority, or is none of values (another step, set-up or shape, or a wrong computation).

    Args:
        build: returns what this rank holds, for the check after the copies. Local.
        compared: the result of ``check_replicas(everything=True)``.

    Returns:
        The report with ``repaired`` filled in, if all ranks agree now. Else the findings that remain, with a note.
    """
    report = compared.report
    # A thing without a majority along one axis may have one along another, as a replica.
    known = {(f.kind, f.name) for f in report.findings if f.reference_rank is not None}
    # A weight that is not its master may be the odd copy: then its repair mends both. The new check says.
    of_values = [f for f in report.findings if f.kind != COHERENCE]
    unknown = any(f.reference_rank is None and (f.kind, f.name) not in known for f in of_values)
    if unknown or not of_values or any(f.kind in _BEYOND_REPAIR for f in report.findings):
        why = "not all findings have a majority to copy values from"
        if any(f.kind == KIND for f in report.findings):
            why = "a copy does not repair a device that computes otherwise"
        return replace(report, notes=(*report.notes, f"nothing was copied: {why}"))
    with_majority = [(s, [of for of in things if split(of.sides)[0] is not None]) for s, things in compared.differing]
    failures = [text for replicas, differing in with_majority if (text := _mend(replicas, differing))]
    mended = mended_texts(report)
    after = check_replicas(anchor, build).report
    if not after.diverged:
        return replace(after, findings=report.findings, repaired=mended)
    tried = f"these differences remain after a repair of {'; '.join(mended[:8])}"
    return replace(after, notes=(*after.notes, tried, *failures))


def mended_texts(report: DivergenceReport) -> tuple[str, ...]:
    """Return one text per finding: what was copied, and from which rank."""
    found = [f for f in report.findings if f.reference_rank is not None]
    return tuple(f"{f.subject} on {f.who}, from rank {f.reference_rank}" for f in found)


def _mend(replicas: ReplicaSet, differing: list[Differing]) -> str:
    """Copy the things of a set that differ, from the reference rank to the odd ranks. COLLECTIVE over its group.

    Returns:
        The error of the first rank that failed, on all ranks; "" if none did. A rank that fails stays in the
        collectives, so no other waits for it.
    """
    error = ""
    try:
        fields = [replicas.fields(thing.place) for thing in differing]
        for field in (one for part in fields for one in part):
            as_bytes(field.tensor)  # Find tensors that cannot be read before the first broadcast.
    except Exception as raised:
        error = f"rank {replicas.group.rank}: {raised}"
    if any(errors := replicas.group.gather(error)):
        return next(filter(None, errors))
    for thing, part in zip(differing, fields):
        reference, odd = split(thing.sides)
        assert reference is not None
        wrong = any(replicas.group.rank in side for side in odd)
        for field in part:
            content = as_bytes(field.tensor)
            received = _receive(replicas.group, reference, content, wrong)
            try:
                if received is not None:
                    with torch.no_grad():
                        field.tensor.copy_(received.view(field.tensor.dtype).view(field.tensor.shape))
                    if field.store is not None:
                        field.store(field.tensor)
            except Exception as raised:  # For example a view whose elements share memory.
                error = f"'{thing.key.name}' of rank {replicas.group.rank}: {raised}"
    return next(filter(None, replicas.group.gather(error)), "")


def _receive(group: SyncGroup, source: int, content: Tensor, wrong: bool) -> Tensor | None:
    """Broadcast the bytes of a tensor from rank ``source``. COLLECTIVE: one broadcast per 64 MiB.

    Args:
        content: this rank's bytes, uint8[nbytes].
        wrong: True if this rank needs those of ``source``.

    Returns:
        The source's bytes on the device of ``content``, if ``wrong``; else None.
    """
    received = content.clone() if wrong else None
    for start in range(0, content.numel(), _AT_ONCE):
        part = content[start : start + _AT_ONCE].to(group.device, copy=group.rank != source)
        dist.broadcast(part, src=source, group=group.process_group)
        if received is not None:
            received[start : start + _AT_ONCE].copy_(part)
    return received

"""The report of a check, and what follows from it: evidence files, one log message, an error."""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fp8dist.common.divergence import Divergence, Finding, Participant
from fp8dist.errors import DivergenceError
from fp8dist.state.groups import SyncGroup, own_rank

__all__ = ["DivergenceReport", "Sender", "announce", "save_evidence", "sides_of", "split", "this_rank"]

logger = logging.getLogger("fp8dist")

MAX_WITH_EVIDENCE = 8
"""Odd ranks of one finding that write evidence."""


@dataclass(frozen=True)
class DivergenceReport(Divergence):
    """The result of one check. The findings are equal on all ranks that took part. ``str(report)`` is a table.

    Attributes:
        findings: what differs.
        compared: number of compared things by kind: "slot", "parameter", "gradient", "optimizer"; for files also
            "scale" and other parts of slots.
        skipped: what this rank did not compare, and why.
        repaired: what was copied from the majority to the odd ranks.
        notes: further remarks.
        noun: "rank" or "file".
        compared_bytes: bytes of the compared things by kind, where they are known, on this rank.
        unverified: kinds that were to be compared, and of which a rank could compare nothing, with the reason. If the
            model has trainable parameters, only these count. The same kinds on all ranks.
        partial: kinds of which only a part was compared, with how many of how many, such as "1 of 6 parameters". Only
            parameters are counted; of a model with trainable ones, only these. If all is finite, the same kinds on all
            ranks.
        nonfinite: parameters with NaN or infinity, and buffers of the state dict and optimizer state with NaN, whether
            ranks hold the same or not. Looked for in checks of parameters, in all that this rank holds, also if there
            is one rank; in optimizer state if the check has the optimizer.
        diverged: True if something differs, and was not repaired.
        consistent: True if something was compared, nothing differs (or all was repaired), and nothing is
            ``unverified``. So a report is consistent, diverged, or neither.
    """

    def raise_if_diverged(self) -> None:
        """Raise DivergenceError if ``diverged``."""
        if self.diverged:
            raise DivergenceError(self)


class Sender(NamedTuple):
    """A rank that sends its part of a finding. ``step``: of its check. ``last_good``: by kind of what it compares, the
    last step at which all was equal; None: never."""

    participant: Participant
    step: int
    last_good: Mapping[str, int | None]


def this_rank(device: torch.device, coords: dict[str, int] | None) -> Participant:
    """Return this process as a Participant. ``device``: where its tensors are. ``coords``: its place in the mesh."""
    local = os.environ.get("LOCAL_RANK", "")
    local_rank = int(local) if local.isdigit() else None
    return Participant(own_rank(), socket.gethostname(), local_rank, str(device), coords)


def sides_of(values: Mapping[int, Hashable]) -> tuple[tuple[int, ...], ...]:
    """Return the sets of ranks with equal values, the largest first, then by lowest rank."""
    by_value: dict[Hashable, list[int]] = {}
    for rank in sorted(values):
        by_value.setdefault(values[rank], []).append(rank)
    return tuple(tuple(side) for side in sorted(by_value.values(), key=lambda side: (-len(side), side[0])))


def split(sides: tuple[tuple[int, ...], ...]) -> tuple[int | None, list[tuple[int, ...]]]:
    """Return (lowest rank of a strict majority, other sides), or (None, [all ranks]) without a majority."""
    total = sum(map(len, sides))
    if 2 * len(sides[0]) > total:
        return sides[0][0], list(sides[1:])
    return None, [tuple(sorted(rank for side in sides for rank in side))]


def save_evidence(
    report: DivergenceReport, report_dir: str | None, evidence: Callable[[Finding], dict[str, Any] | None]
) -> None:
    """Write the report, and what odd ranks and the reference hold. Call before a repair. Local; never raises.

    Args:
        report_dir: None: write nothing.
        evidence: returns what this rank holds of a finding, as JSON values, or None.
    """
    if report_dir is None or not report.diverged:
        return
    try:
        _write_files(Path(report_dir), report, own_rank(), evidence)
    except Exception as error:  # A full disk must not hide the divergence, or leave other ranks waiting.
        logger.warning("fp8dist: no evidence written to %s: %s", report_dir, error)


def announce(
    report: DivergenceReport,
    group: SyncGroup | None,
    raises: bool,
    notify: Callable[[DivergenceReport], None] | None = None,
    texts: Sequence[str] | None = None,
    waits: bool = True,
) -> None:
    """Log the report once, and with ``raises`` raise on all ranks. COLLECTIVE over ``group`` if anything differed, and
    ``waits``.

    Args:
        report: the same on all ranks of the group.
        group: None: this rank alone.
        texts: logged in place of the report's text.
        notify: called with the report after the barrier. If it raises, no rank is left waiting.

    Raises:
        DivergenceError: ``raises``, and something differs. No rank raises before the report is logged,
            because a launcher kills the other ranks when one has failed.
    """
    if not report.findings:
        return
    if group is None or group.rank == report.reporting_rank:
        level = logging.ERROR if raises and report.diverged else logging.WARNING
        for text in (str(report),) if texts is None else texts:
            logger.log(level, "%s", text)
    if waits and group is not None and group.communicates:
        dist.barrier(group=group.process_group)
    if notify is not None:
        notify(report)
    if raises:
        report.raise_if_diverged()


def _write_files(
    folder: Path, report: DivergenceReport, rank: int, evidence: Callable[[Finding], dict[str, Any] | None]
) -> None:
    step = max(f.step for f in report.findings)
    if rank == report.reporting_rank:
        _write(folder, f"step{step:08d}-report", ".txt", f"{report}\n")
        _write(folder, f"step{step:08d}-report", ".json", json.dumps(report.to_json(), indent=1))
    mine = []
    for finding in report.findings:
        reference = report.reporting_rank if finding.reference_rank is None else finding.reference_rank
        if rank in finding.ranks[:MAX_WITH_EVIDENCE] or rank == reference:
            found = evidence(finding)
            if found is not None:
                mine.append({"kind": finding.kind, "name": finding.name, **found})
    if mine:
        _write(folder, f"step{step:08d}-rank{rank}", ".json", json.dumps(mine, indent=1))


def _write(folder: Path, name: str, suffix: str, text: str) -> None:
    """Write a new file, with a number if the name exists: two models may diverge at the same step."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(1, 1000):
        path = folder / (f"{name}{suffix}" if number == 1 else f"{name}-{number}{suffix}")
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
            return
        except FileExistsError:
            continue

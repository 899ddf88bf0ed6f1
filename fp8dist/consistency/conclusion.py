"""What follows from a report: files of evidence, one message, and the policy."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fp8dist.consistency.report import DivergenceReport
from fp8dist.divergence import Finding
from fp8dist.sync.groups import SyncGroup

__all__ = ["conclude", "save_evidence"]

logger = logging.getLogger("fp8dist")

MAX_WITNESSES = 8
"""Odd ranks of one finding that write their evidence."""


def save_evidence(
    report: DivergenceReport, report_dir: str | None, evidence: Callable[[Finding], dict[str, Any] | None]
) -> None:
    """Write the report, and what odd ranks and reference hold, before anything is mended. Local; never raises.

    Args:
        report_dir: None: nothing is written.
        evidence: what this rank has of a finding, as JSON values.
    """
    if report_dir is None or report.consistent:
        return
    try:
        _write_files(Path(report_dir), report, dist.get_rank(), evidence)
    except Exception as error:  # A full disk must not hide the divergence, or leave the others alone in a collective.
        logger.warning("fp8dist: no evidence written to %s: %s", report_dir, error)


def conclude(
    report: DivergenceReport,
    group: SyncGroup,
    raises: bool,
    tell: Callable[[DivergenceReport], None] | None = None,
) -> None:
    """Say it once, and with ``raises`` raise on all ranks. COLLECTIVE over ``group`` if anything differed.

    Args:
        report: the same on all ranks of the group.
        tell: is called with it when the message is out: what it raises leaves nobody waiting here.

    Raises:
        DivergenceError: ``raises``, and the report is not consistent. No rank raises before the message is out: a
            launcher kills the other ranks when one has failed.
    """
    if not report.findings:
        return
    if group.rank == report.speaker:
        logger.log(logging.ERROR if raises and not report.consistent else logging.WARNING, "%s", report)
    if group.size > 1:
        dist.barrier(group=group.process_group)
    if tell is not None:
        tell(report)
    if raises:
        report.raise_if_diverged()


def _write_files(
    folder: Path, report: DivergenceReport, rank: int, evidence: Callable[[Finding], dict[str, Any] | None]
) -> None:
    step = max(f.step for f in report.findings)
    if rank == report.speaker:
        _write(folder, f"step{step:08d}-report", ".txt", f"{report}\n")
        _write(folder, f"step{step:08d}-report", ".json", json.dumps(report.to_json(), indent=1))
    mine = []
    for finding in report.findings:
        reference = report.speaker if finding.reference_rank is None else finding.reference_rank
        if rank in finding.ranks[:MAX_WITNESSES] or rank == reference:
            found = evidence(finding)
            if found is not None:
                mine.append({"kind": finding.kind, "name": finding.name, **found})
    if mine:
        _write(folder, f"step{step:08d}-rank{rank}", ".json", json.dumps(mine, indent=1))


def _write(folder: Path, name: str, suffix: str, text: str) -> None:
    """A file that was not there: two models may diverge at one step."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(1, 1000):
        path = folder / (f"{name}{suffix}" if number == 1 else f"{name}-{number}{suffix}")
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
            return
        except FileExistsError:
            continue

"""DivergenceReport: the result of a check, and what follows from it: evidence files, one log message, an error.

Ranks that hold the same are a *side*. If a side has more than half of the ranks, it is the majority, its lowest rank is
the *reference*, and the ranks of other sides are *odd*.
"""

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

logger = logging.getLogger("fp8dist")

MAX_WITH_EVIDENCE = 8
"""The most odd ranks of one finding that write evidence."""


@dataclass(frozen=True)
class DivergenceReport(Divergence):
    """The result of one check. ``str(report)`` is a table for people.

    The findings are the same on all ranks that took part, and so is whether a report is consistent, diverged or
    neither. Numbers and reasons are this rank's.

    Attributes:
        findings: what differs between ranks.
        compared: number of compared things by kind: "slot", "parameter", "gradient", "buffer", "optimizer",
            "computation", "audit"; for files also "scale" and other parts of slots.
        skipped: what was not compared, and why.
        repaired: what was copied from the majority to the odd ranks. Empty if the repair failed.
        notes: further remarks.
        noun: what was compared: "rank" or "file".
        compared_bytes: bytes of the compared things by kind, as far as they are known.
        compared_by: bytes of this rank's tensors by the way in which they were compared: "copies" (with ranks that are
            known to hold the same), "axis tp" (along an axis that the caller named), "inferred" (with ranks that keep
            it equal without being told to, only to warn), "inside the rank" (coherence), "at rest" (with their own
            values before, ``prepare(at_rest_every=…)``); and "not compared" with other ranks.
        unverified: the reason, by kind, for kinds that the check was to compare, but of which some rank could compare
            nothing. Of a model with trainable parameters, frozen ones do not count. The same kinds on all ranks.
        partial: kinds of which only a part was compared, with a text such as "1 of 6 parameters". Only parameters are
            counted; of a model with trainable ones, only these. The same kinds on all ranks, unless a value is not
            finite.
        nonfinite: names of parameters with NaN or infinity, and of buffers of the state dict and optimizer state with
            NaN. Ranks may hold the same ones: then nothing differs. A check of parameters looks for them in all that
            this rank holds, also if there is one rank, and in optimizer state if it was given the optimizer.
        diverged: True if something differs, and was not repaired.
        consistent: True if something was compared, nothing differs (or all was repaired), and nothing is
            ``unverified``.
    """

    def raise_if_diverged(self) -> None:
        """Raise DivergenceError with this report, if ``diverged``. Local."""
        if self.diverged:
            raise DivergenceError(self)


class Sender(NamedTuple):
    """A rank that takes part in a comparison. ``step``: of its check. ``last_good``: the newest step at which all ranks
    were equal, by each kind that it compares; None: never. ``late``: names of parameters that DDP does not reduce,
    because it was made before them."""

    participant: Participant
    step: int
    last_good: Mapping[str, int | None]
    late: tuple[str, ...] = ()


def this_rank(device: torch.device, coords: dict[str, int] | None) -> Participant:
    """Return this rank with its host and local rank. ``device``: where its tensors are. ``coords``: its place on each
    axis of the mesh, if there is one."""
    local = os.environ.get("LOCAL_RANK", "")
    local_rank = int(local) if local.isdigit() else None
    return Participant(own_rank(), socket.gethostname(), local_rank, str(device), coords)


def sides_of(values: Mapping[int, Hashable]) -> tuple[tuple[int, ...], ...]:
    """Return the sets of ranks with equal values, the largest first, of equal size the one with the lowest rank.
    ``values``: by rank."""
    by_value: dict[Hashable, list[int]] = {}
    for rank in sorted(values):
        by_value.setdefault(values[rank], []).append(rank)
    return tuple(tuple(side) for side in sorted(by_value.values(), key=lambda side: (-len(side), side[0])))


def split(sides: tuple[tuple[int, ...], ...]) -> tuple[int | None, list[tuple[int, ...]]]:
    """Return (reference rank, odd sides); without a majority (None, [all ranks]), because no rank can be blamed."""
    total = sum(map(len, sides))
    if 2 * len(sides[0]) > total:
        return sides[0][0], list(sides[1:])
    return None, [tuple(sorted(rank for side in sides for rank in side))]


def save_evidence(
    report: DivergenceReport, report_dir: str | None, evidence: Callable[[Finding], dict[str, Any] | None]
) -> None:
    """Write the report (one rank), and what odd ranks and the reference hold. Call it before a repair overwrites that.
    Local; never raises.

    Args:
        report_dir: folder, which is created; None: write nothing.
        evidence: returns what this rank holds of a finding's thing, as JSON values; None: it does not hold the thing.
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
    """Log a report on one rank, notify, and raise on all ranks. COLLECTIVE: as ``log_on_one_rank``. Does nothing
    without findings.

    Args:
        report: with the same findings on all ranks of the group.
        group: None: this rank alone.
        raises: raise if the report has diverged. Else it is logged as a warning.
        notify: called with the report, after the barrier. If it raises, no rank is left waiting.
        texts: logged in place of the report's table.
        waits: False inside a Join context, where ranks without data do not come to the barrier.

    Raises:
        DivergenceError: on all ranks, with ``raises``, if something differs and was not repaired.
    """
    log_on_one_rank(report, group, raises, texts, waits)
    conclude(report, raises, notify)


def log_on_one_rank(
    report: DivergenceReport,
    group: SyncGroup | None,
    raises: bool,
    texts: Sequence[str] | None = None,
    waits: bool = True,
) -> None:
    """The first part of ``announce``. COLLECTIVE: a barrier over ``group``, if the report has findings and ``waits``.

    The barrier comes between log and error, because a launcher kills the other ranks when one has failed.
    """
    if not report.findings:
        return
    if group is None or group.rank == report.reporting_rank:
        level = logging.ERROR if raises and report.diverged else logging.WARNING
        for text in (str(report),) if texts is None else texts:
            logger.log(level, "%s", text)
    if waits and group is not None and group.communicates:
        dist.barrier(group=group.process_group)


def conclude(report: DivergenceReport, raises: bool, notify: Callable[[DivergenceReport], None] | None = None) -> None:
    """The second part of ``announce``. Local. Not inside ``failing_by_name``: an error of a callback is its own."""
    if report.findings and notify is not None:
        notify(report)
    if raises:
        report.raise_if_diverged()


def _write_files(
    folder: Path, report: DivergenceReport, rank: int, evidence: Callable[[Finding], dict[str, Any] | None]
) -> None:
    """See ``save_evidence``. ``rank``: this rank. Raises OSError."""
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
    """Write a new file. A number is added to a name that exists, because two models may diverge at the same step."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(1, 1000):
        path = folder / (f"{name}{suffix}" if number == 1 else f"{name}-{number}{suffix}")
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
            return
        except FileExistsError:
            continue

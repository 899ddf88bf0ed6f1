"""Standing findings: those that were logged before, and still differ.

With ``policy="warn"``, a difference is found again by every check. A standing finding gets one line in the log instead
of another table, and one line when the ranks are equal again.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import replace
from types import MappingProxyType

from fp8dist.checks.contents import FINDING_KINDS
from fp8dist.checks.report import DivergenceReport
from fp8dist.common.divergence import COHERENCE, MORE, Finding
from fp8dist.common.text import first_few
from fp8dist.state.groups import SyncGroup

logger = logging.getLogger("fp8dist")

HEADER_KINDS = frozenset({"manifest", "step", "scale"})
"""The kinds of findings that are over if the header of a sync agrees. The header is the part of a step's all-reduce
that compares set-ups, step counters and scales."""

_OF_NO_THING = frozenset({"manifest", "step", "layout", "error", MORE})
"""The kinds and names of findings that are not about one thing that is compared."""

_SLOT = MappingProxyType({"scale": "slot", "history": "slot"})
"""The kind of the thing that a finding is about, where the two have different names."""

MAX_LINES = 8
"""The most findings that get a line of their own in one message. The rest is counted."""

_Identity = tuple[str, str, tuple[int, ...]]
"""(kind, name, ranks) of a finding. Findings with equal identities are the same one, found again."""


class Standing:
    """The standing findings of the checks of one manager, or of the syncs of one arena.

    Reports have the same findings on all ranks, so all ranks remember the same. All methods are local.
    """

    def __init__(self) -> None:
        self._first: dict[_Identity, Finding] = {}  # As they were found first.
        self._nonfinite = False  # True if the last report had values that are not finite.

    def texts(self, report: DivergenceReport) -> list[str]:
        """Return what to log of a report: a table of new findings, and a line for each standing one. Remember all."""
        found = {_identity(f): f for f in report.findings}
        new = tuple(f for f in report.findings if _identity(f) not in self._first)
        lines = [
            f"fp8dist: {_step(f)}still: {f.subject} on {f.who}{_since(self._first[identity])}"
            for identity, f in found.items()
            if identity in self._first
        ]
        self._first = {**found, **self._first}
        return [*([str(replace(report, findings=new))] if new else []), *_few(lines, "fp8dist: still")]

    def not_finite(self, report: DivergenceReport, rank: int | None) -> list[str]:
        """Return what to log about values that are not finite. Empty if the last report had some, too.

        Args:
            rank: the rank that holds them; None: there is one rank.
        """
        new, self._nonfinite = bool(report.nonfinite) and not self._nonfinite, bool(report.nonfinite)
        names = first_few(report.nonfinite, MAX_LINES)
        of = "" if rank is None else f" of rank {rank}"
        text = (
            f"fp8dist: NaN or infinity in {names}{of}: a checkpoint that is saved now is not good, also if ranks agree"
        )
        return [text] if new else []

    def gone(
        self,
        report: DivergenceReport,
        kinds: Collection[str],
        rank: int,
        things: Collection[tuple[str, str]] | None = None,
    ) -> list[str]:
        """Forget standing findings that are over: those of ``kinds`` that ``report`` does not have. Return what
        ``rank`` logs about them; each finding is logged by one rank that is concerned.

        Args:
            things: (name, kind) of what this rank has compared. None: all that it did before.
        """
        if any(f.kind in ("error", "layout") or f.name == MORE for f in report.findings):
            return []  # Something was not compared, or is not named in the report: it may still differ.
        found = set(map(_identity, report.findings))
        gone = [f for identity, f in self._first.items() if f.kind in kinds and identity not in found]
        if things is not None:  # A check may be of a part of the model, or of one of several models.
            left_out = [f for f in gone if _is_held_by(f, rank) and not _is_of(f, things)]
            gone = [f for f in gone if f not in left_out and not (left_out and f.name == MORE)]
        for f in gone:
            del self._first[_identity(f)]
        # On other ranks than before it is another finding, and the thing still differs.
        gone = [f for f in gone if not any(_is_about_one_thing(f, other) for other in report.findings)]
        # ``kinds`` come from what this rank has compared. A rank that does not hold a thing may not know that it was
        # compared, so the lowest rank that holds it logs.
        lines = [
            f"fp8dist: equal again: {f.subject} on {f.who}{_since(f, 'different ')}"
            for f in gone
            if rank == _lowest_rank(f)
        ]
        return _few(lines, "fp8dist: equal again")


def log_changes(
    group: SyncGroup | None,
    standing: Standing,
    report: DivergenceReport,
    kinds: Collection[str],
    nonfinite_rank: int | None = None,
    things: Collection[tuple[str, str]] | None = None,
) -> None:
    """Log what changed since the last report: earlier findings that are gone, and new values that are not finite.
    Local.

    Args:
        standing: the findings of earlier reports.
        kinds: of the findings that ``report`` would have if they were not gone.
        nonfinite_rank: the rank that logs values that are not finite; None: there is one rank, or no such value.
        things: see ``Standing.gone``.
    """
    rank = group.rank if group is not None else 0
    new = standing.not_finite(report, nonfinite_rank)
    for text in (*standing.gone(report, kinds, rank, things), *(new if nonfinite_rank in (None, rank) else ())):
        logger.warning("%s", text)


def kinds_of(compared: Collection[str]) -> set[str]:
    """Return the kinds of findings that are over if a check does not report them. ``compared``: the kinds of things
    that it compared."""
    of_slots = {"slot", *FINDING_KINDS.values()} if "slot" in compared else set()
    return {"manifest", "step", "layout", "error", *compared, *of_slots}


def _identity(f: Finding) -> _Identity:
    return f.kind, f.name, f.ranks


def _is_about_one_thing(a: Finding, b: Finding) -> bool:
    """True if both are about the same thing on ranks that hold it alike. Other ranks may call another thing so."""
    return (a.kind, a.name) == (b.kind, b.name) and any(_is_held_by(a, rank) for side in b.sides for rank in side)


def _is_held_by(f: Finding, rank: int) -> bool:
    """True if this rank holds the thing. Others cannot know if it was compared, and must not remember what its holders
    forget: any rank may log the next report."""
    return any(rank in side for side in f.sides or (f.ranks,))


def _is_of(f: Finding, things: Collection[tuple[str, str]]) -> bool:
    """True if the finding is about one of these things, given by name and kind, or about no thing."""
    name = f.name.partition(" (")[0] if f.kind == COHERENCE else f.name  # Of a cast: "0 (rows)".
    of_none = f.name == f.kind or not _OF_NO_THING.isdisjoint((f.kind, f.name))
    return of_none or (name, _SLOT.get(f.kind, f.kind)) in things


def _lowest_rank(f: Finding) -> int:
    """Return the lowest rank that holds the thing."""
    return min(rank for side in f.sides or (f.ranks,) for rank in side)


def _step(f: Finding) -> str:
    return f"step {f.step}: " if f.step else ""


def _since(f: Finding, what: str = "") -> str:
    return f", {what}since step {f.step}" if f.step else ""


def _few(lines: list[str], what: str) -> list[str]:
    """Return the first lines, and one with the number of further lines. ``what``: its beginning."""
    more = len(lines) - MAX_LINES
    return lines if more <= 0 else [*lines[:MAX_LINES], f"{what}: {more} more"]

"""Findings that stand: logged before, and not seen equal since. They get a line, not another table."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from fp8dist.checks.contents import FINDING_KINDS
from fp8dist.checks.report import DivergenceReport
from fp8dist.common.divergence import MORE, Finding
from fp8dist.common.text import first_few

__all__ = ["HEADER_KINDS", "Standing", "kinds_of"]

HEADER_KINDS = frozenset({"manifest", "step", "scale"})
"""Kinds of findings that the header of a sync proves absent."""

MAX_LINES = 8
"""Findings that still stand, or are gone, with a line of their own. The rest is counted."""

_Identity = tuple[str, str, tuple[int, ...]]


class Standing:
    """The standing findings of one observer: of the checks of a manager, or of the syncs of an arena.

    All ranks of the observer's group hand in the same reports, so all remember the same.
    """

    def __init__(self) -> None:
        self._first: dict[_Identity, Finding] = {}
        self._nonfinite = False

    def texts(self, report: DivergenceReport) -> list[str]:
        """Return what to log of a report, and remember its findings: the table of new ones, a line for each other."""
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
        """Return what to log of values that are not finite, which ``rank`` holds: once, until a check finds all finite.
        None: there is one rank."""
        new, self._nonfinite = bool(report.nonfinite) and not self._nonfinite, bool(report.nonfinite)
        names = first_few(report.nonfinite, MAX_LINES)
        of = "" if rank is None else f" of rank {rank}"
        text = (
            f"fp8dist: NaN or infinity in {names}{of}: a checkpoint that is saved now is not good, also if ranks agree"
        )
        return [text] if new else []

    def gone(self, report: DivergenceReport, kinds: Collection[str], rank: int) -> list[str]:
        """Forget findings of these kinds that ``report`` has no more. Return what ``rank`` logs about them."""
        if any(f.kind in ("error", "layout") or f.name == MORE for f in report.findings):
            return []  # Not everything was compared, or named.
        found = set(map(_identity, report.findings))
        gone = [f for identity, f in self._first.items() if f.kind in kinds and identity not in found]
        for f in gone:
            del self._first[_identity(f)]
        # Ranks that do not hold a thing do not know that it was compared.
        lines = [
            f"fp8dist: equal again: {f.subject} on {f.who}{_since(f, 'different ')}" for f in gone if rank == _first(f)
        ]
        return _few(lines, "fp8dist: equal again")


def kinds_of(compared: Collection[str]) -> set[str]:
    """Return the kinds of findings that a check proves absent. ``compared``: kinds of what it compared."""
    of_slots = {"slot", *FINDING_KINDS.values()} if "slot" in compared else set()
    return {"manifest", "step", "layout", "error", *compared, *of_slots}


def _identity(f: Finding) -> _Identity:
    return f.kind, f.name, f.ranks


def _first(f: Finding) -> int:
    return min(rank for side in f.sides or (f.ranks,) for rank in side)


def _step(f: Finding) -> str:
    return f"step {f.step}: " if f.step else ""


def _since(f: Finding, what: str = "") -> str:
    return f", {what}since step {f.step}" if f.step else ""


def _few(lines: list[str], what: str) -> list[str]:
    more = len(lines) - MAX_LINES
    return lines if more <= 0 else [*lines[:MAX_LINES], f"{what}: {more} more"]

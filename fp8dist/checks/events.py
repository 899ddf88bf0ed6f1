"""Events: what happened in a step, for the callbacks of ``manager.on_event``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from fp8dist.checks.report import DivergenceReport
from fp8dist.state.cause import Cause
from fp8dist.state.slots import Slot


class ReplayFacts(Protocol):
    """The part of ``fp8dist.Replayed`` that an event needs. A Protocol, because this room may not import replays."""

    def fields(self) -> dict[str, Any]:
        """Return the fields of the event's line in events.jsonl, as JSON values."""


@dataclass(frozen=True)
class Event:
    """Something that happened in step ``step``, for the callbacks of ``manager.on_event``.

    ``kind`` is one of these:

    - "nonfinite": ``slots`` had a NaN or Inf amax; their scales did not change.
    - "saturated": weights that FSDP2 gathers in FP8 exceeded the range of their scale; ``slots`` are theirs.
    - "fallback": the modules that cast ``slots`` run in high precision for some steps.
    - "jump": the scales of ``slots`` jumped since the last watched step.
    - "diverged": ranks differ, see ``report``.
    - "replayed": a kept batch was replayed; ``replay`` is an ``fp8dist.Replayed``.

    Callbacks get events at boundaries (the end of a step) and in ``check()``, the same ones on all ranks.

    ``cause``, for "nonfinite" and "jump": the cast that recorded the first bad amax, with its step, rank, microbatch,
    module and role. None: no watch (``fp8dist.watch``) observed it.
    """

    kind: Literal["nonfinite", "saturated", "fallback", "jump", "diverged", "replayed"]
    step: int
    slots: tuple[Slot, ...] = ()
    report: DivergenceReport | None = None
    cause: Cause | None = None
    replay: ReplayFacts | None = None


class EventQueue:
    """The events of one manager that no callback has got yet. All methods are local.

    ``callbacks``: called with each event.
    """

    def __init__(self) -> None:
        self.callbacks: list[Callable[[Event], None]] = []
        self._queued: list[Event] = []

    def queue(self, event: Event) -> None:
        """Queue an event for the callbacks, which run at the end of this boundary."""
        self._queued.append(event)

    def queue_diverged(self, report: DivergenceReport) -> None:
        """Queue a report of a difference as an event."""
        self.queue(Event("diverged", max(f.step for f in report.findings), report=report))

    def run(self) -> None:
        """Call the callbacks with the queued events. Only between collectives: a callback may raise, and then no other
        rank may be waiting for this one."""
        events, self._queued = self._queued, []
        for event in events:
            for callback in self.callbacks:
                callback(event)

    def notify(self, event: Event) -> None:
        """Queue an event, and call the callbacks with all queued events."""
        self.queue(event)
        self.run()

    def notify_diverged(self, report: DivergenceReport) -> None:
        """Queue a report of a difference as an event, and call the callbacks."""
        self.queue_diverged(report)
        self.run()

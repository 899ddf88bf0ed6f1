"""``replay_on``: replays the kept batch that caused an event of the training, such as an amax that is not finite."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import nn

from fp8dist.checks.events import Event
from fp8dist.common.names import check_keywords, require_choice, require_int
from fp8dist.errors import ConfigurationError, LossAlarm, SyncError
from fp8dist.job.manager import Internals, StateManager
from fp8dist.parallel.wrappers import require_replicas
from fp8dist.replays.buffer import KeptBatch, ReplayBuffer
from fp8dist.replays.model_replay import replay
from fp8dist.replays.replay_report import Replayed, ReplayReport
from fp8dist.state.groups import GroupLike, SyncGroup, own_rank, world_size
from fp8dist.state.roll_call import failing_by_name

logger = logging.getLogger("fp8dist")

Trigger = Literal["nonfinite", "jump", "spike"]

_KINDS: tuple[str, ...] = ("nonfinite", "jump", "spike")
"""The kinds of events. If a step has several, the first in this order is replayed."""

_UNKNOWN = -1


class _Wish(NamedTuple):
    """A rank's wish for a replay, from an event of this ``kind``. ``microbatch``, ``rank``: as the event names them.
    ``microbatch`` None: replay the step's microbatches in order, until a replay has findings."""

    kind: str
    step: int
    microbatch: int | None = None
    rank: int | None = None


class LossEvents(Protocol):
    """The part of ``LossGuard`` that ``replay_on`` uses."""

    @property
    def stops(self) -> bool:
        """True if an alarm ends the run."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks that get the same alarms."""

    def on_observe(self, callback: Callable[[LossAlarm | None], None]) -> None:
        """Register a function that gets the alarm of each loss, or None."""


def _first_place(report: ReplayReport) -> int:
    return report.findings[0].place


@check_keywords("fp8dist.replay_on")
def replay_on(
    manager: StateManager | nn.Module,
    recorder: ReplayBuffer,
    step: Callable[[Any], object],
    events: Sequence[Trigger] = ("nonfinite", "jump", "spike"),
    at_most_every: int = 100,
    *,
    guard: LossEvents | None = None,
    group: GroupLike | None = None,
    scaler: Any = None,
    callback: Callable[[Event], None] | None = None,
) -> None:
    """From now on, replay the kept batch that an event names, and report the findings. The call itself is local; make
    it on all ranks alike. From then on, with FP8, the end of each step (the boundary) has one more COLLECTIVE: an
    all-reduce of 96 bytes, with which the ranks agree on a replay. On GPUs the boundary waits for the device, because
    the amaxes of a step are judged at its own boundary, before the update.

    A replay begins at the end of the boundary of the step, inside the optimizer's step before the update. So the
    weights are those of the step. With delayed scaling, the scales are those computed at this boundary. Each rank
    replays its own microbatch of the number that the event names; if the event names none, the step's microbatches in
    order, until a replay has findings. If ranks do not agree on the event, nothing is replayed, and one rank warns
    once.

    The report is logged on one rank, and is an Event "replayed" for the callbacks of the manager, which a ``Recorder``
    writes to its events. It is the same on all ranks. With tensor parallelism each data-parallel group has a report,
    and the one with the earliest finding is taken. A replay that raises does not end the training: one rank warns.

    - "nonfinite": an amax, or the loss that the guard sees, is not finite.
    - "jump": a scale jumped, see ``fp8dist.watch(jump=…)``. A delayed scale jumps one step after its amax. The batch
      of the amax's step is replayed, with the weights of the step after it. If ``watch`` did not observe the amax's
      step, nothing is replayed.
    - "spike": the guard saw a spike. If the guard stops the run, or there is no manager, the ranks agree and replay
      inside ``LossGuard.observe``: call ``observe`` between the backward and the update.

    Args:
        manager: the StateManager of the model, or a model without FP8, for which only the guard has events.
        recorder: keeps the batches.
        step: runs forward and backward of a batch, as the training does, with its own autocast. See
            ``fp8dist.replay``.
        events: kinds of events to replay after. A kind needs its source, such as ``guard`` for "spike".
        at_most_every: least number of steps from one replay to the next.
        guard: the ``LossGuard`` of the run, for "spike" and losses that are not finite.
        group: see ``fp8dist.replay``. None: the ranks that share the FP8 state, or all ranks of the job, which also
            agree on each replay. A tensor parallel model needs it.
        scaler: the GradScaler, see ``fp8dist.replay``.
        callback: also called with the Event, on all ranks. Without a manager, no other callback is called.

    Raises:
        ConfigurationError: an argument is invalid, or none of ``events`` can occur. Raised in the first step, if the
            model is tensor parallel and ``group`` is None.
    """
    if not isinstance(recorder, ReplayBuffer):
        raise ConfigurationError(f"recorder must be a ReplayBuffer, which keeps batches, got {type(recorder).__name__}")
    for kind in events:
        require_choice("events", kind, _KINDS)
    require_int("at_most_every", at_most_every, 1, what="a number of steps")
    fp8 = isinstance(manager, StateManager) and manager.settings.enabled
    if not events or (guard is None and (not fp8 or set(events) == {"spike"})):
        raise ConfigurationError(
            f"none of events={tuple(events)!r} can come: pass guard=, the LossGuard, for losses that spike or are not "
            "finite; amaxes and scales have events only in FP8"
        )
    if fp8 and not recorder.counts_for(manager):
        raise ConfigurationError("recorder keeps the batches of another model: pass ReplayBuffer(manager)")
    _Replays(manager, recorder, step, tuple(events), at_most_every, guard, group, scaler, callback).begin()


@dataclass(eq=False)
class _Replays:
    """The replays of one run, with the arguments of ``replay_on``. Its hooks keep it alive as long as the manager or
    the guard."""

    _owner: StateManager | nn.Module
    _recorder: ReplayBuffer
    _step: Callable[[Any], object]
    _events: tuple[str, ...]
    _every: int
    _guard: LossEvents | None
    _given: GroupLike | None
    _scaler: Any
    _callback: Callable[[Event], None] | None
    _wishes: dict[str, _Wish] = field(default_factory=dict)
    _rest: int = 0  # Steps until the next replay may begin.
    _warned: set[str] = field(default_factory=set)  # Warnings that are not repeated.

    def __post_init__(self) -> None:
        owner = self._owner
        self._manager = owner if isinstance(owner, StateManager) and owner.settings.enabled else None

    def begin(self) -> None:
        """Register for the events. Local."""
        if self._manager is not None:
            self._manager.on_event(self._on_event)
            Internals(self._manager).cycle.listeners.append(self._end_step)
        if self._guard is not None:
            self._guard.on_observe(self._judge)

    # Events --------------------------------------------------------------------------------------

    def _on_event(self, event: Event) -> None:
        """Note an event of the manager, with the microbatch and the rank of its cause if they are known. Local."""
        assert self._manager is not None
        cause = event.cause
        if event.kind == "jump" and cause is None and "jump" in self._events:
            self._warn_once(
                "a jump names no batch, unless fp8dist.watch(manager, every=1, ranks=True) observes each step"
            )
        elif cause is not None:
            self._note(event.kind, cause.step, cause.microbatch, cause.rank)
        elif event.kind == "nonfinite":
            self._note(event.kind, self._manager.run_step)

    def _judge(self, alarm: LossAlarm | None) -> None:
        """Note the guard's alarm about a loss; None: no alarm. Without FP8, and if the guard stops the run, the ranks
        agree on a replay here. This is COLLECTIVE: on an alarm, or at each loss if only some ranks get the alarms."""
        if alarm is not None:
            self._note(alarm.kind, self._now(alarm.step))
        assert self._guard is not None
        if self._manager is None or self._guard.stops:
            if alarm is not None or self._ranks is None or self._guard.ranks != tuple(self._ranks.ranks):
                self._replay_if_agreed()
            if self._manager is None:
                self._rest = max(0, self._rest - 1)

    def _note(self, kind: str, step: int, microbatch: int | None = None, rank: int | None = None) -> None:
        """Note a wish. Of several of one kind, the first that names a microbatch stays, else the last."""
        before = self._wishes.get(kind)
        if kind in self._events and (before is None or before.microbatch is None):
            self._wishes[kind] = _Wish(kind, step, microbatch, rank)

    def _end_step(self, took_place: bool) -> None:
        """Replay at the end of a boundary. COLLECTIVE, unless a loss scaler skipped the step (``took_place`` False)."""
        assert self._manager is not None
        if not took_place:
            self._wishes.clear()
            return
        now = self._manager.run_step
        noted = self._wishes.get("nonfinite")
        if noted is not None and noted.step < now:  # An earlier step was replayed at its own boundary.
            del self._wishes["nonfinite"]
        if "nonfinite" in self._events and Internals(self._manager).cycle.found_nonfinite():
            cause = Internals(self._manager).cycle.verdicts.cause_of_nonfinite()
            self._note("nonfinite", now, *((None, None) if cause is None else (cause.microbatch, cause.rank)))
        self._replay_if_agreed()
        self._rest = max(0, self._rest - 1)

    @property
    def _model(self) -> nn.Module:
        return self._owner if isinstance(self._owner, nn.Module) else Internals(self._owner).called_module

    # Agreement -----------------------------------------------------------------------------------

    @functools.cached_property
    def _ranks(self) -> SyncGroup | None:
        """The ranks that agree on a replay; None for a single rank. With tensor parallelism, more than those of
        ``group``."""
        if self._given is None:
            require_replicas(self._model, "fp8dist.replay_on")
        if self._manager is not None:
            return Internals(self._manager).cycle.checker.anchor()
        return None if world_size() == 1 else SyncGroup(dist.group.WORLD)  # type: ignore[arg-type]

    def _extremes(self, *values: int) -> tuple[list[int], list[int]]:
        """Return the least and the greatest of each value over the ranks. COLLECTIVE: one all-reduce."""
        ranks = self._ranks
        if ranks is None or not ranks.communicates:
            return list(values), list(values)
        sent = torch.tensor([*values, *(-value for value in values)], dtype=torch.int64, device=ranks.device)
        with failing_by_name("fp8dist.replay_on", lambda: "the agreement on a replay", ranks.ranks):
            dist.all_reduce(sent, dist.ReduceOp.MAX, group=ranks.process_group)
        found = sent.tolist()
        return [-value for value in found[len(values) :]], found[: len(values)]

    def _replay_if_agreed(self) -> None:
        """Replay if all ranks have the same wish. COLLECTIVE even if this rank has none, as others may have one."""
        wish = next((self._wishes[kind] for kind in _KINDS if kind in self._wishes), None)
        self._wishes.clear()
        mine, kept = (0, 0, 0, 0), 0
        if wish is not None:
            microbatch, rank = (_UNKNOWN if one is None else one for one in (wish.microbatch, wish.rank))
            mine = (1 + _KINDS.index(wish.kind), wish.step, microbatch, rank)
            kept = len(self._recorder.of(wish.step))
        (*least, kept, _), (*most, _, rests) = self._extremes(*mine, kept, int(self._rest > 0))
        if rests or not most[0]:  # A rank may not replay yet, or no rank has a wish.
            return
        if wish is None or least != most:
            self._warn_once("the ranks do not agree on an event, so its batch is not replayed")
        elif kept <= (wish.microbatch or 0):
            self._warn_once(
                f"not every rank has kept the batch of step {wish.step} that a {wish.kind!r} names: call keep(batch) "
                "for each microbatch, and ReplayBuffer(last=2) or more"
            )
        else:
            self._rest = self._every
            with self._recorder.paused():
                self._replay(wish, range(kept) if wish.microbatch is None else (wish.microbatch,))

    # Replays -------------------------------------------------------------------------------------

    def _replay(self, wish: _Wish, microbatches: Iterable[int]) -> None:
        """Replay microbatches until a report has findings, and notify of the last report. COLLECTIVE."""
        for microbatch in microbatches:
            try:
                report, failure = self._replay_one(self._recorder.of(wish.step)[microbatch]), ""
            except SyncError:  # A rank is gone: the training cannot go on either.
                raise
            except Exception as error:  # The user's step may raise anything. Then all ranks raise.
                report, failure = None, " ".join(f"{type(error).__name__}: {error}".split())
            everyone = [(report, failure)]
            if self._given is not None and self._ranks is not None:  # Each data-parallel group has its own report.
                everyone = self._ranks.gather((report, failure))
            failure = next((failure for _, failure in everyone if failure), "")
            if failure:
                self._warn(f"the replay of microbatch {microbatch} of step {wish.step} failed: {failure}")
                return
            reports = [report for report, _ in everyone if report is not None]
            found = min((one for one in reports if one.findings), key=_first_place, default=reports[0])
            if found.findings:
                break
        self._notify(Replayed(wish.kind, wish.step, microbatch, found))

    def _replay_one(self, kept: KeptBatch) -> ReplayReport:
        """Replay a microbatch. COLLECTIVE. Raises on all ranks, if a rank cannot put its batch back on its device."""
        batch, failed = None, None
        try:
            batch = kept.batch()
        except Exception as error:  # Such as no memory on the GPU. The other ranks must not begin the replay.
            failed = error
        if self._extremes(int(failed is not None))[1][0]:
            raise failed or RuntimeError("another rank could not put its batch back on its device")
        given = {"group": self._group(), "random_state": kept.random_state, "scaler": self._scaler}
        with torch.enable_grad():
            return replay(self._model, self._step, batch, **given)

    def _group(self) -> GroupLike | None:
        """Return the group of the replay: the given one, else the ranks that agree."""
        if self._given is not None or self._ranks is None:
            return self._given
        return self._ranks.mesh or self._ranks.process_group

    def _notify(self, replayed: Replayed) -> None:
        """Log the report on one rank, and call the callbacks on all."""
        event = Event("replayed", self._now(replayed.step), replay=replayed)
        self._warn(
            f"after a {replayed.trigger!r}, microbatch {replayed.microbatch} of step {replayed.step} was replayed: "
            f"{replayed.report}"
        )
        if self._manager is not None:
            Internals(self._manager).cycle.events.notify(event)
        if self._callback is not None:
            self._callback(event)

    def _warn(self, message: str) -> None:
        """Log on the lowest of the ranks that agree."""
        if own_rank() == (0 if self._ranks is None else min(self._ranks.ranks)):
            logger.warning("fp8dist: step %d: %s", self._now(0), message)

    def _now(self, otherwise: int) -> int:
        """Return the step whose batches were kept last; ``otherwise`` if none are kept."""
        return self._recorder.steps[-1] if self._recorder.steps else otherwise

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            self._warn(message)

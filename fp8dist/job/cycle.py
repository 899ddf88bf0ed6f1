"""StepCycle: the boundaries, launches and commits of one manager."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import Any

from torch import Tensor

from fp8dist.checks.at_rest import AtRest
from fp8dist.checks.audit import Audits
from fp8dist.checks.checker import Checker
from fp8dist.checks.events import EventQueue
from fp8dist.checks.verdicts import Verdicts
from fp8dist.errors import ConfigurationError, SyncError
from fp8dist.job.measurement import Measurement
from fp8dist.job.order import require_order
from fp8dist.job.periodic_checks import PeriodicChecks
from fp8dist.job.step_watch import StepWatch
from fp8dist.job.weight_scales import WeightScales
from fp8dist.modules.job_state import Activity
from fp8dist.modules.model_state import ModelState
from fp8dist.modules.precision_control import PrecisionControl
from fp8dist.state import overwrites
from fp8dist.state.arena_sync import Phase
from fp8dist.state.slots import Slot
from fp8dist_kernels.graphs import compiled_any


class StepCycle:
    """Drives all arenas of one manager through their steps.

    Methods that communicate are called at points of the program that all ranks reach, and handle the arenas in the
    order of ``ModelState``.

    Attributes:
        control: the precision of modules.
        events: what callbacks get. ``verdicts``: acts on what syncs prove. ``checker``: compares ranks on request.
        scales: the scales of weights, and the weights that FSDP2 gathers in FP8.
        measurement: the watch, and the time that steps wait in syncs.
        checks: runs the checks that are due.
        audits: the audits of casts and products; None: the settings ask for none.
        at_rest: compares tensors between steps.
        steps: watches all optimizers of the process. The manager sets it, as soon as it has a cycle.
        listeners: called as a training step ends. False: the step was skipped.
    """

    steps: StepWatch

    def __init__(self, state: ModelState) -> None:
        self.state = state
        self._init_transient()

    def _init_transient(self) -> None:
        """Job-specific state. Not copied or pickled."""
        state = self.state
        self.settings, self.job, self.precisions = state.settings, state.job, state.precisions
        self.syncs, self.groups = state.syncs, state.groups
        self.audits: Audits | None = None
        self.at_rest = AtRest(state.settings.at_rest_every)
        self.control = PrecisionControl(state)
        self.events = EventQueue()
        self.verdicts = Verdicts(state, self.control, self.events)
        self.checker = Checker(state, self.verdicts, self.events)
        self.scales = WeightScales(state)
        self.measurement = Measurement(state, self.events)
        self.checks = PeriodicChecks(state, self.checker, self.scales, self.at_rest)
        self.listeners: list[Callable[[bool], None]] = []
        self._loaded = False  # State was loaded, and no step has ended since.
        self._failure: SyncError | None = None  # Of a commit during a compilation; the next boundary raises it.
        self.job.warned_unsynced = False

    def __getstate__(self) -> dict[str, Any]:
        return {"state": self.state}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._init_transient()

    # The phase -------------------------------------------------------------------------------------

    @property
    def activities(self) -> tuple[Activity, ...]:
        """Activities in progress besides plain training."""
        found = (
            (Activity.CAPTURING, self.state.captures),
            (Activity.REPLAYING, self.job.replaying),
            (Activity.CALIBRATING, self.job.calibrating),
            (Activity.JOINED, self.job.joined),
            (Activity.IN_STEP, any([sync.phase is Phase.IN_FLIGHT for sync in self.syncs])),
        )
        return tuple([activity for activity, under_way in found if under_way])

    def require(self, call: str, switched_off: bool = False) -> None:
        """Raise ConfigurationError if the current phase refuses a call (``job/order.py``). Local.

        Args:
            switched_off: True if the call needs ``attach`` even with FP8 switched off.
        """
        shared = self.job.shared and (self.job.enabled or switched_off)
        require_order(call, self.job.tie, self.activities, shared)

    # The step ------------------------------------------------------------------------------------

    def boundary(self, hold: Tensor | None = None, calibrated: bool = False) -> None:
        """End a step. COLLECTIVE: one all-reduce per arena, except for syncs that were launched early.

        Args:
            hold: one element on the state's device, non-zero if the loss scaler skips this step, which then does not
                count. Read on the device.
            calibrated: True at the end of a calibration, which is not a training step.
        """
        in_graph = self._begin_boundary()
        if not in_graph:
            self._act(calibrated)
        if self.settings.enabled:
            self._launch(hold, calibrated)
            if self.job.measuring:
                self.measurement.collect(calibrated, in_graph)
            self._commit(hold, in_graph)
            self._end_boundary(calibrated, in_graph)
            if not (calibrated or in_graph or self.job.joined):
                self._notify_listeners(True)
        elif self._loaded and not (calibrated or in_graph):
            # The scales are those of the weights before this step, which no amax follows. What is saved must show it.
            for sync in self.syncs:
                overwrites.make_cold(sync.arena, range(len(sync.arena)))
            self._loaded = False

    def _notify_listeners(self, took_place: bool) -> None:
        for listener in self.listeners:
            listener(took_place)

    def _begin_boundary(self) -> bool:
        """Refuse a step out of order, and commit the last step. Return True if a CUDA graph captures this step."""
        self.require("a step")
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        in_graph = self.state.captures
        if in_graph and (self.scales.sharded is not None or self.job.joined):
            raise ConfigurationError("a step with fp8_all_gather, or inside Join, cannot be captured into a CUDA graph")
        self.job.captured |= in_graph
        self.job.invalidate_casts()
        if self.settings.enabled:
            self.state.settle()
        return in_graph

    def _act(self, calibrated: bool) -> None:
        """Act on the verdicts of the last syncs, and run the audit and the check that are due.

        COLLECTIVE if a sync found a difference, or an audit or a check is due.
        """
        passed = self.job.boundaries
        self.job.boundaries += 1  # First, because the rest may raise, and a loop may catch the error and go on.
        if self.settings.enabled:
            if not calibrated:
                self.control.end_step()
            self.verdicts.act(self.job.joined)
        if self.audits is not None and not (calibrated or self.job.joined):
            self.verdicts.settle_audits(self.audits)
        self.checks.run_if_due(passed, in_step=True)

    def detached(self) -> None:
        """Forget what belongs to the attachment that has ended. Local."""
        self.audits = None
        self.job.detach()
        self.steps.detached()
        self.job.invalidate_casts()

    def begin_audit(self) -> None:
        """Choose which cast or product of the next step is recorded for an audit, if that step is audited. Local."""
        if self.audits is not None:
            self.audits.begin(self.job.step + 1, self.job.boundaries - self.checks.since)

    def _launch(self, hold: Tensor | None, calibrated: bool) -> None:
        """Launch the sync of each arena, unless it was launched early. In a Join context, backwards launch syncs."""
        for sync in self.syncs:
            if not sync.every_step:
                sync.step_alone(hold)
            elif not self.job.joined and (calibrated or sync.phase is Phase.IDLE):
                sync.launch(hold, self.job.scaled)

    def found_nonfinite(self) -> bool:
        """Return True if the sync of the step that has just ended saw a non-finite amax, before there is an event of
        it. Local. Commits that sync now, and waits for the device."""
        self.state.settle()
        return any(sync.verdict is not None and sync.verdict.read().nonfinite for sync in self.syncs)

    def _commit(self, hold: Tensor | None, in_graph: bool) -> None:
        """Mark the launched syncs as past their boundary, so that the next reader of scales commits them. Local.

        Commits them now if ``update`` is "same_step", or if the next reader of scales may bypass Python.
        """
        for sync in self.syncs:
            sync.pass_boundary(hold, self.job.scaled)
        at_once = in_graph or (self._unseen_forwards() and not self.job.by_optimizer)
        for sync in self.syncs:
            if at_once or sync.arena.recipe.update == "same_step":
                sync.settle()

    def _end_boundary(self, calibrated: bool, in_graph: bool) -> None:
        """Count the step, and act on its immediate verdicts. COLLECTIVE if they show a difference."""
        if calibrated:
            self.measurement.waits.drop()
        elif not in_graph:
            self.job.step += 1
            self.measurement.end_step()
            self.begin_audit()
        if not in_graph:
            self.verdicts.act(self.job.joined, only_immediate=True)

    def count_from_state(self, step: int | None = None) -> None:
        """Set ``run_step``, and begin to measure and audit anew. Local.

        Args:
            step: the run's step, which goes on. None: that of the watch, or of the state.
        """
        watch = self.measurement.watch
        if step is not None:
            self.job.step = step
        elif watch is not None and watch.resume_after is not None:
            self.job.step = watch.resume_after
        else:
            self.job.step = max((int(sync.arena.step) for sync in self.syncs), default=0)
        self.job.began = self.job.step
        self.verdicts.forget_steps()
        self.checker.forget_steps()
        self.measurement.restart()
        self.begin_audit()  # After Join, ranks have counted other numbers of steps.

    def _unseen_forwards(self) -> bool:
        """True if the next forward may bypass Python (torch.compile, CUDA graph), so cannot commit a pending sync."""
        return self.job.graphed or self.job.compiled or compiled_any()

    # Called by hooks -----------------------------------------------------------------------------

    def compilation_begins(self, compilation: Any) -> None:
        """Commit pending syncs, because torch.compile is about to trace, maybe a forward. Local."""
        self.job.compiled = True
        try:
            self.state.settle()
        except SyncError as error:  # Raised later: Dynamo would wrap it in an error of its own.
            self._failure = error

    def scaler_found(self) -> None:
        """Treat a loss scaler that ``attach`` was not given as if it had been. Local."""
        self.job.scaled = True
        self.step_skipped()  # Earlier steps may have been skipped unnoticed.

    def state_loaded(self, slots: Collection[Slot], step: int | None = None) -> None:
        """Handle loaded or reset state of these slots: FP8 casts are stale, and slots may be cold. Local.

        Args:
            step: see ``count_from_state``.
        """
        self._loaded = True
        self.job.invalidate_casts()
        self.count_from_state(step)
        self.steps.state_loaded(slots)
        if self.scales.sharded is not None:
            self.scales.sharded.state_loaded(slots)

    @contextlib.contextmanager
    def weights_swapped(self) -> Iterator[None]:
        """Context in which the caller swaps weights and puts them back: restores notes and scales at exit. Local."""
        scales = self.scales.sharded.kept_scales() if self.scales.sharded is not None else contextlib.nullcontext()
        growth = self.job.growth, self.job.eval_growth
        self.job.invalidate_casts()
        try:
            with self.steps.kept_notes(), scales:
                yield
        finally:
            self.job.growth, self.job.eval_growth = growth
            self.job.invalidate_casts()

    def weights_changed(self) -> None:
        """Handle the end of an attached optimizer's step. Local."""
        self.job.invalidate_casts()
        self.commit_unseen()
        self.steps.renews = self.scales.sharded is not None

    def commit_unseen(self) -> None:
        """Commit the syncs of the step that has just ended if the next forward may not be able to. Local."""
        if self._unseen_forwards():
            self.state.settle()

    def reuse_casts(self, allowed: bool) -> None:
        """Allow or forbid reuse of weight casts until the next call. Local."""
        self.job.reuse_casts = allowed
        self.job.invalidate_casts()

    def optimizer_loaded(self, stepped: bool) -> None:
        """Handle loaded state of an attached optimizer. Local. ``stepped``: True if it has stepped before."""
        if self.job.boundaries == self.checks.since:
            self.control.training_resumes(stepped)
        self.steps.optimizer_loaded()

    def step_skipped(self) -> None:
        """Drop non-finite amaxes, but no others, because the loss scaler skipped the optimizer. Local."""
        self.state.settle()
        for sync in self.syncs:
            sync.drop_nonfinite()
        self._notify_listeners(False)

"""Measurement: the statistics that a watch collects in some steps, and the times that steps wait in syncs."""

from __future__ import annotations

import math

from fp8dist.checks.events import Event, EventQueue
from fp8dist.modules.model_state import ModelState
from fp8dist.state.microbatches import Microbatches
from fp8dist.state.waits import Waits
from fp8dist.state.watch import Watch
from fp8dist_kernels.formats import Role


class Measurement:
    """Measures the steps of one manager. ``watch``: ``fp8dist.watch`` sets it; None: nothing is collected."""

    def __init__(self, state: ModelState, events: EventQueue) -> None:
        self._state, self._events = state, events
        self.watch: Watch | None = None
        self.waits = Waits()
        for sync in state.syncs:
            sync.waits = self.waits

    def restart(self) -> None:
        """Begin with the step after ``run_step``, after ``attach`` or a load. Local."""
        self.waits.averaged = self.watch is not None and self.watch.ranks
        if self.watch is not None:
            self.watch.start(self._state.job.step)
        self._choose()

    def end_step(self) -> None:
        """Note that a training step has ended. Local."""
        self.waits.end_step()
        if self.watch is not None:
            self.watch.resume_after = None
        self._choose()

    def _choose(self) -> None:
        """Set whether the casts of the next step are measured. Compiled forwards are compiled for both cases."""
        job, watch = self._state.job, self.watch
        due = watch is not None and self._state.settings.enabled and watch.is_due(job.step + 1)
        if due or job.measuring:
            self._measure(due)

    def _measure(self, on: bool) -> None:
        self._state.job.measuring = False  # Until all syncs measure: Ctrl-C may come in between.
        for sync in self._state.syncs:
            sync.watch(on)
        self._state.job.microbatches = Microbatches(self._state.syncs) if on else None
        self._state.job.measuring = on

    def collect(self, calibrated: bool, in_graph: bool) -> None:
        """Collect the statistics of the step that ends, which is measured, and queue the events that they give rise to.
        COLLECTIVE, unless the step is a calibration, is inside Join, or is captured. Between launch and commit.

        Args:
            calibrated: True at the end of a calibration.
            in_graph: True if a CUDA graph captures the step.
        """
        if calibrated:
            self._measure(True)  # Restart, because a calibration is not the step to be measured.
        elif not (self._state.job.joined or in_graph):
            assert self.watch is not None
            syncs, step = self._state.syncs, self._state.job.step + 1
            synced = any(sync.every_step for sync in syncs)
            waited = self.waits.mean() if synced and self.waits.averaged else math.nan
            jumps = self.watch.collect(step, syncs, waited, self._microbatches_known())
            if jumps:
                cause = self.watch.outlier(jumps, syncs)
                self._events.queue(Event("jump", step, tuple(jump.slot for jump in jumps), cause=cause))
            # Syncs find non-finite amaxes themselves. Recipes without one need the watch for that.
            cause, slots = self.watch.nonfinite(step)
            unsynced = {slot for sync in syncs if not sync.every_step for slot in sync.arena.index}
            bad = tuple(slot for slot in slots if slot in unsynced)
            if bad:
                self._events.queue(Event("nonfinite", step, bad, cause=cause))

    def _microbatches_known(self) -> bool:
        """True if this rank knows which microbatch recorded what: every FP8Linear that recorded an amax did so in
        Python, and not in a graph of torch.compile or CUDA."""
        noted = self._state.job.microbatches
        if noted is None or not noted.known:
            return False
        seen = [sync.measured for sync in self._state.syncs if sync.measured is not None]
        inputs = (slot.fqn for each in seen for slot in each.recorded() if slot.role == Role.INPUT)
        return all(fqn in noted.called or fqn not in self._state.precisions.by_fqn for fqn in inputs)

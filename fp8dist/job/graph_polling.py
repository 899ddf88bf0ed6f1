"""GraphPolling: the host's part of steps that are replayed in CUDA graphs."""

from __future__ import annotations

import logging

from fp8dist.job.cycle import StepCycle

logger = logging.getLogger("fp8dist")


class GraphPolling:
    """Does the host's part of steps that CUDA graphs replay, for one manager, when the loop calls ``poll``."""

    def __init__(self, cycle: StepCycle) -> None:
        self._cycle = cycle
        self._replays = 0
        self._polled: int | None = None  # Boundaries at the last poll without a graph.
        self._warned = False

    def poll(self) -> None:
        """See ``StateManager.poll``. Commits a pending sync of an eager step, acts on the verdicts of replayed syncs,
        counts the replays as boundaries, and runs the check that is due. COLLECTIVE if a verdict shows a difference, or
        a check is due."""
        cycle, job = self._cycle, self._cycle.job
        cycle.require("poll()")
        self._warn_if_idle()
        cycle.state.settle()
        job.invalidate_casts()
        if cycle.settings.enabled:
            cycle.verdicts.act(job.joined)
        for sync in cycle.syncs:
            sync.poll()
        try:
            cycle.verdicts.act(job.joined)
        finally:
            replays = max((sync.replays for sync in cycle.syncs), default=0)
            new, self._replays = replays - self._replays, replays
            job.boundaries += new
        cycle.checks.run_if_due(job.boundaries, in_step=False)

    def _warn_if_idle(self) -> None:
        """Warn once about polls without a graph. No error, because a loop may skip a step, and all ranks must poll."""
        cycle, job = self._cycle, self._cycle.job
        if job.captured or job.graphed or not cycle.settings.enabled or self._warned:
            return
        idle, self._polled = self._polled == job.boundaries, job.boundaries
        if idle and cycle.state.logs:
            self._warned = True
            logger.warning(
                "fp8dist: poll() without a graph: no step was captured into a CUDA graph, and none has ended since the "
                "last poll(). It is for replays; a step that is taken eagerly ends with the attached optimizer's step, "
                "or with manager.step()"
            )

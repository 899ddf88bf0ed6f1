"""Syncs that are launched before the boundary: by communication hooks of DDP and FSDP1, and inside torch's ``Join``
contexts, where a rank without data takes part in the syncs of the others."""

from __future__ import annotations

import torch
import torch.distributed as dist

from fp8dist.job.cycle import StepCycle
from fp8dist.modules.job_state import JobState
from fp8dist.modules.precision_control import PrecisionControl
from fp8dist.state.arena import Arena
from fp8dist.state.arena_sync import ArenaSync, Phase
from fp8dist.state.groups import SyncGroup
from fp8dist.state.precision import Precisions

__all__ = ["EarlyLauncher"]


class EarlyLauncher:
    """Launches the syncs of one manager before the boundary. The results of several launches merge."""

    def __init__(self, cycle: StepCycle) -> None:
        self._cycle = cycle

    @property
    def job(self) -> JobState:
        """The manager's current state."""
        return self._cycle.job

    @property
    def communicates(self) -> bool:
        """True if steps end with a collective."""
        return any(sync.communicates and sync.every_step for sync in self._cycle.syncs)

    def launch_early(self) -> None:
        """Launch the sync of each arena. COLLECTIVE: one all-reduce per arena.

        Launches nothing while calibrating, which commits on a clean exit only, or after ``detach``.
        """
        job = self.job
        if self._cycle.settings.enabled and not job.recording and not job.untied:
            for sync in self._cycle.syncs:
                if sync.every_step:
                    sync.launch()

    def launch_from_hook(self) -> None:
        """Call ``launch_early`` for a communication hook, which may have outlived a ``detach``. COLLECTIVE.

        Raises:
            ConfigurationError: the call comes out of order.
        """
        job = self.job
        if not job.untied:
            job.launches_early = True
            if job.joined or (self._cycle.settings.enabled and not job.recording):
                self._cycle.require("comm_hook")
                self.launch_early()

    def launch_idle(self) -> None:
        """Take part in a launch of the other ranks, on a rank without data, which contributes nothing. COLLECTIVE: one
        all-reduce per arena."""
        for sync in self._cycle.syncs:
            if sync.communicates and sync.every_step:
                sync.launch_idle()
        self._cycle.measurement.waits.drop()

    def resync_after_join(self) -> None:
        """Take over the state of the rank that has done the most steps, and end the Join context. COLLECTIVE: a
        max-reduction, and broadcasts of the whole state, per arena."""
        cycle = self._cycle
        cycle.state.settle()
        # Ranks without data have no verdicts. Act on those of the other ranks before taking over their state.
        cycle.checker.act_on_verdicts(True, raises=False)
        for sync in cycle.syncs:
            _take_furthest(sync, cycle.precisions, cycle.control)
            if sync.phase is not Phase.IDLE:
                sync.abandon()
        cycle.job.invalidate_casts()
        # A rank without data has counted fewer steps. These counts decide when ranks check, so make them equal.
        cycle.checks.restart()
        cycle.count_from_state()
        cycle.measurement.waits.drop()
        cycle.job.leave_join()


def _take_furthest(sync: ArenaSync, precisions: Precisions, control: PrecisionControl) -> None:
    """Copy the state of the rank with the highest step counter to all ranks: the arena, and which GEMMs of its modules
    run in high precision and for how long. COLLECTIVE if the sync communicates."""
    if not sync.communicates:
        return
    assert sync.group is not None
    source = _broadcast_furthest(sync.arena, sync.group)
    fqns = {slot.fqn for slot in sync.arena.index}
    described = precisions.describe()
    theirs = [{fqn: of for fqn, of in described.items() if fqn in fqns}]
    dist.broadcast_object_list(theirs, src=source, group=sync.group.process_group, device=sync.arena.device)
    precisions.restore({**{fqn: of for fqn, of in described.items() if fqn not in fqns}, **theirs[0]})
    control.announce()


def _broadcast_furthest(arena: Arena, group: SyncGroup) -> int:
    """Broadcast the arena of the rank with the highest step counter, and return that rank. COLLECTIVE."""
    me = group.ranks.index(group.rank)
    furthest = (arena.step.to(torch.int64) * group.size + me).view(1)
    dist.all_reduce(furthest, dist.ReduceOp.MAX, group=group.process_group)
    source = group.ranks[int(furthest) % group.size]
    for tensor in arena.shared_state():
        dist.broadcast(tensor, src=source, group=group.process_group)
    return source

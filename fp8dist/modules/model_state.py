"""ModelState: what the manager of one model, its step cycle, its checker and its precision control share."""

from __future__ import annotations

from dataclasses import dataclass

from fp8dist.modules.job_state import JobState
from fp8dist.state.arena_sync import ArenaSync
from fp8dist.state.groups import SyncGroup
from fp8dist.state.precision import Precisions
from fp8dist.state.settings import Settings
from fp8dist_kernels.graphs import capturing

__all__ = ["ModelState"]


@dataclass(frozen=True, eq=False)
class ModelState:
    """The FP8 state of one model.

    ``syncs``: the arenas with their syncs, sorted by the ranks of their groups. So ranks of several groups launch them
    in one order, and cannot wait for each other in a circle. ``groups``: by place in ``syncs``, the group that an arena
    was prepared for, attached or not; None: no group.
    """

    settings: Settings
    job: JobState
    precisions: Precisions
    syncs: tuple[ArenaSync, ...]
    groups: tuple[SyncGroup | None, ...]

    def group_of(self, sync: ArenaSync) -> SyncGroup | None:
        """Return the group that an arena was prepared for, attached or not."""
        return self.groups[self.syncs.index(sync)]

    def settle(self) -> None:
        """Commit pending syncs. Local: may wait for a collective in flight, but never starts one."""
        for sync in self.syncs:
            sync.settle()

    @property
    def captures(self) -> bool:
        """True if this step is being captured into a CUDA graph."""
        return any([capturing(sync.arena.device) for sync in self.syncs])

    @property
    def speaks(self) -> bool:
        """True on the one rank that logs for all ranks."""
        group = next((group for group in self.groups if group is not None), None)
        return group is None or group.rank == min(group.ranks)

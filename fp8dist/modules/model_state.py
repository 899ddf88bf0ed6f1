"""ModelState: the FP8 state of one model. Its manager, step cycle, checker and precision control share it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fp8dist.modules.job_state import JobState
from fp8dist.state.arena_sync import ArenaSync
from fp8dist.state.groups import SyncGroup
from fp8dist.state.precision import Precisions
from fp8dist.state.settings import Settings
from fp8dist_kernels.graphs import capturing


@dataclass(frozen=True, eq=False)
class ModelState:
    """The FP8 state of one model.

    Attributes:
        syncs: one per arena, sorted by the ranks of their groups. All ranks launch their all-reduces in this order.
            Otherwise ranks that are in several groups could wait for each other in a circle.
        groups: the process group that each arena was prepared for, in the order of ``syncs``, attached or not. None:
            no group.
        axes: an ``fp8dist.Axes``, along which checks compare plain tensors, too; None: the caller named none.
        values: returns values that checks by ``check_every`` compare as well; None: there are none.
    """

    settings: Settings
    job: JobState
    precisions: Precisions
    syncs: tuple[ArenaSync, ...]
    groups: tuple[SyncGroup | None, ...]
    axes: Any = None
    values: Callable[[], Mapping[str, Any]] | None = None

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
    def logs(self) -> bool:
        """True on the one rank that logs for its group: the lowest."""
        group = next((group for group in self.groups if group is not None), None)
        return group is None or group.rank == min(group.ranks)

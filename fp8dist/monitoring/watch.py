"""Watch: collects the slot statistics of all ranks at an interval, with one all-reduce per group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fp8dist.monitoring.monitor import Monitor, ScaleJump, SlotStatistics
from fp8dist.state.arena import Arena
from fp8dist.sync.arena_sync import ArenaSync, all_reduce_max
from fp8dist.sync.groups import SyncGroup
from fp8dist_kernels.reference.magnitude import DID_NOT_RUN
from fp8dist_kernels.scaling import scale_from_amax

__all__ = ["Watch"]

_LAST_RANK = (1 << 31) - 1
_LOW = (1 << 32) - 1


class Watch:
    """Collects the cast statistics of all ranks for one manager, every ``every`` steps.

    Amaxes and shares are maxima over all ranks. With ``ranks``, each value travels as an int64 with the rank in its
    lower half, so that the same all-reduce also finds the rank that held the maximum (the lowest rank, if several did).

    ``resume_after``: the step number to count from, until a step has ended. None: count from the step counter of the
    FP8 state, which includes calibrations, but not steps without FP8.
    """

    def __init__(self, every: int, ranks: bool, monitor: Monitor, resume_after: int | None = None) -> None:
        self.every, self.ranks, self.resume_after = every, ranks, resume_after
        self._monitor = monitor

    def describe(self) -> dict[str, Any]:
        """Return the settings that must be equal on all ranks, as JSON values."""
        return {"every": self.every, "ranks": self.ranks, "resume_after": self.resume_after}

    def is_due(self, step: int) -> bool:
        """True if the casts of this step are measured."""
        return step % self.every == 0

    def collect(self, step: int, syncs: Sequence[ArenaSync]) -> list[ScaleJump]:
        """Reduce the ranks' statistics, write them, and return the scales that jumped. COLLECTIVE: one all-reduce for
        each group that has arenas. Reads the device.

        Call it after the launch and before the commit, while scales and cold flags are still those of the step.
        """
        by_group: dict[Sequence[int], list[ArenaSync]] = {}
        for sync in syncs:
            ranks = sync.group.ranks if sync.communicates and sync.group is not None else ()
            by_group.setdefault(ranks, []).append(sync)
        statistics: list[SlotStatistics] = []
        for together in by_group.values():
            seen = torch.cat([sync.take_seen() for sync in together], 1)
            first = together[0]
            reduced, holders = self._reduce(seen, first, first.group if first.communicates else None)
            start = 0
            for sync in together:
                part = slice(start, start + len(sync.arena))
                statistics += _statistics(sync.arena, reduced[:, part], None if holders is None else holders[:, part])
                start = part.stop
        return self._monitor.observe(step, sorted(statistics))

    def _reduce(self, seen: Tensor, sync: ArenaSync, group: SyncGroup | None) -> tuple[Tensor, Tensor | None]:
        """Return the maxima (float32[3, n], ranks int64[3, n] or None), on the CPU."""
        sent = bits = seen.view(torch.int32)
        if self.ranks:
            sent = (bits.to(torch.int64) << 32) | (_LAST_RANK - (0 if group is None else group.rank))
        if group is not None:
            with sync.failing_by_name("the watch of FP8 scales"):
                all_reduce_max(sent, group, sync.counters).wait()
        found = sent.cpu()
        if not self.ranks:
            return found.view(torch.float32), None
        return (found >> 32).to(torch.int32).view(torch.float32), _LAST_RANK - (found & _LOW)

    def close(self) -> None:
        """Close the monitor's files. Local."""
        self._monitor.close()


def _statistics(arena: Arena, seen: Tensor, holders: Tensor | None) -> list[SlotStatistics]:
    amaxes, *shares = seen.tolist()
    ranks = None if holders is None else holders.tolist()
    scales = _scales(arena, seen[0]).tolist()
    found = []
    for i, spec in enumerate(arena.specs):
        seen_here = [None if value[i] == DID_NOT_RUN else value[i] for value in (amaxes, *shares)]
        held = [None if ranks is None or value is None else ranks[row][i] for row, value in enumerate(seen_here)]
        amax, saturated, underflow = seen_here
        one = SlotStatistics(spec.slot, torch.nan if amax is None else amax, scales[i], saturated, underflow, *held)
        found.append(one._replace(fp8_max=spec.format.max))
    return found


def _scales(arena: Arena, amax: Tensor) -> Tensor:
    """Return float32[n] on the CPU: the scales of the step's casts; NaN where each rank, row or block had its own."""
    nothing = torch.full(amax.shape, torch.nan)
    recipe = arena.recipe
    if recipe.delayed:
        return torch.where(arena.cold, torch.nan, arena.scale).cpu()
    if recipe.by != "tensor":
        return nothing
    return scale_from_amax(amax, nothing, arena.fp8_max.cpu(), recipe.margin, recipe.power_of_two)

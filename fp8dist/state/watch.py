"""Watch: collects the slot statistics of all ranks at an interval, with one all-reduce per group."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8dist.errors import ConfigurationError
from fp8dist.state.arena import Arena
from fp8dist.state.arena_sync import ArenaSync, all_reduce_max, all_reduce_sum
from fp8dist.state.cause import Cause, earliest
from fp8dist.state.expert_loads import ExpertLoad, LoadCounts
from fp8dist.state.groups import SyncGroup, own_rank
from fp8dist.state.slots import Slot
from fp8dist.state.statistics import JumpAlarm, ScaleJump, SlotStatistics
from fp8dist_kernels.reference.magnitude import DID_NOT_RUN
from fp8dist_kernels.scaling import scale_from_amax

_FOR_MICROBATCH = 12
"""A holder is a rank and its microbatch, packed into 32 bits: the microbatch in the lowest 12, the rank above."""

_LAST_RANK = (1 << 20) - 1
_UNKNOWN = (1 << _FOR_MICROBATCH) - 1
"""Stands for a microbatch that is not known, or whose number has more than 12 bits."""

_LOW = (1 << 32) - 1
_NOTHING = torch.iinfo(torch.int64).min


class RankTimes(NamedTuple):
    """Mean times of a rank per step since the last observation, in ms; NaN: unknown. ``sync_wait``: wait in syncs."""

    sync_wait: float
    step: float


class Observation(NamedTuple):
    """What a watch collected in one step. ``ranks``: times by global rank; empty without ``ranks=True``. ``experts``:
    of each mixture whose experts had tokens."""

    step: int
    slots: tuple[SlotStatistics, ...]
    ranks: dict[int, RankTimes]
    experts: tuple[ExpertLoad, ...] = ()


Observer = Callable[[Observation], None]


class _View(NamedTuple):
    """One call of ``fp8dist.watch``."""

    every: int
    ranks: bool
    alarm: JumpAlarm | None
    observers: Sequence[Observer]


class Watch:
    """Collects the cast statistics of all ranks for one manager, in the steps that a call of ``fp8dist.watch``
    wants. All calls share the collectives, so each gets what any of them asks for.

    Amaxes and shares are maxima over all ranks. With ``ranks``, each value travels as an int64 with its holder in the
    lower half, (rank, microbatch), so that the same all-reduce also finds who held the maximum: the lowest rank if
    several did, and its first microbatch. Each rank's times travel in columns of their own at the end. The tokens of
    experts are sums, and take an all-reduce of their own.

    ``resume_after``: the step number to count from, until a step has ended. None: count from the step counter of the
    FP8 state, which includes calibrations, but not steps without FP8. ``order``: index of each module in the model, by
    fqn. ``seen``: the last observation; None: there is none yet.
    """

    def __init__(self, order: Mapping[str, int] = MappingProxyType({})) -> None:
        self.resume_after: int | None = None
        self._views: list[_View] = []
        self._order = order
        self.seen: Observation | None = None
        self._before: Observation | None = None  # The observation before ``seen``.
        self.start(0)

    def add(
        self,
        every: int,
        ranks: bool,
        alarm: JumpAlarm | None = None,
        resume_after: int | None = None,
        observers: Sequence[Observer] = (),
    ) -> None:
        """Add a call of ``fp8dist.watch``, which ``require_fits``. Local: on all ranks alike, in the same order.

        Args:
            observers: called with each Observation, on all ranks.
        """
        self._views.append(_View(every, ranks, alarm, observers))
        self.resume_after = self.resume_after if resume_after is None else resume_after

    def require_fits(self, resume_after: int | None) -> None:
        """Raise ConfigurationError if an earlier call of ``fp8dist.watch`` has another ``resume_after``. Local."""
        if resume_after is not None and self.resume_after not in (None, resume_after):
            raise ConfigurationError(
                f"watch(resume_after={resume_after}): an earlier watch of this manager continues after step "
                f"{self.resume_after}: give both the same step"
            )

    @property
    def observers(self) -> list[Observer]:
        """The observers of all calls."""
        return [observer for view in self._views for observer in view.observers]

    @property
    def ranks(self) -> bool:
        """True if who held a maximum is asked for."""
        return any(view.ranks for view in self._views)

    def describe(self) -> dict[str, Any]:
        """Return the settings that must be equal on all ranks, as JSON values."""
        views = [{"every": view.every, "ranks": view.ranks} for view in self._views]
        return {"views": views, "resume_after": self.resume_after}

    def start(self, step: int) -> None:
        """Time steps from now on. ``step``: number of steps that have ended."""
        self._since = step, time.perf_counter()
        self.seen = self._before = None
        self._loads = LoadCounts()

    def is_due(self, step: int) -> bool:
        """True if the casts of this step are measured."""
        return any(step % view.every == 0 for view in self._views)

    def collect(
        self, step: int, syncs: Sequence[ArenaSync], sync_wait: float = math.nan, microbatches_known: bool = False
    ) -> list[ScaleJump]:
        """Reduce the ranks' statistics, call the observers, and return the scales that jumped. COLLECTIVE: one
        all-reduce for each group that has arenas, and one for each that has experts. Reads the device.

        Call it after the launch and before the commit, while scales and cold flags are still those of the step.

        Args:
            sync_wait: this rank's mean wait in syncs, ms per step.
            microbatches_known: True if this rank knows which microbatch recorded what.
        """
        own = RankTimes(sync_wait, self._step_ms(step))
        by_group: dict[Sequence[int], list[ArenaSync]] = {}
        for sync in syncs:
            ranks = sync.group.ranks if sync.communicates and sync.group is not None else ()
            by_group.setdefault(ranks, []).append(sync)
        statistics: list[SlotStatistics] = []
        experts: list[ExpertLoad] = []
        times = {own_rank(): own} if self.ranks else {}
        for together in by_group.values():
            reduced, held, of_ranks = self._reduce(together, own, microbatches_known)
            times |= of_ranks
            start = 0
            for sync in together:
                part = slice(start, start + len(sync.arena))
                ages = self._loads.ages(step, sync)
                held_here = None if held is None else held[..., part]
                statistics += _statistics(sync.arena, reduced[:, part], held_here, ages)
                start = part.stop
            for sync, tokens in self._tokens(together):
                experts += self._loads.of(step, sync, tokens)
        statistics.sort(key=lambda one: one.slot)
        seen = Observation(step, tuple(statistics), dict(sorted(times.items())), tuple(experts))
        self._before, self.seen = self.seen, seen
        due = [view for view in self._views if step % view.every == 0]
        jumps = [jump for view in due if view.alarm is not None for jump in view.alarm.jumps(step, statistics)]
        for view in due:
            for observer in view.observers:
                observer(seen)
        largest = {jump.slot: jump for jump in sorted(jumps, key=lambda jump: jump.factor)}
        return sorted(largest.values(), key=lambda jump: (-jump.factor, jump.slot))

    def nonfinite(self, step: int) -> tuple[Cause | None, tuple[Slot, ...]]:
        """Return the first amax of a step that was not finite, and the slots of all. Nothing if all were finite, or the
        step was not observed. Local."""
        observed = () if self.seen is None or self.seen.step != step else self.seen.slots
        found = [one for one in observed if one.amax is not None and not math.isfinite(one.amax)]
        return earliest(step, found, self._order), tuple(one.slot for one in found)

    def outlier(self, jumps: Sequence[ScaleJump], syncs: Sequence[ArenaSync]) -> Cause | None:
        """Return the first amax that made a scale jump in the last observation. Local.

        A delayed scale is made from amaxes of earlier steps. So the amax is looked for in the step before, and None is
        returned if that was not observed, or if an older amax has left the history.
        """
        assert self.seen is not None
        jumped = {jump.slot: jump.after for jump in jumps}
        step, before = self.seen.step, self._before
        followed = before is not None and before.step == step - 1
        causes = []
        for sync in syncs:
            arena = sync.arena
            delayed = arena.recipe.delayed
            if delayed and not followed:
                continue
            observed = before if delayed and before is not None else self.seen
            slots = [one for one in observed.slots if one.slot in jumped and one.slot in arena.index]
            if delayed:
                slots = [one for one in slots if _made(arena, one, jumped[one.slot])]
            causes.append(earliest(observed.step, slots, self._order))
        return min([cause for cause in causes if cause is not None], key=lambda cause: cause.step, default=None)

    def _step_ms(self, step: int) -> float:
        (before, start), now = self._since, time.perf_counter()
        self._since = step, now
        return 1e3 * (now - start) / (step - before) if step > before else math.nan

    def _reduce(
        self, together: Sequence[ArenaSync], own: RankTimes, microbatches_known: bool
    ) -> tuple[Tensor, Tensor | None, dict[int, RankTimes]]:
        """Return the maxima (float32[3, n]), who held them (int64[2, 3, n] of rank and microbatch, or None), both on
        the CPU, and the times of the group's ranks."""
        first = together[0]
        group = first.group if first.communicates else None
        taken = [sync.measured.take() for sync in together if sync.measured is not None]
        bits = torch.cat([seen for seen, _ in taken], 1).view(torch.int32)
        sent = bits.view(-1)
        if self.ranks:
            microbatches = torch.cat([held for _, held in taken], 1).clamp(max=_UNKNOWN)
            if not microbatches_known:
                microbatches.fill_(_UNKNOWN)
            sent = torch.cat([_packed(bits, microbatches), _columns(own, group).to(bits.device)])
        if group is not None:
            with first.failing_by_name("the watch of FP8 scales"):
                all_reduce_max(sent, group, first.counters).wait()
        found = sent.cpu()
        if not self.ranks:
            return found.view(torch.float32).view(3, -1), None, {}
        found, columns = found[: bits.numel()].view(3, -1), found[bits.numel() :]
        holders = found & _LOW
        held = torch.stack([_LAST_RANK - (holders >> _FOR_MICROBATCH), _UNKNOWN - (holders & _UNKNOWN)])
        return _floats(found >> 32), held, {} if group is None else _times(columns, group)

    def _tokens(self, together: Sequence[ArenaSync]) -> list[tuple[ArenaSync, Tensor]]:
        """Return the tokens of the group in the step that ends, int64[n] on the CPU, of the arenas with experts."""
        found = [sync for sync in together if sync.experts]
        if not found:
            return []
        counts, first = torch.cat([sync.arena.tokens for sync in found]), together[0]
        if first.communicates and first.group is not None:
            with first.failing_by_name("the watch of experts"):
                all_reduce_sum(counts, first.group, first.counters)
        return list(zip(found, counts.cpu().split([len(sync.arena) for sync in found])))

    def close(self) -> None:
        """Let go of the observers, so that they close what is open. Local."""
        self._views.clear()


def _packed(bits: Tensor, microbatches: Tensor) -> Tensor:
    """Return int64[3n]: values above, holders below. Of equal values, the lowest rank and microbatch is the maximum."""
    rank = (_LAST_RANK - own_rank()) << _FOR_MICROBATCH
    return ((bits.to(torch.int64) << 32) | rank | (_UNKNOWN - microbatches)).view(-1)


def _columns(own: RankTimes, group: SyncGroup | None) -> Tensor:
    """Return int64[2 x ranks], on the CPU: this rank's times as float32 bits in its columns, the lowest value in
    others."""
    if group is None:
        return torch.empty(0, dtype=torch.int64, device="cpu")
    columns = torch.full((len(group.ranks), 2), _NOTHING, dtype=torch.int64, device="cpu")
    columns[group.ranks.index(group.rank)] = torch.tensor(own, dtype=torch.float32, device="cpu").view(torch.int32)
    return columns.view(-1)


def _times(columns: Tensor, group: SyncGroup) -> dict[int, RankTimes]:
    return {rank: RankTimes(*both) for rank, both in zip(group.ranks, _floats(columns).view(-1, 2).tolist())}


def _floats(bits: Tensor) -> Tensor:
    """Return the float32 values with these bits (int64)."""
    return bits.to(torch.int32).view(torch.float32)


def _statistics(arena: Arena, seen: Tensor, held: Tensor | None, ages: Tensor | None) -> list[SlotStatistics]:
    since = [None] * len(arena) if ages is None else ages.tolist()
    amaxes, *shares = seen.tolist()
    ranks, microbatches = ([None] * 3, [None] * 3) if held is None else held.tolist()
    scales = _scales(arena, seen[0]).tolist()
    found = []
    for i, spec in enumerate(arena.specs):
        here = [None if value[i] == DID_NOT_RUN else value[i] for value in (amaxes, *shares)]
        by_rank = [None if row is None or value is None else row[i] for row, value in zip(ranks, here)]
        by_microbatch = [None if row is None or value is None else row[i] for row, value in zip(microbatches, here)]
        known = [None if microbatch == _UNKNOWN else microbatch for microbatch in by_microbatch]
        amax, saturated, underflow = here
        one = SlotStatistics(spec.slot, amax, scales[i], saturated, underflow, *by_rank, *known)
        found.append(one._replace(age=since[i], fp8_max=spec.format.max))
    return found


def _made(arena: Arena, one: SlotStatistics, scale: float) -> bool:
    """True if this amax alone gives this scale."""
    if one.amax is None or one.fp8_max is None or not 0 < one.amax < math.inf:
        return False
    amax, largest = (torch.tensor([value], dtype=torch.float32, device="cpu") for value in (one.amax, one.fp8_max))
    made = scale_from_amax(
        amax, torch.full_like(amax, torch.nan), largest, arena.recipe.margin, arena.recipe.power_of_two
    )
    return float(made) == scale


def _scales(arena: Arena, amax: Tensor) -> Tensor:
    """Return float32[n] on the CPU: the scales of the step's casts; NaN where each rank, row or block had its own."""
    nothing = torch.full(amax.shape, torch.nan)
    recipe = arena.recipe
    if recipe.delayed:
        return torch.where(arena.cold, torch.nan, arena.scale).cpu()
    if recipe.by != "tensor":
        return nothing
    return scale_from_amax(amax, nothing, arena.fp8_max.cpu(), recipe.margin, recipe.power_of_two)

"""ExpertLoad: the tokens of a mixture's experts, for how long they had none, and for how long scales stand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fp8dist.sync.arena_sync import ArenaSync

__all__ = ["ExpertLoad", "Loads", "idle_numbers"]


class ExpertLoad(NamedTuple):
    """A mixture's experts in one step; each list has a number for each expert.

    ``tokens``: over all ranks and microbatches that had a backward. ``idle``: steps without a token up to this one, at
    least; 0: it had some. With delayed scaling, no rank ran the expert in these steps; otherwise only observed steps
    are known. ``age``: steps since the scale of its output gradients was last renewed, at least; None: scales are made
    just in time.
    """

    module: str
    tokens: list[int]
    idle: list[int]
    age: list[int] | None


class _Before(NamedTuple):
    """The last observation: its step, the amaxes that were taken before it, int64[n], and what followed, int64[n]."""

    step: int
    taken: Tensor
    since: Tensor


class Loads:
    """Follows counters of amaxes and tokens from one observation to the next. Local; reads the device.

    A slot whose counter stands still has not renewed its scale. Between two observations the counter tells how often
    it did, but not when; so what is not certain counts as none, and numbers are lower bounds.
    """

    def __init__(self) -> None:
        self._ages: dict[int, _Before] = {}
        self._idle: dict[str, _Before] = {}

    def ages(self, step: int, sync: ArenaSync) -> Tensor | None:
        """Return how many steps before this one have not renewed each slot's scale, int64[n], on the CPU; None without
        delayed scaling. Call it once for each step and arena, and before the commit."""
        if not sync.arena.recipe.delayed:
            return None
        taken, before = sync.arena.taken.clone().cpu(), self._ages.get(id(sync))
        if before is None:
            ages = torch.where(taken == 0, int(sync.arena.step), 0)
        else:
            ages = torch.where(taken == before.taken, before.since + (step - before.step), 0)
        self._ages[id(sync)] = _Before(step, taken, ages)
        return ages

    def of(self, step: int, sync: ArenaSync, tokens: Tensor) -> Iterator[ExpertLoad]:
        """Yield the loads of an arena's mixtures, of each product's module once. Nothing of a mixture without any
        token: it did not run, or not in FP8. Call it after ``ages``.

        Args:
            tokens: int64[n], on the CPU, at the slots of output gradients.
        """
        known = self._ages.get(id(sync))
        done = set()
        for fqn, slots in sync.experts.items():
            module = fqn.rpartition(".")[0]
            if module in done:
                continue
            done.add(module)
            run = sync.arena.run_of(slots)
            counts = tokens[run]
            if not counts.any():
                continue
            taken = torch.zeros_like(counts) if known is None else known.taken[run]
            idle = self._idle_of(module, step, counts, taken, known is not None, int(sync.arena.step))
            age = None if known is None else known.since[run].tolist()
            yield ExpertLoad(module, counts.tolist(), idle.tolist(), age)

    def _idle_of(self, module: str, step: int, tokens: Tensor, taken: Tensor, counted: bool, done: int) -> Tensor:
        """``counted``: each step counts in ``taken``. ``done``: steps before this one."""
        before = self._idle.get(module)
        if before is None:
            longer = torch.where(taken == 0, done + 1, 1) if counted else torch.ones_like(tokens)
        else:
            still = (before.since > 0) & (taken == before.taken)
            longer = torch.where(still, before.since + (step - before.step), 1)
        idle = torch.where(tokens > 0, 0, longer)
        self._idle[module] = _Before(step, taken, idle)
        return idle


def idle_numbers(loads: Sequence[ExpertLoad]) -> dict[str, float]:
    """Return the number of experts without tokens, and the most steps of one; nothing without experts."""
    idle = [steps for load in loads for steps in load.idle]
    return {"idle_experts": sum(steps > 0 for steps in idle), "longest_idle_steps": max(idle)} if idle else {}

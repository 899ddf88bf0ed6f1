"""ExpertLoad: the tokens of a mixture's experts, for how long they had none, and for how long scales stand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fp8dist.state.arena_sync import ArenaSync
from fp8dist_kernels.formats import Role


class ExpertLoad(NamedTuple):
    """A mixture's experts in one step; each list has a number for each expert.

    ``tokens``: over all ranks and microbatches that had a backward. ``idle``: steps without a token up to this one, at
    least; 0: it had some. With delayed scaling, no rank ran the expert in these steps; without it, only observed steps
    are known. An expert in high precision counts from the last observation. ``age``: steps since the scale of its
    output gradients was last renewed, at least; None: scales are made just in time. ``ranks``: how many ranks'
    tokens are counted.
    """

    module: str
    tokens: list[int]
    idle: list[int]
    age: list[int] | None
    ranks: int = 1


class _Before(NamedTuple):
    """What the last observation found, to compare the next one with.

    ``step``: its step. ``taken``: int64[n], how many amaxes each slot had taken into its history. ``since``: int64[n],
    what was concluded: steps without a renewed scale, or without tokens. ``turns``: int64[n], how often the precision
    of each expert had changed; None: not counted.
    """

    step: int
    taken: Tensor
    since: Tensor
    turns: Tensor | None = None


class LoadCounts:
    """Follows counters of amaxes and tokens from one observation to the next. Local; reads the device.

    A slot whose counter stands still has not renewed its scale. Between two observations the counter shows how
    many renewals there were, but not when, so ages are lower bounds.
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
        for fqn, precisions in sync.experts.items():
            module = fqn.rpartition(".")[0]
            before = self._idle.get(module)
            if before is not None and before.step == step:
                continue
            run = sync.arena.run_of([precision.slots[Role.GRAD_OUTPUT] for precision in precisions])
            counts = tokens[run]
            if not counts.any():
                if known is None:  # It may have run in high precision: nothing shows it.
                    self._idle.pop(module, None)
                continue
            turns = torch.tensor([precision.turns for precision in precisions], device="cpu")
            since = torch.zeros_like(counts) if before is None else before.since
            taken = torch.zeros_like(counts) if known is None else known.taken[run]
            steps = 1 if before is None else step - before.step
            if known is not None:  # Each step with tokens counts in ``taken``, of experts that are recorded.
                recorded = torch.tensor([Role.GRAD_OUTPUT in each.recorded for each in precisions], device="cpu")
                # In other steps the mixture may have run in high precision, or with a recipe that does not count.
                most = int((taken if before is None else taken - before.taken).max())
                if before is None:
                    since = torch.where(recorded & (turns == 0) & (taken == 0), most, 0)
                else:
                    since = torch.where(recorded & (turns == before.turns) & (taken == before.taken), since, 0)
                    steps = min(most, steps)
            idle = torch.where(tokens[run] > 0, 0, torch.where(since > 0, since + steps, 1))
            self._idle[module] = _Before(step, taken, idle, turns)
            age = None if known is None else known.since[run].tolist()
            ranks = sync.group.size if sync.communicates and sync.group is not None else 1
            yield ExpertLoad(module, counts.tolist(), idle.tolist(), age, ranks)


def idle_numbers(loads: Sequence[ExpertLoad]) -> dict[str, float]:
    """Return the number of experts without tokens, and the most steps of one; nothing without experts."""
    idle = [steps for load in loads for steps in load.idle]
    return {"idle_experts": sum(steps > 0 for steps in idle), "longest_idle_steps": max(idle)} if idle else {}

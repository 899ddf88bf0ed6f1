"""Cause: the cast whose amax probably was the first that went wrong."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from fp8dist.common.text import placed
from fp8dist.state.statistics import SlotStatistics


class Cause(NamedTuple):
    """Which cast recorded a bad amax.

    ``step``: the run's number of the step (``StateManager.run_step``). ``rank``: the global rank; ``microbatch``: its
    number, from 0. Both are None if not known (see ``fp8dist.watch(ranks=True)``). ``module``: its fqn. ``role``:
    "input", "weight" or "grad_output".
    """

    step: int
    rank: int | None
    microbatch: int | None
    module: str
    role: str

    def __str__(self) -> str:
        return f"{self.module}, {self.role}{placed(self.rank, self.microbatch)}"


def earliest(step: int, slots: Iterable[SlotStatistics], order: Mapping[str, int]) -> Cause | None:
    """Return the slot whose amax was probably recorded first: in the earliest microbatch, forwards before backwards, in
    the order of the model's modules, which backwards reverse. None: there are no slots. Local.

    Args:
        order: place of each module in the model, by fqn.
    """

    def age(one: SlotStatistics) -> tuple[float, bool, int, bool]:
        place, backward = order.get(one.slot.fqn, len(order)), one.slot.role == "grad_output"
        microbatch = math.inf if one.amax_microbatch is None else one.amax_microbatch
        return microbatch, backward, -place if backward else place, one.slot.role != "weight"

    first = min(slots, key=age, default=None)
    if first is None:
        return None
    return Cause(step, first.amax_rank, first.amax_microbatch, first.slot.fqn, first.slot.role)

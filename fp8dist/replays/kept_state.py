"""Save a manager's FP8 state before extra forwards and backwards, and restore it after them. Local."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from fp8dist.job.cycle import StepCycle
from fp8dist.modules.linear_slots import LinearSlots

_PERMANENT = ("_states", "replaying", "compiled", "graphed", "captured")
"""Attributes that are not restored: views of arenas, and facts that stay true, such as that a model was compiled."""


def kept_fp8_state(cycle: StepCycle, modules: Sequence[LinearSlots]) -> Callable[[], None]:
    """Save the FP8 state, and return a function that restores it. The function may be called several times.

    Commits a pending sync first, as the next forward would.

    Args:
        cycle: the manager's step cycle.
        modules: the LinearSlots of all FP8 weights of the manager.
    """
    cycle.state.settle()
    tensors = [sync.kept_records() for sync in cycle.syncs]
    weights = () if cycle.scales.sharded is None else cycle.scales.sharded.weights
    kept: list[tuple[Any, dict[str, Any]]] = [(thing, dict(thing.__dict__)) for thing in (cycle.job, *weights)]
    for slots in modules:
        kept += [
            (thing, dict(thing.__dict__)) for thing in (slots, slots.note, slots.cache, slots.monitor, slots.caster)
        ]
    noted = None if cycle.job.microbatches is None else copy.deepcopy(_sets(cycle.job.microbatches))
    taken = None if cycle.audits is None else cycle.audits.kept()

    def put_back() -> None:
        for put in tensors:
            put()
        for thing, attributes in kept:
            thing.__dict__.update({name: value for name, value in attributes.items() if name not in _PERMANENT})
        if noted is not None:
            cycle.job.microbatches.__dict__.update(copy.deepcopy(noted))
        if taken is not None:
            taken()

    return put_back


def _sets(noted: Any) -> dict[str, Any]:
    """Return the attributes of a ``Microbatches``, without its references to syncs."""
    return {name: value for name, value in noted.__dict__.items() if name != "_syncs"}

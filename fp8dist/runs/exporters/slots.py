"""What a tool gets to see of the slots: by role the worst share, and the headroom."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from fp8dist.state.statistics import SlotStatistics


class RoleNumbers(NamedTuple):
    """Numbers of all slots of a role in one observation. None: no slot has it.

    ``saturated``, ``underflow``: largest share of a slot, 0 to 1. ``headroom``: the least, in doublings; -inf after an
    infinite amax. ``headrooms``: the finite headrooms, in the order of the slots.
    """

    saturated: float | None
    underflow: float | None
    headroom: float | None
    headrooms: tuple[float, ...]


def headroom(one: SlotStatistics) -> float | None:
    """Return how many times the slot's values can double before they saturate: ``log2(fp8_max / (amax * scale))``.

    Negative: they have saturated. Infinite: all values were zero. None: the amax, the scale or the format is unknown.
    """
    if one.fp8_max is None or one.amax is None:
        return None
    filled = one.amax * one.scale / one.fp8_max
    if not filled >= 0:  # NaN, as in a cold slot.
        return None
    return math.inf if filled == 0 else -math.inf if filled == math.inf else 0.0 - math.log2(filled)  # No -0.0.


def by_role(slots: Sequence[SlotStatistics]) -> dict[str, RoleNumbers]:
    """Return the numbers of each role."""
    found = {}
    for role in sorted({str(one.slot.role) for one in slots}):
        of_role = [one for one in slots if one.slot.role == role]
        headrooms = _measured(map(headroom, of_role))
        found[role] = RoleNumbers(
            max(_measured(one.saturated for one in of_role), default=None),
            max(_measured(one.underflow for one in of_role), default=None),
            min(headrooms, default=None),
            tuple(filter(math.isfinite, headrooms)),
        )
    return found


def _measured(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None and not math.isnan(value)]

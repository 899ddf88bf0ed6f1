"""What a watch (``watch.py``) collects about each slot in a step, and jumps of scales between two such steps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from fp8dist.state.slots import Slot

__all__ = ["ScaleJump", "SlotStatistics", "StatisticsSink"]


class SlotStatistics(NamedTuple):
    """Statistics of one slot in one step.

    ``amax``: None if no rank recorded one. ``scale``: NaN while the slot is cold. ``saturated``, ``underflow``: the
    share, 0 to 1, of elements that the cast saturated at the largest FP8 value, or flushed to zero; None: not measured.
    ``…_rank``: the global rank that held the maximum; None: not requested. ``…_microbatch``: the first microbatch of
    that rank with the maximum, from 0; None: not requested or not known (see docs/watching.md).
    ``age``: steps since the scale was last renewed, at least (see docs/watching.md); None: it is made just in time.
    ``fp8_max``: the largest finite magnitude of the slot's format; None: unknown. No line has it: it never changes.
    """

    slot: Slot
    amax: float | None
    scale: float
    saturated: float | None = None
    underflow: float | None = None
    amax_rank: int | None = None
    saturated_rank: int | None = None
    underflow_rank: int | None = None
    amax_microbatch: int | None = None
    saturated_microbatch: int | None = None
    underflow_microbatch: int | None = None
    age: int | None = None
    fp8_max: float | None = None

    def numbers(self) -> Iterator[tuple[str, float | int | None]]:
        """Yield (name, value) for all fields but the slot and ``fp8_max``. A NaN is None, unless it is the amax."""
        for name, value in zip(self._fields[1:-1], self[1:-1]):
            unknown = name != "amax" and isinstance(value, float) and math.isnan(value)
            yield name, None if unknown else value


class ScaleJump(NamedTuple):
    """A large change of a scale between two observations. ``step``: the step of the later observation.

    ``factor``: after / before or before / after, whichever is at least 1.
    """

    slot: Slot
    step: int
    before: float
    after: float
    factor: float


class StatisticsSink(Protocol):
    """What a watch hands the statistics of a step to, such as ``fp8dist.Monitor``."""

    def observe(self, step: int, statistics: Sequence[SlotStatistics]) -> list[ScaleJump]:
        """Write the statistics, and return the scales that jumped."""

    def close(self) -> None:
        """Close what is open."""

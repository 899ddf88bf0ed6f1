"""What a watch (``watch.py``) collects about each slot in a step, and jumps of scales between two such steps."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fp8dist.common.names import is_number
from fp8dist.common.text import first_few
from fp8dist.errors import ConfigurationError
from fp8dist.state.slots import Slot

logger = logging.getLogger("fp8dist")

_NAMED = 5
"""Maximum number of slots that the log names."""


class SlotStatistics(NamedTuple):
    """Statistics of one slot in one step.

    ``amax``: None if no rank recorded one. ``scale``: NaN while the slot is cold. ``saturated``, ``underflow``: the
    share, 0 to 1, of elements that the cast saturated at the largest FP8 value, or flushed to zero; None: not measured.
    ``…_rank``: the global rank that held the maximum; None: not requested. ``…_microbatch``: the first microbatch of
    that rank with the maximum, from 0; None: not requested or not known (see docs/reference/files.md).
    ``age``: steps since the scale was last renewed, at least; None: it is made just in time.
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


class JumpAlarm:
    """Finds scales that changed by a factor or more since their slot's last observation.

    Args:
        least: the factor, above 1.
        logs: True on the one rank that logs the jumps.

    Raises:
        ConfigurationError: ``least`` is not a finite factor above 1.
    """

    def __init__(self, least: float, logs: bool) -> None:
        if not (is_number(least) and 1 < least < math.inf):
            raise ConfigurationError(f"jump must be a factor above 1, or None for no alarms, got {least!r}")
        self._least, self._logs = least, logs
        self._scales: dict[Slot, float] = {}  # The last one of each slot that is not cold.

    def jumps(self, step: int, statistics: Sequence[SlotStatistics]) -> list[ScaleJump]:
        """Return the scales that jumped, the largest factor first. Local.

        A slot that is cold, or is observed for the first time, has not jumped.
        """
        found = []
        for slot, _, after, *_ in statistics:
            before = self._scales.pop(slot, None)
            if not 0 < after < math.inf:  # Cold.
                continue
            self._scales[slot] = after
            if before is not None and (factor := max(after / before, before / after)) >= self._least:
                found.append(ScaleJump(slot, step, before, after, factor))
        found.sort(key=lambda jump: (-jump.factor, jump.slot))
        if found and self._logs:
            shown = first_few([f"{jump.slot} from {jump.before:.4g} to {jump.after:.4g}" for jump in found], _NAMED)
            text = "fp8dist: step %d: %d scale(s) jumped by a factor of %g or more: %s"
            logger.warning(text, step, len(found), self._least, shown)
        return found

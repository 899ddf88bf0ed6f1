"""What a line of a run's files says. The report reads all lines of a file, the live view each as it comes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from fp8dist.common.numbers import from_json, number_or_none

LARGEST = 1 << 53
"""Steps below it are exact in float64, which JavaScript has."""


class RankRecord(NamedTuple):
    """A line of ranks.jsonl. ``sync_wait_ms``, ``step_ms``: ms per step, for each rank; NaN: unknown."""

    ranks: tuple[int, ...]
    sync_wait_ms: tuple[float, ...]
    step_ms: tuple[float, ...]


def numbers_in(line: Mapping[str, Any], fields: Iterable[str]) -> dict[str, float]:
    """Return the numbers of a line of metrics.jsonl or scales.jsonl, without fields that are no numbers. NaN occurs."""
    return {field: number for field in fields if (number := number_or_none(line.get(field))) is not None}


def slot_in(line: Mapping[str, Any]) -> str | None:
    """Return the slot that a line of scales.jsonl is of; None if it names none."""
    slot = line.get("slot")
    return slot if isinstance(slot, str) else None


def rank_record(line: Mapping[str, Any]) -> RankRecord | None:
    """Return what a line of ranks.jsonl says; None if it names no ranks."""
    ranks = line.get("ranks")
    if not isinstance(ranks, list) or not ranks or not all(type(rank) is int for rank in ranks):
        return None
    waits, steps = (_finite(line.get(name), len(ranks)) for name in ("sync_wait_ms", "step_ms"))
    return RankRecord(tuple(ranks), waits, steps)


def _finite(values: Any, count: int) -> tuple[float, ...]:
    """Return the finite numbers of a list, one for each rank; NaN for anything else."""
    if not isinstance(values, list) or len(values) != count:
        return (math.nan,) * count
    return tuple(number if math.isfinite(number := from_json(value)) else math.nan for value in values)

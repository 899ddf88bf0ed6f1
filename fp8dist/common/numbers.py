"""Numbers in JSON. It has no NaN and no infinities: these become the strings "NaN", "Infinity" and "-Infinity"."""

from __future__ import annotations

import math
from typing import Any


def to_json(value: float | int | None) -> float | int | str | None:
    """Return the number as a JSON value. Python's ``float()`` reads the strings as well."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def from_json(value: Any) -> float:
    """Return a number that ``to_json`` wrote; NaN for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return math.nan
    if isinstance(value, str) and value not in ("NaN", "Infinity", "-Infinity"):
        return math.nan
    try:
        return float(value)
    except OverflowError:  # An integer beyond float64.
        return math.nan


def number_or_none(value: Any) -> float | None:
    """Return a number that ``to_json`` wrote, which may be NaN; None for anything else."""
    number = from_json(value)
    return None if math.isnan(number) and value != "NaN" and not isinstance(value, float) else number

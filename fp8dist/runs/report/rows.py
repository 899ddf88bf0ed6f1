"""The slots as rows of heat maps: by role, in the order of their names, in as many bins as a page can hold."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from fp8dist.runs.report.binned import Singles, paired
from fp8dist.runs.report.numbers import RunNumbers
from fp8dist_kernels.formats import Format, Role

MOST_ROWS, MOST_CELLS = 1 << 10, 1 << 17
"""Rows and cells of a page. Each cell takes 40 bytes of it."""


class Quantity(NamedTuple):
    """What a heat map shows. ``low``, ``high``: the ends of its colours. ``reverse``: low values are the bad ones."""

    name: str
    title: str
    low: float
    high: float
    log: bool
    reverse: bool


QUANTITIES = (
    Quantity("underflow", "underflow: share of elements that become zero", 1e-6, 1.0, True, False),
    Quantity("saturated", "saturation: share of elements beyond the largest value", 1e-8, 1.0, True, False),
    Quantity("headroom", "headroom: powers of two from the amax to the largest value", 0.0, 8.0, False, True),
)


class SlotRow(NamedTuple):
    """A slot. ``largest``, ``normal``, ``subnormal``: largest and smallest values of its format; NaN: unknown."""

    name: str
    role: str
    format: str
    largest: float
    normal: float
    subnormal: float


class Rows(NamedTuple):
    """``arrays``: float32[rows, bins] by name, see ``SlotBins``, and ``headroom``. A bin has ``width`` steps, the first
    from ``start``. ``left_out``: slots that lose less than those that are here.
    """

    rows: tuple[SlotRow, ...]
    arrays: dict[str, Singles]
    start: int
    width: int
    left_out: int

    def of_role(self, role: str) -> slice:
        """Return the rows of a role, which lie together."""
        places = [place for place, row in enumerate(self.rows) if row.role == role]
        return slice(places[0], places[-1] + 1) if places else slice(0, 0)

    def roles(self) -> list[str]:
        """Return the roles in their order."""
        return list(dict.fromkeys(row.role for row in self.rows))


def rows_of(run: RunNumbers) -> Rows | None:
    """Return the rows; None if no slot was recorded."""
    slots = run.slots
    known = run.folder.formats()
    every = [_row(name, known) for name in slots.names]
    arrays = slots.arrays
    if not every or not slots.width:
        return None
    chosen = _worst(arrays)
    order = sorted(chosen, key=lambda place: _key(every[place]))
    arrays = {name: values[order] for name, values in arrays.items()}
    start, width, used = slots.start, slots.width, _used(arrays)
    while len(order) * (used.stop - used.start) > MOST_CELLS and used.stop - used.start > 1:
        arrays, width = paired(arrays), 2 * width
        used = _used(arrays)
    largest = np.array([every[place].largest for place in order])[:, None]
    reach = np.where(arrays["reach"] > 0, arrays["reach"], np.nan)
    with np.errstate(divide="ignore"):  # If it is infinite, -inf.
        arrays["headroom"] = np.log2(largest / reach).astype(np.float32)
    arrays = {name: np.ascontiguousarray(values[:, used]) for name, values in arrays.items()}
    rows = tuple(every[place] for place in order)
    return Rows(rows, arrays, start + used.start * width, width, len(every) - len(rows))


def _used(arrays: dict[str, Singles]) -> slice:
    """Return the bins from the first to the last with an observation."""
    seen = np.flatnonzero(~np.all([np.isnan(values).all(0) for values in arrays.values()], axis=0))
    return slice(int(seen[0]), int(seen[-1]) + 1) if len(seen) else slice(0, 1)


def _worst(arrays: dict[str, Singles]) -> list[int]:
    """Return the rows that lose most, at most MOST_ROWS."""
    count = len(arrays["amax"])
    if count <= MOST_ROWS:
        return list(range(count))
    loss = sum(np.nan_to_num(arrays[name]).max(1) for name in ("underflow", "saturated"))
    bad = np.isinf(arrays["amax"]).any(1)
    return [int(place) for place in np.argsort(-(loss + 2.0 * bad), kind="stable")[:MOST_ROWS]]


def _row(name: str, known: Mapping[str, Format]) -> SlotRow:
    role = name.rpartition(":")[2]
    role = role if role in [str(one) for one in Role] else "other"
    if name not in known:
        return SlotRow(name, role, "", np.nan, np.nan, np.nan)
    format = known[name]
    info = torch.finfo(format.dtype)
    return SlotRow(name, role, format.name, format.max, info.smallest_normal, info.smallest_normal * info.eps)


def _key(row: SlotRow) -> tuple[Any, ...]:
    """Sort by role, then so that layer 2 comes before layer 10."""
    roles = [*(str(role) for role in Role), "other"]
    parts = re.split(r"(\d{1,18})", row.name[:1000], maxsplit=50)
    return roles.index(row.role), [(int(part), "") if part.isdecimal() else (-1, part) for part in parts], row.name

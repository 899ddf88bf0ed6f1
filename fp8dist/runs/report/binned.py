"""Numbers of rows over steps in a bounded number of bins, which widen as steps come."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from fp8dist.runs.report.columns import Columns, Floats, Ints

BINS = 256
"""Bins over all steps. Widening halves their number, so that between half of them and all are in use."""

MOST_RANKS = 1 << 12
"""Ranks whose maxima are counted."""

FOLDS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("amax", "saturated", "underflow", "reach", "jump"), "largest"),
        **dict.fromkeys(("scale", "rank", "microbatch"), "of the largest amax"),
    }
)
"""What a bin keeps of the observations in it."""

Singles = npt.NDArray[np.float32]  # The watch measures in float32.


class SlotBins:
    """What ``scales.jsonl`` says about each slot, by bins of steps: float32 arrays [slots, BINS], NaN where unknown.

    Bin i has the steps from ``start + i * width`` to ``start + (i + 1) * width - 1``. The width doubles until all fit.
    ``amax``: the largest; inf if one was not finite. ``scale``, ``rank``, ``microbatch``: its scale, and who held it.
    ``saturated``, ``underflow``: the largest share. ``reach``: the largest amax * scale. ``jump``: the largest factor
    between two scales that follow each other.

    ``newest``: the step of the last line, which is not the largest one if the job has gone back.

    ``held``: int64[slots, ranks], how often each rank held the maximum. ``sums``: float64[slots, 4], sums of the
    shares saturated and underflow over the observations, and how many of each there were.
    """

    def __init__(self) -> None:
        self.names: dict[str, int] = {}
        self.start = self.width = 0
        self.observations = 0
        self.arrays: dict[str, Singles] = {name: np.empty((0, BINS), np.float32) for name in FOLDS}
        self.held: Ints = np.zeros((0, 0), np.int64)
        self.sums: Floats = np.zeros((0, 4))
        self._scale: Floats = np.empty(0)  # The newest of each slot.
        self.newest: int | None = None

    def add(self, columns: Columns) -> None:
        """Add lines, in their order."""
        if not len(columns.step):
            return
        self._grow(len(self.names))
        self._count(columns)
        amax, scale = columns.numbers["amax"], columns.numbers["scale"]
        amax = np.where(amax < 0, np.nan, np.where(np.isnan(amax), np.inf, amax))
        at = columns.slot * BINS + self._bins(columns.step)
        with np.errstate(over="ignore", invalid="ignore"):
            reach = np.where(np.isfinite(amax), amax * scale, np.nan)
        most = {"amax": amax, "reach": reach, "jump": self._jumps(columns.slot, scale)}
        with np.errstate(over="ignore"):
            for name, values in {**most, **{key: columns.numbers[key] for key in ("saturated", "underflow")}}.items():
                np.fmax.at(self.arrays[name].reshape(-1), at, values.astype(np.float32))
            self._hold(columns, at, amax.astype(np.float32))

    def _grow(self, slots: int) -> None:
        more = slots - len(self.sums)
        if more > 0:
            for name, values in self.arrays.items():
                self.arrays[name] = np.concatenate([values, np.full((more, BINS), np.nan, np.float32)])
            self.held = np.pad(self.held, ((0, more), (0, 0)))
            self.sums = np.pad(self.sums, ((0, more), (0, 0)))
            self._scale = np.pad(self._scale, (0, more), constant_values=np.nan)

    def _count(self, columns: Columns) -> None:
        changed = np.flatnonzero(np.diff(columns.step, prepend=np.int64(-1) if self.newest is None else self.newest))
        self.observations += len(changed) + (self.newest is None and columns.step[0] == -1)
        self.newest = int(columns.step[-1])
        for place, name in enumerate(("saturated", "underflow")):
            share = columns.numbers[name]
            known = np.isfinite(share)
            np.add.at(self.sums[:, place], columns.slot[known], share[known])
            np.add.at(self.sums[:, place + 2], columns.slot[known], 1)

    def _bins(self, steps: Ints) -> Ints:
        if not self.width:
            gaps = np.diff(np.unique(steps))
            self.start, self.width = int(steps[0]), int(np.median(gaps)) if len(gaps) else 1
        while int(steps.min()) < self.start:
            self.start -= BINS * self.width
            self._widen(upwards=False)
        while int(steps.max()) >= self.start + BINS * self.width:
            self._widen(upwards=True)
        return (steps - self.start) // self.width

    def _widen(self, upwards: bool) -> None:
        """Double the width. The bins become those of the lower half, so that there is room upwards, or of the upper."""
        self.width *= 2
        empty = np.full((len(self.sums), BINS // 2), np.nan, np.float32)
        for name, half in paired(self.arrays).items():
            self.arrays[name] = np.concatenate([half, empty] if upwards else [empty, half], axis=1)

    def _jumps(self, slot: Ints, scale: Floats) -> Floats:
        """Return the factor, at least 1, by which each scale differs from the slot's scale before it; else NaN."""
        scale = np.where((scale > 0) & np.isfinite(scale), scale, np.nan)
        order = np.argsort(slot, kind="stable")
        slots, scales = slot[order], scale[order]
        before = np.roll(scales, 1)
        first = np.flatnonzero(np.diff(slots, prepend=-1))
        before[first] = self._scale[slots[first]]
        self._scale[slots[np.append(first[1:] - 1, len(slots) - 1)]] = scales[np.append(first[1:] - 1, len(slots) - 1)]
        factor = np.empty(len(scale))
        factor[order] = np.fmax(scales / before, before / scales)
        return factor

    def _hold(self, columns: Columns, at: Ints, amax: Singles) -> None:
        """Note who held the maxima."""
        ranks = columns.numbers["amax_rank"]
        holds = self.arrays["amax"].reshape(-1)[at] == amax
        sources = {"scale": "scale", "rank": "amax_rank", "microbatch": "amax_microbatch"}
        for name, source in sources.items():
            values = columns.numbers[source]
            # The last of several assignments stays: of equal maxima, that of the first step.
            self.arrays[name].reshape(-1)[at[holds][::-1]] = values[holds][::-1]
        known = (ranks >= 0) & (ranks < MOST_RANKS)
        if known.any():
            widest = int(ranks[known].max()) + 1
            self.held = np.pad(self.held, ((0, 0), (0, max(0, widest - self.held.shape[1]))))
            np.add.at(self.held, (columns.slot[known], ranks[known].astype(np.int64)), 1)


def paired(arrays: Mapping[str, Singles]) -> dict[str, Singles]:
    """Return the arrays with each two neighbouring bins made one."""
    first = {name: values[:, 0::2] for name, values in arrays.items()}
    second = {name: values[:, 1::2] for name, values in arrays.items()}
    later = ~(first["amax"] >= second["amax"]) & ~np.isnan(second["amax"])
    made = {}
    for name, fold in FOLDS.items():
        larger = np.fmax(first[name], second[name])
        made[name] = larger if fold == "largest" else np.where(later, second[name], first[name])
    return made

"""Where two runs part: the first step and slot whose recorded state differs, bit for bit."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fp8dist.runs.report.columns import Columns, Ints, scale_columns
from fp8dist.runs.report.folder import Lines
from fp8dist.runs.report.numbers import Metrics, RunNumbers
from fp8dist.runs.run_format import SCALES

Words = npt.NDArray[np.uint64]

STATE = ("amax", "scale")
"""The fields that are compared."""


class SlotDifference(NamedTuple):
    """A number of a slot that differs. ``bits``: of both, as float64."""

    slot: str
    field: str
    values: tuple[float, float]


class Parting(NamedTuple):
    """``step``: the first observed step of both runs that differs; None: there is none. ``before``: the last equal one.

    ``compared``: observed steps that both have. ``slots``: how many slots differ in that step. ``first``: the first
    of them in the order of the file. ``losses_compared``: steps of both runs with a loss.
    ``loss_step``, ``losses``: the first one with another loss.
    """

    compared: int
    step: int | None
    before: int | None
    slots: int
    first: SlotDifference | None
    losses_compared: int
    loss_step: int | None
    losses: tuple[float, float] | None


class Digests:
    """A number for each observed step, made of the bits of all slots, in whatever order they come."""

    def __init__(self) -> None:
        self.by_step: dict[int, int] = {}
        self._words: Words = np.empty(0, np.uint64)
        self._newest: int | None = None
        self._of_newest: Words = np.empty(0, np.uint64)  # Of the newest step, a word for each slot; 0: not seen.

    def add(self, columns: Columns) -> None:
        """Add lines. A job that has gone back has some steps twice: as everywhere, the newer lines count."""
        if not len(columns.step):
            return
        new = [_word(name) for name in columns.names[len(self._words) :]]
        self._words = np.append(self._words, np.array(new, np.uint64))
        mixed = self._words[columns.slot]
        for field in STATE:
            mixed = _mix(mixed ^ _bits(columns.numbers[field]))
        self._of_newest = np.append(self._of_newest, np.zeros(len(new), np.uint64))
        cuts = np.flatnonzero(np.diff(columns.step)) + 1
        for slots, words, (step, *_) in zip(*(np.split(each, cuts) for each in (columns.slot, mixed, columns.step))):
            self._begin(int(step))
            self._of_newest[slots] = words
            self.by_step[int(step)] = int(self._of_newest.sum())

    def _begin(self, step: int) -> None:
        if step == self._newest:
            return
        if self._newest is not None and step < self._newest:
            self.by_step = {one: number for one, number in self.by_step.items() if one < step}
        self._newest = step
        self._of_newest[:] = 0


def _word(name: str) -> np.uint64:
    return np.frombuffer(hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=8).digest(), np.uint64)[0]


def _bits(values: Any) -> Words:
    canonical = np.where(np.isnan(values), np.nan, values)  # One NaN for all.
    return canonical.astype(np.float64).view(np.uint64)


def _mix(words: Words) -> Words:
    """The finaliser of splitmix64 (Steele et al. 2014): each bit of the input changes half of the output."""
    with np.errstate(over="ignore"):
        words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def part(runs: tuple[RunNumbers, RunNumbers], digests: tuple[Digests, Digests]) -> Parting:
    """Return where the runs part. If they do, reads scales.jsonl of both again."""
    first, second = (each.by_step for each in digests)
    common = sorted(first.keys() & second.keys())
    step = next((one for one in common if first[one] != second[one]), None)
    differences = [] if step is None else _differences(runs, step)
    earlier = [one for one in common if step is None or one < step]
    return Parting(
        len(common),
        step,
        earlier[-1] if earlier else None,
        len({one.slot for one in differences}),
        differences[0] if differences else None,
        *_losses(runs[0].metrics, runs[1].metrics),
    )


def _differences(runs: tuple[RunNumbers, RunNumbers], step: int) -> list[SlotDifference]:
    first, second = (_observation(run.folder.path / SCALES, step) for run in runs)
    absent = (float("nan"),) * len(STATE)
    found = []
    for slot in dict.fromkeys((*first, *second)):
        pairs = zip(STATE, first.get(slot, absent), second.get(slot, absent))
        missing = (slot in first) != (slot in second)
        found += [
            SlotDifference(slot, field, (one, other))
            for field, one, other in pairs
            if missing or _bits(np.array([one]))[0] != _bits(np.array([other]))[0]
        ]
    return found


def _observation(path: Path, step: int) -> dict[str, tuple[float, ...]]:
    """Return the numbers of each slot in a step."""
    found: dict[str, tuple[float, ...]] = {}
    for columns in scale_columns(Lines(path), {}):
        for row in np.flatnonzero(columns.step == step).tolist():
            found[columns.names[columns.slot[row]]] = tuple(float(columns.numbers[field][row]) for field in STATE)
    return found


def _losses(first: Metrics, second: Metrics) -> tuple[int, int | None, tuple[float, float] | None]:
    common = np.intersect1d(_with_loss(first), _with_loss(second), assume_unique=True)
    ours, theirs = (np.searchsorted(each.step, common) for each in (first, second))
    pair = (first.columns["loss"][ours], second.columns["loss"][theirs])
    differs = np.flatnonzero(_bits(pair[0]) != _bits(pair[1]))
    if not len(differs):
        return len(common), None, None
    at = differs[0]
    return len(common), int(common[at]), (float(pair[0][at]), float(pair[1][at]))


def _with_loss(metrics: Metrics) -> Ints:
    """Return the steps that have a loss, also one that is not finite."""
    return metrics.step[~np.isnan(metrics.columns["loss"]) | np.isin(metrics.step, metrics.bad_losses)]

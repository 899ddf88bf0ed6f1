"""Where two runs part: the first step and slot whose recorded state differs, bit for bit."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fp8dist.runs.report.columns import Columns, scale_columns
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
    of them in the order of the file. ``loss_step``, ``losses``: the first step with another loss.
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

    def add(self, columns: Columns) -> None:
        """Add lines."""
        new = [_word(name) for name in columns.names[len(self._words) :]]
        self._words = np.append(self._words, np.array(new, np.uint64))
        mixed = self._words[columns.slot]
        for field in STATE:
            mixed = _mix(mixed ^ _bits(columns.numbers[field]))
        steps, place = np.unique(columns.step, return_inverse=True)
        sums = np.zeros(len(steps), np.uint64)
        np.add.at(sums, place, mixed)
        for step, number in zip(steps.tolist(), sums.tolist()):
            self.by_step[step] = (self.by_step.get(step, 0) + number) % (1 << 64)


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
    """Return where the runs part. Reads scales.jsonl of both again, up to the step in which they do."""
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
        rows = np.flatnonzero(columns.step == step)
        for row in rows.tolist():
            found[columns.names[columns.slot[row]]] = tuple(float(columns.numbers[field][row]) for field in STATE)
        if found and not len(rows):
            break
    return found


def _losses(first: Metrics, second: Metrics) -> tuple[int, int | None, tuple[float, float] | None]:
    common, ours, theirs = np.intersect1d(first.step, second.step, assume_unique=True, return_indices=True)
    pair = (first.columns["loss"][ours], second.columns["loss"][theirs])
    differs = np.flatnonzero(_bits(pair[0]) != _bits(pair[1]))
    if not len(differs):
        return len(common), None, None
    at = differs[0]
    return len(common), int(common[at]), (float(pair[0][at]), float(pair[1][at]))

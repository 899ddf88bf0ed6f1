"""The numbers of a run, read from its folder, in bounded memory."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fp8dist.runs.report.binned import SlotBins
from fp8dist.runs.report.columns import Columns, Floats, Ints, scale_columns
from fp8dist.runs.report.events import Events, RunEvent
from fp8dist.runs.report.experts import MixtureTokens, mixtures_of
from fp8dist.runs.report.folder import Lines, RunFolder
from fp8dist.runs.report.records import LARGEST, numbers_in, rank_record
from fp8dist.runs.run_format import EVENTS, EXPERTS, METRICS, RANKS, SCALES

FIELDS = ("loss", "grad_norm", "validation_loss", "tokens", "step_ms", "tokens_per_s", "proven", "checked")
"""Fields of metrics.jsonl that a report shows."""

ROWS = 256
"""Rows of waits at which each two become their mean."""


class Metrics(NamedTuple):
    """``step``: int64[n], growing. ``columns``: float64[n] by field, NaN where a step has none. Of lines with one step
    after another, the last number of each field counts. A step back takes the place of all lines with its step or a
    later one. ``bad_losses``, ``bad_norms``: the steps with a loss, and with a gradient norm, that is not finite.
    """

    step: Ints
    columns: Mapping[str, Floats]
    bad_losses: tuple[int, ...] = ()
    bad_norms: tuple[int, ...] = ()

    def newest(self, field: str) -> float | None:
        """Return the last number of a field; None if there is none."""
        known = self.columns[field][~np.isnan(self.columns[field])]
        return float(known[-1]) if len(known) else None


class RankWaits(NamedTuple):
    """``rows``: float64[n, ranks], mean ms per step that a rank waited in syncs. ``steps``: the last step of each row.

    ``sync_wait_ms``, ``step_ms``: float64[ranks], means over the run.
    """

    ranks: tuple[int, ...]
    steps: Ints
    rows: Floats
    sync_wait_ms: Floats
    step_ms: Floats


class RunNumbers(NamedTuple):
    """All that a report needs. ``left_out``: damaged lines by file."""

    name: str
    folder: RunFolder
    metrics: Metrics
    slots: SlotBins
    waits: RankWaits | None
    events: tuple[RunEvent, ...]
    left_out: Mapping[str, int]
    mixtures: tuple[MixtureTokens, ...] = ()


def read_run(path: Path, also: Callable[[Columns], None] | None = None) -> RunNumbers:
    """Read a run. ``also`` gets the columns of scales.jsonl.

    Raises:
        ConfigurationError: the folder is not that of a run.
    """
    run, slots = read_steps(path), SlotBins()
    files = {name: run.folder.lines(name) for name in (SCALES, RANKS, EXPERTS)}
    for columns in scale_columns(files[SCALES], slots.names):
        slots.add(columns)
        if also is not None:
            also(columns)
    waits, mixtures = _waits(files[RANKS]), mixtures_of(files[EXPERTS])
    left_out = {**run.left_out, **_left_out(files)}
    return run._replace(slots=slots, waits=waits, mixtures=mixtures, left_out=left_out)


def read_steps(path: Path) -> RunNumbers:
    """Read the numbers of steps and the events of a run, not those of slots, ranks and experts, which take long.

    Raises:
        ConfigurationError: the folder is not that of a run.
    """
    folder = RunFolder(path)
    files = {name: folder.lines(name) for name in (METRICS, EVENTS)}
    metrics, events = _metrics(files[METRICS]), Events()
    for line in files[EVENTS].new():
        files[EVENTS].left_out += not events.add(line)
    return RunNumbers(folder.name, folder, metrics, SlotBins(), None, events.kept(), _left_out(files))


def _left_out(files: Mapping[str, Lines]) -> dict[str, int]:
    return {name: lines.left_out for name, lines in files.items() if lines.left_out}


def _metrics(lines: Lines) -> Metrics:
    steps, columns = array("q"), {field: array("d") for field in FIELDS}
    bad: dict[str, list[int]] = {"loss": [], "grad_norm": []}
    for line in lines.new():
        step = line["step"]
        if abs(step) >= LARGEST:
            lines.left_out += 1
            continue
        if steps and step < steps[-1]:
            place = bisect_left(steps, step)
            del steps[place:]
            for numbers in columns.values():
                del numbers[place:]
            for found in bad.values():
                del found[bisect_left(found, step) :]
        if not steps or step > steps[-1]:
            steps.append(step)
            for numbers in columns.values():
                numbers.append(math.nan)
        for field, number in numbers_in(line, FIELDS).items():
            columns[field][-1] = number
            if field in bad:
                del bad[field][bisect_left(bad[field], step) :]
                bad[field] += [step] * (not math.isfinite(number))
    floats = {field: np.array(values, dtype=np.float64) for field, values in columns.items()}
    return Metrics(np.array(steps, dtype=np.int64), floats, tuple(bad["loss"]), tuple(bad["grad_norm"]))


def _waits(lines: Lines) -> RankWaits | None:
    ranks: tuple[int, ...] = ()
    steps: list[int] = []
    rows: list[Floats] = []
    pending: list[Floats] = []
    each, sums = 1, np.zeros((4, 0))  # Observations in a row; sums of waits, of times of steps, and their numbers.
    for line in lines.new():
        found = rank_record(line)
        if found is None:
            lines.left_out += 1
            continue
        if found.ranks != ranks:  # The first line, or a resume with other ranks: only the newest ranks are shown.
            ranks, steps, rows, pending, each, sums = found.ranks, [], [], [], 1, np.zeros((4, len(found.ranks)))
        times = np.array(found[1:])
        sums += np.concatenate([np.nan_to_num(times), ~np.isnan(times)])
        pending.append(times[0])
        if len(pending) == each:
            steps.append(line["step"])
            rows.append(_mean(pending))
            pending = []
        if len(rows) == ROWS:
            steps, rows, each = steps[1::2], [_mean(two) for two in zip(rows[::2], rows[1::2])], 2 * each
    if not rows:
        return None
    with np.errstate(invalid="ignore"):
        means = sums[:2] / np.where(sums[2:] > 0, sums[2:], np.nan)
    return RankWaits(ranks, np.array(steps, dtype=object), np.array(rows), means[0], means[1])


def _mean(rows: Sequence[Floats]) -> Floats:
    """Return the mean of several rows, without their NaN."""
    known = np.sum(~np.isnan(rows), axis=0)
    return np.where(known > 0, np.nansum(rows, axis=0) / np.maximum(known, 1), np.nan)

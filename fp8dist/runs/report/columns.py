"""scales.jsonl as columns of numbers, block by block."""

from __future__ import annotations

import gc
import json
import multiprocessing
import re
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fp8dist.common.numbers import from_json
from fp8dist.runs.report.folder import Lines, objects_in
from fp8dist.runs.report.records import LARGEST, slot_in

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

NUMBERS = ("amax", "scale", "saturated", "underflow", "amax_rank", "amax_microbatch")
"""The fields that are read."""

MOST_SLOTS = 1 << 14
"""Slots that are read. Lines of further slots are left out."""

PROCESSES, SMALL = 2, 1 << 27
"""Processes that parse the blocks of a file of more than SMALL bytes."""


class Columns(NamedTuple):
    """Some lines of the file, in its order: n of them.

    ``step``, ``slot``: int64[n]; ``slot`` is the place of the name in ``names``. ``numbers``: float64[n] for each of
    ``NUMBERS``. NaN: unknown; but an amax that is unknown is -1, and one that is NaN was NaN on a rank.
    """

    step: Ints
    slot: Ints
    numbers: dict[str, Floats]
    names: Sequence[str]
    left_out: int = 0


def scale_columns(lines: Lines, names: dict[str, int]) -> Iterator[Columns]:
    """Yield the content of the file in its order. Lines that are left out are counted in ``lines.left_out``.

    Args:
        names: the place of each slot. New slots are added, at most ``MOST_SLOTS``.
    """
    for columns in _in_order(lines):
        lines.left_out += columns.left_out
        for name in columns.names:
            if len(names) < MOST_SLOTS:
                names.setdefault(name, len(names))
        slot = np.array([names.get(name, -1) for name in columns.names], dtype=np.int64)[columns.slot]
        known = slot >= 0
        if known.all():
            yield columns._replace(slot=slot, names=list(names))
        else:
            lines.left_out += int(len(slot) - known.sum())
            numbers = {name: values[known] for name, values in columns.numbers.items()}
            yield Columns(columns.step[known], slot[known], numbers, list(names))


def _in_order(lines: Lines) -> Iterator[Columns]:
    blocks = lines.blocks()
    if lines.size() <= SMALL or "fork" not in multiprocessing.get_all_start_methods():
        yield from map(_parsed, blocks)
        return
    waiting: deque[Future[Columns]] = deque()
    fork = multiprocessing.get_context("fork")  # The children only compute: they need no threads and no torch.
    with ProcessPoolExecutor(PROCESSES, fork, initializer=gc.disable) as pool:
        for block in blocks:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".*multi-threaded, use of fork", DeprecationWarning)
                waiting.append(pool.submit(_parsed, block))
            if len(waiting) > 2 * PROCESSES:  # Bounds the memory.
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _parsed(block: bytes) -> Columns:
    """Return the lines of a block.

    If all lines have the fields of the first line in the same order, as fp8dist writes them, one regular expression
    reads them, in a third of the time of JSON.
    """
    try:
        found = _alike(block)
    except ValueError:  # Something that is no number.
        found = None
    return found or _from_objects(block)


def _alike(block: bytes) -> Columns | None:
    pattern = _pattern(block[: block.index(b"\n")])
    if pattern is None:
        return None
    rows: list[tuple[bytes, ...]] = pattern.findall(block)
    if len(rows) != block.count(b"\n"):
        return None
    columns = dict(zip(pattern.groupindex, zip(*rows)))
    step = np.fromiter(map(int, columns["step"]), np.int64, len(rows))
    if np.abs(step).max() >= LARGEST:
        return None
    places = {name: place for place, name in enumerate(dict.fromkeys(columns["slot"]))}
    slot = np.fromiter(map(places.__getitem__, columns["slot"]), np.int64, len(rows))
    numbers = {name: _numbers(columns.get(name), name, len(rows)) for name in NUMBERS}
    return Columns(step, slot, numbers, [name.decode() for name in places])


def _pattern(line: bytes) -> re.Pattern[bytes] | None:
    """Return the expression of lines like this one, with a group for each field that is read; None if it is odd."""
    try:
        found = json.loads(line)
    except RecursionError:
        return None
    keys = list(found) if isinstance(found, dict) else []
    if not {"step", "slot"} <= set(keys) or not all(re.fullmatch(r"[a-z_]+", str(key)) for key in keys):
        return None
    number = r'(?:[-+.eE\d]+|null|"[A-Za-z-]+")'
    values = {"step": r"-?\d{1,17}", "slot": r'[^"\\\n]*'}
    parts = []
    for key in keys:
        value = f"(?P<{key}>{values.get(key, number)})" if key in (*values, *NUMBERS) else number
        parts.append(rf'"{key}": "{value}"' if key == "slot" else rf'"{key}": {value}')
    return re.compile(rf"^\{{{', '.join(parts)}\}}$".encode(), re.MULTILINE)


def _numbers(texts: Sequence[bytes] | None, field: str, count: int) -> Floats:
    if texts is None:
        return np.full(count, _number(None, field))
    try:
        return np.fromiter(map(float, texts), np.float64, count)
    except ValueError:  # A null or a string.
        return np.array([_number(json.loads(text), field) for text in texts])


def _number(value: Any, field: str) -> float:
    number = from_json(value)
    return -1.0 if field == "amax" and value != "NaN" and not number >= 0 else number


def _from_objects(block: bytes) -> Columns:
    found, left_out = objects_in(block)
    named = [one for one in found if slot_in(one) is not None and abs(one["step"]) < LARGEST]
    places: dict[str, int] = {}
    slot = np.array([places.setdefault(one["slot"], len(places)) for one in named], dtype=np.int64)
    numbers = {field: np.array([_number(one.get(field), field) for one in named], dtype=float) for field in NUMBERS}
    step = np.array([one["step"] for one in named], dtype=np.int64)
    return Columns(step, slot, numbers, list(places), left_out + len(found) - len(named))

"""Numbers of a run: bins, jumps and holders against plain Python; experts; hostile lines; bounded memory."""

from __future__ import annotations

import functools
import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fp8dist.runs.report import binned, columns, numbers
from fp8dist.runs.report.columns import scale_columns
from fp8dist.runs.report.events import Events
from fp8dist.runs.report.experts import MixtureTokens, idle_experts, relative_loads
from fp8dist.runs.report.folder import Lines
from fp8dist.runs.report.live import LiveRun
from fp8dist.runs.report.numbers import RunNumbers, read_run
from fp8dist.runs.report.rows import rows_of
from tests.support.runs import lines, load, made_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_run(tmp_path_factory.mktemp("runs") / "made")


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _oracle(found: list[dict[str, Any]], start: int, width: int) -> dict[tuple[str, int], dict[str, float]]:
    """Return what each (slot, bin) holds, in plain Python."""
    cells: dict[tuple[str, int], dict[str, float]] = defaultdict(dict)
    before: dict[str, float] = {}
    for line in found:
        slot = line["slot"]
        cell = cells[slot, (line["step"] - start) // width]
        if line["amax"] is not None:
            amax = float(line["amax"])
            amax = amax if math.isfinite(amax) else math.inf
            if amax > cell.get("amax", -1.0):
                cell |= {"amax": amax, "rank": line["amax_rank"], "microbatch": line["amax_microbatch"]}
                cell["scale"] = math.nan if line["scale"] is None else line["scale"]
            if math.isfinite(amax) and line["scale"] is not None:
                cell["reach"] = max(cell.get("reach", 0.0), amax * line["scale"])
        for name in ("underflow", "saturated"):
            cell[name] = max(cell.get(name, 0.0), line[name])
        scale = line["scale"]
        if scale is not None:
            if slot in before:
                cell["jump"] = max(cell.get("jump", 0.0), scale / before[slot], before[slot] / scale)
            before[slot] = scale
        else:
            before.pop(slot, None)
    return cells


@pytest.mark.parametrize(("bins", "block"), [(256, 1 << 22), (16, 5_000), (4, 1 << 22)])
def test_bins_hold_what_plain_python_finds(
    folder: Path, bins: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(binned, "BINS", bins)
    monkeypatch.setattr("fp8dist.runs.report.folder.BLOCK", block)
    slots = read_run(folder).slots
    assert (slots.observations, slots.newest) == (40, 400)
    found = _read(folder / "scales.jsonl")
    for slot, row in slots.names.items():
        mine = [line for line in found if line["slot"] == slot]
        assert slots.held[row].tolist() == [sum(line["amax_rank"] == rank for line in mine) for rank in range(4)]
        sums = [math.fsum(line[name] for line in mine) for name in ("saturated", "underflow")]
        assert slots.sums[row].tolist() == pytest.approx([*sums, 40, 40], rel=1e-12)
    expected = _oracle(found, slots.start, slots.width)
    assert {bin_ for _, bin_ in expected} <= set(range(bins))
    for name in binned.FOLDS:
        for slot, row in slots.names.items():
            for place in range(bins):
                want = np.float32(expected.get((slot, place), {}).get(name, math.nan))
                have = slots.arrays[name][row, place]
                assert have == want or (math.isnan(have) and math.isnan(want)), (name, slot, place)


def _with(tmp_path: Path, **files: list[dict[str, Any]]) -> RunNumbers:
    (tmp_path / "metrics.jsonl").touch()
    for name, objects in files.items():
        lines(tmp_path / f"{name}.jsonl", objects)
    return read_run(tmp_path)


def test_steps_below_the_first_get_bins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binned, "BINS", 4)
    steps = [100, 101, 102, 90, 110, -5, 10**15]
    found = [{"step": step, "slot": "a:input", "amax": float(i + 1)} for i, step in enumerate(steps)]
    slots = _with(tmp_path, scales=found).slots
    assert slots.start <= -5
    assert slots.start + 4 * slots.width > 10**15
    assert np.nanmax(slots.arrays["amax"]) == slots.observations == len(steps)


ODD = [
    {"step": 1, "slot": "a:input", "amax": None, "scale": 2.0},
    {"slot": "a:input", "step": 2, "amax": 1.5, "scale": "Infinity", "extra": [1, {"x": None}]},
    {"step": 3, "slot": 'quote " and \\ and \ud800 <b>', "amax": "NaN", "amax_rank": 2},
    {"step": 4, "slot": "a:input", "amax": "-Infinity", "scale": "1.0", "amax_rank": "x", "underflow": True},
    {"step": 5, "slot": ["no", "name"], "amax": 1.0},
    {"step": 10**40, "slot": "a:input", "amax": 1.0},
    {"step": 6, "slot": "a:input", "amax": 10**400, "scale": {}},
]


def test_both_ways_of_reading_agree(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The regular expression, JSON, and two processes."""

    def read(path: Path) -> tuple[list[Any], int]:
        source, names = Lines(path), dict[str, int]()
        found = list(scale_columns(source, names))
        rows = [
            (step, list(names)[slot], *(repr(float(part.numbers[name][i])) for name in columns.NUMBERS))
            for part in found
            for i, (step, slot) in enumerate(zip(part.step.tolist(), part.slot.tolist()))
        ]
        return rows, source.left_out

    mixed = tmp_path / "scales.jsonl"
    lines(mixed, [*_read(folder / "scales.jsonl"), *ODD])
    monkeypatch.setattr("fp8dist.runs.report.folder.BLOCK", 50_000)
    fast = read(mixed)
    assert fast[1] == 2
    assert len(fast[0]) == 40 * 36 + len(ODD) - 2
    monkeypatch.setattr(columns, "SMALL", 0)
    assert read(mixed) == fast
    monkeypatch.setattr(columns, "SMALL", 1 << 30)
    monkeypatch.setattr(columns, "_alike", lambda block: None)
    assert read(mixed) == fast


def test_a_file_that_begins_with_another_kind_of_line_is_read(tmp_path: Path) -> None:
    line = json.dumps({"step": 1, "slot": "a:input", "amax": 1.0})
    (tmp_path / "scales.jsonl").write_text(f'[["x"], {{}}]\n{line}\n')
    source = Lines(tmp_path / "scales.jsonl")
    (found,) = scale_columns(source, {})
    assert (found.step.tolist(), source.left_out) == ([1], 1)


def test_values_beyond_float32_leave_no_headroom(tmp_path: Path) -> None:
    """Without a warning of numpy."""
    (tmp_path / "run.json").write_text(
        json.dumps({"format": "fp8dist run", "version": 1, "slots": [{"slot": "a:input", "format": "e4m3"}]})
    )
    found = rows_of(_with(tmp_path, scales=[{"step": 1, "slot": "a:input", "amax": 3e38, "scale": 64.0}]))
    assert found is not None
    assert found.arrays["headroom"].tolist() == [[-math.inf]]


def test_slots_beyond_the_bound_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "MOST_SLOTS", 3)
    run = _with(tmp_path, scales=[{"step": i // 5, "slot": f"{i % 5}:input", "amax": 1.0} for i in range(20)])
    assert list(run.slots.names) == ["0:input", "1:input", "2:input"]
    assert run.left_out == {"scales.jsonl": 8}


def test_a_step_back_replaces_the_lines_from_it_on(tmp_path: Path) -> None:
    bad = {"step": 4, "loss": "NaN", "grad_norm": "Infinity"}
    found = [{"step": 2, "grad_norm": "NaN"}, {"step": 3, "loss": 1.0}, bad, {"step": 5}, bad, {"step": 4, "loss": 2.0}]
    metrics = _with(tmp_path, metrics=found).metrics
    assert metrics.step.tolist() == [2, 3, 4]
    assert metrics.columns["loss"][1:].tolist() == [1.0, 2.0]
    assert (metrics.bad_losses, metrics.bad_norms) == ((), (2, 4))
    assert metrics.newest("loss") == 2.0
    assert metrics.newest("proven") is None


@pytest.mark.parametrize(
    ("first", "second", "loss", "norm"),
    [
        ({"loss": "NaN"}, {"grad_norm": 1.0}, math.nan, 1.0),
        ({"loss": "Infinity"}, {"loss": None, "grad_norm": "x"}, math.inf, None),
        ({"grad_norm": "NaN"}, {"loss": 2.0, "grad_norm": None}, 2.0, math.nan),
        ({"loss": 1.0, "grad_norm": 1.0}, {"loss": 2.0}, 2.0, 1.0),
        ({"loss": 1.0}, {"loss": "NaN"}, math.nan, None),
        ({"loss": "NaN"}, {"loss": 1.0}, 1.0, None),
    ],
)
def test_lines_of_one_step_are_merged(
    first: dict[str, Any], second: dict[str, Any], loss: float, norm: float | None, tmp_path: Path
) -> None:
    """Also by the live view."""
    begin: dict[str, Any] = {"step": 5, "loss": 0.5, "step_ms": 1.0}
    run = _with(tmp_path, metrics=[begin, {"step": 6, "step_ms": 2.0, **first}, {"step": 6, **second}]).metrics
    live = LiveRun(tmp_path)
    live.read()
    assert run.step.tolist() == [5, 6]
    assert run.bad_losses == (() if math.isfinite(loss) else (6,))
    assert run.bad_norms == (() if norm is None or math.isfinite(norm) else (6,))
    wanted = [loss, math.nan if norm is None else norm, 2.0]
    assert repr([run.columns[name][1].item() for name in ("loss", "grad_norm", "step_ms")]) == repr(wanted)
    assert repr([live.loss, live.grad_norm, live.step_ms]) == repr([loss, norm, 2.0])
    assert repr(list(live.losses)) == repr([0.5, loss])
    assert ("NOT FINITE since step 6" in live.sound[1]) == (not math.isfinite(loss))


def test_a_resume_undoes_events_of_later_steps(tmp_path: Path) -> None:
    kinds = [(9, "saved", None), (12, "saved", None), (10, "start", 10), (12, "saved", None)]
    events = _with(tmp_path, events=[{"step": s, "kind": k, "resumed_after": a} for s, k, a in kinds]).events
    assert [(event.step, event.undone) for event in events] == [(9, False), (12, True), (10, False), (12, False)]
    names = ["start", "checked", "diverged", "end", "start", "saved"]  # An earlier run in the folder is not of the run.
    events = _with(tmp_path, events=[{"step": 9, "kind": kind, "resumed_after": None} for kind in names]).events
    assert [event.kind for event in events] == ["start", "saved"]


def test_events_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numbers, "Events", functools.partial(Events, 10))
    found = [{"step": step, "kind": "jump", "slots": ["x" * 9_000] * 99} for step in range(50)]
    found += [{"step": 1, "kind": f"kind {i}"} for i in range(100)] + [{"step": 2, "kind": ["list"]}]
    run = _with(tmp_path, events=found)
    jumps = [event for event in run.events if event.kind == "jump"]
    assert (jumps[0].step, jumps[-1].step, len(jumps)) == (0, 49, 10)
    assert jumps[0].data["slots_count"] == 99
    assert len(json.dumps(jumps[0].data)) < 33 * 2_010
    assert len({event.kind for event in run.events}) == 64
    assert run.left_out == {"events.jsonl": 38}


@pytest.mark.parametrize("count", [3, 256, 1000])
def test_waits_are_means_over_the_run(count: int, tmp_path: Path) -> None:
    rows = [[float(i), None if i % 2 else 2.0, "NaN"] for i in range(count)]
    found: list[dict[str, Any]] = [{"step": 0, "ranks": [0], "sync_wait_ms": [1.0]}, {"step": 0, "ranks": "odd"}]
    found += [{"step": i, "ranks": [0, 1, 5], "sync_wait_ms": row, "step_ms": [1]} for i, row in enumerate(rows)]
    run = _with(tmp_path, ranks=found)
    waits = run.waits
    assert waits is not None
    assert waits.ranks == (0, 1, 5)
    assert waits.sync_wait_ms.tolist()[:2] == [(count - 1) / 2, 2.0]
    assert np.isnan(waits.sync_wait_ms[2])
    assert np.isnan(waits.step_ms).all()
    assert len(waits.rows) == len(waits.steps) < numbers.ROWS
    assert np.diff(waits.rows[:, 0]).max(initial=0) <= 1000 / 128 + 1
    assert run.left_out == {"ranks.jsonl": 1}


def test_idle_experts_are_told_in_a_sentence(tmp_path: Path) -> None:
    made = [
        load(10, "blocks.0.mlp.experts", [6, 2, 0], [0, 0, 10], [0, 0, 9]),
        load(10, "blocks.1.mlp.experts", [5, 5], [0, 0], [0, 0]),
        load(20, "blocks.0.mlp.experts", [2, 6, 0], [0, 0, 20], [0, 0, 19]),
        load(20, "blocks.1.mlp.experts", [0, 10], [1, 0], [0, 0]),
        load(20, "m", [0, 3], [11, 0]),
    ]
    odd = [
        load(1, "m", [1], [0, 0]),
        load(1, "m", [1, 2], [0, -1]),
        load(1, "m", [1, True], [0, 0]),
        load(1, "m", [0, 0], [1, 1]),
        load(1, "m", [1, 2], [0, 0], [0]),
        load(1, "m", [1, 2], [0, 0], "old"),
        {**load(1, "m", [1], [0]), "module": 7},
        {"step": 1, "module": "m"},
    ]
    run = _with(tmp_path, experts=[*odd, *made])
    assert run.mixtures[0].shares.tolist() == [0.5, 0.5, 0.0]
    assert [str(one) for one in idle_experts(run.mixtures)] == [
        "expert 2 of blocks.0.mlp.experts has had no token for 20 steps",
        "expert 0 of m has had no token in any observed step of the last 11",
        "expert 0 of blocks.1.mlp.experts has no token in step 20",
    ]
    assert run.left_out == {"experts.jsonl": len(odd)}


def test_loads_of_experts_are_relative_to_an_even_spread() -> None:
    mixtures = [
        MixtureTokens("a", 1, np.array([0.5, 0.25, 0.25, 0.0]), 1, [0, 0, 0, 1], None),
        MixtureTokens("b", 1, np.array([0.25, 0.75]), 1, [0, 0], None),
    ]
    loads, names = relative_loads(mixtures, 8)
    np.testing.assert_array_equal(loads, [[2, 1, 1, 0], [0.5, 1.5, np.nan, np.nan]])
    assert names == ["0", "1", "2", "3"]
    loads, names = relative_loads(mixtures, 2)
    np.testing.assert_array_equal(loads, [[1.5, 0.5], [1.0, np.nan]])
    assert names == ["0 to 1", "2 to 3"]

"""LiveRun against an oracle that reads whole files, and against files that nobody should write."""

from __future__ import annotations

import json
import math
import os
import random
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

import fp8dist
from fp8dist.common.text import shortened
from fp8dist.runs.report import facts, live
from fp8dist.runs.report.live import LiveRun, RankWait, clean
from fp8dist.runs.report.numbers import read_run
from fp8dist.runs.report.screen import one_line, screen, sparkline, stuck


def _write(path: Path, *lines: Any) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def _run(folder: Path, *steps: dict[str, Any], **header: Any) -> LiveRun:
    folder.mkdir(exist_ok=True)
    (folder / "run.json").write_text(json.dumps({"format": "fp8dist run", "version": 1, **header}))
    _write(folder / "metrics.jsonl", *steps)
    run = LiveRun(folder)
    run.read()
    return run


def _severity(slot: dict[str, Any]) -> tuple[Any, ...]:
    """Sort as the issue says: not finite, saturated share, underflow share, beyond the format; 4: no trouble."""
    if isinstance(slot["amax"], str):
        return (0,)
    if slot["saturated"] >= 1e-3:
        return 1, -slot["saturated"]
    if slot["underflow"] >= 1e-2:
        return 2, -slot["underflow"]
    return 3 if slot["amax"] * slot["scale"] >= 2 * 448 else 4, -slot["amax"] * slot["scale"]


def _slot(chance: random.Random, step: int, place: int) -> dict[str, Any]:
    amax = chance.choice(["NaN", "Infinity", *[chance.uniform(0.1, 100.0) for _ in range(8)]])
    shares = {
        name: chance.choice([0.0, 0.0, chance.uniform(0.0, 0.02), chance.random()])
        for name in ("saturated", "underflow")
    }
    places = {f"{n}_{unit}": chance.randrange(9) for n in ("amax", *shares) for unit in ("rank", "microbatch")}
    return {"step": step, "slot": f"m.{place}:input", "amax": amax, "scale": 16.0, **shares, **places}


@pytest.mark.parametrize("seed", range(3))
def test_the_state_is_that_of_the_whole_files(seed: int, tmp_path: Path) -> None:
    """Files grow in random pieces, some torn inside a line."""
    chance = random.Random(seed)
    slots = [{"slot": f"m.{i}:input", "format": "e4m3", "max": 448.0} for i in range(40)]
    run = _run(tmp_path, slots=slots)
    steps: list[dict[str, Any]] = []
    text = {name: "" for name in ("metrics", "scales", "ranks", "events")}
    for step in range(1, 30):
        due = {"proven": step - 1, "checked": step // 7 * 7 or None} if step % 3 == 0 else {}
        steps.append({"step": step, "loss": chance.choice([chance.random(), "NaN"]), "step_ms": chance.random(), **due})
        text["metrics"] += json.dumps(steps[-1]) + "\n"
        if step % 3 == 0:
            seen = [_slot(chance, step, place) for place in range(40)]
            text["scales"] += "".join(json.dumps(slot) + "\n" for slot in seen)
            waits = [chance.random() for _ in range(5)]
            text["ranks"] += json.dumps({"step": step, "ranks": [*range(5)], "sync_wait_ms": waits}) + "\n"
        if step % 4 == 0:
            text["events"] += json.dumps({"step": step, "kind": "saved", "path": f"/{step}"}) + "\n"
        for name, kept in text.items():
            size = chance.randrange(len(kept) + 1) if step < 29 else len(kept)
            with (tmp_path / f"{name}.jsonl").open("a") as file:
                file.write(kept[:size])
            text[name] = kept[size:]
        run.read()
    assert run.step == 29
    assert [repr(loss) for loss in run.losses] == [repr(float(line["loss"])) for line in steps]
    assert run.check is not None
    assert (run.proven, run.check.step, run.step_ms) == (26, 21, steps[-1]["step_ms"])
    assert [event.text for event in run.events] == [f"a checkpoint is saved, /{step}" for step in range(4, 29, 4)]
    assert run.waits == [RankWait(rank, wait) for rank, wait in enumerate(waits)]
    expected = sorted((slot for slot in seen if _severity(slot)[0] < 4), key=_severity)
    found = run.troubled(40)
    assert [slot.trouble.rank_of_kind for slot in found] == [_severity(line)[0] for line in expected]
    for slot, line in zip(found, expected):
        if not isinstance(line["amax"], str):
            assert slot.name == line["slot"]
            of = ("saturated", "underflow", "amax")[slot.trouble.rank_of_kind - 1]
            assert slot.what
            assert slot.place == (line[f"{of}_rank"], line[f"{of}_microbatch"])


def test_only_slots_in_trouble_are_named(tmp_path: Path) -> None:
    """Not one that fills its format, as delayed scaling wants it, nor one that cuts off a single element, nor one that
    is no longer watched."""
    run = _run(tmp_path, {"step": 1}, slots=[{"slot": "full:input", "format": "e4m3"}])
    sound = {"step": 1, "slot": "full:input", "amax": 1.1, "scale": 448.0, "saturated": 1e-6, "underflow": 2e-3}
    unwatched = {"step": -1, "slot": "unwatched:input", "amax": "NaN"}
    _write(tmp_path / "scales.jsonl", sound | {"step": -1}, unwatched, sound | {"step": 0}, sound)
    run.read()
    text = "\n".join(line.plain for line in screen(run, 80, 40))
    assert "no slot is in trouble, of 1 observed" in text
    assert "full" not in text
    assert "worst" not in one_line(run)
    name = "model.layers.31.block_sparse_moe.experts.down_proj.127:grad_output"  # Whole, so that grep finds it.
    _write(tmp_path / "scales.jsonl", {**sound, "slot": name, "underflow": 0.02, "underflow_rank": 3})
    run.read()
    assert f"worst slot {name}: 2 % underflow, rank 3" in one_line(run)
    assert "slots in trouble" in "\n".join(line.plain for line in screen(run, 80, 40))


def test_the_header_says_from_which_shares_on_a_slot_is_in_trouble(tmp_path: Path) -> None:
    """A fact of its recipe. The headers of earlier versions do not say it."""
    named = ("own:input", "odd:input", "old:input")
    slots = [{"slot": named[0], "trouble": {"saturated": 0.03, "underflow": 0.5}}, {"slot": named[1], "trouble": [7]}]
    run = _run(tmp_path, {"step": 1}, slots=slots)
    for shares, expected in (
        ({"saturated": 0.02, "underflow": 0.3}, named[1:]),
        ({"saturated": 0.0, "underflow": 0.5}, named),
        ({"saturated": 0.03, "underflow": 0.0}, named),
    ):
        _write(tmp_path / "scales.jsonl", *({"step": 1, "slot": name, "amax": 1.0, **shares} for name in named))
        run.read()
        assert {slot.name for slot in run.troubled(9)} == set(expected)


def test_the_screen_has_the_run_its_losses_and_its_events(tmp_path: Path) -> None:
    (tmp_path / "larger").mkdir()
    folder = tmp_path / "larger" / "fp8"  # Runs of two experiments are often called the same.
    recipe = {"recipe": "DelayedScaling(history_len=1024)", "device": "cpu"}
    run = _run(folder, {"step": 235, "loss": 3.0, "validation_loss": 3.5}, {"step": 236, "loss": 2.0}, **recipe)
    assert run.title == ["larger/fp8", "DelayedScaling", "cpu"]
    assert read_run(folder).name == "larger/fp8"
    assert "validation loss 3.5 (step 235)" in one_line(run)
    slot = "model.blocks.2.mlp.up:grad_output"
    _write(
        folder / "events.jsonl",
        {"step": 200, "kind": "saved", "path": "checkpoints/step200"},
        {"step": 236, "kind": "nonfinite", "slots": [slot], "rank": 5, "microbatch": 3},
        {"step": 236, "kind": "evaluated", "validation_loss": 2.25, "perplexity": 9.488},
        {"step": 240, "kind": "end"},
    )
    run.read()
    lines = [line.plain for line in screen(run, 80, 40)]  # Each says the kind once, and the rank on 80 columns.
    assert [line for line in lines if line.startswith("step 2")][-4:] == [
        "step 200  saved  checkpoints/step200",
        f"step 236  nonfinite  {slot}, rank 5, microbatch 3",
        "step 236  evaluated  validation_loss 2.25, perplexity 9.488",
        "step 240  end  the run ends",
    ]
    assert f"nonfinite in step 236: {slot}, rank 5, microbatch 3" in one_line(run)
    assert lines[2].startswith("loss 2  validation loss 2.25 (step 236)  █▁")
    assert facts.validation_losses(read_run(folder)) == {235: 3.5, 236: 2.25}
    _write(folder / "events.jsonl", {"step": 235, "kind": "start", "resumed_after": 235})
    assert facts.validation_losses(read_run(folder)) == {235: 3.5}


@pytest.mark.parametrize("ranks", [None, [], ["0", 1], "01"])
def test_a_line_that_names_no_ranks_changes_no_wait_and_is_left_out_of_a_report(ranks: Any, tmp_path: Path) -> None:
    run = _run(tmp_path, {"step": 1})
    good = {"step": 1, "ranks": [0, 1], "sync_wait_ms": [2.5, "NaN"], "step_ms": [9.0]}
    _write(tmp_path / "ranks.jsonl", good, {"step": 2, "ranks": ranks, "sync_wait_ms": [7.0, 7.0]})
    run.read()
    assert repr(run.waits) == repr([RankWait(0, 2.5), RankWait(1, math.nan)])
    numbers = read_run(tmp_path)
    assert numbers.left_out == {"ranks.jsonl": 1}
    assert numbers.waits is not None
    assert [repr(float(wait)) for wait in numbers.waits.sync_wait_ms] == ["2.5", "nan"]


def test_files_that_are_replaced_start_anew(tmp_path: Path) -> None:
    run = _run(tmp_path, {"step": 9, "loss": 1.0}, {"step": 10, "loss": 2.0}, ranks=1)
    _write(tmp_path / "scales.jsonl", {"step": 10, "slot": "a:input", "amax": "NaN"})
    audited = {"findings": [{"kind": "audit"}]}
    _write(tmp_path / "events.jsonl", {"step": 9, "kind": "checked"}, {"step": 10, "kind": "diverged"})
    _write(tmp_path / "events.jsonl", {"step": 10, "kind": "diverged", "report": audited}, {"step": 10, "kind": "end"})
    assert run.read()
    before = run.event_count
    for name, line in (
        ("metrics", {"step": 3, "loss": 5.0}),
        ("scales", {"step": 3, "slot": "b:input", "amax": 1.0}),
        ("events", {"step": 3, "kind": "saved"}),
    ):
        _write(tmp_path / "new", line)
        os.replace(tmp_path / "new", tmp_path / f"{name}.jsonl")
    (tmp_path / "run.json").write_text(json.dumps({"format": "fp8dist run", "version": 1, "ranks": 4}))
    assert run.read()
    assert (run.step, list(run.losses)) == (3, [5.0])
    assert [slot.name for slot in run.observed()] == ["b:input"]
    assert run.title[-1] == "4 ranks"
    assert [event.kind for event in run.events] == ["saved"]
    assert (run.ended, run.check, run.diverged, run.wrong) == (False, None, None, None)
    assert one_line(run, before).endswith("saved in step 3: a checkpoint is saved")
    assert not run.read()
    (tmp_path / "run.json").write_text("{")
    run.read()
    assert run.title[-1] == "4 ranks"


def test_a_new_run_that_outgrows_the_old_one_between_two_reads_starts_anew(tmp_path: Path) -> None:
    with fp8dist.Recorder(tmp_path) as recorder:
        recorder.log(1, loss=math.nan, proven=1)
    run = LiveRun(tmp_path)
    run.read()
    assert run.proven == 1
    with fp8dist.Recorder(tmp_path) as recorder:
        for step in range(1, 9):
            recorder.log(step, loss=float(step))
    run.read()
    assert list(run.losses) == [*range(1, 9)]
    assert run.sound[0] is None


def test_a_job_that_goes_back_is_sound_to_no_later_step(tmp_path: Path) -> None:
    ahead = {"step": 50, "loss": "NaN", "validation_loss": 2.0, "proven": 50, "checked": 50}
    run = _run(tmp_path, ahead, {"step": 21}, ranks=1)
    assert run.sound == (True, "proven to step 20")
    assert (run.step, run.validation) == (21, None)


@pytest.mark.parametrize(
    ("count", "longest", "expected"),
    [
        (0, 0, ""),
        (2, 1400, "2 experts without tokens, one for 1,400 steps or more"),
        (1, 1, "1 expert without tokens, one for 1 step or more"),
        (3, "NaN", "3 experts without tokens"),
        ("many", -1, ""),
        (1e300, 1e300, ""),
    ],
)
def test_experts_without_tokens_are_told(count: Any, longest: Any, expected: str, tmp_path: Path) -> None:
    """Also in the steps after the observation."""
    due = {"step": 10, "idle_experts": count, "longest_idle_steps": longest}
    run = _run(tmp_path, due, {"step": 11})
    assert run.idle_experts == expected
    assert expected in one_line(run)
    assert any(expected in line.plain for line in screen(run, 100, 30))


def test_a_job_without_steps_is_stuck(tmp_path: Path) -> None:
    run = _run(tmp_path, {"step": 1, "step_ms": 500.0, "time": time.time() + 1e6})
    assert stuck(run) == ""
    os.utime(tmp_path / "metrics.jsonl", (time.time() - 123, time.time() - 123))
    assert stuck(LiveRun(tmp_path)) == "no step yet"
    old = LiveRun(tmp_path)
    old.read()
    assert stuck(old) in ("no step for 123 s", "no step for 124 s")
    _write(tmp_path / "metrics.jsonl", {"step": 2, "step_ms": 500_000.0, "time": 0})
    old.read()
    assert stuck(old) == ""
    _write(tmp_path / "events.jsonl", {"step": 2, "kind": "end"})
    old.read()
    assert stuck(old) == "the run has ended"
    _write(tmp_path / "events.jsonl", {"step": 2, "kind": "start", "resumed_after": 2})
    old.read()
    assert not old.ended


HOSTILE = ["\x1b[31m\x07", "[red]x[/red]", "y" * 10_000, "‮", "漢" * 500, "\ud800", "", 0, -1, 10**4000, 1e308, True]
HOSTILE += [None, [], {}, [[]], {"findings": [7, {}, {"ranks": "x", "name": []}]}, "NaN", "Infinity", math.inf]


@pytest.mark.parametrize("seed", range(10))
def test_no_line_breaks_the_screen(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    keys = "step time loss grad_norm step_ms proven checked slot amax scale saturated underflow amax_rank ranks kind"
    keys += " sync_wait_ms slots rank microbatch module role report resumed_after median path digest amax_microbatch"
    run = _run(tmp_path, recipe="[bold]\x1b[2J", ranks=3, slots=[{"slot": "a:input", "max": 448}, 7, {"slot": 3}])
    kinds = ["start", "nonfinite", "diverged", "saved", "spike", "checked", "end", "???"]
    for _ in range(60):
        line = {key: chance.choice(HOSTILE) for key in keys.split() if chance.random() < 0.6}
        line["step"] = chance.choice([1, 2, -5, 10**18, 10**1000])
        line["kind"] = chance.choice([line.get("kind"), *kinds])
        _write(tmp_path / f"{chance.choice(['metrics', 'scales', 'ranks', 'events'])}.jsonl", line)
        run.read()
        width, height = chance.choice([(80, 24), (20, 8), (300, 100), (1, 1)])
        lines = screen(run, width, height)
        assert len(lines) <= height
        assert all(line.cell_len <= width for line in lines)
        for text in (one_line(run), *(line.plain for line in lines)):
            assert text.isprintable()


@pytest.mark.slow
def test_memory_is_bounded(tmp_path: Path) -> None:
    run = _run(tmp_path)
    held = []
    read_by = (str(Path(live.__file__).parent / "*"), json.decoder.__file__, json.__file__)
    ours = [tracemalloc.Filter(True, place) for place in read_by]
    tracemalloc.start()
    for part in range(4):
        for name, more in (
            ("metrics", {"loss": 1.5, "note": "x" * 100}),
            ("events", {"kind": "nonfinite", "slots": ["a" * 50] * 9}),
            ("scales", {"slot": "a:input", "amax": 1.0}),
        ):
            _write(tmp_path / f"{name}.jsonl", *({"step": part * 400 + i, **more} for i in range(400)))
        run.read()
        # Other threads of the process allocate, too.
        traced = tracemalloc.take_snapshot().filter_traces(ours).statistics("filename")
        held.append(sum(one.size for one in traced))
    tracemalloc.stop()
    assert held[3] - held[1] < 50_000
    assert (len(run.losses), len(run.events)) == (400, 100)


def test_sparklines_and_names_are_short() -> None:
    assert sparkline([0.0, 1.0, 2.0, 7.0], 10) == "▁▂▃█"
    assert sparkline([5.0, math.nan, math.inf, 5.0], 10) == "▁!!▁"
    assert sparkline([9.0, 0.0, 7.0], 2) == "▁█"
    assert sparkline([-1.7e308, 1.7e308], 2) == "▁!"
    assert sparkline([], 5) == sparkline([1.0], 0) == ""
    assert shortened("abcdefghij", 10) == "abcdefghij"
    assert [shortened("abcdefghij", width) for width in (6, 0, 1, 2)] == ["ab…hij", "", "…", "…j"]
    assert len(clean("\x1b" * 10_000)) == 1_000


def test_many_ranks_take_few_lines(tmp_path: Path) -> None:
    run = _run(tmp_path, {"step": 1})
    waits = [float(rank) for rank in range(1024)]
    _write(tmp_path / "ranks.jsonl", {"step": 1, "ranks": list(range(1024)), "sync_wait_ms": [None, *waits[1:]]})
    run.read()
    text = "\n".join(line.plain for line in screen(run, 80, 40))
    for rank in (1, 2, 3, 4, 1020, 1021, 1022, 1023):
        assert f"rank {rank}: " in text
    assert "and 1016 more, median 512" in text
    assert text.count("rank ") == 8
    _write(tmp_path / "ranks.jsonl", {"step": 2, "ranks": list(range(8)), "sync_wait_ms": waits[:8]})
    run.read()
    assert "more, median" not in "\n".join(line.plain for line in screen(run, 80, 40))

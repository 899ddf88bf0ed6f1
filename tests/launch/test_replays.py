"""The example job replays the batch that an event names: ``--replay-on``, with its faults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fp8dist.runs.report import facts
from fp8dist.runs.report.live import LiveRun
from fp8dist.runs.report.numbers import read_run
from tests.support.main_job import ALONE, RANKS, TINY, finish, start
from tests.support.suite import NIGHTLY, few

FLAGS = ["--layers", "2", "--accumulate", "2", "--log-every", "1"]
NAN = ["--replay-on", "nonfinite", "--loss-guard", "skip"]
SPIKE = ["--steps", "13", "--replay-on", "spike", "--loss-guard", "skip", "--inject", "spike:0:12"]
WATCH = ["--watch-every", "1", "--watch-ranks"]


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def replays(folder: Path) -> list[dict[str, Any]]:
    return [event for event in events(folder) if event["kind"] == "replayed"]


MODES = [
    pytest.param(mode, precision, marks=[] if (mode, precision) == ("ddp", "fp8") else NIGHTLY)
    for mode in ("none", "ddp", "fsdp2")
    for precision in ("fp8", "fp32")
]


def run(out: Path, mode: str, precision: str, *flags: str) -> tuple[dict[str, Any], int]:
    """Run the job, and return its one replay, and the number of its ranks."""
    command, ranks = (ALONE, 1) if mode == "none" else (RANKS, 2)
    watch = WATCH if precision == "fp8" else []
    given = ["--parallel", mode, "--precision", precision, *watch, *flags]
    done = finish(out, command, *TINY, *FLAGS, *given)
    (replay,) = replays(out)
    assert done.output.count(replay["sentence"]) == 1
    return replay, ranks


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "precision"), MODES)
def test_a_sample_that_gives_a_nan_is_named(mode: str, precision: str, tmp_path: Path) -> None:
    rank = 0 if mode == "none" else 1
    replay, _ = run(tmp_path, mode, precision, *NAN, "--inject", f"nan-sample:{rank}:5")
    place = {"step": 5, "trigger": "nonfinite", "replayed_step": 5, "microbatch": 1, "rank": rank}
    assert (place | {"module": "embedding", "what": "output"}).items() <= replay.items()
    assert "gives the first non-finite value in module 'embedding', output" in replay["sentence"]
    told = [point.text for point in facts.story(read_run(tmp_path)) if point.kind == "replayed"]
    assert told == [f"replay of step 5, microbatch 1, after nonfinite: {replay['sentence']}"]
    live = LiveRun(tmp_path)
    live.read()
    assert told[0][:300] in [event.text for event in live.events]


@pytest.mark.slow
@pytest.mark.parametrize("fault", few(["nondeterminism", "hidden-state"], "hidden-state"))
@pytest.mark.parametrize(("mode", "precision"), MODES)
def test_what_differs_from_run_to_run_is_named(fault: str, mode: str, precision: str, tmp_path: Path) -> None:
    rank = 0 if mode == "none" else 1
    replay, _ = run(tmp_path, mode, precision, *SPIKE, "--inject", f"{fault}:{rank}")
    assert {"step": 12, "trigger": "spike", "rank": rank, "module": "blocks.1"}.items() <= replay.items()
    assert replay["sentence"].startswith(f"not deterministic on rank {rank}, first in module 'blocks.1', output")


@pytest.mark.slow
def test_a_jump_names_the_cast_and_the_step_of_its_amax(tmp_path: Path) -> None:
    flags = ["--history-len", "1", "--scale-jump", "64", "--replay-on", "jump", "--inject", "outlier:1:5"]
    replay, _ = run(tmp_path, "ddp", "fp8", *flags)
    assert {"step": 6, "trigger": "jump", "replayed_step": 5}.items() <= replay.items()
    jump = next(event for event in events(tmp_path) if event["kind"] == "jump")
    who = {"step": 6, "cause_step": 5, "rank": 1, "module": "blocks.1.mlp_in", "role": "input"}
    assert who.items() <= jump.items()
    told = next(point.text for point in facts.story(read_run(tmp_path)) if point.kind == "jump")
    assert replay["microbatch"] == jump["microbatch"]
    assert told.endswith(f", first in blocks.1.mlp_in, input, rank 1, microbatch {jump['microbatch']}, of step 5")


@pytest.mark.slow
def test_a_text_that_has_the_mark_is_refused(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.write_bytes(bytes(range(256)) * 8)
    done = start(RANKS, *TINY, "--data", str(data), "--out", str(tmp_path), "--inject", "nan-sample:1:3")
    assert done.returncode == 2
    assert "the text has the byte 255, which marks the sample" in done.stderr


@pytest.mark.long
def test_a_spike_that_stops_the_run_is_replayed_before(tmp_path: Path) -> None:
    flags = ["--steps", "13", "--loss-guard", "stop", "--replay-on", "spike", "--inject", "spike:1:12"]
    done = start(RANKS, *TINY, *FLAGS, *flags, "--out", str(tmp_path))
    assert done.returncode == 6, done.stderr
    (replay,) = replays(tmp_path)
    assert {"step": 12, "trigger": "spike", "module": "lm_head"}.items() <= replay.items()

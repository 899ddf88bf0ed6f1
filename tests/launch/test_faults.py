"""Faults that the lab plants, and what finds them: checks and audits, alarms, replays."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from fp8dist.runs.report import facts
from fp8dist.runs.report.live import LiveRun
from fp8dist.runs.report.numbers import read_run
from tests.support.main_job import ALONE, RANKS, TABLE_HEADER, TINY, assert_refused, finish, metrics, start
from tests.support.suite import few

SCALE, WEIGHT = "blocks.0.attention_out:weight", "blocks.0.mlp_in.weight"
LAST = "blocks.0.mlp_out"
"""Its wgrad and dgrad are the first of a step. The audits of this job visit them in steps 1 and 8."""

EXPERTS = "blocks.0.mlp.experts"
ONCE = "computes wrong once (transient)"


def audited(rank: int, detail: str, **name: str) -> dict[str, Any]:
    """Return what an audit finds."""
    return {"kind": "audit", "ranks": [rank], "detail": detail, **name}


FOUND: dict[str, tuple[str, int, int, list[dict[str, Any]]]] = {
    # A scale is reported at its own step.
    "scale": ("scale:1:5", 3, 5, [{"kind": "scale", "name": SCALE, "ranks": [1], "last_good_step": 3}]),
    # The flip comes after the update of step 5. The checks run in steps 5 and 9, before their updates.
    "weight": (
        *("weight:2:5 --check-every 4", 3, 9),
        [{"kind": "parameter", "name": WEIGHT, "ranks": [2], "last_good_step": 4, "index": [64, 0]}],
    ),
    "two ranks cannot mend a lost update": (
        *("skip:1:6 --check-every 3 --check-policy repair", 2, 7),
        [{"kind": "parameter", "ranks": [0, 1], "reference_rank": None}],
    ),
    "weight of an expert": ("weight:1:3 --experts 4 --check-every 4", 2, 5, [{"kind": "parameter"}]),
    "product, 2 ranks": (
        *("product:1:1 --audit-every 1", 2, 1),
        [audited(1, "transient on rank 1: repeated, it gets what rank 0", name=f"{LAST}: wgrad")],
    ),
    "product, alone": (
        *("product:0:1 --audit-every 1", 1, 1),
        [audited(0, "transient on rank 0, which repeated its own work", name=f"{LAST}: wgrad")],
    ),
    "product, fsdp2": (
        *("product:2:8:dgrad --audit-every 1 --parallel fsdp2", 3, 8),
        [audited(2, f"rank 2 {ONCE};", name=f"{LAST}: dgrad")],
    ),
    "product, hsdp": (
        *("product:0:21:fprop --audit-every 1 --parallel hsdp --steps 22", 4, 21),
        [audited(0, f"rank 0 {ONCE};", name="blocks.0.qkv: fprop")],
    ),
    # Of the last experts, whose products are the first of a backward.
    "product of experts": (
        *("product:1:4:dgrad --audit-every 1 --experts 4", 3, 4),
        [audited(1, f"rank 1 {ONCE}; ranks 2 and 0 agree (matmul_grouped", name=f"{EXPERTS}.down: dgrad")],
    ),
    "bad device": (
        *("bad-device:1:1 --audit-every 1 --check-policy repair", 3, 1),  # Nothing can be repaired.
        [
            audited(1, "rank 1 computes wrong repeatedly; ranks 2 and 0 agree"),
            audited(1, "rank 1, which audits rank 0, computes wrong repeatedly; 0 and 2 agree"),
        ],
    ),
    # A tenth of the products of rank 2 are wrong. Each audit looks at one of them, and at one repeat.
    "bad device, seldom": ("bad-device:2:0.1 --audit-every 1 --steps 100", 3, 0, [audited(2, ONCE)]),
}
"""``--inject`` and further flags, ranks, the step in which it is found (0: any), and the findings. One that has no name
describes all of them."""

USUAL = ("scale", "weight", "two ranks cannot mend a lost update", "product, alone", "product of experts", "bad device")


@pytest.mark.slow
@pytest.mark.parametrize("name", few(FOUND, *USUAL))
def test_a_fault_is_found(name: str, tmp_path: Path) -> None:
    flags, ranks, step, expected = FOUND[name]
    job = (*TINY, "--inject", *flags.split(), "--out", str(tmp_path))
    done = start(ALONE if ranks == 1 else RANKS, *job, NPROC=str(ranks), TMPDIR=str(tmp_path))
    assert (done.returncode, done.stdout) == (4, ""), done.stdout + done.stderr
    assert done.stderr.count(TABLE_HEADER) == 1
    assert (tmp_path / "divergence.txt").read_text() in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "summary.json").exists()
    report = json.loads((tmp_path / "divergence.json").read_text())
    assert report["consistent"] is False
    found = sorted(report["findings"], key=lambda finding: str(finding["detail"]))
    several = len(found) if len(expected) == 1 and "name" not in expected[0] else 1
    for finding, wanted in zip(found, expected * several, strict=True):
        assert finding["step"] == step or not step
        assert (wanted | {"detail": finding["detail"]}).items() <= finding.items()
        assert wanted.get("detail", "") in str(finding["detail"])
    if name == "weight of an expert":
        assert f"{EXPERTS}.up_proj" in {finding["name"] for finding in found}
    if name == "scale":
        assert found[0]["value"] == 2 * found[0]["expected"]
        assert f"[rank 1] --inject scale:1:5: scale of {SCALE} is now" in done.stderr
        # Completed steps whose losses were not shared yet are kept too.
        assert [line["step"] for line in metrics(tmp_path)] == [1, 2, 3, 4]


@pytest.mark.slow
def test_a_wrong_product_is_found_by_audits_alone_and_the_folder_shows_it(tmp_path: Path) -> None:
    """With "warn" the run goes on. Later checks find its ranks equal, and that does not make it sound."""
    flags = [*TINY, "--inject", "product:1:1", "--check-policy", "warn"]
    found = finish(tmp_path / "found", RANKS, *flags, "--check-every", "2", "--audit-every", "1", "--steps", "4")
    unseen = finish(tmp_path / "unseen", RANKS, *flags, "--check-every", "1", "--steps", "4")
    assert [run.summary["divergences"] for run in (found, unseen)] == [1, 0]
    assert unseen.summary["checks"] == 4
    (planted,) = re.findall(r"--inject product:.* is now \S+ instead of \S+", found.output)
    assert planted in unseen.output  # The same bits of the same product.
    wrong = f"a result of {LAST}: wgrad is wrong: transient on"
    assert facts.verdict(read_run(found.out)).text.startswith(f"Not sound: in step 1 {wrong}")
    live = LiveRun(found.out)
    live.read()
    known, text = live.sound
    assert known is False
    assert text.startswith(f"WRONG RESULT in step 1: {wrong}")


@pytest.mark.slow
def test_without_fp8_ranks_that_differ_may_go_on(tmp_path: Path) -> None:
    flags = ["--inject", "skip:1:6", "--check-every", "3", "--check-policy", "warn", "--precision", "fp32"]
    run = finish(tmp_path, RANKS, *TINY, *flags)
    assert run.output.count(TABLE_HEADER) == 3
    assert (run.summary["checks"], run.summary["divergences"]) == (4, 3)  # After 3, 6, 9 and 12 steps.
    assert run.summary["parameters_identical"] is False
    assert "wait_max_ms" in run.lines[0]
    assert not [name for line in run.lines for name in line if name.startswith("sync")]


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


@pytest.mark.slow
def test_a_nan_and_a_jump_of_the_loss_are_events_and_stop_nobody(tmp_path: Path) -> None:
    faults = ["--inject", "nan:1:8", "--inject", "spike:1:11", "--check-every", "4"]
    watch = ["--watch-every", "4", "--watch-ranks", "--accumulate", "2", "--loss-guard", "warn"]
    run = finish(tmp_path, RANKS, *TINY, *faults, *watch, "--loss-factor", "1.5")
    assert "[rank 1] --inject nan:1:8: recorded a NaN amax for" in run.output
    assert run.summary["checks"] == 3  # After 4 and 8 steps, and at the end.
    assert run.summary["check_ms_per_check"] > 0
    assert run.summary["divergences"] == 0
    assert run.summary["fp8_state_identical"] is run.summary["parameters_identical"] is True
    counted = [line["nonfinite_amaxes"] for line in run.lines]
    assert counted == [0] * 5 + [1] * 7  # Rank 0's counter, read after 5 and 10 steps. All ranks count the same.
    (nan,) = events(tmp_path, "nonfinite")
    assert (nan["step"], nan["rank"], nan["role"]) == (8, 1, "grad_output")
    assert [f"{nan['module']}:{nan['role']}"] == nan["slots"]
    (spike,) = events(tmp_path, "spike")
    assert spike["step"] == 11
    assert spike["loss"] > 1.5 * spike["median"]
    assert run.summary["loss_alarms"] == 1


REPLAYS = ["--layers", "2", "--accumulate", "2", "--log-every", "1"]
WATCH = ["--watch-every", "1", "--watch-ranks"]
SPIKE = ["--steps", "13", "--replay-on", "spike", "--loss-guard", "skip", "--inject", "spike:0:12"]


def replay_of(out: Path, mode: str, precision: str, *flags: str) -> dict[str, Any]:
    """Run the job, and return its one replay."""
    watch = WATCH if precision == "fp8" else []
    command = ALONE if mode == "none" else RANKS
    done = finish(out, command, *TINY, *REPLAYS, "--parallel", mode, "--precision", precision, *watch, *flags)
    (replay,) = events(out, "replayed")
    assert done.output.count(replay["sentence"]) == 1
    return replay


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "precision"), few([("ddp", "fp8"), ("none", "fp32"), ("fsdp2", "fp8")], ("ddp", "fp8"))
)
def test_a_sample_that_gives_a_nan_is_named(mode: str, precision: str, tmp_path: Path) -> None:
    rank = 0 if mode == "none" else 1
    flags = ["--steps", "6", "--replay-on", "nonfinite", "--loss-guard", "skip", "--inject", f"nan-sample:{rank}:5"]
    replay = replay_of(tmp_path, mode, precision, *flags)
    place = {"step": 5, "trigger": "nonfinite", "replayed_step": 5, "microbatch": 1, "rank": rank}
    assert (place | {"module": "embedding", "what": "output"}).items() <= replay.items()
    assert "gives the first non-finite value in module 'embedding', output" in replay["sentence"]
    told = [point.text for point in facts.story(read_run(tmp_path)) if point.kind == "replayed"]
    assert told == [f"replay of step 5, microbatch 1, after nonfinite: {replay['sentence']}"]
    live = LiveRun(tmp_path)
    live.read()
    assert told[0][:300] in [event.text for event in live.events]


CHANGING = [("hidden-state", "ddp", "fp8"), ("nondeterminism", "none", "fp8"), ("nondeterminism", "fsdp2", "fp32")]


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "mode", "precision"), few(CHANGING, CHANGING[1]))
def test_what_differs_from_run_to_run_is_named(fault: str, mode: str, precision: str, tmp_path: Path) -> None:
    rank = 0 if mode == "none" else 1
    replay = replay_of(tmp_path, mode, precision, *SPIKE, "--inject", f"{fault}:{rank}")
    assert {"step": 12, "trigger": "spike", "rank": rank, "module": "blocks.1"}.items() <= replay.items()
    assert replay["sentence"].startswith(f"not deterministic on rank {rank}, first in module 'blocks.1', output")


@pytest.mark.slow
def test_a_jump_names_the_cast_and_the_step_of_its_amax(tmp_path: Path) -> None:
    flags = ["--history-len", "1", "--scale-jump", "64", "--replay-on", "jump", "--inject", "outlier:1:5"]
    replay = replay_of(tmp_path, "ddp", "fp8", *flags, "--steps", "7")
    assert {"step": 6, "trigger": "jump", "replayed_step": 5}.items() <= replay.items()
    jump = events(tmp_path, "jump")[0]
    who = {"step": 6, "cause_step": 5, "rank": 1, "module": "blocks.1.mlp_in", "role": "input"}
    assert who.items() <= jump.items()
    told = next(point.text for point in facts.story(read_run(tmp_path)) if point.kind == "jump")
    assert replay["microbatch"] == jump["microbatch"]
    assert told.endswith(f", first in blocks.1.mlp_in, input, rank 1, microbatch {jump['microbatch']}, of step 5")


@pytest.mark.slow
def test_a_loss_that_jumps_is_replayed_and_stops_all_ranks_with_exit_6(tmp_path: Path) -> None:
    out = tmp_path / "run"
    flags = ["--loss-guard", "stop", "--replay-on", "spike", "--inject", "spike:1:11", "--save-every", "8"]
    done = start(RANKS, *TINY, *flags, "--out", str(out))
    assert done.returncode == 6, done.stdout + done.stderr
    assert done.stderr.count("train_gpt: stopped by --loss-guard: step 11: the loss ") == 1
    assert "Traceback" not in done.stderr
    (replay,) = events(out, "replayed")
    assert {"step": 11, "trigger": "spike", "module": "lm_head"}.items() <= replay.items()
    lines = metrics(out)
    assert [line["step"] for line in lines] == list(range(1, 12))
    assert lines[-1]["loss"] > 10 * lines[-2]["loss"]  # The mean: only rank 1's loss jumped.
    assert not (out / "summary.json").exists()
    assert (out / "checkpoints/step-00000008/.metadata").exists()


@pytest.mark.slow
def test_faults_that_the_run_cannot_plant_are_refused(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.write_bytes(bytes(range(256)) * 8)
    out = ("--out", str(tmp_path))
    done = start(ALONE, *TINY, "--data", str(data), *out, "--inject", "nan-sample:0:3")
    assert_refused(done, "the text has the byte 255, which marks the sample")
    done = start(ALONE, *TINY, *out, "--inject", "scale:0:3", FP8DIST_AMAX_SYNC="0")
    assert_refused(done, "--inject scale:0:3: FP8 or its amax sync is switched off")

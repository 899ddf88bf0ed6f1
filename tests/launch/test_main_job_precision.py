"""The lab's recipes, switches to high precision, log of scales, and loss guard."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.main_job import ALONE, RANKS, STEPS, TINY, Runs, finish, metrics, start
from tests.support.suite import few

TWO_BLOCKS = [*TINY, "--layers", "2", "--width", "64", "--log-every", "1"]
MODULES = [f"blocks.{block}.{name}" for block in (0, 1) for name in ("attention_out", "mlp_in", "mlp_out", "qkv")]
SLOTS = sorted(f"{module}:{role}" for module in MODULES for role in ("input", "weight", "grad_output"))
COLD = "slots had no amax in the first step"
"""Part of the library's message when FP8 starts without scales."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "parallel"), few([("rowwise", "fsdp2"), ("rowwise", "ddp"), ("block", "ddp")], ("rowwise", "ddp"))
)
def test_each_recipe_learns_and_leaves_ranks_alike(runs: Runs, recipe: str, parallel: str) -> None:
    run = runs(RANKS, *TWO_BLOCKS, "--recipe", recipe, "--parallel", parallel, "--check-every", "5")
    assert run.summary["fp8_slots"] == len(SLOTS)
    assert run.summary["fp8_state_identical"] is run.summary["parameters_identical"] is True
    # Half of the data is that of the FP32 run on one process, so the losses are close but not equal.
    fp32 = runs(ALONE, *TWO_BLOCKS, "--precision", "fp32")
    assert run.losses[-1] == pytest.approx(fp32.losses[-1], rel=0.03)
    assert run.losses[-1] < run.losses[0] - 0.5
    assert [line["high_precision_modules"] for line in run.lines] == [0] * STEPS


@pytest.mark.slow
def test_fp8_goes_on_from_fp32(runs: Runs) -> None:
    """With cold scales, with those of a calibration, or at a later step. And FP32 goes on from FP8."""
    fp32 = runs(ALONE, *TWO_BLOCKS, "--precision", "fp32", "--save-every", "6", "--stop-after", "6")
    from_fp32 = [*TWO_BLOCKS, "--resume", str(fp32.out / "checkpoints/step-00000006")]
    cold = runs(ALONE, *from_fp32, "--fp8-start-step", "7")
    assert f"16 of {len(SLOTS)} {COLD}" in cold.output  # Slots of weights have scales.
    assert "has no FP8 state: scales start cold" in cold.output
    calibrates = ("--calibrate-steps", "4")
    warm = runs(ALONE, *from_fp32, *calibrates, "--save-every", "3")
    assert COLD not in warm.output
    assert "has no FP8 state: scales come from --calibrate-steps" in warm.output
    assert warm.losses != cold.losses
    # This run's checkpoint has FP8 state, which a calibration must not change.
    from_fp8 = [*TWO_BLOCKS, "--resume", str(warm.out / "checkpoints/step-00000009")]
    assert runs(ALONE, *from_fp8, *calibrates).losses == warm.losses[3:]
    assert len(runs(ALONE, *from_fp8, "--precision", "fp32").losses) == 3
    late = runs(ALONE, *from_fp32, "--loss-guard", "warn", "--fp8-start-step", "9")
    straight = runs(ALONE, *TWO_BLOCKS, "--precision", "fp32").losses
    assert late.losses[:2] == straight[6:8]
    assert late.losses[2] != straight[8]
    assert [line["high_precision_modules"] for line in late.lines] == [8, 0, 0, 0, 0, 0]
    assert COLD not in late.output


@pytest.mark.slow
def test_an_outlier_on_one_rank_sends_all_to_high_precision_for_a_while(tmp_path: Path) -> None:
    flags = ["--recipe", "current", "--fallback-steps", "3", "--fallback-underflow", "0.5", "--inject", "outlier:1:5"]
    watched = ["--watch-every", "5", "--watch-ranks", "--tensorboard", "--check-every", "2"]
    run = finish(tmp_path, RANKS, *TWO_BLOCKS, *flags, *watched)
    assert "[rank 1] --inject outlier:1:5: the input of blocks.1.mlp_in has " in run.output
    # Rank 0's metrics: its own tensors have no outlier.
    high = [line["high_precision_modules"] for line in run.lines]
    assert high[:4] == [0] * 4
    assert all(high[4:7])
    assert high[7:] == [0] * 5
    assert [line["fallbacks"] for line in run.lines] == [0] * 4 + [high[4]] * 8
    assert run.summary["fallbacks"] == high[4]
    assert run.summary["fp8_state_identical"] is run.summary["parameters_identical"] is True
    assert (tmp_path / "tensorboard").is_dir()
    lines = [json.loads(line) for line in (tmp_path / "scales.jsonl").read_text().splitlines()]
    assert [(line["step"], line["slot"]) for line in lines] == [(step, slot) for step in (5, 10) for slot in SLOTS]
    planted, later = (line for line in lines if line["slot"] == "blocks.1.mlp_in:input")
    assert planted["amax_rank"] == planted["underflow_rank"] == 1
    assert planted["amax"] > 1e5 > 100 > later["amax"] > 0
    assert planted["underflow"] > 0.5 > later["underflow"]


@pytest.mark.slow
def test_a_loss_that_jumps_stops_all_ranks_with_exit_6(tmp_path: Path) -> None:
    out = tmp_path / "run"
    flags = ["--loss-guard", "stop", "--inject", "spike:1:11", "--log-every", "4", "--save-every", "8"]
    done = start(RANKS, *TWO_BLOCKS, *flags, "--out", str(out))
    assert done.returncode == 6, done.stdout + done.stderr
    assert done.stderr.count("train_gpt: stopped by --loss-guard: step 11: the loss ") == 1
    assert "Traceback" not in done.stderr
    lines = metrics(out)
    assert [line["step"] for line in lines] == list(range(1, 12))
    assert lines[-1]["loss"] > 10 * lines[-2]["loss"]  # The mean: only rank 1's loss jumped.
    assert not (out / "summary.json").exists()
    assert (out / "checkpoints/step-00000008/.metadata").exists()

"""The lab's runs on one and two ranks: what they share and write, switches to high precision, and the loss guard."""

from __future__ import annotations

import json
import math
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fp8dist.errors import ManifestMismatchError
from fp8dist.state.publications import _absent
from launch.train_gpt.ranks import most_restarts
from tests.support.lab.failures import CollectiveFailed, Whereabouts
from tests.support.main_job import ALONE, RANKS, STEPS, TINY, TORCHRUN, Run, Runs, finish, start
from tests.support.ranks import RankPool
from tests.support.suite import few

SOUND = {"ranks": 2, "fp8_collectives_per_step": 1, "fp8_state_identical": True, "parameters_identical": True}
PLAIN: dict[str, Any] = {"fp8_slots": 12, "fp8_bytes_per_sync": 4 * (8 + 12), "bytes_gathered_per_step": 0}
"""Slots of qkv, attention_out, mlp_in and mlp_out. lm_head is not an FP8 module."""

IN_FP8, IN_BLOCK, OUTSIDE = 32 * (3 * 32 + 32 + 4 * 32 + 4 * 32), 9 * 32 + 4 * 32, 2 * 256 * 32 + 32 * 32 + 2 * 32
"""Elements of the weights of the block's Linears; of their biases and the block's norms; of the rest of the model."""

GATHERED = {"bytes_gathered_per_step": (2 * (IN_FP8 + 4 * IN_BLOCK) + 4 * OUTSIDE) // 2}
"""The block is gathered in forward and backward, its weights in FP8, and the rest once. Half of it is remote."""

TWO_BLOCKS = [*TINY, "--layers", "2", "--width", "64", "--log-every", "1"]
MODULES = [f"blocks.{block}.{name}" for block in (0, 1) for name in ("attention_out", "mlp_in", "mlp_out", "qkv")]
SLOTS = sorted(f"{module}:{role}" for module in MODULES for role in ("input", "weight", "grad_output"))
COLD = "slots had no amax in the first step"
"""Part of the library's message when FP8 starts without scales."""

TWO_RANKS: dict[str, tuple[str, dict[str, Any]]] = {
    "--update next_step --eval-every 6": ("equal", PLAIN),
    # Gradients and their norm, which clips them, are summed in another order.
    "--parallel fsdp1": ("near", {}),
    "--parallel fsdp2": ("near", GATHERED),
    "--accumulate 2 --calibrate-steps 2": ("other", PLAIN),
    "--no-amax-sync": ("other", {"fp8_collectives_per_step": 0, "fp8_state_identical": False}),
}
"""By flags: how losses compare with those of a run without, and fields of the summary."""


@pytest.mark.slow
@pytest.mark.parametrize("flags", few(TWO_RANKS, *(of for of in TWO_RANKS if "fsdp1" not in of and "acc" not in of)))
def test_two_ranks_hold_the_same_state_for_one_collective_a_step(runs: Runs, flags: str) -> None:
    """Metrics have a line per step. Validation does not affect training."""
    compared, fields = TWO_RANKS[flags]
    run, plain = runs(RANKS, *TINY, *flags.split()), runs(RANKS, *TINY)
    assert (SOUND | PLAIN).items() <= plain.summary.items()
    assert (SOUND | fields).items() <= run.summary.items()
    if compared == "equal":
        assert_equal_runs(run, plain)
    elif compared == "near":
        assert run.losses == pytest.approx(plain.losses, rel=1e-5)
        assert run.summary["validation_loss"] == pytest.approx(plain.summary["validation_loss"], rel=1e-5)
        norms = [[line["grad_norm"] for line in of.lines] for of in (run, plain)]  # Of the whole model.
        assert norms[0] == pytest.approx(norms[1], rel=1e-3)  # In FP8 small differences may cross a rounding.
    syncs = flags != "--no-amax-sync"
    assert (run.summary["exposed_sync_ms_per_step"] > 0) == syncs
    assert f"fp8_state_identical:        {syncs}" in run.output
    assert [line["step"] for line in run.lines] == list(range(1, STEPS + 1))
    for line in run.lines:
        assert math.isfinite(line["loss"])
        assert min(line["tokens_per_s"], line["learning_rate"]) > 0
        assert (line["sync_ms"] > 0) == syncs
        assert line["cold_slots"] == line["nonfinite_amaxes"] == 0
    validated = [line["step"] for line in run.lines if "validation_loss" in line]
    assert validated == ([6, 12] if "--eval-every" in flags else [])


def assert_equal_runs(first: Run, second: Run) -> None:
    assert first.losses == second.losses
    for key in ("validation_loss", "parameters_sha256"):
        assert first.summary[key] == second.summary[key]


@pytest.mark.long
def test_forked_ranks_are_those_of_torchrun(tmp_path: Path, runs: Runs) -> None:
    """Other tests may therefore use forked ranks. With LOGS each rank has its own log."""
    logs = tmp_path / "logs"
    run = finish(tmp_path / "two", TORCHRUN, *TINY, LOGS=str(logs))
    assert_equal_runs(run, runs(RANKS, *TINY))
    assert run.losses != runs(ALONE, *TINY).losses
    (first,) = logs.glob("*/attempt_0/0/stdout.log")
    (second,) = logs.glob("*/attempt_0/1/stdout.log")
    assert second.read_text() == ""  # Only rank 0 prints.
    table = first.read_text().splitlines()
    assert any("fp8_state_identical" in line for line in table)
    assert all(f"[0]: {line}\n" in run.output for line in table)


@pytest.mark.slow
def test_only_the_first_rank_prints_a_mistake() -> None:
    done = start(ALONE, "--steps", "0", RANK="1", LOCAL_RANK="1", WORLD_SIZE="2")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")


def test_a_rank_that_does_not_attach_is_missing_and_one_that_differs_is_not() -> None:
    watch = Whereabouts(0, 2, "GPT")
    absent = ManifestMismatchError(_absent([1], 2, timedelta(seconds=9)))
    with pytest.raises(CollectiveFailed, match=r"^rank 0: step 0: starting: no FP8 manager"), watch.during("starting"):
        raise absent
    with pytest.raises(ManifestMismatchError), watch.during("starting"):
        raise ManifestMismatchError("ranks were prepared differently; timeout: 1 against 2")


def _restarts(own: tuple[str, ...]) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHELASTIC_RESTART_COUNT", own[dist.get_rank()])
        return most_restarts(torch.device("cpu"))


@pytest.mark.slow
def test_all_ranks_count_the_restarts_of_every_agent(two_ranks: RankPool) -> None:
    """So that all resume from the same step."""
    assert two_ranks.run(_restarts, ("0", "2")) == [2, 2]
    assert two_ranks.run(_restarts, ("1", "0")) == [1, 1]


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

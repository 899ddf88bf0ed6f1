"""The lab's runs on one and two ranks: what they learn, share and write."""

from __future__ import annotations

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
SLOTS = 4 * 3
"""qkv, attention_out, mlp_in, mlp_out; lm_head is not an FP8 module."""

PLAIN: dict[str, Any] = {"fp8_slots": SLOTS, "fp8_bytes_per_sync": 4 * (8 + SLOTS), "bytes_gathered_per_step": 0}

TWO_RANKS: dict[str, tuple[str, dict[str, Any]]] = {
    "--update next_step --eval-every 6": ("equal", PLAIN),
    # Gradients and their norm, which clips them, are summed in another order.
    "--parallel fsdp1": ("near", {}),
    "--parallel fsdp2": ("near", {}),
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
def test_switched_off_by_environment_equals_high_precision(runs: Runs) -> None:
    off = runs(ALONE, *TINY, FP8DIST_ENABLED="0")
    assert_equal_runs(off, runs(ALONE, *TINY, "--precision", "fp32"))
    assert "switched off" in off.output


@pytest.mark.slow
def test_one_process_learns_a_text(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_bytes(b"a few words, over and over. " * 100)
    flags = ["--calibrate-steps", "2", "--amax-algo", "most_recent", "--format", "e4m3", "--data", str(text)]
    run = finish(tmp_path / "out", ALONE, *TINY, *flags)
    assert run.summary["ranks"] == 1
    assert run.losses[-1] < run.losses[0]


@pytest.mark.slow
def test_gathering_fp8_changes_bytes_and_no_bits(runs: Runs) -> None:
    # The default: on where supported.
    fp8, fp32 = (runs(RANKS, *TINY, "--parallel", "fsdp2", *flag) for flag in ((), ("--no-fp8-all-gather",)))
    assert_equal_runs(fp8, fp32)
    gathered = fp32.summary["bytes_gathered_per_step"] - fp8.summary["bytes_gathered_per_step"]
    weights = 32 * (3 * 32 + 32 + 4 * 32 + 4 * 32)  # Elements of the block's four Linears.
    assert gathered == 2 * (weights // 2) * (4 - 1)  # Forward, backward; half is remote; 3 bytes saved.


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

"""The example job as a user starts it: launch/train_gpt, alone and by launch/torchrun.sh on two ranks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from launch.train_gpt import train
from launch.train_gpt.data import read_text
from launch.train_gpt.options import Options, parse
from launch.train_gpt.ranks import Ranks
from scripts import compare_runs
from tests.support import forked
from tests.support.main_job import (
    EXAMPLE,
    EXAMPLE_RANKS,
    RANKS,
    SIZE,
    STEPS,
    TINY,
    Runs,
    assert_refused,
    finish,
    metrics,
    start,
)
from tests.support.ranks import on_ranks
from tests.support.suite import few


@pytest.mark.slow
def test_a_run_on_two_ranks_has_its_folder(runs: Runs) -> None:
    run = runs(EXAMPLE_RANKS, *SIZE, "--check-every", "4", "--watch-every", "4", "--watch-ranks")
    assert [line["step"] for line in run.lines] == list(range(1, STEPS + 1))
    assert run.losses[-1] < run.losses[0] - 0.3
    assert all(line["grad_norm"] > 0 and line["tokens"] == 256 for line in run.lines)
    assert (run.lines[-1]["proven"], run.lines[-1]["cold_slots"]) == (STEPS, 0)
    assert run.summary["ranks"] == 2
    assert run.summary["fp8_collectives_per_step"] == (STEPS + STEPS // 4) / STEPS  # Syncs, and the watch.
    assert run.summary["validation_loss"] == pytest.approx(run.losses[-1], rel=0.1)
    assert "final_training_loss:" in run.output


@pytest.mark.slow
def test_ranks_without_windows_of_their_own_share_the_held_out_text(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_bytes(read_text(None, 32).training[:400])  # 40 bytes are held out: one window.
    run = finish(tmp_path / "run", EXAMPLE_RANKS, *SIZE, "--data", str(text), "--steps", "1", "--context", "32")
    assert run.summary["validation_loss"] == pytest.approx(run.losses[-1], rel=0.1)


ALIKE = (
    "",
    "--parallel fsdp2 --accumulate 2",
    "--parallel hsdp --update next_step",
    "--parallel fsdp2 --recipe block --width 96",
    "--recipe current --no-amax-sync",
    "--precision bf16 --parallel fsdp2",
    "--precision fp32 --check-every 5",
)


@pytest.mark.slow
@pytest.mark.parametrize("flags", few(ALIKE, *ALIKE[:2]))
def test_the_lab_trains_as_the_example_does(runs: Runs, flags: str) -> None:
    """So the tests of the lab are tests of the example: equal losses, bit for bit."""
    example, lab = runs(EXAMPLE_RANKS, *SIZE, *flags.split()), runs(RANKS, *TINY, *flags.split())
    assert example.losses == lab.losses
    norms = [[line["grad_norm"] for line in run.lines] for run in (example, lab)]
    assert norms[0] == norms[1]


RESUMED = [
    ("ddp", "3", "--resume auto", {}),
    ("fsdp2", "2", "", {"TORCHELASTIC_RESTART_COUNT": "1"}),  # As torchrun restarts it.
]


@pytest.mark.slow
@pytest.mark.parametrize(("parallel", "ranks", "flag", "variables"), few(RESUMED, RESUMED[0]))
def test_a_resumed_run_is_the_same_run(
    tmp_path: Path, parallel: str, ranks: str, flag: str, variables: dict[str, str]
) -> None:
    """DDP runs on three ranks, because the order of a sum has no effect on two."""
    flags = [*SIZE, "--parallel", parallel, "--save-every", "5", "--keep", "3"]
    straight = finish(tmp_path / "run", EXAMPLE_RANKS, *flags, NPROC=ranks)
    saved = tmp_path / "run/checkpoints"
    assert sorted(path.name for path in saved.iterdir()) == [f"step-{step:08d}" for step in (5, 10, 12)]
    for given in ((), ("--resume", str(saved / "step-00000005"))):
        done = start(EXAMPLE_RANKS, *flags, *given, "--out", str(tmp_path / "run"), NPROC="1")
        assert_refused(done, "has checkpoints: resume with --resume auto")
    for step in (10, 12):
        shutil.rmtree(saved / f"step-{step:08d}")
    again = finish(tmp_path / "run", EXAMPLE_RANKS, *flags, *flag.split(), NPROC=ranks, **variables)
    assert again.summary["resumed_after_step"] == 5
    assert again.losses == straight.losses
    assert again.summary["validation_loss"] == straight.summary["validation_loss"]
    other = finish(tmp_path / "other", EXAMPLE_RANKS, *SIZE, "--resume", str(saved / "step-00000010"), NPROC="1")
    assert len(other.losses) == 2  # On another number of ranks.


def _damaged(flags: list[str]) -> int:
    """Run the job with a weight of one rank that changes after step 5."""
    step = train.Training.step

    def damage(self: train.Training, number: int) -> Any:
        result = step(self, number)
        if number == 5 and self.ranks.rank == 1:
            self.model.lm_head.weight.data[3, 5] += 1
        return result

    training: Any = train.Training
    training.step = damage
    return train.main(flags)


@pytest.mark.slow
@pytest.mark.parametrize("precision", few(["fp8", "bf16"], "fp8"))
def test_ranks_that_differ_end_with_status_4_and_a_report(tmp_path: Path, precision: str) -> None:
    flags = [*SIZE, "--precision", precision, "--check-every", "3", "--out", str(tmp_path)]
    done = forked.run(flags, 3, {}, main=_damaged)
    assert done.returncode == 4, done.stdout + done.stderr
    (finding,) = json.loads((tmp_path / "divergence.json").read_text())["findings"]
    assert (finding["name"], finding["ranks"], finding["index"]) == ("lm_head.weight", [1], [3, 5])
    assert "parameters differ between ranks" in (tmp_path / "divergence.txt").read_text()
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "summary.json").exists()
    assert len(metrics(tmp_path)) >= 5
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    (checked,) = [event for event in events if event["kind"] == "checked"]
    (diverged,) = [event for event in events if event["kind"] == "diverged"]
    assert checked["step"] == 3
    assert checked["compared"]["parameter"] > 1
    assert diverged["report"]["findings"] == [json.loads(json.dumps(finding))]


def test_torchrun_sh_tells_a_mistake_before_it_starts_a_rank() -> None:
    """Both one node with two ranks and two nodes with one rank each are two ranks."""
    message = "--parallel none is for one rank, got 2"
    assert_refused(start(EXAMPLE, "--parallel", "none"), message)
    nodes = {"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "localhost", "NPROC": "1"}
    assert_refused(start(EXAMPLE, "--parallel", "none", **nodes), message)


@pytest.mark.slow
def test_what_the_library_refuses_is_one_line_too(tmp_path: Path) -> None:
    done = forked.run([*SIZE, "--out", str(tmp_path)], None, {"FP8DIST_BACKEND": "abacus"}, main=train.main)
    assert_refused(done, "FP8DIST_BACKEND must be one of")


def test_runs_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, loss in (("a", 2.0), ("b", 2.03), ("c", 2.1)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "summary.json").write_text(json.dumps({"final_training_loss": loss, "ranks": 2}))
    assert compare_runs.main(str(tmp_path / "a"), str(tmp_path / "b")) == 0
    assert "gap between the final training losses: +1.50%" in capsys.readouterr().out
    assert compare_runs.main(str(tmp_path / "a"), str(tmp_path / "c")) == 1


@pytest.mark.slow
@on_ranks(2)
def test_a_resumed_run_has_the_buckets_of_the_first_run(tmp_path: Path) -> None:
    """Else sums over three or more ranks round otherwise."""
    folder = str(tmp_path)
    options, found = parse([*SIZE, "--out", folder], Options), []
    for resumes in (False, True):
        ranks = Ranks(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), "gloo")
        training = train.Training(options, ranks, read_text(None, options.context))
        training.parallel.bf16 = True
        before = training.manager.state_dict()
        if resumes:
            training.settle_buckets()
            assert training.manager.state_dict() == before
        for step in (1, 2, 3):
            training.step(step)
        found.append(training.module._get_ddp_logging_data()["rebuilt_per_bucket_param_indices"])
        training.recorder.close()
    first, resumed = found
    assert first == resumed
    assert len(first.split()) > 8

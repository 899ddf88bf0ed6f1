"""Checkpoints of the example job: when one is complete, which ones are kept, and bitwise-equal resumed runs."""

from __future__ import annotations

import errno
import json
import os
import resource
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from fp8dist.runs.report.folder import RunFolder
from tests.support import forked
from tests.support.lab import checkpoints, failures, folders, job
from tests.support.lab.options import parse
from tests.support.lab.ranks import Ranks
from tests.support.main_job import (
    ALONE,
    CHECK,
    RANKS,
    STEPS,
    TINY,
    Run,
    Runs,
    assert_refused,
    finish,
    start,
)

Opener = Callable[..., Any]


@pytest.fixture
def opened(tmp_path: Path) -> Opener:
    """Return a function that makes the Checkpoints of a one-process job after ``restarts`` restarts by torchrun."""

    def make(*flags: str, restarts: int = 0) -> Any:
        options = parse(["--out", str(tmp_path), *flags])
        return checkpoints.Checkpoints(options, Ranks(0, 1, torch.device("cpu"), None, restarts))

    return make


def write(folder: Path) -> Path:
    """Create and return a folder that looks like a checkpoint."""
    folder.mkdir(parents=True)
    (folder / ".metadata").write_text("of DCP\n")
    (folder / "__0_0.distcp").write_text("tensors\n")
    return folder


def test_a_checkpoint_counts_from_its_renaming_on(tmp_path: Path) -> None:
    assert folders.whole(tmp_path / "absent") == []
    write(tmp_path / "step-00000004")
    written = write(folders.partial(tmp_path, 8))
    assert not folders.is_whole(written)
    assert folders.newest(tmp_path) == tmp_path / "step-00000004"
    assert folders.finish(tmp_path, 8) == tmp_path / "step-00000008"
    assert folders.newest(tmp_path) == tmp_path / "step-00000008"
    assert not written.exists()


def test_what_has_another_name_or_no_metadata_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "step-00000009").mkdir()
    for name in ("step-9", "step-00000009.new", "abandoned-step-00000009", "mine"):
        write(tmp_path / name)
    assert folders.whole(tmp_path) == []
    assert folders.newest(tmp_path) is None


def test_steps_are_ordered_as_numbers(tmp_path: Path) -> None:
    for step in (99_999_999, 100_000_000, 5):
        write(folders.partial(tmp_path, step))
        folders.finish(tmp_path, step)
    assert [folders.step_of(folder) for folder in folders.whole(tmp_path)] == [5, 99_999_999, 100_000_000]


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (2, 4, 6, 8):
        write(tmp_path / f"step-{step:08d}")
    folders.prune(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000006", "step-00000008"]
    folders.prune(tmp_path, 5)
    assert len(folders.whole(tmp_path)) == 2


def test_a_removal_that_is_interrupted_leaves_nothing_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (2, 4):
        write(tmp_path / f"step-{step:08d}")

    def die(path: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as context:
        context.setattr(folders.shutil, "rmtree", die)
        with pytest.raises(KeyboardInterrupt):
            folders.prune(tmp_path, 1)
    assert folders.whole(tmp_path) == [tmp_path / "step-00000004"]
    (leftover,) = folders.remove_leftovers(tmp_path)
    assert not leftover.exists()
    assert folders.whole(tmp_path) == [tmp_path / "step-00000004"]


def test_later_steps_are_set_aside(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        write(tmp_path / f"step-{step:08d}")
    write(tmp_path / "abandoned-step-00000006")
    assert [path.name for path in folders.set_aside(tmp_path, 2)] == [
        "abandoned-step-00000004",
        "abandoned-step-00000006-2",
    ]
    assert folders.newest(tmp_path) == tmp_path / "step-00000002"


def test_what_was_set_aside_is_never_lost_and_can_be_put_back(tmp_path: Path) -> None:
    for i in range(3):
        (write(tmp_path / "step-00000004") / "which").write_text(str(i))
        aside = folders.set_aside(tmp_path, 2)
    names = ["abandoned-step-00000004", "abandoned-step-00000004-2", "abandoned-step-00000004-3"]
    assert [(tmp_path / name / "which").read_text() for name in names] == ["0", "1", "2"]
    folders.put_back(aside)
    assert (tmp_path / "step-00000004/which").read_text() == "2"


def test_only_a_restarted_job_takes_over_what_it_was_not_told_of(tmp_path: Path, opened: Opener) -> None:
    newest = write(tmp_path / "checkpoints/step-00000004")
    leftover = write(tmp_path / "checkpoints/partial-step-00000008")
    with pytest.raises(Exception, match="has checkpoints, the newest is step-00000004"):
        opened("--save-every", "4").find()
    assert leftover.exists()  # A job that was refused changes nothing.
    assert opened("--save-every", "4", restarts=1).find() == newest
    assert not leftover.exists()
    assert opened(restarts=1).find() is None  # This job saves nothing, so the checkpoints belong to another job.
    assert opened("--resume", "auto").find() == newest


def test_a_crash_before_loading_does_not_bring_later_steps_back(tmp_path: Path, opened: Opener) -> None:
    four, eight = (write(tmp_path / f"checkpoints/step-0000000{step}") for step in (4, 8))
    flags = ["--save-every", "4", "--resume", str(four)]
    assert opened(*flags).find() == four
    # The job dies here.
    assert opened(*flags, restarts=1).find() == four
    assert not eight.exists()
    assert (tmp_path / "checkpoints/abandoned-step-00000008").is_dir()


def test_a_refused_checkpoint_leaves_later_ones_where_they_were(tmp_path: Path, opened: Opener) -> None:
    four, eight = (write(tmp_path / f"checkpoints/step-0000000{step}") for step in (4, 8))
    checkpoints = opened("--save-every", "4", "--resume", str(four))
    folder = checkpoints.find()
    assert not eight.exists()
    module = torch.nn.Linear(1, 1)
    with pytest.raises(ValueError, match=f"--resume {four}: it cannot be read: "):
        checkpoints.load(folder, module, torch.optim.SGD(module.parameters()), None)
    assert eight.exists()


def _failing(cause: Exception) -> Callable[..., None]:
    def save(*_: Any, **__: Any) -> None:
        raise CheckpointException("write", {1: (cause, None)})  # type: ignore[dict-item]

    return save


def test_a_full_disk_is_no_failed_collective(tmp_path: Path, opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    made, module = opened("--save-every", "4"), torch.nn.Linear(1, 1)
    optimizer, watch = torch.optim.SGD(module.parameters()), failures.Whereabouts(0, 2, "GPT")
    monkeypatch.setattr(checkpoints, "save", _failing(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    said = r"^rank 0: checkpoint of step 4 could not be written: rank 1: OSError: \[Errno 28\] No space left on device$"
    with pytest.raises(failures.CheckpointFailed, match=said), watch.during("saving a checkpoint"):
        made.save(4, module, optimizer, None)
    monkeypatch.setattr(checkpoints, "save", _failing(dist.DistNetworkError("connection reset")))
    with pytest.raises(failures.CollectiveFailed), watch.during("saving a checkpoint"):
        made.save(4, module, optimizer, None)


@pytest.mark.timeout(60)
def test_a_save_in_the_background_counts_when_it_is_done(
    tmp_path: Path, opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    futures: list[Future[None]] = []

    def begun(state: Any, storage_writer: Any, **_: Any) -> Future[None]:
        write(Path(storage_writer.path))
        futures.append(Future())
        return futures[-1]

    monkeypatch.setattr(checkpoints, "async_save", begun)
    made, module = opened("--save-every", "4", "--async-save"), torch.nn.Linear(1, 1)
    optimizer, parent = torch.optim.SGD(module.parameters()), tmp_path / "checkpoints"
    made.save(4, module, optimizer, None)
    made.poll()
    assert folders.whole(parent) == []
    futures[0].set_result(None)
    made.poll()
    assert folders.whole(parent) == [parent / "step-00000004"]
    made.save(8, module, optimizer, None)
    futures[1].set_exception(CheckpointException("write", {0: (OSError(errno.ENOSPC, "full"), None)}))  # type: ignore[dict-item]
    with pytest.raises(failures.CheckpointFailed, match="checkpoint of step 8 could not be written"):
        made.save(12, module, optimizer, None)  # Waits for the previous save.
    assert len(futures) == 2
    assert folders.whole(parent) == [parent / "step-00000004"]


def test_a_checkpoint_that_cannot_be_used_is_one_line_and_exit_2(tmp_path: Path) -> None:
    for name in ("checkpoints/step-00000004", "checkpoints/partial-step-00000008", "other/step-00000002"):
        write(tmp_path / name)
    for flags, message in {
        "--resume {out}/checkpoints/partial-step-00000008": "step-00000008: there is no complete checkpoint",
        "--resume {out}": "there is no complete checkpoint (a folder step-… with a file .metadata)",
        "--save-every 4": "has checkpoints, the newest is step-00000004: resume from it with --resume auto",
        "--save-every 4 --resume {out}/other/step-00000002": "has checkpoints of another run",
    }.items():
        assert_refused(start(CHECK, *flags.format(out=tmp_path).split(), "--out", str(tmp_path)), message)


# A resumed run is the same run --------------------------------------------------------------------

TWO_BLOCKS = "--layers 2 --width 64 --log-every 1"
SPIKE = "--loss-guard lower-lr --inject spike:0:11"
MIXED = "--experts 4 --top-k 2"

RESUMED: dict[str, tuple[str, str, int, int]] = {
    # DDP runs on three ranks, because the order of a sum has no effect on two.
    "ddp": ("--watch-every 3 --watch-ranks --check-every 5", "3", 6, 4),
    # The interruption comes during the steps in high precision.
    "alone": (f"{TWO_BLOCKS} --fp8-start-step 9 --calibrate-steps 1 --watch-every 3 --scale-jump 4", "1", 5, 5),
    "mixture in fsdp2": (f"{MIXED} --parallel fsdp2", "2", 6, 6),
    "mixture in ddp": (MIXED, "2", 6, 6),
    "fsdp1": ("--parallel fsdp1", "2", 6, 4),
    "fsdp2": ("--parallel fsdp2 --update next_step", "2", 6, 4),
    "saved in the background": ("--parallel fsdp2 --async-save", "2", 7, 2),
    "current": (f"{TWO_BLOCKS} --recipe current --fp8-start-step 9", "1", 6, 6),
    "rowwise": (f"{TWO_BLOCKS} --recipe rowwise --fp8-start-step 9", "1", 6, 6),
    "current in ddp": (f"{TWO_BLOCKS} --recipe current --fp8-start-step 4", "2", 6, 6),
    "block in fsdp2": (f"{TWO_BLOCKS} --recipe block --parallel fsdp2 --fp8-start-step 4", "2", 6, 6),
    # The guard's window of ten losses starts before the checkpoint, and the halved learning rate stays.
    "a guard before its alarm": (f"{TWO_BLOCKS} {SPIKE}", "1", 6, 6),
    "a guard after its alarm": (f"{TWO_BLOCKS} {SPIKE}", "1", 11, 11),
}
"""Flags, number of ranks, the step after which the run ends, and how often it saves."""

OFTEN = ("ddp", "alone", "mixture in fsdp2")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in OFTEN else pytest.mark.long) for name in RESUMED]
)
def test_a_resumed_run_is_the_same_run(name: str, runs: Runs, tmp_path: Path) -> None:
    words, ranks, end, save = RESUMED[name]
    flags = [*TINY, *words.split(), "--save-every", str(save)]
    command = ALONE if ranks == "1" else RANKS
    straight = runs(command, *flags, NPROC=ranks)
    first = finish(tmp_path, command, *flags, "--stop-after", str(end), NPROC=ranks)
    assert [line["step"] for line in first.lines] == list(range(1, end + 1))
    checkpoints = tmp_path / "checkpoints"
    assert folders.step_of(folders.whole(checkpoints)[-1]) == end
    # Imitate a killed run: steps after the last checkpoint, half a line, and an unfinished save.
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": end + 1, "loss": 1.0}) + f'\n{{"step": {end + 2}, "lo')
    write(folders.partial(checkpoints, end + 2))
    second = finish(tmp_path, command, *flags, "--resume", "auto", NPROC=ranks)
    assert second.summary["resumed_after_step"] == end
    assert_same_end(second, straight)
    assert [folder.name for folder in sorted(checkpoints.iterdir())] == [
        folder.name for folder in folders.whole(straight.out / "checkpoints")
    ]
    events = [(event["kind"], event["step"]) for event in told(tmp_path)]
    assert [event for event in events if event[0] in ("start", "end")] == [
        *[("start", 0), ("end", end)],
        *[("start", end), ("end", STEPS)],
    ]
    saved = {
        run: {e["step"]: e["digest"] for e in told(run) if e["kind"] == "saved"} for run in (tmp_path, straight.out)
    }
    assert saved[tmp_path].items() >= saved[straight.out].items()
    assert len({*saved[tmp_path].values()}) == len(saved[tmp_path])
    if "--watch-every" in words:
        assert (tmp_path / "scales.jsonl").read_text() == (straight.out / "scales.jsonl").read_text()
    if "--watch-ranks" in words:
        assert [line["step"] for line in RunFolder(tmp_path).lines("ranks.jsonl").new()] == [3, 6, 9, 12]
    if "--fp8-start-step" in words:  # Counted at the end of a step: the one before the start has already switched.
        high = 8 if TWO_BLOCKS in words else 4
        start = int(words.split("--fp8-start-step ")[1].split()[0])
        expected = [high] * (start - 2) + [0] * (STEPS - start + 2)
        assert [line["high_precision_modules"] for line in straight.lines] == expected
    if "--loss-guard" in words:
        usual = [line["learning_rate"] for line in runs(ALONE, *TINY, *TWO_BLOCKS.split()).lines]
        assert [line["learning_rate"] for line in straight.lines] == [*usual[:10], *(rate / 2 for rate in usual[10:])]
        assert second.summary["loss_alarms"] == 1


def told(folder: Path) -> list[dict[str, Any]]:
    """Return the events of a run."""
    return list(RunFolder(folder).lines("events.jsonl").new())


def assert_same_end(run: Run, straight: Run) -> None:
    """Assert the same bits and the same lines, but for the times."""
    assert [line["step"] for line in run.lines] == list(range(1, STEPS + 1))
    for name in ("loss", "grad_norm", "tokens", "learning_rate", "high_precision_modules"):
        assert [line.get(name) for line in run.lines] == [line.get(name) for line in straight.lines], name
    for key in ("final_training_loss", "validation_loss", "parameters_sha256", "bytes_gathered_per_step"):
        assert run.summary[key] == straight.summary[key]


@pytest.mark.slow
def test_auto_starts_afresh_where_there_is_nothing(tmp_path: Path) -> None:
    """Resuming a finished run takes no steps."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 9.0}\n')
    first, again = (finish(tmp_path, ALONE, *TINY, "--save-every", "5", "--resume", "auto") for _ in range(2))
    assert first.summary["resumed_after_step"] == 0
    assert [line["step"] for line in first.lines] == list(range(1, STEPS + 1))
    assert first.losses[0] != 9.0
    assert again.summary["resumed_after_step"] == STEPS
    assert again.losses == first.losses
    for key in ("parameters_sha256", "final_training_loss", "validation_loss"):
        assert again.summary[key] == first.summary[key]


@pytest.mark.slow
def test_going_on_from_an_older_checkpoint(tmp_path: Path) -> None:
    straight = finish(tmp_path, ALONE, *TINY, "--save-every", "4", "--keep", "3")
    four = tmp_path / "checkpoints/step-00000004"
    again = finish(tmp_path, ALONE, *TINY, "--save-every", "4", "--keep", "3", "--resume", str(four))
    assert_same_end(again, straight)
    assert again.summary["resumed_after_step"] == 4
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["abandoned-step-00000008", "abandoned-step-00000012"] + [f"step-{i:08d}" for i in (4, 8, 12)]


@pytest.mark.long
@pytest.mark.parametrize(
    ("source", "others"),
    [
        ("fsdp1", {"hsdp": "2", "fsdp2": "3"}),
        ("fsdp2", {"none": "1", "fsdp1": "2", "ddp": "3"}),
    ],
    ids=["fsdp1", "fsdp2"],
)
def test_others_read_the_same_state(runs: Runs, tmp_path: Path, source: str, others: dict[str, str]) -> None:
    """No step follows loading, so the parameters must equal the saved ones under any kind of parallelism."""
    stop = ["--save-every", "6", "--stop-after", "6"]
    saved = runs(RANKS, *TINY, *stop, "--parallel", source)
    folder = str(saved.out / "checkpoints/step-00000006")
    for parallel, ranks in others.items():
        out = tmp_path / parallel
        run = finish(out, RANKS, *TINY, *stop, "--parallel", parallel, "--resume", folder, NPROC=ranks)
        assert run.summary["parameters_sha256"] == saved.summary["parameters_sha256"]
        # The mean over ranks is summed in another order.
        assert run.summary["validation_loss"] == pytest.approx(saved.summary["validation_loss"], rel=1e-6)
        assert run.summary["fp8_state_identical"] is True
        assert run.lines == []


@pytest.mark.long
def test_going_on_as_another_kind(runs: Runs, tmp_path: Path) -> None:
    first = runs(RANKS, *TINY, "--save-every", "6", "--stop-after", "6")
    folder = str(first.out / "checkpoints/step-00000006")
    further = finish(tmp_path, RANKS, *TINY, "--parallel", "fsdp2", "--resume", folder)
    assert [line["step"] for line in further.lines] == list(range(7, STEPS + 1))
    straight = runs(RANKS, *TINY)
    assert first.losses == straight.losses[:6]
    assert further.losses == pytest.approx(straight.losses[6:], rel=1e-5)


@pytest.mark.long
def test_fp8_may_begin_later_and_end_earlier(runs: Runs, tmp_path: Path) -> None:
    save = ["--save-every", "6", "--stop-after", "6"]
    folder = {
        precision: str(runs(ALONE, *TINY, *save, "--precision", precision).out / "checkpoints/step-00000006")
        for precision in ("fp32", "fp8")
    }
    begins = finish(tmp_path / "begins", ALONE, *TINY, "--precision", "fp8", "--resume", folder["fp32"])
    assert "has no FP8 state: scales start cold" in begins.output
    assert "another precision: fp8 instead of fp32" in begins.output
    ends = finish(tmp_path / "ends", ALONE, *TINY, "--precision", "fp32", "--resume", folder["fp8"])
    assert len(begins.losses) == len(ends.losses) == STEPS - 6


def _with_small_files(flags: list[str]) -> int:
    """Run the job with files limited to 40 KiB. A checkpoint's files are larger."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (40 * 1024, resource.RLIM_INFINITY))
    return job.start(flags)


@pytest.mark.slow
def test_a_checkpoint_that_cannot_be_written_is_exit_3(tmp_path: Path) -> None:
    error_file = tmp_path / "error.json"
    flags = [*TINY, "--precision", "fp32", "--save-every", "4", "--out", str(tmp_path / "run")]
    done = forked.run(flags, None, {"TORCHELASTIC_ERROR_FILE": str(error_file)}, main=_with_small_files)
    assert done.returncode == 3, done.stdout + done.stderr
    said = done.stderr.splitlines()[-1]
    assert said.startswith("rank 0: checkpoint of step 4 could not be written: ")
    assert "File too large" in said
    assert "Traceback" not in done.stderr
    assert json.loads(error_file.read_text())["message"]["message"] == said
    assert not list((tmp_path / "run/checkpoints").glob("step-*"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "ranks", "others", "message"),
    [
        ("", "1", "--width 64", ": saved with --width 32, got 64"),
        (MIXED, "2", "--experts 2", "saved with --experts 4, got 2"),
        (MIXED, "2", "--experts 4 --top-k 1", "saved with --top-k 2, got 1"),
        (MIXED, "2", "", "saved with --experts 4, got 0"),
        ("--no-amax-sync", "2", "", "FP8 state rank0, rank1, of 2 rank(s), but this job needs shared, on 1: "),
    ],
)
def test_another_model_and_other_ranks_are_refused(
    runs: Runs, tmp_path: Path, flags: str, ranks: str, others: str, message: str
) -> None:
    save = ("--save-every", "6", "--stop-after", "6")
    saved = runs(ALONE if ranks == "1" else RANKS, *TINY, *flags.split(), *save)
    folder = str(saved.out / "checkpoints/step-00000006")
    done = start(ALONE, *TINY, *others.split(), "--out", str(tmp_path / "new"), "--resume", folder)
    assert_refused(done, message)

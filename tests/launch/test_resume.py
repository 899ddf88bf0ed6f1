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


MISTAKES = {
    "nothing there": (["--resume", "no/such"], "--resume no/such: there is no complete checkpoint"),
    "not whole": (
        ["--resume", "{out}/checkpoints/partial-step-00000008"],
        "step-00000008: there is no complete checkpoint",
    ),
    "a run": (["--resume", "{out}"], "there is no complete checkpoint (a folder step-… with a file .metadata)"),
    "afresh": (
        ["--save-every", "4"],
        "has checkpoints, the newest is step-00000004: resume from it with --resume auto",
    ),
    "another's": (["--save-every", "4", "--resume", "{out}/other/step-00000002"], "has checkpoints of another run"),
    "stop alone": (["--stop-after", "4"], "--stop-after needs --save-every"),
    "late stop": (["--stop-after", "9", "--steps", "8"], "--stop-after 9 is beyond --steps 8"),
    "async alone": (["--async-save"], "--async-save needs --save-every"),
    "keep none": (["--keep", "0"], "--keep: must be at least 1"),
    "no patience": (["--timeout", "0"], "--timeout: must be positive"),
}


def test_a_mistake_is_one_line_and_exit_2(tmp_path: Path) -> None:
    for name in ("checkpoints/step-00000004", "checkpoints/partial-step-00000008", "other/step-00000002"):
        write(tmp_path / name)
    for flags, message in MISTAKES.values():
        given = [flag.format(out=tmp_path) for flag in flags]
        assert_refused(start(CHECK, *given, "--out", str(tmp_path)), message)


def assert_same_end(run: Run, straight: Run) -> None:
    assert run.losses == straight.losses
    assert [line["learning_rate"] for line in run.lines] == [line["learning_rate"] for line in straight.lines]
    for key in ("final_training_loss", "validation_loss", "parameters_sha256", "bytes_gathered_per_step"):
        assert run.summary[key] == straight.summary[key]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallel", "update", "ranks"),
    [
        pytest.param("ddp", "same_step", "3", id="ddp"),
        pytest.param("fsdp1", "same_step", "2", id="fsdp1", marks=pytest.mark.long),
        pytest.param("fsdp2", "next_step", "2", id="fsdp2", marks=pytest.mark.long),
    ],
)
def test_a_resumed_run_is_the_same_run(tmp_path: Path, parallel: str, update: str, ranks: str) -> None:
    """DDP runs on three ranks, because the order of a sum has no effect on two."""
    flags = [*TINY, "--parallel", parallel, "--update", update]
    straight = finish(tmp_path / "straight", RANKS, *flags, NPROC=ranks)
    out = tmp_path / "parts"
    first = finish(out, RANKS, *flags, "--save-every", "4", "--stop-after", "6", NPROC=ranks)
    assert [line["step"] for line in first.lines] == [1, 2, 3, 4, 5, 6]
    # Imitate a killed run: steps after the last checkpoint, half a line, and an unfinished save.
    with (out / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 7, "loss": 1.0}) + '\n{"step": 8, "lo')
    write(out / "checkpoints/partial-step-00000008")
    second = finish(out, RANKS, *flags, "--save-every", "4", "--resume", "auto", NPROC=ranks)
    assert second.summary["resumed_after_step"] == 6
    assert [line["step"] for line in second.lines] == list(range(1, STEPS + 1))
    assert_same_end(second, straight)
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["step-00000008", "step-00000012"]


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
def test_others_read_the_same_state(tmp_path: Path, source: str, others: dict[str, str]) -> None:
    """No step follows loading, so the parameters must equal the saved ones under any kind of parallelism."""
    stop = ["--save-every", "6", "--stop-after", "6"]
    saved = finish(tmp_path / "saved", RANKS, *TINY, *stop, "--parallel", source)
    folder = str(tmp_path / "saved/checkpoints/step-00000006")
    for parallel, ranks in others.items():
        out = tmp_path / parallel
        run = finish(out, RANKS, *TINY, *stop, "--parallel", parallel, "--resume", folder, NPROC=ranks)
        assert run.summary["parameters_sha256"] == saved.summary["parameters_sha256"]
        # The mean over ranks is summed in another order.
        assert run.summary["validation_loss"] == pytest.approx(saved.summary["validation_loss"], rel=1e-6)
        assert run.summary["fp8_state_identical"] is True
        assert run.lines == []


@pytest.mark.long
def test_going_on_as_another_kind(tmp_path: Path) -> None:
    first = finish(tmp_path / "a", RANKS, *TINY, "--save-every", "6", "--stop-after", "6", "--parallel", "ddp")
    folder = str(tmp_path / "a/checkpoints/step-00000006")
    further = finish(tmp_path / "b", RANKS, *TINY, "--parallel", "fsdp2", "--resume", folder)
    assert [line["step"] for line in further.lines] == list(range(7, STEPS + 1))
    straight = finish(tmp_path / "c", RANKS, *TINY, "--parallel", "ddp")
    assert first.losses == straight.losses[:6]
    assert further.losses == pytest.approx(straight.losses[6:], rel=1e-5)


@pytest.mark.long
def test_fp8_may_begin_later_and_end_earlier(tmp_path: Path) -> None:
    save = ["--save-every", "6", "--stop-after", "6"]
    folder = {}
    for precision in ("fp32", "fp8"):
        finish(tmp_path / precision, ALONE, *TINY, *save, "--precision", precision)
        folder[precision] = str(tmp_path / precision / "checkpoints/step-00000006")
    begins = finish(tmp_path / "begins", ALONE, *TINY, "--precision", "fp8", "--resume", folder["fp32"])
    assert "has no FP8 state: scales start cold" in begins.output
    assert "another precision: fp8 instead of fp32" in begins.output
    ends = finish(tmp_path / "ends", ALONE, *TINY, "--precision", "fp32", "--resume", folder["fp8"])
    assert len(begins.losses) == len(ends.losses) == STEPS - 6


@pytest.mark.long
def test_saving_in_the_background_changes_nothing(tmp_path: Path) -> None:
    flags = [*TINY, "--parallel", "fsdp2"]
    straight = finish(tmp_path / "straight", RANKS, *flags)
    out = tmp_path / "parts"
    finish(out, RANKS, *flags, "--save-every", "2", "--async-save", "--stop-after", "7")
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["step-00000006", "step-00000007"]
    second = finish(out, RANKS, *flags, "--save-every", "2", "--async-save", "--resume", "auto")
    assert_same_end(second, straight)


@pytest.mark.slow
def test_another_model_is_refused(tmp_path: Path) -> None:
    finish(tmp_path / "saved", ALONE, *TINY, "--save-every", "6", "--stop-after", "6")
    folder = str(tmp_path / "saved/checkpoints/step-00000006")
    done = start(ALONE, *TINY, "--width", "64", "--out", str(tmp_path / "new"), "--resume", folder)
    assert_refused(done, f"--resume {folder}: saved with --width 32, got 64")


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
def test_state_of_other_ranks_is_refused(tmp_path: Path) -> None:
    save = ["--save-every", "6", "--stop-after", "6"]
    finish(tmp_path / "saved", RANKS, *TINY, *save, "--no-amax-sync")
    folder = str(tmp_path / "saved/checkpoints/step-00000006")
    done = start(ALONE, *TINY, "--out", str(tmp_path / "new"), "--resume", folder)
    assert_refused(done, "has FP8 state rank0, rank1, of 2 rank(s), but this job needs shared, on 1: ")

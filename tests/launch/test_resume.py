"""Checkpoints of the lab: runs that resume from one end with the same bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fp8dist.runs.report.folder import RunFolder
from tests.support.main_job import ALONE, RANKS, STEPS, TINY, Run, Runs, finish
from tests.support.suite import few

TWO_BLOCKS = "--layers 2 --width 64 --log-every 1"
SPIKE = "--loss-guard skip --inject spike:0:11"
MIXED = "--experts 4 --top-k 2"

RESUMED: dict[str, tuple[str, str, int, int]] = {
    # DDP runs on three ranks, because the order of a sum has no effect on two.
    "ddp": ("--watch-every 3 --watch-ranks --check-every 5", "3", 6, 4),
    # The interruption comes during the steps in high precision.
    "alone": (f"{TWO_BLOCKS} --fp8-start-step 9 --calibrate-steps 1 --watch-every 3 --scale-jump 4", "1", 5, 5),
    "mixture in fsdp2": (f"{MIXED} --parallel fsdp2 --check-every 4 --watch-every 4 --watch-ranks", "2", 6, 6),
    "fsdp1": ("--parallel fsdp1", "2", 6, 4),
    "fsdp2": ("--parallel fsdp2 --update next_step", "2", 7, 2),
    "current": (f"{TWO_BLOCKS} --recipe current --fp8-start-step 4", "2", 6, 6),
    "rowwise": (f"{TWO_BLOCKS} --recipe rowwise --fp8-start-step 9", "1", 6, 6),
    "block in fsdp2": (f"{TWO_BLOCKS} --recipe block --parallel fsdp2 --fp8-start-step 4", "2", 6, 6),
    # The guard's window of ten losses starts before the checkpoint.
    "a guard before its alarm": (f"{TWO_BLOCKS} {SPIKE}", "1", 6, 6),
    "a guard after its alarm": (f"{TWO_BLOCKS} {SPIKE}", "1", 11, 11),
}
"""Flags, number of ranks, the step after which the run ends, and how often it saves."""


@pytest.mark.slow
@pytest.mark.parametrize("name", few(RESUMED, "alone"))
def test_a_resumed_run_is_the_same_run(name: str, runs: Runs, tmp_path: Path) -> None:
    words, ranks, end, save = RESUMED[name]
    flags = [*TINY, *words.split(), "--save-every", str(save)]
    command = ALONE if ranks == "1" else RANKS
    straight = runs(command, *flags, NPROC=ranks)
    first = finish(tmp_path, command, *flags, "--stop-after", str(end), NPROC=ranks)
    assert [line["step"] for line in first.lines] == list(range(1, end + 1))
    checkpoints = tmp_path / "checkpoints"
    assert names_in(checkpoints)[-1] == f"step-{end:08d}"
    # Imitate a killed run: steps after the last checkpoint, half a line, and an unfinished save.
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": end + 1, "loss": 1.0}) + f'\n{{"step": {end + 2}, "lo')
    (checkpoints / f"partial-step-{STEPS:08d}").mkdir()
    (checkpoints / f"partial-step-{STEPS:08d}/.metadata").write_text("half of it")
    second = finish(tmp_path, command, *flags, "--resume", "auto", NPROC=ranks)
    assert second.summary["resumed_after_step"] == end
    assert_same_end(second, straight)
    assert names_in(checkpoints) == names_in(straight.out / "checkpoints")
    ends = [(event["kind"], event["step"]) for event in events(tmp_path) if event["kind"] in ("start", "end")]
    assert ends == [("start", 0), ("end", end), ("start", end), ("end", STEPS)]
    saved, others = (
        {e["step"]: e["digest"] for e in events(run) if e["kind"] == "saved"} for run in (tmp_path, straight.out)
    )
    assert saved.items() >= others.items()
    assert len({*saved.values()}) == len(saved)
    if "--watch-every" in words:
        assert (tmp_path / "scales.jsonl").read_text() == (straight.out / "scales.jsonl").read_text()
    if "--watch-ranks" in words:
        every = int(words.split("--watch-every ")[1].split()[0])
        steps = [line["step"] for line in RunFolder(tmp_path).lines("ranks.jsonl").new()]
        assert steps == list(range(every, STEPS + 1, every))
    if "--fp8-start-step" in words:  # Counted at the end of a step: the one before the start has already switched.
        high = 8 if TWO_BLOCKS in words else 4
        start = int(words.split("--fp8-start-step ")[1].split()[0])
        expected = [high] * (start - 2) + [0] * (STEPS - start + 2)
        assert [line["high_precision_modules"] for line in straight.lines] == expected
    if "--loss-guard" in words:
        assert second.summary["loss_alarms"] == 1


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def events(folder: Path) -> list[dict[str, Any]]:
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

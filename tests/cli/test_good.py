"""``fp8dist good``: the newest good checkpoint that is there, alone on stdout."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from fp8dist.cli.main import main
from tests.support.runs import lines, made_run

Capture = pytest.CaptureFixture[str]

ALL = {"compared": {"parameter": 4}, "compared_bytes": {}, "unverified": {}, "nonfinite": [], "partial": {}}


def run(folder: Path, *events: dict[str, Any]) -> Path:
    """Write a run with ten steps and these events."""
    folder.mkdir(parents=True)
    lines(folder / "metrics.jsonl", ({"step": step, "loss": 1.0} for step in range(1, 11)))
    lines(folder / "events.jsonl", ({"step": 0, "kind": "start", "resumed_after": None}, *events))
    return folder


def saved(step: int, path: Path | str | None) -> dict[str, Any]:
    return {"step": step, "kind": "saved", **({} if path is None else {"path": str(path)})}


def checked(step: int, **more: Any) -> dict[str, Any]:
    return {"step": step, "kind": "checked", **ALL, **more}


def good(folder: Path, capsys: Capture) -> tuple[int, str, str]:
    """Return the exit code, stdout and stderr of the command."""
    code = main(["good", str(folder)])
    return code, *capsys.readouterr()


def made(folder: Path, *names: str) -> list[Path]:
    """Create these checkpoints."""
    for name in names:
        (folder / name).mkdir(parents=True)
    return [folder / name for name in names]


def test_the_newest_good_one_is_printed_alone(tmp_path: Path, capsys: Capture) -> None:
    a, b, c = made(tmp_path / "elsewhere", "a", "b", "c")
    folder = run(tmp_path / "run", saved(2, a), saved(4, b), checked(4), saved(6, c))
    assert good(folder, capsys) == (0, f"{b}\n", "")
    b.rmdir()  # A job keeps only some of its checkpoints.
    assert good(folder, capsys) == (0, f"{a}\n", "")
    a.rmdir()
    none = f"fp8dist good: {folder}: none that is good is there any more: {b}\n"
    assert good(folder, capsys) == (1, "", none)
    code, out, err = good(tmp_path, capsys)
    assert (code, out) == (2, "")
    assert "holds no run" in err


@pytest.mark.parametrize(
    ("events", "why"),
    [
        ([], 'no checkpoint is recorded. Note each: recorder.event("saved", step, path=…)'),
        ([saved(2, "x")], "no check came after one and found parameters equal and finite"),
        ([saved(2, "x"), checked(4, nonfinite=["w"])],
         "after step 4 a check found 4 parameters equal, NaN or infinity"),
        ([saved(2, "x"), checked(4, compared={"slot": 3}, unverified={"parameter": "shards"})], "not verifiable"),
        ([saved(2, "x"), checked(4, partial={"parameter": "1 of 4 parameters"})], "compared only 1 of 4 parameters"),
        ([saved(2, None), checked(4)], "of those that are good no path is recorded"),
        ([saved(2, "x"), checked(4), saved(6, "x")], "a later one was saved in their place"),
    ],
)  # fmt: skip
def test_without_a_good_one_it_says_why(events: list[Any], why: str, tmp_path: Path, capsys: Capture) -> None:
    folder = run(tmp_path / "run", *events)
    made(folder, "x")
    code, out, err = good(folder, capsys)
    assert (code, out) == (1, "")
    assert why in err
    assert err.count("\n") == 1


def test_a_file_that_a_later_save_has_replaced_is_not_good(tmp_path: Path, capsys: Capture) -> None:
    """Also if a resume has undone that save: the file holds what it wrote."""
    (x,) = made(tmp_path, "x")
    back = {"step": 4, "kind": "start", "resumed_after": 4}
    assert good(run(tmp_path / "run", saved(4, x), checked(4), saved(8, x), back), capsys)[0] == 1
    assert good(run(tmp_path / "again", saved(4, x), saved(8, x), back, saved(4, x), checked(4)), capsys)[0] == 0


def test_paths_that_are_relative_or_have_moved_with_the_run(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relative to the run, to where the job ran, and of a run that was copied with its checkpoints."""
    for path in ("checkpoints/2", "runs/gpt/checkpoints/2", "/old/runs/gpt/checkpoints/2"):
        folder = run(tmp_path / path.replace("/", "-") / "gpt", saved(2, path), checked(2))
        made(folder, "checkpoints/2")
        assert good(folder, capsys) == (0, f"{folder / 'checkpoints/2'}\n", "")
    monkeypatch.chdir(tmp_path)
    folder = run(tmp_path / "run", saved(2, "weights/2"), checked(2))
    made(tmp_path, "weights/2")
    assert good(folder, capsys) == (0, "weights/2\n", "")
    folder = made_run(tmp_path / "diverged", steps=400, layers=1)
    made(folder, *(f"checkpoints/step-{step:08d}" for step in (100, 200, 300)))
    assert good(folder, capsys) == (0, f"{folder / 'checkpoints/step-00000200'}\n", "")


def test_the_path_is_printed_byte_by_byte(tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    """Names of files need not be UTF-8."""
    name = b"\xff \xc3\xa4"
    (path,) = made(tmp_path, os.fsdecode(name))
    folder = run(tmp_path / "run", saved(2, path), checked(4))
    assert main(["good", str(folder)]) == 0
    assert capsysbinary.readouterr().out == os.fsencode(tmp_path) + b"/" + name + b"\n"

"""RunFolder and Lines: torn, damaged, growing and replaced files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from fp8dist.errors import ConfigurationError
from fp8dist.runs.report import folder as module
from fp8dist.runs.report.folder import Lines, RunFolder
from fp8dist.runs.report.numbers import read_run


def _line(step: int, **more: object) -> str:
    return json.dumps({"step": step, **more}) + "\n"


def _lines(*steps: int) -> str:
    return "".join(map(_line, steps))


def _new(lines: Lines) -> list[int]:
    return [line["step"] for line in lines.new()]


def test_lines_come_once_and_a_torn_line_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = Lines(path)
    assert _new(lines) == []
    path.write_text(_lines(1, 2) + '{"step": 3, "lo')
    assert (_new(lines), _new(lines)) == ([1, 2], [])
    with path.open("a") as file:
        file.write('ss": 1}\n' + _line(4))
    assert list(lines.new()) == [{"step": 3, "loss": 1}, {"step": 4}]
    assert (lines.left_out, lines.replaced()) == (0, False)
    new = tmp_path / "new"
    new.write_text(_lines(1, 2, 3))
    os.replace(new, path)
    assert (lines.replaced(), _new(lines)) == (True, [1, 2, 3])
    path.write_text(_line(1))  # The same file, cut.
    assert (lines.replaced(), _new(lines)) == (True, [1])


@pytest.mark.parametrize("block", [1, 7, 1 << 22])
def test_damaged_lines_are_left_out_and_counted(block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK", block)
    path = tmp_path / "events.jsonl"
    damaged = ["", "{", "[1", "2]", '{"step": 1', '"x": 2}', '{"step": true}', '{"step": "4"}', "[" * 100_000, "\0\xff"]
    path.write_bytes((_line(1) + "\n".join(damaged) + "\n" + _line(2)).encode("latin-1"))
    lines = Lines(path)
    assert (_new(lines), lines.left_out) == ([1, 2], len(damaged))
    monkeypatch.setattr(module, "BLOCK", 16)
    monkeypatch.setattr(module, "LONGEST", 64)  # A line without end costs no memory.
    path.write_text(_line(1) + "x" * 1_000 + "\n" + _line(2))
    lines = Lines(path)
    assert (_new(lines), lines.left_out) == ([1, 2], 1)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "holds no run: neither run.json nor metrics.jsonl is there"),
        ("{", "is no JSON object"),
        ("[" * 100_000, "is no JSON object"),
        ("[]", "is no JSON object"),
        ('{"format": "another"}', "is not the header of a run of fp8dist"),
        ('{"format": "fp8dist run", "version": 2}', "has format version 2, and this version of fp8dist reads 1"),
    ],
)
def test_a_folder_of_another_kind_is_refused(content: str | None, problem: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    with pytest.raises(ConfigurationError, match=problem) as caught:
        RunFolder(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_run_without_a_header_is_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(_lines(*range(10, 20)))  # 13 bytes each.
    run = RunFolder(tmp_path)
    assert (run.header, _new(run.lines("metrics.jsonl"))) == ({}, [*range(10, 20)])
    with pytest.raises(ConfigurationError, match="is not a folder"):
        RunFolder(path)
    for tail in (0, 1, 12, 13, 14, 26, 10_000):  # A tail starts with a whole line.
        path.write_text(_lines(*range(10, 20)))
        lines = Lines(path, tail)
        assert _new(lines) == [*range(10, 20)][10 - min(10, tail // 13) :]
        with path.open("a") as file:
            file.write(_line(20))
        assert (_new(lines), lines.left_out) == ([20], 0)


@pytest.mark.parametrize("name", ["run.json", "metrics.jsonl"])
@pytest.mark.parametrize("kind", ["pipe", "device", "endless", "folder"])
def test_what_is_no_file_is_not_read(name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The opening of a pipe waits for its writer, and some devices have no end."""
    monkeypatch.setattr(module, "LONGEST", 1 << 20)
    (tmp_path / "run.json").write_text(json.dumps({"format": "fp8dist run", "version": 1}))
    (tmp_path / ("metrics.jsonl" if name == "run.json" else "other")).write_text(_line(1))
    path = tmp_path / name
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    else:
        with path.open("wb") as file:
            file.truncate(1 << 33)  # Takes no space.
    if (name, kind) == ("run.json", "endless"):
        with pytest.raises(ConfigurationError, match="no JSON object"):
            read_run(tmp_path)
    elif (name, kind) != ("metrics.jsonl", "endless"):
        assert read_run(tmp_path).events == ()

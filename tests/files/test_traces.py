"""Traces that are read: damage of every kind, hostile content, and comparison across ranks."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fp8dist.checks.outputs import Place, Taken
from fp8dist.errors import CheckpointError
from fp8dist.files.partings import compare_traces, compare_traces_of_ranks, traces_text
from fp8dist.files.sources import open_source
from fp8dist.files.traces import Head, is_trace, open_trace, trace_bytes
from fp8dist.state.groups import SyncGroup
from tests.support.ranks import RankPool


def head(**changes: Any) -> Head:
    likeness = "a CPU, 4 threads; torch 2.11.0; CUDA None"
    return Head(0, 1, "a", likeness, {"mkldnn": True}, {"random numbers": "0" * 32})._replace(**changes)


def trace(path: Path, words: list[int], head: Head | None = None) -> Path:
    """Write a trace of one Linear per word, with that word as its digest."""
    head = head or _HEAD
    places = tuple(Place(f"layers.{i}", "output", 0, 0, (2, 3), "float32") for i in range(len(words)))
    digests = torch.tensor([[word, 0] for word in words], dtype=torch.int64).view(-1, 2)
    path.write_bytes(trace_bytes(head, Taken(places, digests, torch.zeros(len(words), dtype=torch.bool), ())))
    return path


_HEAD = head()


def read(path: Path) -> int:
    """Return the number of rows."""
    return len(list(open_trace(str(path))[1]))


def sealed(path: Path, lines: list[bytes]) -> Path:
    """Write lines with a checksum that fits them."""
    data = b"".join(line + b"\n" for line in lines)
    last = {"places": len(lines) - 1, "sha256": hashlib.sha256(data).hexdigest()}
    path.write_bytes(data + json.dumps(last).encode() + b"\n")
    return path


@pytest.mark.slow
def test_every_truncation_and_flipped_bit_is_damage(tmp_path: Path) -> None:
    data = trace(tmp_path / "a", [1, 2, 3]).read_bytes()
    assert read(tmp_path / "a") == 3
    bad = tmp_path / "b"
    for length in range(len(data)):
        bad.write_bytes(data[:length])
        with pytest.raises(CheckpointError, match=str(bad)):
            read(bad)
    for place in range(0, len(data), 3):
        bad.write_bytes(data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :])
        with pytest.raises(CheckpointError, match=str(bad)):
            read(bad)
    bad.write_bytes(data + b"more")
    with pytest.raises(CheckpointError, match="damaged"):
        read(bad)


def _hostile() -> Iterator[tuple[str, int, Any]]:
    """Yield (name, line, the line or what changes in it)."""
    yield "a list", 1, b"[]"
    yield "deep", 1, b"[" * 500_000
    yield "long", 1, b'{"module":"' + b"x" * (1 << 20) + b'"}'
    yield "digits", 1, b'{"call":' + b"9" * 10_000 + b"}"
    yield "no JSON", 1, b"__import__('os')"
    yield "no text", 1, b"\xff\xfe"
    for field, value in (
        ("module", 3),
        ("what", "input"),
        ("call", -1),
        ("call", True),
        ("part", 1 << 63),
        ("shape", "23"),
        ("shape", [1] * 65),
        ("shape", [1e30]),
        ("dtype", None),
        ("digest", "0" * 31),
        ("digest", "z" * 32),
        ("nonfinite", 1),
    ):
        yield f"row {field} {str(value)[:20]}", 1, {field: value}
    for field, value in (
        ("version", 2),
        ("version", "1"),
        ("rank", "0"),
        ("likeness", []),
        ("settings", [1]),
        ("settings", {"a": {}}),
        ("settings", {str(i): i for i in range(257)}),
        ("start", None),
    ):
        yield f"head {field} {str(value)[:20]}", 0, {field: value}


@pytest.mark.parametrize(
    ("name", "place", "change"), list(_hostile()), ids=lambda value: value if isinstance(value, str) else ""
)
def test_hostile_content_is_refused(name: str, place: int, change: Any, tmp_path: Path) -> None:
    lines = trace(tmp_path / "a", [1, 2]).read_bytes().splitlines()[:-1]
    if isinstance(change, dict):
        change = json.dumps({**json.loads(lines[place]), **change}, separators=(",", ":")).encode()
    lines[place] = change
    path = sealed(tmp_path / "b", lines)
    with pytest.raises(CheckpointError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert len(str(caught.value)) < 1100
    assert "\n" not in str(caught.value)


def test_strange_names_are_printed_on_one_line(tmp_path: Path) -> None:
    lines = trace(tmp_path / "a", [1]).read_bytes().splitlines()[:-1]
    for name, digest in (("b", "1"), ("c", "2")):
        row = {**json.loads(lines[1]), "module": "x\n\x1b[31m\ud800" + "y" * 10_000, "digest": digest * 32}
        sealed(tmp_path / name, [lines[0], json.dumps(row).encode()])
    text = traces_text(compare_traces([str(tmp_path / "b"), str(tmp_path / "c")]))
    sentence = text.splitlines()[0]
    assert sentence.isprintable()
    assert "\\x1b[31m\\ud800yyy" in sentence
    assert sentence.endswith("the bits differ: 11111111… on file 0; 22222222… on file 1")


def test_versions_and_flags_that_differ_are_named(tmp_path: Path) -> None:
    other = head(host="b", likeness="a CPU, 4 threads; torch 2.13.0; CUDA None", settings={"mkldnn": False, "new": 3})
    paths = [trace(tmp_path / "a", [1, 2]), trace(tmp_path / "b", [1, 3], other), trace(tmp_path / "c", [1, 2])]
    report = compare_traces(list(map(str, paths)))
    (finding,) = report.findings
    assert (finding.ranks, finding.reference_rank, finding.hosts) == ((1,), 0, (str(paths[1]),))
    assert finding.detail == (
        "file 1 first parts from files 0, 2 in the output of 'layers.1', call 1 (place 2 of the step): "
        "the bits differ: 02000000… on files 0, 2; 03000000… on file 1"
    )
    assert report.notes[:4] == (
        "host: a on files 0, 2; b on file 1",
        "mkldnn: True on files 0, 2; False on file 1",
        "new: none on files 0, 2; 3 on file 1",
        "machine: torch 2.11.0 on files 0, 2; torch 2.13.0 on file 1",
    )
    assert compare_traces([str(paths[0]), str(paths[2])]).notes == ()
    same = compare_traces([str(paths[0]), str(trace(tmp_path / "d", [1, 2], other))])
    assert same.consistent
    assert "machine: torch 2.11.0 on file 0; torch 2.13.0 on file 1" in traces_text(same)


def test_a_trace_that_ends_earlier_or_is_damaged_later(tmp_path: Path) -> None:
    whole, bad = str(trace(tmp_path / "a", [1, 2, 3])), trace(tmp_path / "b", [1, 2])
    report = compare_traces([whole, str(bad)])
    assert report.findings[0].detail == (
        "the traces first part at place 3 of the step: other modules run: output of 'layers.2', call 1 on file 0; "
        "the end on file 1"
    )
    assert report.compared == {"output": 3}
    trace(bad, [9, 2, 3])
    bad.write_bytes(bad.read_bytes().replace(b"layers.2", b"layers.3"))
    with pytest.raises(CheckpointError, match="checksum"):
        compare_traces([whole, str(bad)])


def test_what_is_a_trace(tmp_path: Path) -> None:
    path = trace(tmp_path / "a.safetensors", [1])
    assert is_trace(str(path))
    with pytest.raises(CheckpointError, match="is a trace, not a checkpoint"):
        open_source(trace(tmp_path / "a", [1]))
    (tmp_path / "empty").touch()
    os.mkfifo(tmp_path / "pipe")
    assert not any(is_trace(str(tmp_path / name)) for name in ("empty", "pipe", "."))
    with pytest.raises(CheckpointError, match="No such file"):
        is_trace(str(tmp_path / "absent"))


def _across(folder: str) -> tuple[str, int | None]:
    group = SyncGroup(dist.group.WORLD)  # type: ignore[arg-type]
    try:
        report = compare_traces_of_ranks(f"{folder}/{group.rank}", group)
    except CheckpointError as error:
        return f"unreadable: {error}", None
    return traces_text(report), None if report.consistent else report.findings[0].reference_rank


@pytest.mark.slow
def test_ranks_bring_their_own(three_ranks: RankPool, tmp_path: Path) -> None:
    for rank in range(3):
        trace(tmp_path / str(rank), [1, 2, 3], head(rank=rank, ranks=3))
    assert (
        three_ranks.run(_across, str(tmp_path))
        == [("consistent (3 outputs)\nrank: 0 on rank 0; 1 on rank 1; 2 on rank 2", None)] * 3
    )
    trace(tmp_path / "1", [1, 7, 3, 4])
    (text, reference), *others = three_ranks.run(_across, str(tmp_path))
    assert others == [(text, reference)] * 2
    assert reference == 0
    assert text.startswith(
        "rank 1 first parts from ranks 0, 2 in the output of 'layers.1', call 1 (place 2 of the step): the bits differ"
    )
    trace(tmp_path / "1", [1, 2])
    assert "the end on rank 1" in three_ranks.run(_across, str(tmp_path))[0][0]
    (tmp_path / "1").write_bytes((tmp_path / "1").read_bytes()[:-9])
    texts = {text for text, _ in three_ranks.run(_across, str(tmp_path))}
    assert len(texts) == 1
    assert texts.pop().startswith(f"unreadable: rank 1: {tmp_path / '1'}: ")

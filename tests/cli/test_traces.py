"""``fp8dist check`` with traces: exit codes, JSON, and ranks that bring their own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import fp8dist
from fp8dist.cli.main import main
from tests.support.torchrun import torchrun
from tests.support.training import batch, make_net

Capture = pytest.CaptureFixture[str]


def traced(path: Path, weight: float | None = None) -> str:
    """Trace a step, with one weight of ``branch`` changed. Return the path."""
    model = make_net()
    if weight is not None:
        with torch.no_grad():
            model.branch.weight[0, 0] = weight
    with fp8dist.trace(model, path):
        model(batch(0, 0)[0]).square().mean().backward()
    return str(path)


def test_equal_traces_are_consistent(tmp_path: Path, capsys: Capture) -> None:
    assert main(["check", traced(tmp_path / "t-0"), traced(tmp_path / "t-1")]) == 0
    assert capsys.readouterr().out == "consistent (5 outputs, 5 gradients)\n"
    assert main(["check", str(tmp_path / "t-{rank}")]) == 0


def test_the_first_difference_is_one_sentence(tmp_path: Path, capsys: Capture) -> None:
    paths = [traced(tmp_path / "a"), traced(tmp_path / "b", 3.0), traced(tmp_path / "c")]
    assert main(["check", *paths]) == 1
    sentence, start, *files = capsys.readouterr().out.splitlines()
    assert sentence.startswith(
        "file 1 first parts from files 0, 2 in the output of 'branch', call 1 (place 3 of the step)"
    )
    assert start.startswith("parameters and buffers at the start: ")
    assert files == [f"file {i}: {path}" for i, path in enumerate(paths)]
    assert main(["check", "--summary", *paths]) == 1
    assert capsys.readouterr().out == f"{sentence}\n"
    assert main(["check", "--only", "parameter", *paths]) == 2
    assert "--only is for checkpoints" in capsys.readouterr().err
    assert main(["check", "--json", *paths]) == 1
    report = json.loads(capsys.readouterr().out)
    (finding,) = report["findings"]
    assert [finding[name] for name in ("kind", "name", "field", "ranks", "detail")] == [
        "output",
        "branch",
        "digest",
        [1],
        sentence,
    ]
    assert report["files"] == paths
    assert not report["consistent"]


def test_usage_and_unreadable_files(tmp_path: Path, capsys: Capture) -> None:
    good = traced(tmp_path / "a")
    checkpoint = str(tmp_path / "b.safetensors")
    save_file({"x": torch.zeros(2)}, checkpoint)
    for paths in ([good, checkpoint], [checkpoint, good]):
        assert main(["check", *paths]) == 2
        assert f"{checkpoint} is a checkpoint, and others are traces" in capsys.readouterr().err
    assert main(["check", good]) == 2
    capsys.readouterr()
    for content in (b"", Path(good).read_bytes()[:-1], Path(good).read_bytes()[:400], b"{}\n"):
        (tmp_path / "bad").write_bytes(content)
        assert main(["check", good, str(tmp_path / "bad")]) == 3
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"fp8dist check: {tmp_path / 'bad'}: ")
    assert main(["check", good, str(tmp_path / "absent")]) == 3
    assert main(["inspect", good]) == 3
    assert "is a trace, not a checkpoint: compare it with other traces by fp8dist check" in capsys.readouterr().err


@pytest.mark.long
def test_across_ranks_each_brings_its_own(tmp_path: Path) -> None:
    check = ("-m", "fp8dist", "check", str(tmp_path / "{rank}"))
    traced(tmp_path / "0")
    traced(tmp_path / "1", 3.0)
    run = torchrun(2, *check)
    assert "exitcode  : 1" in run.stderr
    assert run.stdout.count("the traces first part in the output of 'branch', call 1 (place 3 of the step)") == 1
    (tmp_path / "1").write_bytes((tmp_path / "1").read_bytes()[:-1])
    run = torchrun(2, *check)
    assert "exitcode  : 3" in run.stderr
    assert run.stderr.count(f"fp8dist check: rank 1: {tmp_path / '1'}: is truncated") == 1
    save_file({"x": torch.zeros(2)}, tmp_path / "1")
    run = torchrun(2, *check)
    assert "exitcode  : 2" in run.stderr
    assert "is a checkpoint, and others are traces" in run.stderr
    traced(tmp_path / "1")
    run = torchrun(2, *check)
    assert (run.returncode, run.stdout) == (0, "consistent (5 outputs, 5 gradients)\n")

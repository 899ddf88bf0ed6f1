"""The command line: checkpoints and traces compared offline, and under torchrun; exit codes; JSON."""

from __future__ import annotations

import io
import json
import math
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn

import fp8dist
from fp8dist.cli.main import main
from tests.support import forked
from tests.support.torchrun import torchrun
from tests.support.training import batch, make_net

Tensors = dict[str, Tensor]
Capture = pytest.CaptureFixture[str]


def weights() -> Tensors:
    """Return a few tensors of several dtypes. One exceeds a block of 256 KiB."""
    generator = torch.Generator().manual_seed(0)
    return {
        "big": torch.randn(300, 400, generator=generator),
        "bf16": torch.randn(7, 5, generator=generator).bfloat16(),
        "fp8": torch.randn(33, generator=generator).to(torch.float8_e4m3fn),
        "count": torch.tensor(3),
    }


WRITERS: dict[str, Callable[[Any, Path], object]] = {
    "safetensors": save_file,
    "torch": torch.save,
    "dcp": lambda state, path: dcp.save(state, checkpoint_id=path),
}


def write(state: dict[str, Any], path: Path, how: str = "safetensors") -> str:
    """Write a checkpoint. Return its path."""
    WRITERS[how](state, path)
    return str(path)


def flip(tensor: Tensor, place: int, bit: int) -> None:
    """Flip one bit of one element."""
    words = tensor.view(-1).view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])
    words[place] ^= 1 << bit


def check(capsys: Capture, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Return the exit code and report of ``fp8dist check --json``."""
    code = main(["check", "--json", *arguments])
    return code, json.loads(capsys.readouterr().out)


def printed(capsys: Capture, code: int, *words: str) -> str:
    """Run a command, assert its exit code, and return what it prints. An error is one line."""
    assert main(list(words)) == code
    out, err = capsys.readouterr()
    assert code < 2 or (out, err.count("\n")) == ("", 1)
    return out + err


pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable:UserWarning")


def test_without_utf8_and_without_stderr_the_verdict_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [write({"wäight": torch.full((3,), float(n))}, tmp_path / f"{n}.safetensors") for n in range(2)]
    for command, code in (("check", 1), ("inspect", 0)):
        terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
        monkeypatch.setattr("sys.stdout", terminal)
        assert main([command, *paths[: 1 + code]]) == code
        terminal.seek(0)
        assert "w?ight" in terminal.read()
    monkeypatch.setattr("sys.stderr", None)  # ``2>&-`` closes it.
    assert main(["check", *paths]) == 1


def test_equal_checkpoints_are_consistent_in_any_format(tmp_path: Path, capsys: Capture) -> None:
    paths = {how: [write(weights(), tmp_path / f"{how}{i}", how) for i in range(2)] for how in WRITERS}
    for compared in (*paths.values(), [first for first, _ in paths.values()]):
        code, report = check(capsys, *compared)
        assert (code, report["consistent"], report["compared"]) == (0, True, [["parameter", 4]])


@pytest.mark.parametrize(
    ("how", "name", "place", "bit"),
    [("safetensors", "big", 119_000, 20), ("torch", "bf16", 11, 3), ("dcp", "fp8", 32, 0)],
)
def test_one_flipped_bit_is_found(how: str, name: str, place: int, bit: int, tmp_path: Path, capsys: Capture) -> None:
    right, wrong = weights(), weights()
    flip(wrong[name], place, bit)
    paths = [write(tensors, tmp_path / f"c{i}", how) for i, tensors in enumerate((right, wrong, right))]
    code, report = check(capsys, *paths)
    assert (code, report["files"]) == (1, paths)
    (finding,) = report["findings"]
    columns = right[name].shape[-1] if right[name].ndim == 2 else None
    assert finding["index"] == ([place] if columns is None else [place // columns, place % columns])
    where = ("name", "kind", "ranks", "reference_rank", "hosts")
    assert [finding[field] for field in where] == [name, "parameter", [1], 0, [paths[1]]]
    value, expected = (of[name].view(-1)[place].double().item() for of in (wrong, right))
    assert (finding["value"], finding["expected"], finding["ulp"]) == (value, expected, 1 << bit)


def test_a_wrong_first_file_is_named_and_two_files_have_no_culprit(tmp_path: Path, capsys: Capture) -> None:
    wrong = weights()
    wrong["count"] += 1
    wrong["big"] = -wrong["big"]  # As a whole.
    paths = [write(wrong, tmp_path / "a"), write(weights(), tmp_path / "b"), write(weights(), tmp_path / "c")]
    _, report = check(capsys, *paths)
    found = {f["name"]: (f["ranks"], f["reference_rank"], f["value"], f["expected"]) for f in report["findings"]}
    assert found.keys() == {"count", "big"}
    assert found["count"] == ([0], 1, 4, 3)
    _, report = check(capsys, *paths[:2])
    assert [(f["ranks"], f["reference_rank"]) for f in report["findings"]] == [([0, 1], None)] * 2
    paths = [write({"x": torch.full((4,), max(0.0, i - 10.0))}, tmp_path / f"{i}") for i in range(21)]
    _, report = check(capsys, *paths)  # However many sides there are.
    assert sorted(rank for f in report["findings"] for rank in f["ranks"]) == list(range(11, 21))


def test_absent_names_shapes_and_dtypes(tmp_path: Path, capsys: Capture) -> None:
    other = weights()
    del other["bf16"]
    other["fp8"] = other["fp8"].float()
    other["big"] = other["big"].T.contiguous()
    code, report = check(capsys, write(weights(), tmp_path / "a"), write(other, tmp_path / "b"))
    assert code == 1
    assert {(f["kind"], f["name"]) for f in report["findings"]} == {("layout", n) for n in ("bf16", "fp8", "big")}
    details = {f["name"]: f["detail"] for f in report["findings"]}
    assert "file 1: absent" in details["bf16"]
    assert "float8_e4m3fn[33]" in details["fp8"]


def test_nan_and_infinity_are_equal_to_themselves_and_told_in_json(tmp_path: Path, capsys: Capture) -> None:
    special = {"x": torch.tensor([math.nan, math.inf, -0.0])}
    paths = [write(special, tmp_path / f"{i}") for i in range(2)]
    assert check(capsys, *paths)[0] == 0
    zero = {"x": torch.tensor([math.nan, math.inf, 0.0])}
    code, report = check(capsys, paths[0], paths[1], write(zero, tmp_path / "2"))
    assert (code, report["findings"][0]["index"], report["findings"][0]["ulp"]) == (1, [2], 0)
    bits = special["x"].clone()
    flip(bits, 0, 3)
    code, report = check(capsys, paths[0], paths[1], write({"x": bits}, tmp_path / "3"))
    assert (code, report["findings"][0]["value"], report["findings"][0]["ulp"]) == (1, "nan", None)


def trained() -> tuple[nn.Module, fp8dist.StateManager]:
    """Return a model and its manager after three steps. Every call gives the same state."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16))
    manager = fp8dist.prepare(model, fp8dist.DelayedScaling(history_len=4))
    for _ in range(3):
        model(torch.randn(2, 16)).sum().backward()
        manager.step()
    return model, manager


def test_state_dumps(tmp_path: Path, capsys: Capture) -> None:
    """``load`` refuses a scale below zero and an amax that is NaN, but ``check`` must find the damage."""
    for rank in range(4):
        _, manager = trained()
        if rank == 2:
            manager.slot("0", "weight").scale.neg_()
            manager.slot("1", "input").amax.fill_(math.nan)
        if rank == 1:
            manager._syncs[0].arena.history[3, 0] = 7.0
        manager.save(tmp_path / f"dump-{rank}.safetensors")
    path = str(tmp_path / "dump-{rank}.safetensors")
    code, report = check(capsys, path)
    assert code == 1
    found = [(f["kind"], f["name"], f["field"], f["ranks"], f["reference_rank"]) for f in report["findings"]]
    assert found == [
        ("scale", "0:weight", "scale", [2], 0),
        ("history", "1:grad_output", "history", [1], 0),
        ("history", "1:input", "amax", [2], 0),
    ]
    history = report["findings"][1]
    assert (history["value"], history["index"]) == (7.0, [1])  # The first step is at 1.
    table = printed(capsys, 1, "check", path)
    assert "'0:weight'" in table
    assert str(tmp_path / "dump-2.safetensors") in table
    assert json.loads(printed(capsys, 0, "inspect", "--json", path.replace("{rank}", "2")))["entries"]
    text = printed(capsys, 0, "inspect", path.replace("{rank}", "0"))
    assert "step: 3" in text
    row = next(line.split() for line in text.splitlines() if line.startswith("0:weight"))
    assert float(row[1]) == pytest.approx(448 / float(row[2]), rel=1e-6)
    assert "300x400" in printed(capsys, 0, "inspect", write(weights(), tmp_path / "w"))
    (tmp_path / "dump-1.safetensors").unlink()
    (tmp_path / "dump-3.safetensors").rename(tmp_path / "dump-1.safetensors")
    (tmp_path / "dump-2.safetensors").unlink()
    code, report = check(capsys, path)
    assert (code, dict(report["compared"])["scale"]) == (0, 6)


@pytest.mark.parametrize("how", ["torch", "dcp"])
def test_fp8_state_in_a_checkpoint_is_compared_and_shown_slot_by_slot(
    how: str, tmp_path: Path, capsys: Capture
) -> None:
    """Also one kind alone, and as a summary."""
    paths = []
    for name in ("one", "same", "damaged"):
        model, manager = trained()
        if name == "damaged":
            manager.slot("0", "weight").scale.mul_(2)
            manager._syncs[0].arena.history[3, 0] = 7.0
            model[0].bias.data[3] = 2.0
        paths.append(write({"model": model.state_dict(), "fp8": manager.state_dict()}, tmp_path / name, how))
    *paths, damaged = paths
    code, report = check(capsys, *paths)
    counts = {"amax": 6, "cold": 6, "counters": 6, "history": 6, "scale": 6, "step": 1, "parameter": 4}
    assert (code, dict(report["compared"])) == (0, counts)
    code, report = check(capsys, paths[0], damaged)
    assert code == 1
    assert [(f["kind"], f["name"], f["field"]) for f in report["findings"]] == [
        ("scale", "fp8.shared.0:weight", "scale"),
        ("history", "fp8.shared.1:grad_output", "history"),
        ("parameter", "model.0.bias", ""),
    ]
    assert report["findings"][1]["value"] == 7.0
    for kind, *fields in (("parameter",), ("scale", "cold"), ("history", "amax", "counters"), ("step",)):
        code, alone = check(capsys, "--only", kind, paths[0], damaged)
        assert alone["findings"] == [f for f in report["findings"] if f["kind"] == kind]
        assert (code, dict(alone["compared"])) == (int(kind != "step"), {of: counts[of] for of in (kind, *fields)})
    text = printed(capsys, 1, "check", "--summary", paths[0], damaged)
    assert re.fullmatch(r"1 scale, 1 history, 1 parameter; first: .* differ.*\n", text)
    text = printed(capsys, 1, "check", "--summary", "--only", "parameter", paths[0], damaged)
    assert "1 parameter; first: parameters differ between files: parameter 'model.0.bias'" in text
    assert printed(capsys, 0, "check", "--summary", "--only", "step", paths[0], damaged) == "consistent (1 step)\n"
    text = printed(capsys, 0, "inspect", paths[0])
    assert "FP8 state: fp8.shared\nstep: 3\nslots: 6\ncold: 0\n" in text
    assert "tensors: 4" in text
    shown = json.loads(printed(capsys, 0, "inspect", "--json", paths[0]))
    names = [f"model.{i}.{part}" for i in range(2) for part in ("bias", "weight")]
    assert [entry["name"] for entry in shown["entries"]] == names
    (state,) = shown["fp8 states"]
    assert (len(state["entries"]), state["entries"][0]["taken"]) == (6, 3)


def test_states_of_many_keys_are_told_apart_and_damage_is_named(tmp_path: Path, capsys: Capture) -> None:
    """Also if one key is a prefix of another."""
    blob = trained()[1].state_dict()["shared"]
    path = write({"fp8": blob, "fp8.rank0": blob, "fp8.rank1": blob}, tmp_path / "a", "torch")
    states = json.loads(printed(capsys, 0, "inspect", "--json", path))["fp8 states"]
    assert [(s["FP8 state"], len(s["entries"])) for s in states] == [("fp8.rank0", 6), ("fp8.rank1", 6), ("fp8", 6)]
    flipped = blob[:-9] + bytes([blob[-9] ^ 1]) + blob[-8:]
    for how, damaged in (("torch", flipped), ("dcp", flipped), ("torch", blob[:-1])):
        state = {"weight": torch.ones(2), "fp8": {"rank0": blob, "rank1": damaged}}
        path = write(state, tmp_path / f"{how}{len(damaged)}", how)
        for command in (["inspect", path], ["check", path, path]):
            assert re.fullmatch(rf"fp8dist \w+: {path}.*fp8\.rank1.*\n", printed(capsys, 3, *command))


def test_wrong_usage(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments in [[], ["check"], ["mend"], ["check", "--wrong", "a", "b"], ["inspect"]]:
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        assert stopped.value.code == 2
        assert "usage: fp8dist" in capsys.readouterr().err
    path, state = write(weights(), tmp_path / "w"), str(tmp_path / "state")
    trained()[1].save(state)
    for words, text in (
        ([path], "at least two"),
        ([path, state], "compare files of one kind"),
        (["--only", "scale", path, path], "nothing to compare"),
    ):
        assert text in printed(capsys, 2, "check", *words)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    assert "torchrun" in printed(capsys, 2, "check", path)


def test_unreadable_input_is_one_line_that_names_the_file(tmp_path: Path, capsys: Capture) -> None:
    good = write(weights(), tmp_path / "good")
    (tmp_path / "empty").touch()
    (tmp_path / "cut").write_bytes(Path(good).read_bytes()[:-10])
    for bad in ("empty", "cut", "absent", "gap-{rank}"):
        for command in (["check", good, str(tmp_path / bad)], ["inspect", str(tmp_path / bad)]):
            assert str(tmp_path / bad.partition("-")[0]) in printed(capsys, 3, *command)
    # A rank that is missing in between, also before a stray file with a huge number. Numbers may be padded.
    for name in ("r0", "r1", "r3", "h0", "h1", "h1700000000", "z-00000", "z-00001"):
        write(weights(), tmp_path / name)
    (tmp_path / "r1x").write_text("another file")
    for name, missing in (("r", "r2"), ("h", "h2")):
        assert str(tmp_path / missing) in printed(capsys, 3, "check", str(tmp_path / f"{name}{{rank}}"))
    write(weights(), tmp_path / "r2")
    for name in ("r", "z-"):
        printed(capsys, 0, "check", str(tmp_path / f"{name}{{rank}}"))


@pytest.mark.long
def test_across_ranks_each_brings_its_own(tmp_path: Path) -> None:
    wrong = weights()
    flip(wrong["bf16"], 4, 2)
    for rank in range(3):
        write(wrong if rank == 2 else weights(), tmp_path / f"{rank}.st")
    check = ("-m", "fp8dist", "check", str(tmp_path / "{rank}.st"))
    run = torchrun(3, *check)
    assert run.returncode == 1
    assert run.stdout.count("bf16") == 1
    row = next(line.split() for line in run.stdout.splitlines() if "'bf16'" in line)
    assert row[2:8] == ["parameter", "'bf16'", "2", "0", "0,", "4"]
    assert "exitcode  : 1" in run.stderr
    (tmp_path / "1.st").write_bytes((tmp_path / "1.st").read_bytes()[:-1])
    run = torchrun(3, *check)
    assert "exitcode  : 3" in run.stderr
    lines = [line for line in run.stderr.splitlines() if line.startswith("fp8dist check: ")]
    assert len(lines) == 1
    assert f"rank 1: {tmp_path / '1.st'}: " in lines[0]
    (tmp_path / "1.st").unlink()
    write(wrong, tmp_path / "1.st")
    write(wrong, tmp_path / "0.st")
    run = torchrun(3, *check, "--json")
    assert run.returncode == 0
    assert json.loads(run.stdout)["consistent"]


def _on_a_host_of_its_own(arguments: list[str]) -> int:
    """The command on a host that shares its files with the other hosts."""
    with mock.patch("socket.gethostname", return_value=f"host{os.environ['RANK']}"):
        return main(arguments)


@pytest.mark.parametrize("command", [main, _on_a_host_of_its_own])
def test_ranks_that_read_one_file_compare_nothing(command: Callable[[list[str]], int], tmp_path: Path) -> None:
    path = write(weights(), tmp_path / "0.safetensors")
    (tmp_path / "1.safetensors").write_bytes(Path(path).read_bytes())
    run = forked.run(["check", path], 2, {}, main=command)
    assert (run.returncode, run.stdout) == (2, "")
    assert "several ranks read the same file or folder: PATH must give each rank its own" in run.stderr
    run = forked.run(["check", str(tmp_path / "{rank}.safetensors")], 2, {}, main=command)
    assert run.returncode == 0
    assert "consistent (4 parameters" in run.stdout


def _anonymous() -> int:
    """Return the memory of this process in KiB, without what is mapped from files."""
    return int(Path("/proc/self/status").read_text().partition("RssAnon:")[2].split()[0])


def _check_and_tell_memory(words: list[str]) -> int:
    """Run ``fp8dist check``, and print to stderr by how many MiB the memory grew."""
    before, most, done = _anonymous(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            most[0] = max(most[0], _anonymous() - before)

    watching = threading.Thread(target=watch)
    watching.start()
    code = main(["check", "--json", *words])
    done.set()
    watching.join()
    print(most[0] // 1024, file=sys.stderr)
    return code


@pytest.mark.slow
def test_memory_does_not_grow_with_the_files(tmp_path: Path) -> None:
    """For three files of 80 MB, with tensors of 4 MB, memory stays far below one file."""
    tensors = {f"t{i}": torch.randn(1_000_000) for i in range(20)}
    for rank in range(3):
        if rank == 2:
            flip(tensors["t7"], 999_999, 1)
        save_file(tensors, tmp_path / f"{rank}")
    run = forked.run([str(tmp_path / "{rank}")], None, {}, main=_check_and_tell_memory)
    assert run.returncode == 1, run.stderr
    assert [(f["name"], f["ranks"]) for f in json.loads(run.stdout)["findings"]] == [("t7", [2])]
    assert int(run.stderr.split()[-1]) < 40


def test_more_differences_than_are_looked_into(tmp_path: Path, capsys: Capture) -> None:
    for rank in range(3):
        write({f"t{i}": torch.tensor([1.0, float(rank)]) for i in range(70)}, tmp_path / str(rank))
    code, report = check(capsys, str(tmp_path / "{rank}"))
    assert (code, len({f["name"] for f in report["findings"]})) == (1, 70)
    assert len({f["name"] for f in report["findings"] if f["index"] == [1]}) == 64
    assert "more" in printed(capsys, 1, "check", str(tmp_path / "{rank}"))


IMPORTS = """
import fp8dist.job.manager
import fp8dist.job.preparation
import fp8dist
assert not hasattr(fp8dist, "nothing")
from fp8dist import *
assert prepare is fp8dist.prepare and ddp is fp8dist.ddp and set(fp8dist.__all__) < set(dir(fp8dist))
import runpy, sys
print("imported", file=sys.stderr, flush=True)
runpy.run_module("fp8dist", run_name="__main__", alter_sys=True)
"""
"""As ``python -m fp8dist``, after imports."""


@pytest.mark.slow
def test_a_closed_pipe_does_not_change_the_verdict_and_public_names_are_there_after_any_import(tmp_path: Path) -> None:
    """Nobody reads what the process prints. Submodules may be imported first, as a pickle does."""
    wrong = weights()
    wrong["count"] += 1
    paths = [write(weights(), tmp_path / "a"), write(wrong, tmp_path / "b")]
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-c", IMPORTS, "check", *paths]
    run = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    os.close(writer)
    assert run.stderr.startswith("imported\n"), run.stderr
    assert run.returncode == 1, run.stderr


def test_the_installed_command_and_help_without_torch(capsys: Capture) -> None:
    """torch takes two seconds."""
    assert Path(sys.executable).with_name("fp8dist").exists()
    (command,) = entry_points(group="console_scripts", name="fp8dist")
    with pytest.raises(SystemExit) as left:
        command.load()(["--version"])
    assert (left.value.code, capsys.readouterr().out) == (0, f"fp8dist {fp8dist.__version__}\n")
    code = (
        "import runpy, sys\n"
        "for words in ('--help', '--version', 'watch --help', 'launch --help'):\n"
        "    sys.argv[1:] = words.split()\n"
        "    try:\n"
        "        runpy.run_module('fp8dist', run_name='__main__')\n"
        "    except SystemExit as end:\n"
        "        print(end.code, 'torch' in sys.modules, file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stderr.splitlines() == ["0 False"] * 4
    assert done.stdout.count("usage: fp8dist") == 3


def traced(path: Path, weight: float | None = None) -> str:
    """Trace a step, with one weight of ``branch`` changed. Return the path."""
    model = make_net()
    if weight is not None:
        with torch.no_grad():
            model.branch.weight[0, 0] = weight
    with fp8dist.trace(model, path):
        model(batch(0, 0)[0]).square().mean().backward()
    return str(path)


def test_the_first_difference_of_traces_is_one_sentence(tmp_path: Path, capsys: Capture) -> None:
    paths = [traced(tmp_path / "t-0"), traced(tmp_path / "b", 3.0), traced(tmp_path / "t-1")]
    equal = "consistent (5 outputs, 5 gradients)\n"
    assert printed(capsys, 0, "check", paths[0], paths[2]) == equal
    assert printed(capsys, 0, "check", str(tmp_path / "t-{rank}")) == equal
    sentence, start, *files = printed(capsys, 1, "check", *paths).splitlines()
    assert sentence.startswith(
        "file 1 first parts from files 0, 2 in the output of 'branch', call 1 (place 3 of the step)"
    )
    assert start.startswith("parameters and buffers at the start: ")
    assert files == [f"file {i}: {path}" for i, path in enumerate(paths)]
    assert printed(capsys, 1, "check", "--summary", *paths) == f"{sentence}\n"
    assert "--only is for checkpoints" in printed(capsys, 2, "check", "--only", "parameter", *paths)
    _, report = check(capsys, *paths)
    (finding,) = report["findings"]
    fields = ("kind", "name", "field", "ranks", "detail")
    assert [finding[name] for name in fields] == ["output", "branch", "digest", [1], sentence]
    assert (report["files"], report["consistent"]) == (paths, False)


@pytest.mark.long
@pytest.mark.nightly
def test_across_ranks_each_brings_its_own_trace(tmp_path: Path) -> None:
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
    write({"x": torch.zeros(2)}, tmp_path / "1")
    run = torchrun(2, *check)
    assert "exitcode  : 2" in run.stderr
    assert "is a checkpoint, and others are traces" in run.stderr


def test_traces_that_cannot_be_compared(tmp_path: Path, capsys: Capture) -> None:
    good, checkpoint = traced(tmp_path / "a"), write({"x": torch.zeros(2)}, tmp_path / "b.safetensors")
    for paths in ([good, checkpoint], [checkpoint, good]):
        assert f"{checkpoint} is a checkpoint, and others are traces" in printed(capsys, 2, "check", *paths)
    printed(capsys, 2, "check", good)
    bad = tmp_path / "bad"
    bad.write_bytes(Path(good).read_bytes()[:-1])
    assert printed(capsys, 3, "check", good, str(bad)).startswith(f"fp8dist check: {bad}: ")
    text = printed(capsys, 3, "inspect", good)
    assert "is a trace, not a checkpoint: compare it with other traces by fp8dist check" in text

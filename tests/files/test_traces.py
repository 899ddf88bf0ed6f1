"""``fp8dist.trace``: the file of a step, the first place where two steps part, damage of every kind, and comparison
across ranks."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fp8dist
from fp8dist import ConfigurationError, DelayedScaling
from fp8dist.checks.outputs import Place, Taken
from fp8dist.checks.report import DivergenceReport
from fp8dist.errors import CheckpointError
from fp8dist.files.partings import compare_traces, compare_traces_of_ranks, traces_text
from fp8dist.files.sources import open_source
from fp8dist.files.traces import Head, is_trace, open_trace, trace_bytes
from fp8dist.state.groups import SyncGroup
from tests.support.ranks import RankPool, on_ranks
from tests.support.suite import few
from tests.support.training import batch, gradient_bits, make_net

Run = Callable[[nn.Module, Tensor], Tensor]


class Block(nn.Module):
    """Attention and a Linear, with an in-place activation and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.act, self.drop = nn.ReLU(inplace=True), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(2, 16, 3, 2, 16).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2, 16, 32)
        return x + self.drop(self.act(self.out(mixed)))


class Stack(nn.Module):
    """Two blocks that ``run`` calls."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.run(block, x)
        return x


def plain(block: nn.Module, x: Tensor) -> Tensor:
    return block(x)


def reentrant(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(block, x, use_reentrant=True)


def non_reentrant(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(block, x, use_reentrant=False)


def traced(
    path: Path,
    run: Run = plain,
    change: Callable[[Stack], object] = lambda model: None,
    fp8: bool = False,
) -> str:
    """Trace a step of the same model on the same data, after a change. Return the file's path."""
    torch.manual_seed(0)
    model = Stack(run)
    if fp8:
        fp8dist.prepare(model, DelayedScaling(history_len=4))
    x = torch.randn(2, 16, 32, requires_grad=True)
    torch.manual_seed(1)
    change(model)
    with fp8dist.trace(model, path):
        model(x).square().mean().backward()
    return str(path)


def lines_of(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def compared(*paths: str) -> DivergenceReport:
    return compare_traces(paths)


def test_a_file_has_each_place_in_order_and_a_checksum(tmp_path: Path) -> None:
    path = traced(tmp_path / "a")
    head, *rows, last = lines_of(path)
    assert (head["format"], head["version"], head["rank"], head["ranks"]) == ("fp8dist trace", 1, 0, 1)
    inner = ["qkv", "out", "act", "drop", ""]
    names = [f"blocks.{i}.{name}".rstrip(".") for i in range(2) for name in inner]
    assert [row["module"] for row in rows if row["what"] == "output"] == [*names, ""]
    gradients = [row["module"] for row in rows if row["what"] == "gradient"]
    # Autograd drops hooks on a view that is changed in place, as the outputs of these Linears are.
    assert sorted(gradients) == sorted({*names, ""} - {"blocks.0.out", "blocks.1.out"})
    assert gradients.index("blocks.1.drop") < gradients.index("blocks.1.qkv") < gradients.index("blocks.0.qkv")
    assert rows[0]["shape"] == [2, 16, 96]
    assert not any(row["nonfinite"] for row in rows)
    content, _, _ = Path(path).read_bytes().removesuffix(b"\n").rpartition(b"\n")
    assert last == {"places": len(rows), "sha256": hashlib.sha256(content + b"\n").hexdigest()}


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("run", [plain, reentrant, non_reentrant])
def test_equal_steps_give_equal_bytes(run: Run, fp8: bool, tmp_path: Path) -> None:
    """A recomputation shows as a further call of the same modules, with the same bits."""
    first, second = traced(tmp_path / "a", run, fp8=fp8), traced(tmp_path / "b", run, fp8=fp8)
    assert Path(first).read_bytes() == Path(second).read_bytes()
    assert compared(first, second).consistent
    calls = {row["call"]: row["digest"] for row in lines_of(first)[1:-1] if row["module"] == "blocks.0.qkv"}
    assert set(calls) == ({0} if run is plain else {0, 1})
    digests = {row["digest"] for row in lines_of(first)[1:-1] if row["module"] == "blocks.0.qkv"}
    assert len(digests) == 2  # One of the outputs, one of the gradient.


@pytest.mark.parametrize("fp8", [False, True])
def test_tracing_changes_no_bit(fp8: bool, tmp_path: Path) -> None:
    def gradients(trace: bool) -> dict[str, bytes | None]:
        model = make_net()
        if fp8:
            fp8dist.prepare(model, DelayedScaling(history_len=4))
        with fp8dist.trace(model, tmp_path / "a") if trace else contextlib.nullcontext():
            model(batch(0, 0)[0]).square().mean().backward()
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
        return gradient_bits(model)

    assert gradients(True) == gradients(False)


@torch.no_grad()
def _nudge(parameter: Tensor) -> None:
    parameter.view(-1)[3] += 1


@torch.no_grad()
def _poison(model: Stack) -> None:
    model.blocks[1].out.bias[3] = torch.nan


def _double(model: Stack) -> None:
    model.blocks[1].register_forward_hook(lambda module, args, output: output.register_hook(lambda g: g * 2) and None)


CHANGED, RANDOM = "parameters and buffers at the start: ", "random numbers at the start: "
SAME = "the same in all: random numbers, parameters and buffers, inputs, "
NOT_FINITE = "the first value that is not finite: file 1: output of 'blocks.1.out', call 1"
FLASH = "flash attention: True on file 0; False on file 1"


@pytest.mark.parametrize(
    ("change", "place", "detail", "noted"),
    [
        (lambda model: _nudge(model.blocks[1].qkv.weight), ("output", "blocks.1.qkv"), "(place 6 of the", [CHANGED]),
        (lambda model: _nudge(model.blocks[1].out.weight), ("output", "blocks.1.out"), "(place 7 of the", [CHANGED]),
        (lambda model: torch.manual_seed(2), ("output", "blocks.0.drop"), "bits", [RANDOM]),
        (_double, ("gradient", "blocks.1"), "bits", [SAME]),
        (_poison, ("output", "blocks.1.out"), "… (not finite) on file 1", [NOT_FINITE, CHANGED]),
        # The flag also chooses the CPU's kernel. The first module after the attention is named.
        (lambda model: torch.backends.cuda.enable_flash_sdp(False), ("output", "blocks.0.out"), "bits", [FLASH]),
    ],
    ids=["weight", "another weight", "random numbers", "gradient", "not finite", "kernel"],
)
def test_the_first_difference_is_named_with_what_differs_at_the_start(
    tmp_path: Path, change: Callable[[Stack], object], place: tuple[str, str], detail: str, noted: list[str]
) -> None:
    good = traced(tmp_path / "a")
    try:
        report = compared(good, traced(tmp_path / "b", change=change))
    finally:
        torch.backends.cuda.enable_flash_sdp(True)
    (finding,) = report.findings
    assert (finding.kind, finding.name, finding.field) == (*place, "digest")
    assert detail in finding.detail
    notes = (CHANGED, RANDOM, SAME, NOT_FINITE, FLASH)
    assert {one for one in notes if any(note.startswith(one) for note in report.notes)} == set(noted)
    assert traces_text(report).startswith("the traces first part in the ")


def test_other_modules_and_other_shapes(tmp_path: Path) -> None:
    good = traced(tmp_path / "a")
    skips = traced(tmp_path / "b", run=lambda block, x: block.out(x))
    (finding,) = compared(good, skips).findings
    assert (finding.kind, finding.field) == ("layout", "module")
    assert finding.values == ("output of 'blocks.0.qkv', call 1", "output of 'blocks.0.out', call 1")
    low = traced(tmp_path / "c", run=lambda block, x: block.bfloat16()(x.bfloat16()))
    (finding,) = compared(good, low).findings
    assert (finding.kind, finding.field) == ("layout", "layout")
    assert finding.values == ("float32[2, 16, 96]", "bfloat16[2, 16, 96]")


def test_a_step_that_raises_leaves_no_file(tmp_path: Path) -> None:
    model = make_net()
    with pytest.raises(RuntimeError, match="shapes"), fp8dist.trace(model, tmp_path / "a"):
        model(torch.randn(4, 5))
    with (
        pytest.raises(ConfigurationError, match="no module of the model was called"),
        fp8dist.trace(model, tmp_path / "a"),
    ):
        pass
    with pytest.raises(ConfigurationError, match="trace\\(\\) takes the model"), fp8dist.trace([model], "a"):  # type: ignore[arg-type]
        pass
    assert list(tmp_path.iterdir()) == []
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.slow
@pytest.mark.parametrize("whole", few([False, True], False))
def test_compiled_modules_stand_for_what_is_in_them(whole: bool, tmp_path: Path) -> None:
    def compile_it(model: Stack) -> None:
        for module in [model] if whole else model.blocks:
            module.compile(backend="aot_eager")

    first, second = (traced(tmp_path / name, change=compile_it) for name in "ab")
    assert Path(first).read_bytes() == Path(second).read_bytes()
    names = ["blocks.0", "blocks.1", ""]
    outputs = [row["module"] for row in lines_of(first)[1:-1] if row["what"] == "output"]
    assert outputs == (names[-1:] if whole else names)
    bad = traced(tmp_path / "c", change=lambda model: (compile_it(model), _nudge(model.blocks[1].out.bias)))
    assert compared(first, bad).findings[0].name == ("" if whole else "blocks.1")


@pytest.mark.slow
@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
@on_ranks(2)
def test_each_rank_writes_its_own(wrap: str, tmp_path: Path) -> None:
    """Of three runs, the third has another weight in ``branch``; ranks have other data."""
    rank = dist.get_rank()
    for run in ("good", "again", "bad"):
        model = make_net()
        if run == "bad":
            _nudge(model.branch.weight)
        wrapped: nn.Module = DistributedDataParallel(model) if wrap == "ddp" else model
        for part in (model.branch, model) if wrap == "fsdp2" else ():
            fully_shard(part)
        with fp8dist.trace(wrapped, f"{tmp_path}/{run}-{{rank}}"):
            wrapped(batch(rank, 0)[0]).square().mean().backward()
    good, again, bad = (str(tmp_path / f"{run}-{rank}") for run in ("good", "again", "bad"))
    assert [lines_of(good)[0][name] for name in ("rank", "ranks")] == [rank, 2]
    assert Path(good).read_bytes() == Path(again).read_bytes()
    assert compared(good, bad).findings[0].name == "branch"
    dist.barrier()
    across = compared(*(str(tmp_path / f"good-{rank}") for rank in range(2)))
    assert across.findings[0].name == "first"
    told = "the inputs differ, as they do on ranks that share out a batch"
    assert any(note.startswith(told) for note in across.notes)


# Files that are read: damage, hostile content, other versions


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
    text = traces_text(compared(str(tmp_path / "b"), str(tmp_path / "c")))
    sentence = text.splitlines()[0]
    assert sentence.isprintable()
    assert "\\x1b[31m\\ud800yyy" in sentence
    assert sentence.endswith("the bits differ: 11111111… on file 0; 22222222… on file 1")


def test_versions_and_flags_that_differ_are_named(tmp_path: Path) -> None:
    other = head(host="b", likeness="a CPU, 4 threads; torch 2.13.0; CUDA None", settings={"mkldnn": False, "new": 3})
    paths = [trace(tmp_path / "a", [1, 2]), trace(tmp_path / "b", [1, 3], other), trace(tmp_path / "c", [1, 2])]
    report = compared(*map(str, paths))
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
    assert compared(str(paths[0]), str(paths[2])).notes == ()
    same = compared(str(paths[0]), str(trace(tmp_path / "d", [1, 2], other)))
    assert same.consistent
    assert "machine: torch 2.11.0 on file 0; torch 2.13.0 on file 1" in traces_text(same)


def test_a_trace_that_ends_earlier_or_is_damaged_later(tmp_path: Path) -> None:
    whole, bad = str(trace(tmp_path / "a", [1, 2, 3])), trace(tmp_path / "b", [1, 2])
    report = compared(whole, str(bad))
    assert report.findings[0].detail == (
        "the traces first part at place 3 of the step: other modules run: output of 'layers.2', call 1 on file 0; "
        "the end on file 1"
    )
    assert report.compared == {"output": 3}
    trace(bad, [9, 2, 3])
    bad.write_bytes(bad.read_bytes().replace(b"layers.2", b"layers.3"))
    with pytest.raises(CheckpointError, match="checksum"):
        compared(whole, str(bad))


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

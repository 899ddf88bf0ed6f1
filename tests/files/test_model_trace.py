"""``fp8dist.trace``: the file of a step, and the first place where two steps part."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable
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
from fp8dist.checks.report import DivergenceReport
from fp8dist.files.partings import compare_traces, traces_text
from tests.support.ranks import on_ranks
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
    seed: int = 1,
    fp8: bool = False,
) -> str:
    """Trace a step of the same model on the same data, after a change. Return the file's path."""
    torch.manual_seed(0)
    model = Stack(run)
    if fp8:
        fp8dist.prepare(model, DelayedScaling(history_len=4))
    x = torch.randn(2, 16, 32, requires_grad=True)
    torch.manual_seed(seed)
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

"""``fp8dist.trace``: the file of a step, and the first place where two steps part."""

from __future__ import annotations

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
        if trace:
            with fp8dist.trace(model, tmp_path / "a"):
                model(batch(0, 0)[0]).square().mean().backward()
        else:
            model(batch(0, 0)[0]).square().mean().backward()
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
        return gradient_bits(model)

    assert gradients(True) == gradients(False)


@torch.no_grad()
def _nudge(parameter: Tensor) -> None:
    parameter.view(-1)[3] += 1


def test_a_changed_weight_is_named_by_its_module(tmp_path: Path) -> None:
    for i, name in enumerate(("qkv", "out")):
        good = traced(tmp_path / "a")
        bad = traced(tmp_path / "b", change=lambda model, name=name: _nudge(getattr(model.blocks[1], name).weight))
        (finding,) = compared(good, bad).findings
        assert (finding.kind, finding.name, finding.field) == ("output", f"blocks.1.{name}", "digest")
        text = traces_text(compared(good, bad))
        assert text.startswith(
            f"the traces first part in the output of 'blocks.1.{name}', call 1 (place {6 + i} of the step): the bits "
        )
        assert "\nparameters and buffers at the start: " in text
        assert "random numbers" not in text


def test_other_random_numbers_part_at_the_dropout(tmp_path: Path) -> None:
    report = compared(traced(tmp_path / "a"), traced(tmp_path / "b", seed=2))
    assert report.findings[0].name == "blocks.0.drop"
    notes = "\n".join(report.notes)
    assert "random numbers at the start: " in notes
    assert "parameters" not in notes


def test_another_kernel_is_told_by_its_flag(tmp_path: Path) -> None:
    good = traced(tmp_path / "a")
    torch.backends.cuda.enable_flash_sdp(False)  # The flag also chooses the CPU's kernel.
    try:
        bad = traced(tmp_path / "b")
    finally:
        torch.backends.cuda.enable_flash_sdp(True)
    report = compared(good, bad)
    assert report.findings[0].name == "blocks.0.out"  # The first module after the attention.
    assert report.notes[0] == "flash attention: True on file 0; False on file 1"
    assert len(report.notes) == 3  # And the paths of the files.


def test_a_wrong_gradient_is_told_from_a_wrong_output(tmp_path: Path) -> None:
    def hook(model: Stack) -> None:
        model.blocks[1].register_forward_hook(
            lambda module, args, output: output.register_hook(lambda g: g * 2) and None
        )

    report = compared(traced(tmp_path / "a"), traced(tmp_path / "b", change=hook))
    assert (report.findings[0].kind, report.findings[0].name) == ("gradient", "blocks.1")
    assert any(
        note.startswith("the same in all: random numbers, parameters and buffers, inputs, ") for note in report.notes
    )


def test_the_first_value_that_is_not_finite_is_told(tmp_path: Path) -> None:
    def poison(model: Stack) -> None:
        with torch.no_grad():
            model.blocks[1].out.bias[3] = torch.nan

    report = compared(traced(tmp_path / "a"), traced(tmp_path / "b", change=poison))
    assert report.notes[0] == "the first value that is not finite: file 1: output of 'blocks.1.out', call 1"
    assert report.findings[0].detail.endswith("… (not finite) on file 1")


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

"""Known answers on a GPU: equal each time and on all ranks, and equal to plain torch where that is exact."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fp8dist
from fp8dist import DelayedScaling
from fp8dist.cli import burn as burning
from fp8dist.cli.burn import burn
from fp8dist_kernels.reference.operands import operand
from tests.support.answers import FIELDS, flipping
from tests.support.devices import DEVICE, needs_gpu
from tests.support.logs import captured_log
from tests.support.ranks import RankPool

pytestmark = [needs_gpu, pytest.mark.slow]


@pytest.mark.parametrize("dtype", FIELDS)
def test_a_gpu_makes_the_same_operands(dtype: torch.dtype) -> None:
    found, expected = (operand((48, 48), dtype, 0, torch.device(device)).cpu() for device in (DEVICE, "cpu"))
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("size", ["small", "large"])
def test_a_gpu_computes_the_same_each_time(size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if size == "small":
        monkeypatch.setattr(burning, "_SHAPE_ON_GPU", (64, 32))
        monkeypatch.setattr(burning, "_RECIPES", (DelayedScaling(),))
    burned = burn(torch.device(DEVICE, 0), 0.5)
    assert burned.differences == []
    assert burned.repetitions > 0


def _planted() -> Any:
    if DEVICE == "cuda":
        torch.cuda.set_device(0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 256)).to(DEVICE, torch.bfloat16)
    manager = fp8dist.prepare(model, group=dist.group.WORLD, check_policy="warn").attach()
    assert manager._cycle.checker.checks == (DEVICE == "cuda")  # On GPUs, attach() compares known answers.
    with captured_log():
        clean = manager.check(compute=True)
        with flipping("matmul", (256, 128), 2 * (5 * 256 + 7), 0) if dist.get_rank() == 1 else contextlib.nullcontext():
            report = manager.check(compute=True, policy="warn")
    found = [(f.name.split()[0], f.ranks, f.index, f.devices) for f in report.findings]
    return clean.compared["computation"], clean.consistent, found


def test_two_ranks_on_one_gpu_and_a_planted_bit(two_ranks: RankPool) -> None:
    found = [("fprop", (0, 1), (5, 7), (f"{DEVICE}:0",) * 2)]
    assert two_ranks.run(_planted) == [(6, True, found)] * 2

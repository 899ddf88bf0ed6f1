"""Launches and bytes of an FP8Linear, counted, against the figures of ``scripts/benchmarks/roofline.py``."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fp8dist
from fp8dist.modules.fp8_weight import FP8Weight, Gathered
from fp8dist.modules.outgrown import Outgrown
from scripts.benchmarks.host import Launched, without_launches
from scripts.benchmarks.llama_shapes import RECIPES, Layer
from scripts.benchmarks.roofline import BYTES, LAUNCHES, gain
from tests.support import interpreter  # noqa: F401 - Triton's interpreter stands for a GPU's kernels.

TOKENS, IN, OUT = 1024, 512, 256


def _counted(launched: Launched, recipe: fp8dist.Recipe, bias: bool) -> tuple[int, int]:
    """Return launches and bytes of a forward and backward, when the host knows that no slot is cold."""
    model = nn.Sequential(nn.Linear(IN, OUT, bias=bias, dtype=torch.bfloat16))
    manager = fp8dist.prepare(model, recipe, backend="triton")
    manager.attach(model, boundary="manual")
    x = torch.randn(TOKENS, IN, dtype=torch.bfloat16, requires_grad=True)
    for _ in range(3):
        for one in (launched.names, launched.moved):
            one.clear()
        model(x).backward(torch.randn(TOKENS, OUT, dtype=torch.bfloat16))
        for sync in manager._syncs:
            sync.arena.pending.fill_(1.0)
        manager.step()
    names = [name for name in launched.names if name not in ("_launch_kernel", "_commit_kernel")]
    return len(names), sum(launched.moved)


@pytest.mark.parametrize("name", RECIPES)
def test_launches_and_bytes(name: str) -> None:
    each, expected = BYTES[name], LAUNCHES[name]
    with without_launches("triton") as launched:
        launched.sizes = True
        for bias in (False, True):
            count, moved = _counted(launched, RECIPES[name], bias)
            assert count == expected[bias]
            of_gradient = each.gradient + bias * each.bias
            floor = TOKENS * IN * each.input + IN * OUT * each.weight + TOKENS * OUT * of_gradient
            assert moved == pytest.approx(floor, rel=0.06), "the rest are scales and amaxes"


def test_a_gathered_weight_takes_one_launch_more() -> None:
    """It was torch's copy, byte by byte."""
    linear = nn.Sequential(nn.Linear(64, 48, bias=False))
    fp8dist.prepare(linear, fp8dist.DelayedScaling(), backend="triton")
    slots = linear[0].fp8_slots
    rows = torch.randn(48, 64).to(torch.float8_e4m3fn)
    weight = FP8Weight(Gathered(rows, torch.ones(())), torch.bfloat16)
    state = slots.states(torch.device("cpu"))[1]  # type: ignore[union-attr, operator]
    with without_launches("triton") as launched:
        launched.sizes = True
        slots.backward_cast(weight, state, Outgrown(None))  # type: ignore[union-attr, operator]
    assert (launched.names, launched.moved) == (["_transpose_kernel"], [2 * 48 * 64])
    turned: Tensor = slots.backward_cast(weight, state, Outgrown(None))[0]  # type: ignore[union-attr, operator]
    assert torch.equal(turned.view(torch.uint8), rows.t().contiguous().view(torch.uint8))


def test_estimates() -> None:
    """The two shapes of the page's text, and that larger shapes gain more: casts weigh as 1 / in + 1 / out + 1 / m."""
    square = Layer("", 4096, 4096)
    found = [gain(8192, square, fast=fast, reused=reused) for fast in (False, True) for reused in (False, True)]
    assert [round(one, 2) for one in found] == [1.1, 1.14, 1.28, 1.35]
    for fast, limit in ((False, 1.29), (True, 1.57)):
        gains = [gain(2 * width, Layer("", width, width), fast=fast) for width in (2048, 4096, 8192, 16384, 1 << 20)]
        assert gains == sorted(gains)
        assert gains[-1] == pytest.approx(limit, abs=0.01)

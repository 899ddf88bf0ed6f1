"""Launches and bytes of an FP8Linear, counted, against the figures of ``scripts/benchmarks/roofline.py``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8dist
from fp8dist.modules.fp8_weight import FP8Weight, Gathered
from fp8dist.modules.outgrown import Outgrown
from fp8dist_kernels import ops
from fp8dist_kernels.multipliers import Machine
from scripts.benchmarks.host import Launched, without_launches
from scripts.benchmarks.llama_shapes import RECIPES
from scripts.benchmarks.roofline import BYTES, LAUNCHES
from tests.support import interpreter  # noqa: F401 - Triton's interpreter stands for a GPU's kernels.

TOKENS, IN, OUT = 1024, 512, 256


def _counted(launched: Launched, recipe: fp8dist.Recipe, bias: bool) -> tuple[int, int]:
    """Return launches and bytes of a forward and backward of hot slots."""
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


@pytest.mark.parametrize(("name", "captures"), [*((name, False) for name in BYTES), ("delayed", True)])
def test_launches_and_bytes(monkeypatch: pytest.MonkeyPatch, name: str, captures: bool) -> None:
    """A graph takes no launch more. Its casts look on the device if a slot is cold: each input and gradient took an
    amax launch for that."""
    if captures:
        monkeypatch.setattr("fp8dist.modules.casters.capturing", lambda device: True)
    each, expected = BYTES[name], LAUNCHES[name]
    with without_launches("triton") as launched:
        launched.sizes = True
        for bias in (False, True):
            count, moved = _counted(launched, RECIPES[name], bias)
            assert count == expected[bias]
            of_gradient = each.gradient + bias * each.bias
            floor = TOKENS * IN * each.input + IN * OUT * each.weight + TOKENS * OUT * of_gradient
            assert moved == pytest.approx(floor, rel=0.06), "the rest are scales and amaxes"


@pytest.mark.parametrize("recipe", ["delayed", "block"])
@pytest.mark.parametrize("capability", [(9, 0), (10, 0)])
def test_a_gathered_weight_takes_one_launch_more_if_at_all(
    capability: tuple[int, int], recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hopper multiplies one layout only. The transposition was torch's copy, byte by byte."""
    monkeypatch.setattr(ops, "machine_of", lambda device: Machine(capability, (13, 0), (2, 11)))
    linear = nn.Sequential(nn.Linear(64, 48, bias=False))
    fp8dist.prepare(linear, RECIPES[recipe], backend="triton")
    slots: Any = linear[0].fp8_slots
    rows = torch.randn(48, 64).to(torch.float8_e4m3fn)
    one = torch.ones(()) if recipe == "delayed" else torch.ones(1, 1)
    weight = FP8Weight(Gathered(rows, one), torch.bfloat16)
    gradient = torch.randn(32, 48).to(torch.float8_e4m3fn)
    of_gradient = torch.ones(()) if recipe == "delayed" else torch.ones(32, 1)

    def dgrad() -> Tensor:
        turned = slots.backward_cast(weight, slots.states(torch.device("cpu"))[1], Outgrown(None))
        product: Tensor = slots.matmul((gradient, of_gradient), turned, torch.float32, "dgrad")
        return product

    with without_launches("triton") as launched:
        launched.sizes = True
        dgrad()
    transposed = capability == (9, 0)
    assert launched.names[:-1] == ["_transpose_kernel"] * transposed
    assert launched.moved == [*([2 * 48 * 64] * transposed), 0]
    assert torch.allclose(dgrad(), gradient.float() @ rows.float(), rtol=1e-4, atol=1e-3)

"""torch.compile on a GPU: a prepared model in one graph, compiled once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fp8dist
from fp8dist import DelayedScaling
from tests.support.devices import DEVICE, needs_gpu
from tests.support.linear import inputs
from tests.support.training import parameter_bits, state_bits

pytestmark = [needs_gpu, pytest.mark.filterwarnings("default"), pytest.mark.slow]  # Inductor warns on a CPU.

STEPS, WARM = 10, 3


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.up = nn.Linear(64, 128)
        self.down = nn.Linear(128, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


def _train(compiler: str | None, update: Any) -> tuple[list[float], dict[str, bytes], dict[str, bytes]]:
    block = _Block().to(DEVICE)
    manager = fp8dist.prepare(block, DelayedScaling(history_len=4, update=update))
    optimizer = torch.optim.SGD(block.parameters(), lr=0.05)
    manager.attach(block, optimizer=optimizer)
    forward = block if compiler is None else torch.compile(block, fullgraph=True, backend=compiler)
    losses = []
    for step in range(STEPS):
        x = inputs(32, 64, seed=20 + step).to(DEVICE) * (1 + step % 5)
        with torch._dynamo.config.patch(error_on_recompile=step >= WARM):
            loss = forward(x).square().mean()
            loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    assert manager.steps == STEPS
    torch._dynamo.reset()
    return losses, state_bits(manager), parameter_bits(block)


@pytest.mark.parametrize("update", ["same_step", "next_step"])
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_it_is_compiled_once_and_trains_as_in_eager_mode(compiler: str, update: str) -> None:
    expected, mine = _train(None, update), _train(compiler, update)
    if compiler == "aot_eager":
        assert mine == expected
    # Inductor's kernels round differently, so some FP8 values differ.
    assert mine[0] == pytest.approx(expected[0], rel=0.02)

"""Each recipe under torch.compile and activation checkpointing gives the losses, gradients and weights of eager
mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fp8dist
from fp8dist import BlockScaling, CurrentScaling, DelayedScaling, Recipe, RowwiseScaling
from fp8dist.modules.overrides import High
from tests.support.gemms import Gemms
from tests.support.linear import inputs
from tests.support.training import bits, gradient_bits, parameter_bits, state_bits

Overrides = dict[str, Recipe | High]

CASES: dict[str, tuple[Recipe, Overrides]] = {
    "delayed": (DelayedScaling(history_len=4), {}),
    "current": (CurrentScaling(), {}),
    "row-wise": (RowwiseScaling(format="hybrid"), {}),
    "blocks": (BlockScaling(power_of_two=True), {}),
    "delayed, wgrad high": (DelayedScaling(history_len=4, high_precision=("wgrad",)), {}),
    "current, dgrad high": (CurrentScaling(high_precision=("dgrad",)), {}),
    "row-wise, fprop high": (RowwiseScaling(high_precision=("fprop",)), {}),
    "blocks, fprop and wgrad high": (BlockScaling(high_precision=("fprop", "wgrad")), {}),
    "three in one": (DelayedScaling(history_len=4), {"blocks.0.up": BlockScaling(), "*.1.*": RowwiseScaling()}),
    "first and last high": (CurrentScaling(), {"blocks.0.*": "high", "blocks.1.down": "high"}),
}


class Block(nn.Module):
    """Two Linears with irregular sizes and an operation in between."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(48, 144)
        self.down = nn.Linear(144, 48, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Stack(nn.Module):
    """Two blocks, recomputed in backward on request."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x


def train(case: str, compiled: bool = False, checkpointed: bool = False, dynamic: bool | None = None) -> Any:
    """Four steps of two microbatches each. Nothing may be compiled twice. ``dynamic``: the steps differ in size."""
    recipe, overrides = CASES[case]
    stack = Stack(checkpointed)
    manager = fp8dist.prepare(stack, recipe, overrides=overrides)
    optimizer = torch.optim.SGD(stack.parameters(), lr=0.05)
    manager.attach(stack, optimizer=optimizer)
    forward = torch.compile(stack, fullgraph=True, backend="aot_eager", dynamic=dynamic) if compiled else stack
    seen = []
    for step in range(4):
        with torch._dynamo.config.patch(error_on_recompile=step > 0):
            for micro in range(2):
                tokens = 35 + 5 * step if dynamic else 35
                loss = forward(inputs(tokens, 48, seed=20 + 2 * step + micro) * (1 + step)).square().mean()
                loss.backward()
                seen.append(bits(loss))
        seen.append(gradient_bits(stack))
        optimizer.step()
        optimizer.zero_grad()
    torch._dynamo.reset()
    return seen, state_bits(manager), parameter_bits(stack)


@pytest.mark.parametrize(
    "case", ["row-wise, fprop high", "blocks, fprop and wgrad high", "three in one", "first and last high"]
)
def test_checkpointed_it_trains_as_without(case: str) -> None:
    assert train(case, checkpointed=True) == train(case)


@pytest.mark.parametrize(
    ("case", "checkpointed"),
    [
        ("row-wise", False),
        ("blocks, fprop and wgrad high", False),
        ("current, dgrad high", False),
        ("three in one", False),
        ("three in one", True),
        ("first and last high", False),
    ],
)
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo does it itself.
@pytest.mark.slow
def test_compiled_in_one_graph_it_trains_as_in_eager_mode(case: str, checkpointed: bool) -> None:
    assert train(case, compiled=True, checkpointed=checkpointed) == train(case)


@pytest.mark.parametrize("case", ["row-wise", "three in one"])
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.slow
def test_compiled_for_all_sizes_it_trains_as_in_eager_mode(case: str) -> None:
    assert train(case, compiled=True, dynamic=True) == train(case, dynamic=True)


def test_a_recomputed_forward_multiplies_the_same_bytes() -> None:
    """The forwards' products run twice, in every recipe."""
    for case, (recipe, overrides) in CASES.items():
        products = []
        for checkpointed in (False, True):
            stack = Stack(checkpointed)
            fp8dist.prepare(stack, recipe, overrides=overrides)
            with Gemms() as gemms:
                stack(inputs(35, 48)).square().mean().backward()
            products.append({bits(gemm.a) + bits(gemm.b) for gemm in gemms.seen})
        assert products[0] == products[1], case

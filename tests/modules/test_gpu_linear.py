"""FP8Linear and FP8Experts on a GPU: training steps as on a CPU, in which plain torch emulates FP8."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fp8dist
from fp8dist import BlockScaling, DelayedScaling, RowwiseScaling
from tests.support.devices import DEVICE, needs_gpu
from tests.support.sharded_experts import Routed, routed_batch
from tests.support.training import batch, make_net

pytestmark = [needs_gpu, pytest.mark.slow]

Model = tuple[nn.Module, Callable[[int], tuple[torch.Tensor, torch.Tensor]]]
"""A model, and its batches by step: inputs and targets."""

STEPS = 4
RECIPES = {
    "delayed": DelayedScaling(history_len=3),
    "delayed, next step": DelayedScaling(history_len=3, update="next_step"),
    "rowwise": RowwiseScaling(),
    "blocks": BlockScaling(),
}


def _routed(dtype: torch.dtype) -> Model:
    torch.manual_seed(0)
    return Routed().to(dtype), lambda index: (of := routed_batch(0, index, 4).to(dtype), of[:, :32])


MODELS: dict[str, Callable[[], Model]] = {
    "linears": lambda: (make_net(), lambda index: batch(0, index)),
    "experts": lambda: _routed(torch.float32),
    "experts in bf16": lambda: _routed(torch.bfloat16),
}


def _trained(device: str, name: str, recipe: Any, backend: str) -> tuple[list[float], list[torch.Tensor]]:
    """Return the losses and the first step's gradients."""
    model, batch_of = MODELS[name]()
    model = model.to(device)
    manager = fp8dist.prepare(model, recipe, backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    manager.attach(model, optimizer=optimizer)
    losses, gradients = [], []
    for index in range(STEPS):
        x, y = (part.to(device) for part in batch_of(index))
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        if index == 0:
            gradients = [parameter.grad.cpu().float() for parameter in model.parameters() if parameter.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    manager.poll()
    return losses, gradients


@pytest.mark.parametrize("backend", ["auto", "triton", "torch"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", MODELS)
def test_it_trains_as_on_a_cpu(name: str, recipe: str, backend: str) -> None:
    losses, gradients = _trained(DEVICE, name, RECIPES[recipe], backend)
    expected, theirs = _trained("cpu", name, RECIPES[recipe], "reference")
    # Products add in another order, so some FP8 values round differently.
    assert losses[0] == pytest.approx(expected[0], rel=5e-3)
    assert losses == pytest.approx(expected, rel=0.05)
    assert len(gradients) == len(theirs) > 0
    for mine, other in zip(gradients, theirs):
        assert float((mine - other).norm() / other.norm()) <= 0.05

"""FP8Linear on a GPU: training steps as on a CPU, in which plain torch emulates FP8."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fp8dist
from fp8dist import BlockScaling, DelayedScaling, RowwiseScaling
from tests.support.devices import DEVICE, needs_gpu
from tests.support.training import batch, make_net

pytestmark = [needs_gpu, pytest.mark.slow]

STEPS = 4
RECIPES = {
    "delayed": DelayedScaling(history_len=3),
    "delayed, next step": DelayedScaling(history_len=3, update="next_step"),
    "rowwise": RowwiseScaling(),
    "blocks": BlockScaling(),
}


def _trained(device: str, recipe: Any, backend: str) -> tuple[list[float], list[torch.Tensor]]:
    """Return the losses and the first step's gradients."""
    model = make_net().to(device)
    manager = fp8dist.prepare(model, recipe, backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    manager.attach(model, optimizer=optimizer)
    losses, gradients = [], []
    for index in range(STEPS):
        x, y = (part.to(device) for part in batch(0, index))
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        if index == 0:
            gradients = [parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    manager.poll()
    return losses, gradients


@pytest.mark.parametrize("backend", ["auto", "triton", "torch"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_it_trains_as_on_a_cpu(recipe: str, backend: str) -> None:
    losses, gradients = _trained(DEVICE, RECIPES[recipe], backend)
    expected, theirs = _trained("cpu", RECIPES[recipe], "reference")
    # Products add in another order, so some FP8 values round differently.
    assert losses[0] == pytest.approx(expected[0], rel=5e-3)
    assert losses == pytest.approx(expected, rel=0.05)
    assert len(gradients) == len(theirs) > 0
    for mine, other in zip(gradients, theirs):
        assert float((mine - other).norm() / other.norm()) <= 0.05

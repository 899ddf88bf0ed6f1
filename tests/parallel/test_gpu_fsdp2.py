"""FSDP2 on a GPU: one rank with NCCL trains as the unsharded model does, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fp8dist
from fp8dist import CurrentScaling, DelayedScaling
from tests.support.devices import DEVICE, needs_gpu
from tests.support.training import batch, make_net

pytestmark = [needs_gpu, pytest.mark.slow]

STEPS = 4


def _train(recipe: Any, sharded: bool, fp8_all_gather: bool) -> list[float]:
    mesh = init_device_mesh(DEVICE, (1,))
    model = make_net().to(DEVICE)
    manager = fp8dist.prepare(model, recipe, group=mesh, fp8_all_gather=fp8_all_gather)
    if sharded:
        for layer in model.children():
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    manager.attach(model, optimizer=optimizer)
    losses = []
    for index in range(STEPS):
        x, y = (part.to(DEVICE) for part in batch(0, index))
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert not manager.check().diverged
    return losses


@pytest.mark.parametrize("recipe", [DelayedScaling(history_len=3), CurrentScaling()], ids=["delayed", "current"])
def test_one_rank_trains_as_without_fsdp(recipe: Any, tmp_path: Path) -> None:
    how: dict[str, Any] = {"device_id": torch.device("cuda", 0)} if DEVICE == "cuda" else {}
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo", store=store, rank=0, world_size=1, **how)
    try:
        plain = _train(recipe, False, False)
        assert [_train(recipe, True, gathered) for gathered in (False, True)] == [plain, plain]
    finally:
        dist.destroy_process_group()

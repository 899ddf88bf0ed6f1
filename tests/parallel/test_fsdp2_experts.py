"""Experts under FSDP2, which gathers their weights in high precision: the same training as under DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

import fp8dist
from fp8dist import DelayedScaling
from tests.support.experts import Experts, Mixture, routes, rows
from tests.support.logs import captured_log
from tests.support.ranks import RankPool
from tests.support.states import state_of
from tests.support.training import bits


def _train(sharding: str, experts: int, gathers: bool = False) -> tuple[Any, list[bytes], list[str]]:
    model: Any = Mixture(Experts(experts))
    manager = fp8dist.prepare(model, DelayedScaling(history_len=4), group=dist.group.WORLD, fp8_all_gather=gathers)
    called: Any = model
    if sharding == "ddp":
        called = DistributedDataParallel(model)
    else:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        cut: Any = {"shard_placement_fn": lambda parameter: Shard(1)} if sharding == "rows" else {}
        fully_shard(model.experts, mesh=mesh, **cut)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(called.parameters(), lr=0.1)
    with captured_log() as log:
        manager.attach(called, optimizer=optimizer)
    outputs = []
    for step in range(4):
        seed = 10 * step + dist.get_rank()
        among = [e for e in range(experts) if (e + step + dist.get_rank()) % 3]
        index, weights = routes(16, 1, among, seed)
        out: Tensor = called(rows(16, 32, seed), index, weights)
        out.pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        outputs.append(bits(out))
    return state_of(manager), outputs, [line for _, line in log]


@pytest.mark.slow
@pytest.mark.parametrize("experts", [4, 3])
def test_same_as_ddp(two_ranks: RankPool, experts: int) -> None:
    """Along experts (evenly, and with fewer on the last rank) and along rows. Two ranks add gradients in any order."""
    expected = two_ranks.run(_train, "ddp", experts)
    for sharding in ("experts", "rows"):
        for ours, theirs in zip(two_ranks.run(_train, sharding, experts), expected):
            assert ours[1] == theirs[1]
            assert ours[0] == theirs[0]


@pytest.mark.slow
def test_fp8_gather_says_what_it_leaves_out(two_ranks: RankPool) -> None:
    said = [
        any("gathered in high precision" in line for line in of[2]) for of in two_ranks.run(_train, "experts", 4, True)
    ]
    assert said == [True, False]

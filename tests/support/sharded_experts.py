"""A mixture under FSDP2 and DDP, trained on the same data, and its results for bitwise comparison."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

import fp8dist
from fp8dist import DelayedScaling, Recipe, StateManager
from tests.support.experts import Experts, routes, rows
from tests.support.sharded import arena_bits, full, gradients_stay
from tests.support.states import state_of
from tests.support.training import bits


class Routed(nn.Module):
    """A Linear, then a mixture whose batch says which experts each row goes to: x [n, hidden + k], the last k columns
    are experts."""

    def __init__(self, experts: int = 4, k: int = 2, inner: int = 48, **options: Any) -> None:
        super().__init__()
        self.k = k
        self.inlet = nn.Linear(32, 32)
        self.experts: Any = Experts(experts, inner=inner, **options)

    def forward(self, x: Tensor) -> Tensor:
        """Return the experts' outputs: [n, 32]."""
        index = x[:, 32:].long()
        out: Tensor = self.experts(self.inlet(x[:, :32]), index, torch.ones_like(index, dtype=x.dtype) / self.k)
        return out


def routed_batch(rank: int, step: int, experts: int, k: int = 2) -> Tensor:
    """Return rows whose routes differ per rank and step: some experts have no row on a rank, some on none."""
    alive = [e for e in range(experts) if (e + step) % 4 or e < k]
    index, _ = routes(12, k, alive, 100 * step + rank)
    return torch.cat([rows(12, 32, 100 * step + rank), index.float()], 1)


@dataclass(frozen=True)
class Job:
    """One training run; the same on all ranks."""

    parallel: str = "fsdp2"  # or "ddp"
    fp8_all_gather: bool = True
    experts: int = 4
    inner: int = 48
    dim: int = 0  # Along which FSDP2 shards the experts.
    steps: int = 4
    recipe: Recipe = field(default_factory=lambda: DelayedScaling(history_len=3))
    options: dict[str, Any] = field(default_factory=dict)  # of the experts
    settings: dict[str, Any] = field(default_factory=dict)  # of prepare
    shard: dict[str, Any] = field(default_factory=dict)  # of fully_shard
    accumulate: int = 1

    def placement(self, parameter: nn.Parameter) -> Shard:
        """Return what ``shard_placement_fn`` returns."""
        return Shard(self.dim if parameter.ndim == 3 else 0)


def build(job: Job, mesh: DeviceMesh | None = None) -> tuple[Routed, nn.Module, StateManager, torch.optim.Optimizer]:
    """Return (model, the object that the loop calls, manager, optimizer), attached. ``mesh``: of HSDP."""
    torch.manual_seed(0)
    model = Routed(job.experts, inner=job.inner, **job.options)
    gathers = job.fp8_all_gather and job.parallel == "fsdp2"
    manager = fp8dist.prepare(model, job.recipe, group=dist.group.WORLD, fp8_all_gather=gathers, **job.settings)
    if job.parallel == "ddp":
        called: nn.Module = DistributedDataParallel(model)
    else:
        fully_shard(model.experts, mesh=mesh, shard_placement_fn=job.placement, **job.shard)
        called = fully_shard(model, mesh=mesh, **job.shard)
    optimizer = torch.optim.AdamW(called.parameters(), lr=0.01)
    manager.attach(called, optimizer=optimizer)
    return model, called, manager, optimizer


def step(job: Job, called: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> list[float]:
    """Train one step, and return the losses of its microbatches."""
    losses = []
    for micro in range(job.accumulate):
        with gradients_stay(called, micro < job.accumulate - 1):
            x = routed_batch(dist.get_rank(), index * job.accumulate + micro, job.experts)
            loss = (called(x) - x[:, :32]).square().mean() / job.accumulate
            loss.backward()
        losses.append(float(loss.detach()))
    optimizer.step()
    optimizer.zero_grad()
    return losses


def train(job: Job) -> tuple[list[float], dict[str, bytes], dict[Any, Any], dict[str, bytes]]:
    """Train on each rank. Return (losses, parameters, state by slot, arenas)."""
    model, called, manager, optimizer = build(job)
    losses = [loss for index in range(job.steps) for loss in step(job, called, optimizer, index)]
    return losses, {n: bits(p) for n, p in full(model).items()}, state_of(manager), arena_bits(manager)

"""Ten thousand checks of healthy jobs, with all ways of comparing switched on: not one error, and not one warning."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer

import fp8dist
from tests.checks.test_coherence import Masters
from tests.support.by_hand import WIDTH, ByHand, add_up
from tests.support.logs import captured_log
from tests.support.quiet_ranks import zero_redundancy
from tests.support.ranks import RankPool
from tests.support.suite import few

CHECKS = 720
"""Of each job: fourteen jobs make ten thousand."""


@dataclass
class Job:
    """A training of one rank.

    Attributes:
        model: what ``attach`` gets.
        loss: returns the loss of a step for a batch of this rank.
        optimizers: step in this order.
        after: called with the number of each step, between the backward and the steps of the optimizers.
        last: called after the steps.
    """

    model: nn.Module
    loss: Callable[[Tensor], Tensor]
    optimizers: Sequence[Optimizer]
    after: Callable[[int], None] = lambda step: None
    last: Callable[[], None] = lambda: None


Prepare = Callable[..., Any]
"""``fp8dist.prepare`` with the settings of all jobs, some of which a job may replace."""


class Block(nn.Module):
    """Linears, a norm, LoRA's adapter with a zero B, an expert, and BatchNorm if ``batch``."""

    def __init__(self, batch: bool = False) -> None:
        super().__init__()
        self.body, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.down, self.up = nn.Linear(WIDTH, 16, bias=False), nn.Linear(16, WIDTH, bias=False)
        nn.init.zeros_(self.up.weight)
        self.expert, self.batch = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH) if batch else nn.Identity()

    def forward(self, x: Tensor, experts: float = 1.0) -> Tensor:
        y = self.batch(self.body(x))
        return self.norm(y + self.up(self.down(x))) + experts * self.expert(y)


def _squares(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: model(x).square().mean()


def _plain(prepare: Prepare, make: Callable[[Any], Optimizer], batch: bool = False) -> Job:
    """DDP with an optimizer. With ``batch``, each rank has statistics of its own."""
    inner = Block(batch)
    prepare(inner)
    model = DistributedDataParallel(inner, broadcast_buffers=not batch)
    return Job(model, _squares(model), [make(model)])


def _lora(prepare: Prepare) -> Job:
    model = Block()
    prepare(model)
    for name, one in model.named_parameters():
        one.requires_grad_(name.startswith(("down", "up")))
    called = DistributedDataParallel(model)
    return Job(called, _squares(called), [AdamW(model.parameters(), lr=0.01, weight_decay=0.1)])


def _average(prepare: Prepare) -> Job:
    """An average of weights beside the model, which DDP does not know."""
    inner = Block()
    prepare(inner)
    model = DistributedDataParallel(inner)
    average = Block().requires_grad_(False)
    average.load_state_dict(inner.state_dict())
    whole = nn.ModuleDict({"model": model, "average": average})

    @torch.no_grad()
    def last() -> None:
        torch._foreach_lerp_(list(average.parameters()), list(inner.parameters()), 0.1)

    return Job(whole, _squares(model), [AdamW(model.parameters(), lr=0.01)], last=last)


def _sharded(prepare: Prepare, replicas: int) -> Job:
    """FSDP2, or HSDP, whose shards of norms are all ones at the start."""
    ranks = dist.get_world_size() // replicas
    sizes, names = ((replicas, ranks), ("dp", "fsdp")) if replicas > 1 else ((ranks,), ("fsdp",))
    model = Block()
    prepare(model)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    fully_shard(model.body, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return Job(model, _squares(model), [AdamW(model.parameters(), lr=0.01)])


def _experts(prepare: Prepare, idle: bool) -> Job:
    """Experts of each rank start alike, and DDP ignores them. Rank 0's get tokens from the start; those of the others
    after five steps, or never if ``idle``."""
    model = Block()
    prepare(model, skip=["expert"])
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["expert.weight", "expert.bias"])
    called = DistributedDataParallel(model, find_unused_parameters=False)
    steps, first = itertools.count(), dist.get_rank() == 0

    def loss(x: Tensor) -> Tensor:
        return called(x, float(first or (not idle and next(steps) > 5))).square().mean()

    return Job(called, loss, [SGD(model.parameters(), lr=0.1, weight_decay=0.1)])


def _adversaries(prepare: Prepare) -> Job:
    """Two models, of which each step trains one."""
    pair = nn.ModuleList(Block() for _ in range(2))
    prepare(pair)
    for place in range(2):
        pair[place] = DistributedDataParallel(pair[place])
    optimizers = [AdamW(one.parameters(), lr=0.01) for one in pair]
    return Job(pair, lambda x: (pair[1](pair[0](x)) - x).square().mean(), optimizers)


def _by_hand(prepare: Prepare) -> Job:
    """Tensor parallelism by hand, with its axis named."""
    model = ByHand(dist.group.WORLD)
    prepare(model, axes={"tp": dist.group.WORLD}, skip=["router", "gate"])
    alike = torch.Generator().manual_seed(0)

    def loss(_: Tensor) -> Tensor:
        x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(int(torch.randint(99, (), generator=alike))))
        return (model(x) * torch.arange(WIDTH)).sum() / 100

    return Job(model, loss, [AdamW(model.parameters(), lr=0.003)], lambda step: add_up(model, ""))


def _stages(prepare: Prepare, own_seeds: bool) -> Job:
    """Stages of a pipeline with a tie: the first one's embedding is the last one's head."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    if own_seeds:
        torch.manual_seed(rank)
    model = nn.ModuleDict({"block": Block()})
    if rank in (0, last):
        torch.manual_seed(7)
        model["head" if rank else "embed"] = nn.Linear(WIDTH, WIDTH, bias=False)
    tied = [one.weight for name, one in model.items() if name != "block"]

    def loss(x: Tensor) -> Tensor:
        for one in model.values():
            x = one(x)
        return x.square().mean()

    def after(step: int) -> None:
        mine = tied[0].grad if tied else torch.zeros(WIDTH, WIDTH)
        assert isinstance(mine, Tensor)
        dist.all_reduce(mine)

    axes = fp8dist.Axes({"pp": dist.group.WORLD}, copies={"embed.weight": "head.weight"}, distinct="block.*")
    prepare(model, axes=axes, skip=sorted(model.keys() - {"block"}), group=None, amax_sync=False)
    return Job(model, loss, [AdamW(model.parameters(), lr=0.01)], after)


def _masters(prepare: Prepare) -> Job:
    model = Block().bfloat16()
    prepare(model)
    called = DistributedDataParallel(model)
    return Job(called, _squares(called), [Masters(model)])


JOBS: dict[str, Callable[[Prepare], Job]] = {
    "ddp": lambda prepare: _plain(prepare, lambda model: AdamW(model.parameters(), lr=0.01)),
    "batch norms of each rank": lambda prepare: _plain(prepare, lambda model: SGD(model.parameters()), batch=True),
    "zero": lambda prepare: _plain(prepare, zero_redundancy),
    "lora": _lora,
    "average of weights": _average,
    "fsdp2": lambda prepare: _sharded(prepare, 1),
    "hsdp": lambda prepare: _sharded(prepare, 2),
    "experts": lambda prepare: _experts(prepare, False),
    "experts without tokens": lambda prepare: _experts(prepare, True),
    "adversaries": _adversaries,
    "tensor parallelism by hand": _by_hand,
    "stages with equal seeds": lambda prepare: _stages(prepare, False),
    "stages with seeds of their own": lambda prepare: _stages(prepare, True),
    "masters": _masters,
}


def _train(name: str, checks: int) -> Any:
    """Train a job with a check in each step. Return the warnings, and the number of checks."""
    managers = []

    def prepare(model: nn.Module, **options: Any) -> None:
        settings = {"group": dist.group.WORLD, "amax_sync": True, "check_every": 1, "at_rest_every": 1, **options}
        managers.append(fp8dist.prepare(model, fp8dist.CurrentScaling(), **settings))

    with torch.random.fork_rng(), captured_log(logging.WARNING) as log:  # Other tests want equal numbers on all ranks.
        torch.manual_seed(0)
        job = JOBS[name](prepare)
        (manager,) = managers
        manager.attach(job.model, optimizer=job.optimizers)
        torch.manual_seed(dist.get_rank() + 1)
        dtype = next(job.model.parameters()).dtype
        for step in range(checks + 1):
            for optimizer in job.optimizers:
                optimizer.zero_grad()
            job.loss(torch.randn(8, WIDTH).to(dtype)).backward()
            job.after(step)
            for optimizer in job.optimizers:
                optimizer.step()
            job.last()
    return [text for _, text in log], manager.metrics()["fp8/checks"]


@pytest.mark.parametrize("name", few(JOBS, "zero", "lora", "average of weights", "hsdp", "experts without tokens"))
@pytest.mark.parametrize("checks", few([3, CHECKS], 3))
@pytest.mark.timeout(300)
def test_no_check_of_a_healthy_job_warns(name: str, checks: int, four_ranks: RankPool, two_ranks: RankPool) -> None:
    pool = four_ranks if name == "hsdp" else two_ranks
    for texts, count in pool.run(_train, name, checks, timeout=280):
        assert not [text for text in texts if name != "fsdp2" or "DTensors without a Replicate axis" not in text]
        assert count >= checks

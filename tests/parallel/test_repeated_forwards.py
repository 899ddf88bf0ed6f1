"""Activation checkpointing under DDP and FSDP2: what the backward repeats has the bits of a run without it."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fp8dist
from fp8dist import DelayedScaling
from tests.support.ranks import RankPool
from tests.support.sharded import Deep, arena_bits, full, shard
from tests.support.suite import crossed
from tests.support.training import batch, bits

WRAPPERS = ("ddp", "fsdp2", "fsdp2 gather")


class Repeating(Deep):
    """Runs its blocks in checkpoints. ``reentrant``: of which kind; None: in none."""

    reentrant: bool | None = None

    def forward(self, x: Tensor, skip: bool = False) -> Tensor:
        h = self.first(x)
        for block in self.blocks:
            h = block(h) if self.reentrant is None else checkpoint(block, h, use_reentrant=self.reentrant)
        return self.last(h)


def _run(wrapper: str, reentrant: bool | None, what: str) -> Any:
    """Train for four steps. Return losses, FP8 state and parameters."""
    torch.manual_seed(0)
    model = Repeating()
    model.reentrant = reentrant
    for block in model.blocks:
        nn.init.zeros_(block.down.weight)  # Its amax grows by a multiple in each of the next steps.
    manager = fp8dist.prepare(
        model, DelayedScaling(history_len=4), group=dist.group.WORLD, fp8_all_gather=wrapper == "fsdp2 gather"
    )
    called: Any = DistributedDataParallel(model) if wrapper == "ddp" else shard(model)
    optimizer = torch.optim.AdamW(called.parameters(), lr=0.01)
    manager.attach(called, optimizer=optimizer)
    losses = []
    for step in range(4):
        if what == "written" and step == 2:
            manager.load_state_dict(manager.state_dict())
        if what == "written" and step > 1:
            with torch.no_grad():
                model.blocks[0].up.weight.mul_(3.0 if step == 2 else 1e-6)
        x, y = batch(dist.get_rank(), step)
        with manager.no_fp8() if what == "high forward" and step > 1 else torch.enable_grad():
            loss = nn.functional.mse_loss(called(x), y)
        called.train(what != "eval in backward")
        loss.backward()
        called.train()
        losses.append(bits(loss))
        optimizer.step()
        optimizer.zero_grad()
    return losses, arena_bits(manager), {name: bits(value) for name, value in full(model).items()}


@pytest.fixture(scope="module")
def plain(two_ranks: RankPool) -> Any:
    """Return the results without checkpoints."""
    return cache(lambda wrapper, what: two_ranks.run(_run, wrapper, None, what))


@pytest.mark.slow
@crossed(wrapper=WRAPPERS, reentrant=[True, False], what=["written", "high forward", "eval in backward"])
def test_a_repeated_forward_has_the_bits_of_the_first(
    two_ranks: RankPool, plain: Any, wrapper: str, reentrant: bool, what: str
) -> None:
    assert two_ranks.run(_run, wrapper, reentrant, what) == plain(wrapper, what)

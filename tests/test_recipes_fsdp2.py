"""FSDP2 under all recipes: the numbers of DDP; what is gathered in FP8, and what that costs in collectives."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch.distributed as dist
from torch import nn

from fp8dist import BlockScaling, CurrentScaling, DelayedScaling, Recipe, RowwiseScaling
from tests.support.collectives import counted_collectives
from tests.support.ranks import RankPool
from tests.support.sharded import HISTORY, Job, Outcome, build, train
from tests.support.training import batch

pytestmark = pytest.mark.slow

CURRENT = Job(recipe=CurrentScaling(), model="deep")
BLOCK = Job(recipe=BlockScaling(), model="wide", overrides={"layers.3": CurrentScaling()})

RECIPES: dict[str, Recipe] = {
    "delayed": DelayedScaling(history_len=HISTORY),
    "current": CurrentScaling(),
    "current, powers of two": CurrentScaling(power_of_two=True),
    "rowwise": RowwiseScaling(),
    "block": BlockScaling(),
}


def assert_as_ddp(ours: list[Outcome], theirs: list[Outcome]) -> None:
    """Losses and parameters bitwise, rank by rank; and something was learnt."""
    for mine, other in zip(ours, theirs):
        assert mine.losses == other.losses
        assert mine.parameter_bits == other.parameter_bits
        assert mine.steps == other.steps
    assert ours[0].losses[0] != ours[0].losses[-1]


# Gathered in high precision -------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECIPES)
def test_gathered_in_high_precision_is_bitwise_ddp(two_ranks: RankPool, name: str) -> None:
    job = Job(recipe=RECIPES[name], model="deep", fp8_all_gather=False, steps=8, accumulate=2, no_sync=True)
    assert_as_ddp(two_ranks.run(train, job), two_ranks.run(train, replace(job, parallel="ddp")))


# Gathered in FP8 ------------------------------------------------------------------------------------

SAME = [
    pytest.param(replace(CURRENT, steps=12), id="current"),
    pytest.param(replace(CURRENT, accumulate=3, no_sync=True), id="current, accumulation"),
    pytest.param(replace(CURRENT, reshard=False, accumulate=2, no_sync=True), id="current, kept after forward"),
    pytest.param(replace(CURRENT, reshard="mixed", model="net"), id="current, kept by some"),
    pytest.param(replace(CURRENT, per_module=False, optimizer="sgd"), id="current, root only, sgd"),
    pytest.param(replace(CURRENT, optimizer="adamw_foreach"), id="current, foreach"),
    pytest.param(replace(CURRENT, optimizer="adamw_fused"), id="current, fused"),
    pytest.param(replace(CURRENT, recipe=CurrentScaling(format="e4m3", power_of_two=True)), id="current, powers of 2"),
    pytest.param(BLOCK, id="block"),
    pytest.param(
        replace(BLOCK, recipe=BlockScaling(power_of_two=True), reshard=False, accumulate=2, no_sync=True),
        id="block, kept",
    ),
    pytest.param(replace(BLOCK, overrides={"layers.3": None}, optimizer="adamw_fused"), id="block, fused"),
    pytest.param(replace(BLOCK, per_module=False, overrides={"layers.3": DelayedScaling()}), id="block, root only"),
    pytest.param(replace(CURRENT, overrides={"last": DelayedScaling(), "blocks.0.*": None}), id="mixed"),
]


@pytest.mark.parametrize("job", SAME)
def test_gathered_in_fp8_is_bitwise_ddp(two_ranks: RankPool, job: Job) -> None:
    assert_as_ddp(two_ranks.run(train, job), two_ranks.run(train, replace(job, parallel="ddp")))


def _collectives(job: Job) -> list[list[tuple[str, int]]]:
    """What Python code asked for, step by step: forward, backward, the optimizer's step."""
    _, called, manager, optimizer = build(job)
    assert manager is not None
    seen: list[list[tuple[str, int]]] = []
    with counted_collectives() as calls:
        for step in range(3):
            for part in ("forward", "step"):
                calls.names.clear()
                calls.sizes.clear()
                if part == "forward":
                    x, y = batch(dist.get_rank(), step)
                    nn.functional.mse_loss(called(x), y).backward()
                else:
                    optimizer.step()
                    optimizer.zero_grad()
                seen.append([pair for pair in zip(calls.names, calls.sizes) if pair[0] == "all_reduce"])
    return seen


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_foreach", "adamw_fused", "sgd"])
def test_current_scaling_reduces_all_weights_at_once_after_each_step(two_ranks: RankPool, optimizer: str) -> None:
    slots = 3 * (2 + 2 * 2)
    for seen in two_ranks.run(_collectives, replace(CURRENT, optimizer=optimizer)):
        assert seen == [[], [("all_reduce", 4 * slots)]] * 3


def test_block_scaling_reduces_nothing(two_ranks: RankPool) -> None:
    for seen in two_ranks.run(_collectives, replace(BLOCK, overrides={"layers.3": None})):
        assert seen == [[], []] * 3

"""FullyShardedDataParallel (FSDP1) gives DDP's numbers with the memory of a shard."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms._comm_hooks.default_hooks import DefaultState, reduce_scatter_hook
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision

import fp8dist
from fp8dist import BlockScaling, CurrentScaling
from fp8dist.errors import ConfigurationError
from fp8dist.modules.fp8_linear import FP8Linear
from fp8dist.parallel.partitioned import is_partitioned, own_part
from tests.support.collectives import counted_collectives
from tests.support.meshes import Job, assert_bitwise, assert_synced, build, train
from tests.support.parallel import loss_of, make_blocks, tokens
from tests.support.ranks import RankPool, on_ranks
from tests.support.suite import few
from tests.support.training import saved_tensors

FSDP1 = Job("fsdp1", optimizer="momentum", steps=3)
GRAD_OP = replace(FSDP1, strategy="SHARD_GRAD_OP", accumulate=2, no_sync=True, steps=2)
BF16 = MixedPrecision(torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.bfloat16)

pytestmark = pytest.mark.slow

SAME: dict[str, tuple[Job, int, int]] = {
    # (job, syncs of a step, syncs of a step with our hook; 0: without it)
    "SHARD_GRAD_OP": (replace(FSDP1, strategy="SHARD_GRAD_OP", buffer=True, steps=10, optimizer="fused"), 1, 0),
    "inner hook, SHARD_GRAD_OP, next_step": (
        replace(FSDP1, strategy="SHARD_GRAD_OP", hook="inner", update="next_step"),
        1,
        1,
    ),
    "inner hook, NO_SHARD": (replace(FSDP1, strategy="NO_SHARD", hook="inner"), 1, 1),
    "one unit, next_step": (replace(FSDP1, per_block=False, optimizer="foreach", update="next_step"), 1, 0),
    "hook, accumulation": (replace(FSDP1, hook="ours", accumulate=2, update="next_step"), 1, 2),
    "hook, no_sync, frozen": (
        replace(FSDP1, hook="ours", accumulate=3, no_sync=True, frozen=("blocks.0.up.weight", "blocks.1.norm.bias")),
        1,
        1,
    ),
    # Reentrant checkpointing runs a backward per block inside the backward: each launches a sync, and they merge.
    "hook, reentrant checkpointing": (replace(FSDP1, checkpointing="reentrant", hook="ours"), 1, 2),
    "hook, checkpointing": (replace(FSDP1, checkpointing="non-reentrant", hook="ours"), 1, 1),
    "current": (replace(GRAD_OP, strategy="FULL_SHARD", recipe=CurrentScaling()), 0, 0),
    "block": (replace(GRAD_OP, recipe=BlockScaling()), 0, 0),
}
RARE = {"SHARD_GRAD_OP", "inner hook, NO_SHARD", "hook, no_sync, frozen", "hook, checkpointing", "current"}


@pytest.mark.parametrize("name", few(SAME, *(SAME.keys() - RARE)))
def test_on_two_ranks_fsdp1_is_ddp_to_the_bit(two_ranks: RankPool, name: str) -> None:
    """The sum of two numbers does not depend on their order. A hook gives the state of the launch at the boundary."""
    job, syncs, early = SAME[name]
    # DDP adds up microbatches before it reduces them.
    layout = "fsdp1" if job.accumulate > 1 and not job.no_sync else "ddp"
    replicated = two_ranks.run(train, replace(job, layout=layout, hook="", checkpointing=""))
    for hook in dict.fromkeys(("", job.hook)):
        sharded = two_ranks.run(train, replace(job, hook=hook))
        for mine, theirs in zip(sharded, replicated):
            assert_bitwise(mine, theirs)
            assert mine.syncs == [early if hook else syncs] * job.steps
            assert mine.early == [early if hook else 0] * job.steps
            # One unit per block; the root has no parameters.
            assert mine.inner_calls == (2 * job.steps if hook == "inner" else 0)
        if job.recipe is None:
            assert_synced(sharded)
    assert replicated[0].losses[0] != replicated[0].losses[-1]


def test_on_three_ranks_and_with_clipped_gradients(three_ranks: RankPool) -> None:
    """The first step is bitwise equal. Later, sums of three numbers and norms of shards are added up in another order,
    which changes single elements by an FP8 step."""
    job = replace(FSDP1, clip=0.5)
    jobs = (job, replace(job, layout="ddp"), replace(job, layout="ddp", clip=0.0))
    sharded, replicated, unclipped = (three_ranks.run(train, each) for each in jobs)
    for mine, theirs, free in zip(sharded, replicated, unclipped):
        assert mine.losses[0] == theirs.losses[0]
        assert mine.losses == pytest.approx(theirs.losses, rel=1e-3)
        assert mine.losses[1:] != pytest.approx(free.losses[1:], rel=1e-3)
        for slot, window in theirs.histories.items():
            assert mine.histories[slot] == pytest.approx(window, rel=2e-2)
    assert_synced(sharded)


def test_mixed_precision(two_ranks: RankPool) -> None:
    """Amaxes are those of the bfloat16 tensors that the modules multiply, which the recorder sees too."""
    outcomes = two_ranks.run(train, replace(FSDP1, precision=BF16, buffer=True, optimizer="foreach", steps=3))
    assert_synced(outcomes)
    weight = make_blocks().get_parameter("blocks.0.up.weight").detach()
    rounded = float(weight.bfloat16().abs().max())
    assert rounded != float(weight.abs().max())
    for outcome in outcomes:
        assert outcome.histories["blocks.0.up", "weight"][-3] == rounded
        for window in outcome.histories.values():
            assert all(float(torch.tensor(a).bfloat16()) == a for a in window)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", ""])
@on_ranks(2)
def test_no_cast_of_a_weight_outlives_its_forward(strategy: str) -> None:
    """As DDP ("") keeps them."""
    built = build(replace(FSDP1, strategy=strategy) if strategy else replace(FSDP1, layout="ddp"))
    built.step(0)
    with saved_tensors() as kept:
        x, target = tokens(dist.get_rank(), 1)
        output = built.module(torch.cat([x, x, x]))  # 48 tokens: no activation is as large as a weight.
    casts = [tensor.numel() for tensor in kept if tensor.element_size() == 1 and tensor.numel()]
    assert sorted(casts) == sorted([48 * 32, 48 * 32, 48 * 64, 48 * 64, *([] if strategy else [32 * 64] * 4)])
    loss_of(output[:2], target).backward()
    empty = [module.fp8_slots.cache.empty for module in built.module.modules() if isinstance(module, FP8Linear)]
    assert empty == [bool(strategy)] * 4


@on_ranks(2)
def test_flat_parameters_are_refused() -> None:
    """Their weights are not parameters, and have no memory between forwards."""
    net = make_blocks()
    manager = fp8dist.prepare(net, group=dist.group.WORLD)
    module = FullyShardedDataParallel(net, use_orig_params=False, device_id=torch.device("cpu"))
    with pytest.raises(ConfigurationError, match="use_orig_params"):
        manager.attach(module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1))


@on_ranks(2)
def test_a_failed_reduction_launches_nothing() -> None:
    """FSDP1 itself cannot continue after this error, but no rank may hang in one of our collectives."""
    built, reduced = build(FSDP1), []

    def broken(state: Any, gradient: Tensor, *output: Tensor) -> None:
        reduced.append(gradient)
        if len(reduced) == 3:  # In the first unit of the second step.
            raise KeyError("interrupted")
        reduce_scatter_hook(state, gradient, *output)

    built.module.register_comm_hook(DefaultState(dist.group.WORLD), fp8dist.fsdp.comm_hook(built.manager, broken))
    with counted_collectives() as calls:
        built.step(0)
        assert len(calls.syncs(built.manager)) == 1
        with pytest.raises(KeyError):
            built.backward(1)
        assert len(calls.syncs(built.manager)) == 1


@pytest.mark.parametrize(("rank", "expected"), [(0, [1.0, 2.0]), (1, [3.0]), (2, [])])
def test_padding_is_no_part_of_a_parameter_of_zeros_stage_3(
    monkeypatch: pytest.MonkeyPatch, rank: int, expected: list[float]
) -> None:
    """tests/integrations/test_deepspeed.py has the real ones."""
    parameter = torch.nn.Parameter(torch.empty(0))
    assert not is_partitioned(parameter)
    whole = torch.tensor([1.0, 2.0, 3.0, torch.nan, torch.nan, torch.nan])
    parameter.ds_tensor, parameter.ds_numel, parameter.ds_process_group = whole[2 * rank :][:2], 3, None
    monkeypatch.setattr(dist, "get_rank", lambda group: rank)
    assert is_partitioned(parameter)
    assert own_part(parameter).tolist() == expected

"""Mistakes that would otherwise go unnoticed in training warn or raise."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fp8dist
from fp8dist import DelayedScaling
from fp8dist.errors import ConfigurationError
from tests.support.logs import captured_log
from tests.support.ranks import RankPool, on_ranks
from tests.support.training import batch, make_net


@on_ranks(2)
def test_a_forgotten_attach_is_logged_once() -> None:
    net = make_net()
    with captured_log() as log:
        fp8dist.prepare(net, DelayedScaling(history_len=4), group=dist.group.WORLD)
        for index in range(2):
            net(batch(dist.get_rank(), index)[0]).sum().backward()
    (message,) = [message for _, message in log]
    assert "is trained, but attach() was not called" in message


def _back_to_fewer_ranks(gather: bool) -> str:
    net = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32))
    manager = fp8dist.prepare(net, group=dist.group.WORLD, fp8_all_gather=gather)
    for layer in net:
        fully_shard(layer, reshard_after_forward=2)
    fully_shard(net)
    try:
        manager.attach(net)
    except ConfigurationError as error:
        return str(error)
    net(torch.ones(2, 32)).sum().backward()
    return "trained"


def test_going_back_to_fewer_ranks_is_refused_with_an_fp8_all_gather(four_ranks: RankPool) -> None:
    for text in four_ranks.run(_back_to_fewer_ranks, True):
        assert "reshard_after_forward=<number> does not go with fp8_all_gather=True" in text
    assert four_ranks.run(_back_to_fewer_ranks, False) == ["trained"] * 4


@on_ranks(2)
def test_the_ddp_of_another_model_says_nothing_about_this_one() -> None:
    """The DDP wraps a teacher; the prepared model is local to this rank."""
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    student = make_net()
    manager = fp8dist.prepare(student, group=alone)  # type: ignore[arg-type]
    manager.attach(nn.ModuleDict({"teacher": DistributedDataParallel(make_net()), "student": student}))


def test_the_optimizer_of_a_deepspeed_engine_is_refused() -> None:
    """As Accelerate and Transformers would attach: it is stepped once for each group of parameters."""
    engine = type("DeepSpeedEngine", (nn.Module,), {})()
    engine.module = make_net()
    optimizer = torch.optim.SGD(engine.module.parameters(), lr=0.1)
    with pytest.raises(ConfigurationError, match=r"deepspeed\.attach\(manager, engine\)"):
        fp8dist.prepare(engine.module).attach(engine, optimizer=optimizer)

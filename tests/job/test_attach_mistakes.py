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
from tests.support.ranks import RankPool
from tests.support.training import batch, make_net


def _warnings(mistake: str) -> list[str]:
    """Return the log of backwards before and after ``attach``."""
    net = make_net()
    with captured_log() as log:
        manager = fp8dist.prepare(net, DelayedScaling(history_len=4), group=dist.group.WORLD)
        early = torch.optim.SGD(net.parameters(), lr=0.1)
        if mistake == "optimizer before sharding":
            fully_shard(net)
            with pytest.raises(ConfigurationError, match="SGD holds what was the weight of first before"):
                manager.attach(net, optimizer=early)
        elif mistake == "nothing":
            fully_shard(net)
            manager.attach(net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1))
        for index in range(2):
            net(batch(dist.get_rank(), index)[0]).sum().backward()
    return [message for _, message in log]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mistake", "text"),
    [
        ("no attach", "is trained, but attach() was not called"),
        ("optimizer before sharding", "is trained, but attach() was not called"),
    ],
)
def test_what_would_train_on_is_said_once(two_ranks: RankPool, mistake: str, text: str) -> None:
    for said in two_ranks.run(_warnings, mistake):
        assert len(said) == 1
        assert text in said[0]


def test_a_job_without_mistakes_says_nothing(two_ranks: RankPool) -> None:
    assert two_ranks.run(_warnings, "nothing") == [[], []]


def _ddp_beyond_the_group() -> str:
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    net = make_net()
    manager = fp8dist.prepare(net, group=alone)  # type: ignore[arg-type]
    ddp = DistributedDataParallel(net)
    try:
        manager.attach(ddp)
    except ConfigurationError as error:
        return str(error)
    return ""


def test_a_group_smaller_than_ddps_is_refused(two_ranks: RankPool) -> None:
    for rank, text in enumerate(two_ranks.run(_ddp_beyond_the_group)):
        assert f"shared or sharded by ranks 0, 1, but its FP8 state only by ranks {rank}:" in text


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


def _beside_a_ddp() -> str:
    """The DDP wraps a teacher; the prepared model is local to this rank."""
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    student = make_net()
    manager = fp8dist.prepare(student, group=alone)  # type: ignore[arg-type]
    whole = nn.ModuleDict({"teacher": DistributedDataParallel(make_net()), "student": student})
    try:
        manager.attach(whole)
    except ConfigurationError as error:
        return str(error)
    return "attached"


def test_the_ddp_of_another_model_says_nothing_about_this_one(two_ranks: RankPool) -> None:
    assert two_ranks.run(_beside_a_ddp) == ["attached"] * 2

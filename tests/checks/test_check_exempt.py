"""State that differs between ranks by design is not compared, and the report lists it as left out."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fp8dist
from fp8dist import ConfigurationError, DelayedScaling
from tests.support.logs import captured_log
from tests.support.ranks import on_ranks
from tests.support.training import SmallJob, batch


def _seeded_differently(module: nn.Module) -> nn.Module:
    """Each rank has different parameters."""
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(dist.get_rank() + 1)))
    return module


@pytest.mark.parametrize("use_orig_params", [True, False])
@on_ranks(2)
def test_shards_of_fsdp1_are_not_compared(use_orig_params: bool) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    net = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.LayerNorm(16))
    options = {"device_id": torch.device("cpu"), "use_orig_params": use_orig_params}
    net[0] = FullyShardedDataParallel(net[0], **options)
    sharded = FullyShardedDataParallel(net, sharding_strategy=ShardingStrategy.FULL_SHARD, **options)
    model = nn.Sequential(sharded, nn.Linear(16, 16))  # Next to a module that the caller declares as replicated.
    optimizer = torch.optim.AdamW(sharded.parameters())
    nn.init.ones_(model[1].weight), nn.init.ones_(model[1].bias)
    sharded(torch.randn(4, 16)).sum().backward()
    reports = [fp8dist.check(model, group=dist.group.WORLD, gradients=True, optimizer=optimizer, policy="warn")]
    optimizer.step()
    reports.append(fp8dist.check(model, group=dist.group.WORLD, optimizer=optimizer, policy="warn"))
    reports = [(report.findings, report.compared, report.skipped) for report in reports]
    for findings, compared, skipped in reports:
        assert findings == ()
        assert compared == {"parameter": 2}
        assert any("parameters sharded by FSDP1" in text for text in skipped)
    assert any("gradients sharded by FSDP1" in text for text in reports[0][2])
    assert any("optimizer states sharded by FSDP1" in text for text in reports[1][2])


@on_ranks(2)
def test_shards_of_fsdp2_are_not_compared() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    with pytest.raises(ConfigurationError, match="nothing to compare") as alone:  # No tensor has a replica.
        fp8dist.check(model, policy="warn")
    beside = nn.Linear(16, 16)
    report = fp8dist.check(nn.Sequential(model, beside), group=dist.group.WORLD, policy="warn")
    assert report.findings == ()
    assert report.compared == {"parameter": 2}
    assert report.skipped == ("4 parameters that are DTensors without a Replicate axis: each rank has its own",)
    assert f"({report.skipped[0]}): pass group=" in str(alone.value)


class _Experts(nn.Module):
    """A dense layer shared by all ranks, and experts that exist on one rank each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dense = nn.Linear(16, 16)
        self.block = nn.Module()
        self.block.experts = _seeded_differently(nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)]))
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.dense(x))
        return self.block.experts[1](self.block.experts[0](h))


@pytest.mark.parametrize("how", ["prepared", "ignored by DDP", "named"])
@on_ranks(2)
def test_experts_and_batch_statistics_of_each_rank_raise_no_alarm(how: str) -> None:
    """The shared part is still compared."""
    inner: Any = _Experts()
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    model, manager, checks = inner, None, []
    if how == "prepared":
        manager = fp8dist.prepare(inner, group=dist.group.WORLD, groups={"*.experts.*": alone})
    if how != "named":
        own = [name for name, _ in inner.named_parameters() if "experts" in name]
        nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(inner, own)
        model = nn.parallel.DistributedDataParallel(inner)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if manager is not None:
        manager.attach(model, optimizer=optimizer)
        checks = [manager.check]
    if how != "named":
        for step in range(2):
            x, _ = batch(dist.get_rank(), step)  # Each rank has other data and other BatchNorm statistics.
            model(x[:, :16]).sum().backward()
            optimizer.step()
    named: Any = {"group": dist.group.WORLD, "groups": {"*.experts.*": None}} if how == "named" else {}
    for check in (*checks, partial(fp8dist.check, model, **named)):
        report = check(gradients=True, optimizer=optimizer, policy="warn")
        assert report.findings == ()
        compared = {"parameter": 4}  # Weight and bias of dense and norm.
        if how != "named":  # exp_avg, exp_avg_sq and step, for each parameter.
            compared |= {"gradient": 4, "optimizer": 12, **({"slot": 3} if how == "prepared" else {})}
        assert report.compared == compared
        reasons = {"ignored by DDP": ("that DDP was told to ignore",), "named": ("matching *.experts.*",)}
        both = ("matching *.experts.*", "that DDP was told to ignore")
        assert any(f"4 parameters {why}" in text for why in reasons.get(how, both) for text in report.skipped)
    if dist.get_rank() == 1:
        inner.norm.weight.data[3] += 1
    with captured_log():
        report = fp8dist.check(model, policy="warn", **named)
    assert [(f.name, f.ranks, f.index) for f in report.findings] == [("norm.weight", (0, 1), (3,))]


@on_ranks(2)
def test_state_that_is_not_synced_is_not_compared() -> None:
    job = SmallJob(DelayedScaling(history_len=3), amax_sync=False)
    for step in range(3):
        job.step(step)
    scales: list[Any] = [None] * 2
    dist.all_gather_object(scales, job.manager.slot("first", "input").scale.item())
    assert scales[0] != scales[1]
    for report in (job.manager.check(policy="warn"), fp8dist.check(job.called, policy="warn")):
        assert (report.findings, report.compared) == ((), {"parameter": 6})


@pytest.mark.slow
@on_ranks(2)
def test_the_state_of_a_zero_redundancy_optimizer_is_not_compared() -> None:
    import warnings

    warnings.simplefilter("ignore")
    from torch.distributed.optim import ZeroRedundancyOptimizer

    job = SmallJob(optimizer=lambda p: ZeroRedundancyOptimizer(p, torch.optim.AdamW, lr=0.01), enabled=False)
    for step in range(2):
        job.step(step)
    optimizer, saved = job.optimizer, [None]
    optimizer.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        saved = [optimizer.state_dict()]
    dist.broadcast_object_list(saved, src=0)
    optimizer.load_state_dict(saved[0])  # Like a resumed job: it then shows the state of its own part.
    assert max(len(state or ()) for state in optimizer.state.values()) == 3
    report = fp8dist.check(job.called, optimizer=optimizer, policy="warn")
    assert report.findings == ()
    assert dict(report.compared) == {"parameter": 6}
    assert any("states of a ZeroRedundancyOptimizer" in text for text in report.skipped)

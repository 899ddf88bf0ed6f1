"""State that differs between ranks by design is not compared, and the report lists it as left out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fp8dist
from fp8dist import ConfigurationError, DelayedScaling
from tests.support.logs import captured_log
from tests.support.ranks import RankPool, on_ranks
from tests.support.training import batch, make_net


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
    model = _Experts()
    own = [name for name, _ in model.named_parameters() if "experts" in name]
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    manager = None
    if how == "prepared":
        manager = fp8dist.prepare(
            model,
            DelayedScaling(history_len=3),
            group=dist.group.WORLD,
            groups={"*.experts.*": groups[dist.get_rank()]},
        )
    if how != "named":
        nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, own)
        model = nn.parallel.DistributedDataParallel(model)  # type: ignore[assignment]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if manager is not None:
        manager.attach(model, optimizer=optimizer)
    if how != "named":
        for step in range(2):
            x, _ = batch(dist.get_rank(), step)  # Each rank has other data and other BatchNorm statistics.
            model(x[:, :16]).sum().backward()
            optimizer.step()
    reports = []
    if manager is not None:
        reports.append(manager.check(gradients=True, optimizer=optimizer, policy="warn"))
    groups_given = {"*.experts.*": None} if how == "named" else None
    group = dist.group.WORLD if how == "named" else None
    reports.append(
        fp8dist.check(model, group=group, groups=groups_given, gradients=True, optimizer=optimizer, policy="warn")
    )
    reports = [(report.findings, dict(report.compared), report.skipped) for report in reports]
    for findings, compared, skipped in reports:
        assert findings == ()
        assert compared["parameter"] == 4  # Weight and bias of dense and norm.
        assert compared.get("slot", 0) == (3 if how == "prepared" else 0)
        if how != "named":
            assert compared["gradient"] == 4
            assert compared["optimizer"] == 12  # exp_avg, exp_avg_sq and step, for each parameter.
        reason = "that DDP was told to ignore" if how == "ignored by DDP" else "matching *.experts.*"
        assert any(text.startswith(f"4 parameters {reason}") for text in skipped) or (
            how == "prepared" and "4 parameters that DDP was told to ignore" in skipped
        )


@on_ranks(4)
def test_beside_experts_the_shared_part_is_still_compared() -> None:
    """With experts as above, damage to shared parameters is still found."""
    model = _Experts()
    if dist.get_rank() == 2:
        model.norm.weight.data[3] += 1
    with captured_log():
        report = fp8dist.check(model, group=dist.group.WORLD, groups={"*.experts.*": None}, policy="warn")
    assert [(f.name, f.ranks, f.index) for f in report.findings] == [("norm.weight", (2,), (3,))]


def _unsynced_state() -> Any:
    net = make_net()
    manager = fp8dist.prepare(net, DelayedScaling(history_len=3), amax_sync=False)
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    manager.attach(model, optimizer=optimizer)
    for step in range(3):
        x, y = batch(dist.get_rank(), step)
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    scale = manager.slot("first", "input").scale.item()
    reports = [manager.check(policy="warn"), fp8dist.check(model, policy="warn")]
    return scale, [(report.findings, report.compared) for report in reports]


def test_state_that_is_not_synced_is_not_compared(two_ranks: RankPool) -> None:
    results = two_ranks.run(_unsynced_state)
    assert results[0][0] != results[1][0]
    for _, reports in results:
        assert reports == [((), {"parameter": 6})] * 2


@pytest.mark.slow
@on_ranks(2)
def test_the_state_of_a_zero_redundancy_optimizer_is_not_compared() -> None:
    import warnings

    warnings.simplefilter("ignore")
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.parallel.DistributedDataParallel(make_net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
    for step in range(2):
        x, y = batch(dist.get_rank(), step)
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    saved: list[Any] = [None]
    optimizer.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        saved[0] = optimizer.state_dict()
    dist.broadcast_object_list(saved, src=0)
    optimizer.load_state_dict(saved[0])  # Like a resumed job: it then shows the state of its own part.
    owners = sorted(len(state or ()) for state in optimizer.state.values())
    report = fp8dist.check(model, optimizer=optimizer, policy="warn")
    assert owners[-1] == 3
    assert report.findings == ()
    assert dict(report.compared) == {"parameter": 6}
    assert any("states of a ZeroRedundancyOptimizer" in text for text in report.skipped)


@on_ranks(2)
def test_a_check_that_could_compare_nothing_says_so() -> None:
    with pytest.raises(fp8dist.errors.ConfigurationError) as caught:
        fp8dist.check(nn.Linear(4, 4))
    text = str(caught.value)
    assert "pass group=" in text
    assert "2 parameters not known to be replicated" in text

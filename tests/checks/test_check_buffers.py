"""What else is compared: buffers on request, where they are replicated, and the number of steps of an optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import fp8dist
from fp8dist import DelayedScaling, DivergenceReport
from tests.support.collectives import counted_collectives
from tests.support.logs import captured_log
from tests.support.ranks import on_ranks

LEFT_OUT = "3 buffers that buffers=True would compare"


def _net() -> nn.Sequential:
    """Return a net with three buffers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16))


def _batch() -> Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(dist.get_rank()))


def _shown(report: DivergenceReport) -> Any:
    findings = [(f.kind, f.name, f.ranks, f.last_good_step) for f in report.findings]
    return findings, dict(report.compared), report.skipped


@pytest.mark.parametrize("how", ["manager", "group", "DDP"])
@on_ranks(3)
def test_buffers_are_compared_on_request(how: str) -> None:
    """Check a net whose buffers are equal, then damage them on rank 1."""
    net = _net()
    ddp = nn.parallel.DistributedDataParallel(net)
    manager = fp8dist.prepare(net, DelayedScaling(history_len=2), group=dist.group.WORLD) if how == "manager" else None
    if manager is not None:
        manager.attach(ddp)

    def check(**more: Any) -> DivergenceReport:
        if manager is not None:
            return manager.check(policy="warn", **more)
        if how == "group":
            return fp8dist.check(net, group=dist.group.WORLD, policy="warn", step=3, **more)
        return fp8dist.check(ddp, policy="warn", step=3, **more)

    results = {}
    with captured_log(), counted_collectives() as calls:
        results["without"] = _shown(check())
        results["with"] = _shown(check(buffers=True))
    results["calls"] = calls.names
    if dist.get_rank() == 1:
        net[1].running_var[4] = 9.0
    with captured_log():
        results["unseen"] = _shown(check())
        results["seen"] = _shown(check(buffers=True))
    slots = {"slot": 3} if how == "manager" else {}
    assert results["without"] == ([], {"parameter": 4, **slots}, (LEFT_OUT,))
    assert results["with"] == ([], {"buffer": 3, "parameter": 4, **slots}, ())
    assert results["calls"] == ["all_reduce"] * 2
    assert results["unseen"][0] == []
    assert results["seen"][0] == [("buffer", "1.running_var", (1,), 0 if how == "manager" else 3)]


@on_ranks(2)
def test_buffers_that_are_not_known_to_be_replicated_are_skipped() -> None:
    reports = {"plain, beside DDP": nn.ModuleList([nn.parallel.DistributedDataParallel(nn.Linear(2, 2)), _net()])}
    told = _net()
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(told, ["1.running_mean"])
    reports["ignored by DDP"] = nn.ModuleList([nn.parallel.DistributedDataParallel(told)])
    results = {name: _shown(fp8dist.check(model, buffers=True)) for name, model in reports.items()}
    groups = {"*.running_*": dist.group.WORLD, "*": None}
    results["by pattern"] = _shown(fp8dist.check(_net(), groups=groups, buffers=True))
    unknown = ("3 buffers not known to be replicated: name their group or axes, as in fp8dist.check(model, group=…)",)
    assert results["plain, beside DDP"][1:] == ({"parameter": 2}, (*unknown, "4 parameters" + unknown[0][9:]))
    assert results["ignored by DDP"][1:] == ({"buffer": 2, "parameter": 4}, ("1 buffers that DDP was told to ignore",))
    assert results["by pattern"][1:] == (
        {"buffer": 2},
        ("1 buffers matching *: left out", "4 parameters matching *: left out"),
    )


@on_ranks(2)
def test_batch_norm_differs_between_forwards() -> None:
    """Train with BatchNorm: DDP copies its buffers before each forward, and each forward changes them."""
    ddp = nn.parallel.DistributedDataParallel(_net())
    found = []
    with captured_log():
        for _ in range(2):
            ddp(_batch()).sum().backward()
            found.append(sorted(f.name for f in fp8dist.check(ddp, policy="warn", buffers=True).findings))
    assert found == [["1.running_mean", "1.running_var"]] * 2


@on_ranks(3)
def test_buffers_are_repaired() -> None:
    net = _net()
    if dist.get_rank() == 1:
        net[1].num_batches_tracked.fill_(7)
    with captured_log():
        report = fp8dist.check(net, group=dist.group.WORLD, policy="repair", buffers=True)
    assert report.repaired == ("buffer '1.num_batches_tracked' on rank 1, from rank 0",)
    assert int(net[1].num_batches_tracked) == 0


@on_ranks(4)
def test_dtensors_are_compared_along_their_replicate_axes() -> None:
    """A DTensor among the buffers, replicated along one axis of four ranks."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    net = nn.Linear(4, 4)
    for name in ("weight", "bias"):
        value = distribute_tensor(torch.ones_like(getattr(net, name)), mesh, [Replicate(), Shard(0)])
        setattr(net, name, nn.Parameter(value))
    net.register_buffer("table", distribute_tensor(torch.arange(8.0), mesh, [Replicate(), Shard(0)]))
    if dist.get_rank() == 3:
        net.table.to_local()[1] = 99.0  # type: ignore[operator]
    with captured_log():
        report = fp8dist.check(net, policy="warn", buffers=True)
    assert [(f.kind, f.name, f.ranks, f.index, f.values) for f in report.findings] == [
        ("buffer", "table", (1, 3), (1,), (5.0, 99.0))
    ]
    assert dict(report.compared) == {"buffer": 1, "parameter": 2}


# The optimizer's number of steps ---------------------------------------------------------------------


def _stepped(model: nn.Module, without: str = "") -> torch.optim.AdamW:
    """Return an optimizer that has done a step, except with the parameter ``without``, which has no gradient."""
    optimizer = torch.optim.AdamW(model.parameters())
    for name, parameter in model.named_parameters():
        parameter.grad = None if name == without else torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def _checked(model: nn.Module, optimizer: torch.optim.Optimizer) -> DivergenceReport:
    with captured_log():
        return fp8dist.check(model, group=dist.group.WORLD, optimizer=optimizer, policy="warn")


def _mesh(*shape: int) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard", "tp")[: len(shape)])


@pytest.mark.parametrize(
    ("shape", "wrapped", "named"),
    [
        ((4,), True, [(2,)]),
        ((2, 2), True, [(2,)]),
        ((2, 1, 2), True, [(0, 2)]),  # The ranks of the tensor-parallel axis may have other experts.
        ((1, 2, 2), True, [(0, 2)]),
        ((2, 2), False, [(0, 2)]),  # Along the axis of the copies only.
    ],
)
@on_ranks(4, timeout=60)
def test_a_rank_that_is_a_step_behind_is_named(
    shape: tuple[int, ...], wrapped: bool, named: list[tuple[int, ...]]
) -> None:
    torch.manual_seed(0)
    mesh, model = _mesh(*shape), nn.Linear(8, 8)
    if len(shape) == 3 or not wrapped:
        inner = mesh["tp"] if wrapped else mesh
        for name in ("weight", "bias"):
            value = distribute_tensor(
                torch.ones_like(getattr(model, name)), inner, [Replicate(), Shard(0)][-inner.ndim :]
            )
            setattr(model, name, nn.Parameter(value))
    if wrapped:
        fully_shard(model, mesh=mesh if len(shape) < 3 else mesh["replicate", "shard"])
    optimizer = _stepped(model)
    assert _checked(model, optimizer).findings == ()
    if dist.get_rank() == 2:
        optimizer.state[model.weight]["step"] -= 1
    found = [(f.kind, f.name, f.ranks) for f in _checked(model, optimizer).findings]
    assert found == [("optimizer", "weight.step", ranks) for ranks in named]


@on_ranks(4)
def test_equal_counts_verify_no_moments() -> None:
    """Shards of FSDP2 without replicas: the moments exist once."""
    fully_shard(model := nn.Linear(8, 8), mesh=_mesh(4))
    optimizer = _stepped(model)
    with counted_collectives() as calls:
        report = _checked(model, optimizer)
    assert dict(report.compared) == {"optimizer": 2}
    assert set(report.unverified) == {"optimizer", "parameter"}
    assert not report.consistent
    assert calls.names == ["all_reduce"]


@on_ranks(4)
def test_an_expert_without_tokens_on_one_rank_is_no_difference() -> None:
    """Each rank has two of eight experts, whose gradient it gets alone. The other parameter is cut by FSDP2."""
    mesh, model = _mesh(4), nn.Module()
    model.dense = nn.Linear(8, 8)
    fully_shard(model.dense, mesh=mesh)
    model.experts = nn.Parameter(distribute_tensor(torch.ones(8, 4, 4), mesh, [Shard(0)]))
    optimizer = _stepped(model, "experts" if dist.get_rank() == 1 else "")
    assert len(optimizer.state) == (2 if dist.get_rank() == 1 else 3)
    assert _checked(model, optimizer).findings == ()


@on_ranks(3)
def test_a_rank_without_a_part_has_no_count() -> None:
    """Four rows on three ranks: the last one has none of them. An optimizer may keep no state for it."""
    fully_shard(model := nn.Linear(8, 4), mesh=init_device_mesh("cpu", (3,)))
    optimizer = _stepped(model)
    if dist.get_rank() == 2:
        optimizer.state.clear()
    assert _checked_alone(model, optimizer) == ()


def _checked_alone(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Return the findings, with a parameter beside the model that is compared: else there is nothing."""
    assert all(isinstance(one, DTensor) for one in model.parameters())
    whole = nn.ModuleList([model, nn.Linear(2, 2)])
    for parameter in whole[1].parameters():
        nn.init.ones_(parameter)
    return _checked(whole, optimizer).findings

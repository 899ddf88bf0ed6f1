"""The number of steps that an optimizer has done with a DTensor: equal on ranks that get its gradient together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import fp8dist
from fp8dist import DivergenceReport
from tests.support.collectives import counted_collectives
from tests.support.logs import captured_log
from tests.support.ranks import on_ranks


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

"""calibrate(): takes scales from high-precision passes and changes nothing else."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fp8dist
from fp8dist import CurrentScaling, DelayedScaling, Recipe
from fp8dist.errors import ConfigurationError
from tests.support.collectives import counted_collectives
from tests.support.parallel import same_on_all_ranks
from tests.support.ranks import on_ranks
from tests.support.training import batch, bits, histories, make_net, parameter_bits


class Noisy(nn.Module):
    """Contains everything that a pass may change: a BatchNorm, dropout, a buffer that a forward replaces."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(32, 48), nn.BatchNorm1d(48), nn.Dropout(0.5), nn.Linear(48, 16))
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("seen", None)

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        self.seen = x.detach()
        y: Tensor = self.net(x)
        return y


def everything(model: nn.Module) -> dict[str, Any]:
    """Return the bits of parameters, gradients and buffers, and the generators' states."""
    return {
        "parameters": parameter_bits(model),
        "gradients": {name: None if p.grad is None else bits(p.grad) for name, p in model.named_parameters()},
        "buffers": {name: bits(b) for name, b in model.named_buffers()},
        "random": bits(torch.get_rng_state()),
        "training": [m.training for m in model.modules()],
    }


def loss_of(model: nn.Module, index: int, rank: int = 0) -> Tensor:
    x, y = batch(rank, index)
    loss: Tensor = (model(x) - y).square().mean()
    return loss


DELAYED = DelayedScaling(history_len=4)


@pytest.mark.parametrize(
    ("recipe", "gradients", "raises"),
    [(DELAYED, False, False), (DELAYED, True, False), (DELAYED, True, True), (CurrentScaling(), True, False)],
)
def test_nothing_else_changes(recipe: Recipe, gradients: bool, raises: bool) -> None:
    """A recipe without histories has nothing to calibrate."""
    model = Noisy()
    manager = fp8dist.prepare(model, recipe)
    optimizer = torch.optim.AdamW(model.parameters())
    manager.attach(optimizer=optimizer)
    if gradients:
        loss_of(model, 0).backward()
        manager.reset()  # Drops the pending amaxes.
    before, held = everything(model), {name: p.grad for name, p in model.named_parameters()}
    cold = manager.metrics()["fp8/cold_slots"]
    buffer, state = model.calls, copy.deepcopy(optimizer.state_dict())
    with contextlib.suppress(KeyError), manager.calibrate():
        for index in range(3):
            loss_of(model, index).backward()
        if raises:
            raise KeyError("stop")
    assert everything(model) == before
    assert {name: p.grad for name, p in model.named_parameters()} == held  # The same tensors.
    assert model.calls is buffer
    assert str(optimizer.state_dict()) == str(state)
    assert manager.metrics()["fp8/cold_slots"] == (cold if raises else 0)
    assert manager.steps == (0 if raises else 1)


def test_passes_are_in_high_precision() -> None:
    """``test_whole_job.py`` compares the amaxes of calibrations with those of the tensors."""
    net, twin = make_net(), make_net()
    manager = fp8dist.prepare(net, DELAYED).attach()
    x, same = (batch(0, 0)[0].requires_grad_() for _ in range(2))
    with manager.calibrate():
        net(x).square().sum().backward()
    twin(same).square().sum().backward()
    assert bits(x.grad) == bits(same.grad)


def _local(module: nn.Module) -> nn.Module:
    """Return this rank's part of a DTensor; other tensors unchanged."""
    plain = nn.Module()
    for number, parameter in enumerate(module.parameters()):
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        copied = nn.Parameter(local.detach().clone())
        if parameter.grad is not None:
            grad = parameter.grad.to_local() if hasattr(parameter.grad, "to_local") else parameter.grad
            copied.grad = grad.detach().clone()
        plain.register_parameter(f"p{number}", copied)
    return plain


@pytest.mark.parametrize("how", ["ddp", "bucket views", "fsdp2", "FP8 gather"])
@on_ranks(2)
def test_ranks_share_the_amaxes_in_one_collective(how: str) -> None:
    """Gradients that wait for an optimizer step are those of before, also after an evaluation: FSDP2 leaves its
    outermost module unsharded after a forward without a backward."""
    rank, gather = dist.get_rank(), how == "FP8 gather"
    net = make_net()
    manager = fp8dist.prepare(net, DELAYED, group=dist.group.WORLD, fp8_all_gather=gather)
    module: Any = net
    if how in ("fsdp2", "FP8 gather"):
        fully_shard(net.first)
        fully_shard(net)
    else:
        module = DistributedDataParallel(net, gradient_as_bucket_view=how == "bucket views")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    manager.attach(module, optimizer=optimizer)
    size = 4 * (8 + 9)
    for waiting in (True, False):
        if waiting:
            loss_of(module, 0, rank).backward()
            manager.reset()
        before = everything(_local(module))
        with torch.no_grad():
            module(batch(rank, 1)[0])
        with counted_collectives() as calls, manager.calibrate():
            for index in range(2):
                loss_of(module, index, rank).backward()
        assert everything(_local(module)) == before
        assert [(name, of) for name, of in zip(calls.names, calls.sizes) if of == size] == [("all_reduce", size)]
        same_on_all_ranks(histories(manager))
        optimizer.step()
        optimizer.zero_grad()


@on_ranks(2)
def test_gradients_that_wait_for_a_reduction_are_not_mixed_in() -> None:
    net = make_net()
    manager = fp8dist.prepare(net, DELAYED, group=dist.group.WORLD)
    fully_shard(net.first)
    fully_shard(net)
    manager.attach(net)
    for waits in (True, False):
        net.set_requires_gradient_sync(not waits)
        loss_of(net, 0, dist.get_rank()).backward()
        refused = pytest.raises(ConfigurationError, match="has not reduced yet") if waits else contextlib.nullcontext()
        with refused, manager.calibrate():
            pass

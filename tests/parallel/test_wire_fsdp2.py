"""FSDP2's gradients in FP8: how exact they are. What was damaged is named by receiver, sender and module."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import fp8dist
from fp8dist import CurrentScaling, DelayedScaling
from fp8dist.errors import ConfigurationError, DivergenceError
from fp8dist.parallel import torch_internals
from tests.parallel.test_wire import Damage, everything_in_fp8, flipped, received
from tests.parallel.test_wire_training import WORST
from tests.support.ranks import on_ranks
from tests.support.suite import NIGHTLY


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 32))


def sharded(model: nn.Sequential, mesh: Any = None) -> nn.Sequential:
    for part in (*model, model):
        fully_shard(part, mesh=mesh)
    with everything_in_fp8():
        assert fp8dist.fsdp.reduce_in_fp8(model) == ("0", "1")
    return model


def backward(model: nn.Module) -> None:
    with everything_in_fp8():
        model(torch.randn(16, 32)).square().mean().backward()


def found(check: Callable[[], Any]) -> Any:
    """Return the only finding."""
    with pytest.raises(DivergenceError) as caught:
        check()
    (finding,) = caught.value.report.findings
    return finding


@pytest.mark.parametrize("place", [0, -9, -1], ids=["a byte of a number", "a byte of a scale", "of the checksum"])
@on_ranks(3)
def test_damage_is_named(place: int) -> None:
    model = sharded(two_layers())
    backward(model)
    fp8dist.fsdp.check_gradients(model)
    with received(1, flipped(2, place)):
        backward(model)
    backward(model)  # It is remembered.
    finding = found(lambda: fp8dist.fsdp.check_gradients(model))
    assert (finding.ranks, finding.reference_rank) == ((1,), 0)
    assert finding.name == "1, as received in FP8"
    assert "damaged from rank 2" in finding.detail
    fp8dist.fsdp.check_gradients(model)  # It was reported.
    backward(model)
    assert not fp8dist.fsdp.check_gradients(model, policy="warn").diverged


@on_ranks(3)
def test_messages_of_another_step_are_named() -> None:
    """Memory that a rank reads before its messages have come, such as without a wait, holds intact older ones."""
    model = sharded(two_layers())
    older: list[Tensor] = []
    with received(0, lambda messages: older.append(messages.clone())):
        backward(model)
    with received(0, lambda messages: messages.copy_(older[0])):
        backward(model)
    finding = found(lambda: fp8dist.fsdp.check_gradients(model))
    assert finding.ranks == (0,)
    assert "damaged from rank 0, 1, 2" in finding.detail


@on_ranks(4)
def test_a_rank_of_one_replica_is_named() -> None:
    """With HSDP ranks receive from those of their replica, 2 and 3 here, and all ranks get the report."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    model = sharded(two_layers(), mesh)
    backward(model)
    with received(3, flipped(0, 0)):
        backward(model)
    finding = found(lambda: fp8dist.fsdp.check_gradients(model))
    assert (finding.ranks, finding.reference_rank) == ((3,), 0)
    assert "damaged from rank 2" in finding.detail


@on_ranks(4)
def test_modules_on_fewer_ranks_are_checked_with_the_rest() -> None:
    """As experts are: here the first layer is sharded over pairs of ranks."""
    model = two_layers()
    fully_shard(model[0], mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("other", "experts"))["experts"])
    fully_shard(model[1])
    with everything_in_fp8():
        assert fp8dist.fsdp.reduce_in_fp8(model) == ("0", "1")
    with received(3, flipped(0, 0)):
        backward(model)
    with pytest.raises(DivergenceError, match="damaged from rank 0"):  # On all four ranks.
        fp8dist.fsdp.check_gradients(model)


@pytest.mark.parametrize("recipe", [DelayedScaling(), CurrentScaling()], ids=["sync", "no sync"])
@on_ranks(3)
def test_a_manager_names_it(recipe: Any) -> None:
    """In the next step's sync, or, with scales that need none, when it is asked."""
    mesh = init_device_mesh("cpu", (3,))
    model = two_layers()
    manager = fp8dist.prepare(model, recipe, group=mesh)
    sharded(model, mesh)
    optimizer = torch.optim.SGD(model.parameters(), 0.0001)
    manager.attach(model, optimizer=optimizer)

    def step(damage: Damage | None = None) -> None:
        with received(2, damage) if damage else contextlib.nullcontext():
            backward(model)
        optimizer.step()
        optimizer.zero_grad()

    step()
    manager.check()
    step(flipped(1, 0))
    finding = found(step if recipe.delayed else manager.check)
    assert (finding.kind, finding.ranks, finding.reference_rank) == ("gradient", (2,), 0)
    assert finding.name == "1, as received in FP8"
    for _ in range(2):  # It was reported.
        step()
    manager.check()
    manager.detach()


def three_layers() -> nn.Sequential:
    """Two layers of more numbers than travel as before, and one of fewer."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(300, 331), nn.Linear(331, 300), nn.Linear(300, 4))


@pytest.mark.slow
@pytest.mark.parametrize("exclude", [pytest.param((), marks=NIGHTLY), "1"], ids=str)
@on_ranks(3)
def test_fsdp2(exclude: Any) -> None:
    gradients = []
    for in_fp8 in (False, True):
        model = three_layers()
        for part in (*model, model):
            fully_shard(part)
        if in_fp8:
            assert fp8dist.fsdp.reduce_in_fp8(model, exclude) == (("0",) if exclude else ("0", "1"))
        x = torch.randn(16, 300, generator=torch.Generator().manual_seed(dist.get_rank()))
        for _ in range(2):  # Accumulated in the sharded gradient.
            model(x).square().mean().backward()
        gradients.append([p.grad.full_tensor() for p in model.parameters()])
    for (name, _), expected, got in zip(model.named_parameters(), *gradients):
        lost = float((got - expected).norm() / expected.norm())
        assert lost <= WORST
        assert (lost > 0) == (not name.startswith(("2", *exclude))), name


@on_ranks(2)
def test_fsdp2_leaves_shard_groups_of_one_rank_alone() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replica", "shard"))
    for in_fp8 in (False, True):
        model = nn.Linear(300, 300, bias=False)
        fully_shard(model, mesh=mesh)
        model.set_gradient_divide_factor(3.0)
        if in_fp8:
            assert fp8dist.fsdp.reduce_in_fp8(model) == ()
        model(torch.full((1, 300), 1.0 + dist.get_rank())).sum().backward()
        assert model.weight.grad.to_local().unique().tolist() == [1.0]


@on_ranks(2)
def test_fsdp2_refuses() -> None:
    with pytest.raises(ConfigurationError, match="no FSDP2 module"):
        fp8dist.fsdp.reduce_in_fp8(three_layers())
    model = three_layers()
    fully_shard(model)
    with pytest.raises(ConfigurationError, match="exclude"):
        fp8dist.fsdp.reduce_in_fp8(model, "0")
    several = mock.patch.object(FSDPModule, "set_custom_reduce_scatter", side_effect=ValueError("several groups."))
    with several, pytest.raises(ConfigurationError, match=r"several groups\. Exclude"):
        fp8dist.fsdp.reduce_in_fp8(model)
    older = mock.patch.object(torch_internals, "_SETTERS", ("set_in_a_later_torch",))
    with older, pytest.raises(ConfigurationError, match=r"has no FSDPModule\.set_in_a_later_torch"):
        fp8dist.fsdp.reduce_in_fp8(model)
    assert fp8dist.fsdp.reduce_in_fp8(model) == ("",)  # Two ranks are enough.
    fully_shard(several_layers := two_layers())
    assert fp8dist.fsdp.reduce_in_fp8(several_layers) == ()  # Too small.
    with pytest.raises(ConfigurationError, match=r"reduce_in_fp8\(\) has put in FP8"):
        fp8dist.fsdp.check_gradients(several_layers)

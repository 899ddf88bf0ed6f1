"""detach: undoes attach, keeps the state bit for bit, and allows another attach."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.callback import callback_handler
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import fp8dist
from fp8dist import ConfigurationError, DelayedScaling, DivergenceError
from fp8dist.modules.fp8_linear import FP8Linear, fp8_linears
from tests.support.collectives import counted_collectives
from tests.support.ranks import RankPool, on_ranks
from tests.support.training import batch, bits, fp8_count, make_net, state_bits

UPDATES = ["same_step", "next_step"]


def _prepared(update: str = "same_step", **settings: Any) -> Any:
    net = make_net()
    group = dist.group.WORLD if dist.is_initialized() else None
    recipe = DelayedScaling(history_len=3, update=update)  # type: ignore[arg-type]
    return net, fp8dist.prepare(net, recipe, group=group, **settings)


def _wrapped(net: nn.Module, wrapper: str) -> nn.Module:
    if wrapper == "fsdp2":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        return fully_shard(nn.Sequential(net), mesh=mesh)
    return DistributedDataParallel(net) if wrapper == "ddp" else net


def _loss(model: nn.Module, index: int) -> torch.Tensor:
    x, y = batch(dist.get_rank() if dist.is_initialized() else 0, index)
    return nn.functional.mse_loss(model(x), y)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> float:
    loss = _loss(model, index)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def _trained(update: str, wrapper: str, breaks: bool) -> Any:
    """Return losses, state before and after the break, and state and parameters at the end."""
    net, manager = _prepared(update)
    model = _wrapped(net, wrapper)
    optimizer = SGD(model.parameters(), lr=0.05)
    manager.attach(model, optimizer=optimizer)
    losses = [_step(model, optimizer, index) for index in range(3)]
    before = state_bits(manager)
    if breaks:
        manager.detach()
        assert state_bits(manager) == before
        assert sum(isinstance(module, FP8Linear) for module in net.modules()) == 3
        if wrapper == "ddp":  # Use another wrapper.
            model = _wrapped(net, wrapper)
        optimizer = SGD(model.parameters(), lr=0.05)
        manager.attach(model, optimizer=optimizer)
        assert state_bits(manager) == before
    losses += [_step(model, optimizer, index) for index in range(3, 6)]
    return losses, state_bits(manager), {name: bits(_local(p)) for name, p in net.named_parameters()}


def _local(parameter: Any) -> torch.Tensor:
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


@pytest.mark.parametrize(("wrapper", "update"), [("ddp", "next_step"), ("fsdp2", "same_step")])
def test_a_run_that_detaches_and_attaches_anew_is_the_unbroken_one(
    two_ranks: RankPool, update: str, wrapper: str
) -> None:
    assert two_ranks.run(_trained, update, wrapper, True) == two_ranks.run(_trained, update, wrapper, False)


@pytest.mark.parametrize("update", UPDATES[1:])
@on_ranks(2)
def test_nothing_is_left_of_attach(update: str) -> None:
    net, manager = _prepared(update)
    ddp = DistributedDataParallel(net)
    optimizer, scaler = SGD(ddp.parameters(), lr=0.05), torch.amp.GradScaler("cpu", enabled=False)
    untouched = len(ddp._forward_hooks), dict(vars(scaler))
    of_others = list(callback_handler.start_callbacks)  # Managers of other tests may be deleted meanwhile.
    manager.attach(ddp, optimizer=optimizer, scaler=scaler)
    for index in range(2):
        _step(ddp, optimizer, index)
    manager.detach()
    state = state_bits(manager)
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    assert (len(ddp._forward_hooks), dict(vars(scaler))) == untouched
    assert [watch for watch in callback_handler.start_callbacks if watch not in of_others] == []
    assert fp8dist.get_manager(ddp) is manager
    assert "not attached" in repr(manager)
    with counted_collectives() as calls:
        with manager.no_fp8():
            for index in range(2, 5):
                _step(ddp, optimizer, index)
        with pytest.raises(ConfigurationError, match="a second time"):
            _step(ddp, optimizer, 5)
    assert fp8_count(calls, manager) == 0
    with pytest.raises(ConfigurationError, match=r"attach\(\) first"):
        manager.step()
    with pytest.raises(ConfigurationError, match=r"attach\(\) first"):
        manager.check()
    manager.detach()  # A second detach does nothing.
    assert state_bits(manager) == state


@on_ranks(2)
def test_the_hook_that_ddp_keeps_is_idle_while_detached() -> None:
    net, manager = _prepared()
    ddp = DistributedDataParallel(net)
    optimizer = SGD(ddp.parameters(), lr=0.05)
    manager.attach(ddp, optimizer=optimizer)
    ddp.register_comm_hook(None, fp8dist.ddp.comm_hook(manager))
    _step(ddp, optimizer, 0)
    _loss(ddp, 1).backward()
    with pytest.raises(ConfigurationError, match="a sync is in flight until a step that is not skipped: call"):
        manager.detach()
    optimizer.step()
    optimizer.zero_grad()
    manager.detach()
    with counted_collectives() as calls:
        _loss(ddp, 2).backward()
    idle = fp8_count(calls, manager)
    optimizer.zero_grad()
    manager.attach(ddp, optimizer=optimizer)
    with counted_collectives() as calls:
        _step(ddp, optimizer, 3)
    assert (idle, fp8_count(calls, manager), manager.steps) == (0, 1, 3)


@on_ranks(2)
def test_what_the_last_sync_proved_is_not_lost() -> None:
    net, manager = _prepared("next_step")
    optimizer = SGD(net.parameters(), lr=0.0)
    manager.attach(net, boundary="manual")
    for index in range(2):
        if index and dist.get_rank() == 1:
            manager.slot("last", "weight").scale.mul_(2)
        _loss(net, index).backward()
        manager.step()
    with pytest.raises(DivergenceError, match="last:weight") as caught:
        manager.detach()
    attached = manager._job.attached
    manager.detach()
    del optimizer
    assert (attached, manager._job.attached, caught.value.report.findings[0].name) == (True, False, "last:weight")


def test_one_rank_goes_on_with_steps_of_its_own() -> None:
    net, manager = _prepared()
    optimizer = SGD(net.parameters(), lr=0.05)
    manager.attach(optimizer=optimizer)
    _step(net, optimizer, 0)
    manager.detach()
    for index in range(1, 4):
        _step(net, optimizer, index)
        manager.step()
    assert manager.steps == 4
    twin = copy.deepcopy(net)
    assert state_bits(fp8dist.get_manager(twin)) == state_bits(manager)
    assert fp8dist.restore(net) is net
    assert not list(fp8_linears(net))
    with pytest.raises(ConfigurationError, match="restore"):
        manager.detach()


@on_ranks(2)
def test_restore_takes_a_wrapper() -> None:
    net, manager = _prepared()
    ddp = DistributedDataParallel(net)
    optimizer = SGD(ddp.parameters(), lr=0.05)
    manager.attach(ddp, optimizer=optimizer)
    _step(ddp, optimizer, 0)
    assert fp8dist.restore(ddp) is ddp
    assert [type(module) for module in net.modules() if isinstance(module, nn.Linear)] == [nn.Linear] * 3
    assert _step(ddp, optimizer, 1) > 0


def _taken_apart_after_the_end(update: str) -> Any:
    """Call what is local after the job's groups are gone."""
    net, manager = _prepared(update)
    ddp = DistributedDataParallel(net)
    optimizer = SGD(ddp.parameters(), lr=0.05)
    manager.attach(ddp, optimizer=optimizer)
    for index in range(2):
        _step(ddp, optimizer, index)
    state = state_bits(manager)
    dist.barrier()
    del ddp
    dist.destroy_process_group()
    manager.metrics()
    manager.detach()
    assert state_bits(manager) == state
    assert fp8dist.restore(net) is net
    return [type(module) for module in net.modules() if isinstance(module, nn.Linear)]


@pytest.mark.slow
@pytest.mark.parametrize("update", UPDATES)
def test_local_calls_work_after_the_process_group_is_destroyed(update: str) -> None:
    pool = RankPool(2)  # Its own: the ranks have no group afterwards.
    try:
        assert pool.run(_taken_apart_after_the_end, update) == [[nn.Linear] * 3] * 2
    finally:
        pool.close()


def _error(model: nn.Module) -> float:
    """Return the error of the last layer, relative to high precision."""
    linear, x = model[-1], batch(0, 9)[0]  # type: ignore[index]
    x = x[:, : linear.in_features]
    with torch.no_grad():
        exact = x @ linear.weight.T + linear.bias
        return float((linear(x) - exact).norm() / exact.norm())


@pytest.mark.parametrize("detaches", [True, False])
@pytest.mark.parametrize("change", ["loaded", "trained"])
def test_weights_that_changed_while_nothing_was_attached_are_not_cut_off(change: str, detaches: bool) -> None:
    """attach derives only the scales of cold slots; hot slots have scales of outdated weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32))
    manager = fp8dist.prepare(model)
    optimizer = SGD(model.parameters(), lr=1e-6)
    manager.attach(model, optimizer=optimizer)
    for _ in range(3):
        model(batch(0, 1)[0][:, :16]).square().mean().backward()
        optimizer.step()
    usual = _error(model)
    if detaches:
        manager.detach()
    if change == "loaded":
        model.load_state_dict({name: 1.9 * tensor for name, tensor in model.state_dict().items()})
    else:
        with manager.no_fp8():
            model(batch(0, 1)[0][:, :16]).sum().backward()
            model[0].weight.grad = -0.9 * model[0].weight.detach()
            SGD(model.parameters(), lr=1.0).step()
    manager.attach(model, optimizer=optimizer)
    assert _error(model) < 1.3 * usual


def _join_after_a_hook() -> list[str]:
    net, manager = _prepared()
    ddp = DistributedDataParallel(net)
    ddp.register_comm_hook(None, fp8dist.ddp.comm_hook(manager))
    optimizer = SGD(net.parameters(), lr=0.05)
    manager.attach(ddp, optimizer=optimizer)
    _step(ddp, optimizer, 0)
    manager.detach()
    hookless = DistributedDataParallel(net)
    manager.attach(hookless, optimizer=optimizer)
    with Join([hookless, manager]):
        _step(hookless, optimizer, 1)
        with pytest.raises(ConfigurationError, match="Join"):
            fp8dist.restore(net)
    manager.attach(ddp, optimizer=optimizer)  # Its hook works again.
    _step(ddp, optimizer, 2)
    with pytest.raises(ConfigurationError, match="comm_hook"), Join([ddp, manager]):
        pass
    return [bits(parameter) for parameter in net.parameters()]


def test_join_works_with_a_wrapper_that_has_no_hook(two_ranks: RankPool) -> None:
    first, second = two_ranks.run(_join_after_a_hook)
    assert first == second

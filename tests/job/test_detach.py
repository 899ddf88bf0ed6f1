"""detach: undoes attach, keeps the state bit for bit, and allows another attach (see also test_whole_job.py)."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.callback import callback_handler
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import fp8dist
from fp8dist import ConfigurationError, DelayedScaling, DivergenceError
from fp8dist.modules.fp8_linear import fp8_linears
from tests.support.collectives import counted_collectives
from tests.support.parallel import same_on_all_ranks
from tests.support.ranks import on_ranks
from tests.support.training import SmallJob, batch, parameter_bits, state_bits, unwrapped


def _job(update: Any = "same_step", **options: Any) -> SmallJob:
    return SmallJob(DelayedScaling(history_len=3, update=update), **options)


@on_ranks(2)
def test_nothing_is_left_of_attach() -> None:
    job = _job("next_step")
    job.manager.detach()
    optimizer, scaler = job.optimizer, torch.amp.GradScaler("cpu", enabled=False)
    untouched = len(job.called._forward_hooks), dict(vars(scaler))
    of_others = list(callback_handler.start_callbacks)  # Managers of other tests may be deleted meanwhile.
    job.manager.attach(job.called, optimizer=optimizer, scaler=scaler)
    for index in range(2):
        job.step(index)
    job.manager.detach()
    state = state_bits(job.manager)
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    assert (len(job.called._forward_hooks), dict(vars(scaler))) == untouched
    assert [watch for watch in callback_handler.start_callbacks if watch not in of_others] == []
    assert fp8dist.get_manager(job.called) is job.manager
    assert "not attached" in repr(job.manager)
    with counted_collectives() as calls:
        with job.manager.no_fp8():
            for index in range(2, 5):
                job.step(index)
        with pytest.raises(ConfigurationError, match="a second time"):
            job.step(5)
    assert len(calls.syncs(job.manager)) == 0
    job.manager.detach()  # A second detach does nothing.
    assert state_bits(job.manager) == state


@pytest.mark.parametrize("where", ["job.attachment.agree", "checks.checker.check_replicas", "job.attachment.JoinLink"])
@on_ranks(2)
def test_an_attach_that_ends_early_leaves_the_manager_detached(where: str) -> None:
    """Ctrl-C comes while an attached manager is attached again, and has no hooks any more."""

    def interrupt(*_: Any, **__: Any) -> None:
        dist.barrier()  # A rank that leaves while the other one still connects would fail that.
        raise KeyboardInterrupt

    job = _job("next_step")
    job.step(0)
    with mock.patch(f"fp8dist.{where}", side_effect=interrupt), pytest.raises(KeyboardInterrupt):
        job.manager.attach(job.called, optimizer=job.optimizer)
    with pytest.raises(ConfigurationError, match=r"a step after detach\(\)"):
        job.manager.step()
    job.manager.attach(job.called, optimizer=job.optimizer)
    job.step(1)
    assert job.manager.steps == 2


@on_ranks(2)
def test_hooks_that_ddp_keeps_are_idle_while_detached() -> None:
    job = _job()
    manager, ddp = job.manager, job.called
    ddp.register_comm_hook(None, fp8dist.ddp.comm_hook(manager))
    job.step(0)
    manager.detach()
    with counted_collectives() as calls:
        job.backward(2)
    assert len(calls.syncs(manager)) == 0
    job.optimizer.zero_grad()
    job.called = hookless = DistributedDataParallel(job.net)  # Join works with a wrapper that has no hook.
    manager.attach(hookless, optimizer=job.optimizer)
    with Join([hookless, manager]):
        job.step(3)
    job.called = ddp
    manager.attach(ddp, optimizer=job.optimizer)  # Its hook works again.
    with counted_collectives() as calls:
        job.step(4)
    assert (len(calls.syncs(manager)), manager.steps) == (1, 3)
    with pytest.raises(ConfigurationError, match="comm_hook"), Join([ddp, manager]):
        pass
    assert fp8dist.restore(hookless) is hookless  # It takes a wrapper.
    assert not list(fp8_linears(job.net))
    same_on_all_ranks(parameter_bits(job.net))


@on_ranks(2)
def test_what_the_last_sync_proved_is_not_lost() -> None:
    job = _job("next_step", wrap=unwrapped, attach={"boundary": "manual"})
    for index in range(2):
        if index and dist.get_rank() == 1:
            job.manager.slot("last", "weight").scale.mul_(2)
        job.backward(index)
        job.manager.step()
    with pytest.raises(DivergenceError, match="last:weight"):
        job.manager.detach()
    assert job.manager._job.attached
    job.manager.detach()
    assert not job.manager._job.attached


def test_one_rank_goes_on_with_steps_of_its_own() -> None:
    job = _job(wrap=unwrapped)
    job.step(0)
    job.manager.detach()
    for index in range(1, 4):
        job.step(index)
        job.manager.step()
    assert job.manager.steps == 4
    assert state_bits(fp8dist.get_manager(copy.deepcopy(job.net))) == state_bits(job.manager)
    assert fp8dist.restore(job.net) is job.net
    assert not list(fp8_linears(job.net))


def _error(model: nn.Module) -> float:
    """Return the error of the last layer, relative to high precision."""
    linear, x = model[-1], batch(0, 9)[0]  # type: ignore[index]
    x = x[:, : linear.in_features]
    with torch.no_grad():
        exact = x @ linear.weight.T + linear.bias
        return float((linear(x) - exact).norm() / exact.norm())


@pytest.mark.parametrize(("change", "detaches"), [("loaded", True), ("loaded", False), ("trained", True)])
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

"""A torch version without the private state that this package reads: one warning, and no check is lost silently."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp import _dynamo_utils as dynamo_utils
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import fp8dist
from fp8dist import DelayedScaling
from fp8dist.errors import ConfigurationError
from fp8dist.parallel import torch_internals
from tests.support.logs import captured_log
from tests.support.meshes import mesh_of
from tests.support.ranks import on_ranks


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32))


def _refused(call: Callable[[], object]) -> str:
    try:
        call()
    except ConfigurationError as error:
        return str(error)
    return ""


@contextlib.contextmanager
def _without(thing: type, name: str) -> Iterator[None]:
    """Hide an attribute of a class and its objects from this package, but not from torch, which needs it."""
    declared = inspect.get_annotations(thing) and thing.__annotations__

    def hidden(self: object, asked: str) -> Any:
        if asked == name and sys._getframe(1).f_globals["__name__"].startswith("fp8dist."):
            raise AttributeError(asked)
        return object.__getattribute__(self, asked)

    with mock.patch.dict(declared), mock.patch.object(thing, "__getattribute__", hidden, create=True):
        declared.pop(name, None)
        yield


def _lack(net: nn.Module, name: str) -> contextlib.AbstractContextManager[Any]:
    if name == "_get_fsdp_state":
        return _without(FSDPModule, name)
    if name in ("unsharded_accumulated_grad", "_unsharded_param"):
        return _without(FSDPParam, name)
    state = net._get_fsdp_state()  # type: ignore[operator]
    return _without(type(torch_internals._groups(state)[0]), name)


NAMES = ["_get_fsdp_state", "mesh_info", "_partial_reduce_output", "unsharded_accumulated_grad", "_unsharded_param"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "gather"), [(None, True), *((name, False) for name in NAMES), *((name, True) for name in NAMES[:2])]
)
@on_ranks(2)
def test_what_needs_private_state_of_fsdp2_is_refused_without_it(name: str | None, gather: bool) -> None:
    """calibrate() does where FSDP2 does not tell of gradients, and an FP8 all-gather where it does not tell where it
    reshards. Two attachments have one warning. A torch that has all is not warned of."""
    net = _net()
    manager = fp8dist.prepare(net, DelayedScaling(history_len=4), group=dist.group.WORLD, fp8_all_gather=gather)
    for part in (*net, net):
        fully_shard(part)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def calibrate() -> None:
        with manager.calibrate():
            net(torch.ones(4, 32))

    with captured_log() as log, contextlib.nullcontext() if name is None else _lack(net[0], name):
        attach = _refused(lambda: manager.attach(net, optimizer=optimizer))
        calibration = ""
        if not attach:
            manager.attach(net, optimizer=optimizer)
            calibration = _refused(calibrate)
    if name is None:
        assert (log, attach, calibration) == ([], "", "")
        return
    ((_, warned),) = log
    assert torch.__version__ in warned
    assert name in warned
    assert "raise ConfigurationError" in warned
    if gather:
        assert attach.startswith(f"fp8_all_gather=True: torch {torch.__version__} has no ")
        assert attach.endswith("or leave fp8_all_gather out")
    else:
        assert calibration.startswith(f"calibrate(): torch {torch.__version__} has no ")
        assert name in calibration
        assert "train without it" in calibration
        net(torch.ones(4, 32)).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("inside", [True, False], ids=["beside FSDP2", "alone"])
@on_ranks(2)
def test_a_dtensor_whose_owner_this_torch_does_not_tell_is_refused(inside: bool) -> None:
    """Attach a tensor-parallel Linear, beside an FSDP2 module if ``inside``. Return (warnings, the error)."""
    net = _net()
    manager = fp8dist.prepare(net, group=dist.group.WORLD)
    whole = nn.Sequential(net)
    parallelize_module(net[0], mesh_of((dist.get_world_size(),), ("tp",)), ColwiseParallel())
    if inside:
        fully_shard(net[1])
    for hook in net[1]._load_state_dict_post_hooks.values():
        hook.__qualname__ = "Shard.hook"

    def another(self: object) -> None:
        pass

    with captured_log() as log, mock.patch.object(FSDPParam, "__init__", another):
        refused = _refused(lambda: manager.attach(whole))
    (text,) = [text for _, text in log]
    assert "no FSDPParam hook after load_state_dict" in text
    assert refused.startswith("attach() of a DTensor weight that no FSDP2 module of the model holds: torch ")
    assert "pass it as attach(module=…)" in refused


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("orig", [True, False], ids=["use_orig_params", "flat"])
@on_ranks(2)
def test_what_fsdp1_leaves_of_a_linear_is_not_prepared(orig: bool) -> None:
    def annotate(module: nn.Module, ignored: object, use_orig_params: bool) -> None:
        for inner in module.modules():
            inner._another_mark = True  # type: ignore[assignment]

    fsdp1 = sys.modules["torch.distributed.fsdp.fully_sharded_data_parallel"]
    with (
        mock.patch.object(dynamo_utils, "_annotate_modules_for_dynamo", annotate),
        mock.patch.object(fsdp1, "_annotate_modules_for_dynamo", annotate),
    ):
        net = _net()
        FullyShardedDataParallel(net, device_id=torch.device("cpu"), use_orig_params=orig)
        with captured_log() as log:
            sharded, plain = (
                _refused(lambda model=model: fp8dist.prepare(model, amax_sync=False)) for model in (net, _net())
            )
        assert not log
    assert sharded.startswith(f"prepare() of parameters that may be FSDP's: torch {torch.__version__} has no _is_")
    assert "prepare the model before it is sharded" in sharded
    assert plain == ""


@on_ranks(2)
def test_a_check_is_refused_where_fsdp1_does_not_tell_what_it_ignores() -> None:
    net = _net()
    manager = fp8dist.prepare(net, group=dist.group.WORLD)
    wrapped = FullyShardedDataParallel(net, device_id=torch.device("cpu"), use_orig_params=True)
    del wrapped._ignored_params
    with captured_log() as log:
        manager.attach(wrapped)
        refused = _refused(lambda: fp8dist.check(wrapped))
    ((_, text),) = log
    assert "no FullyShardedDataParallel._ignored_params" in text
    assert refused.startswith("check() under FSDP1: torch ")


def test_a_plain_model_is_not_warned_of_any_torch() -> None:
    net = _net()
    with captured_log() as log, mock.patch.object(dynamo_utils, "_annotate_modules_for_dynamo", None):
        with mock.patch.object(_fsdp_param, "FSDPParam", None):
            manager = fp8dist.prepare(net)
            manager.attach()
        with manager.calibrate():
            net(torch.ones(4, 32))
    assert log == []


@pytest.mark.slow
@on_ranks(4)
def test_gradients_that_wait_for_the_all_reduce_of_hsdp_are_not_mixed_in() -> None:
    net = _net()
    manager = fp8dist.prepare(net, DelayedScaling(history_len=4), group=dist.group.WORLD)
    fully_shard(net, mesh=mesh_of((2, 2), ("replicate", "shard")))
    manager.attach(net)
    for reduced in (False, True):
        net.set_requires_all_reduce(reduced)
        net(torch.ones(4, 32)).sum().backward()
        told = _refused(lambda: manager.calibrate().__enter__())
        assert ("has not reduced yet" in told) is (told != "") is not reduced


@pytest.mark.parametrize("name", ["_get_ddp_logging_data", "_use_python_reducer"])
@on_ranks(2)
def test_a_replay_is_refused_where_ddp_does_not_tell_how_it_reduces(name: str) -> None:
    wrapper = DistributedDataParallel(_net())
    with _without(DistributedDataParallel, name):
        told = _refused(lambda: fp8dist.replay(wrapper, lambda x: wrapper(x).sum().backward(), torch.ones(4, 32)))
    assert told.startswith(f"replay(): torch {torch.__version__} has no DistributedDataParallel.{name}")

"""What a replay refuses, with a reason, what DDP's hooks see of it, and that the model is left as it was."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import fp8dist
from fp8dist import ConfigurationError
from tests.support.meshes import quiet
from tests.support.parallel import same_on_all_ranks
from tests.support.ranks import on_ranks
from tests.support.suite import few
from tests.support.training import batch, bits, gradient_bits, make_net, parameter_bits


def _step_of(model: Any) -> Callable[[Any], None]:
    def step(index: int) -> None:
        x, y = batch(0, index)  # Equal data on all ranks.
        nn.functional.mse_loss(model(x), y).backward()

    return step


def _replayed(model: Any, step: Callable[[Any], Any] | None = None, batch: Any = 0) -> fp8dist.ReplayReport:
    return fp8dist.replay(model, _step_of(model) if step is None else step, batch)


def _ddp(**options: Any) -> Any:
    return DistributedDataParallel(make_net(), **options)


def _settled(model: Any = None) -> Any:
    """DDP arranges its buckets in the second forward."""
    model = model or _ddp()
    for index in range(2):
        _step_of(model)(index)
    return model


def _stepping() -> None:
    model = _settled()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _replayed(model, lambda index: (_step_of(model)(index), optimizer.step()))


def _ending_a_step() -> None:
    net = make_net()
    manager = fp8dist.prepare(net, group=dist.group.WORLD).attach(boundary="manual")
    _replayed(net, lambda index: (_step_of(net)(index), manager.step()))


def _writing() -> None:
    net = make_net()

    def step(index: int) -> None:
        _step_of(net)(index)
        with torch.no_grad():
            net.last.bias.add_(1)

    _replayed(net, step)


def _joined() -> None:
    model = _settled()
    with Join([model]):
        _replayed(model)


def _fsdp1() -> None:
    with quiet():
        _replayed(FullyShardedDataParallel(make_net(), device_id=torch.device("cpu")))


def _hooked() -> None:
    net: Any = make_net()
    for module in (net.first, net):
        fully_shard(module)
    net.set_all_reduce_hook(lambda reduced: None)
    _replayed(net)


def _split() -> None:
    net, mesh = make_net(), dist.init_device_mesh("cpu", (2,))
    net.last.weight = nn.Parameter(distribute_tensor(net.last.weight.detach(), mesh, [Shard(0)]))
    net.first.weight = nn.Parameter(distribute_tensor(net.first.weight.detach(), mesh, [Replicate()]))
    _replayed(net)


def _in_main_gradients() -> None:
    net = make_net()
    net.last.weight.main_grad = torch.zeros(16, 48)  # type: ignore[attr-defined]
    _replayed(net)


def _compiled() -> None:
    net = make_net()
    _replayed(net, _step_of(torch.compile(net, backend="eager")))


def _compiled_step() -> None:
    net = make_net()
    _replayed(net, torch.compile(_step_of(net), backend="eager"))


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "an optimizer": (_stepping, "called SGD.step()"),
    "the end of a step": (_ending_a_step, "a step inside replay()"),
    "a parameter": (_writing, "wrote to the parameter last.bias"),
    "join": (_joined, "inside a Join context"),
    "no buckets yet": (lambda: _replayed(_ddp()), "arranges its buckets"),
    "unused": (lambda: _replayed(_settled(_ddp(find_unused_parameters=True))), "find_unused_parameters"),
    "fsdp1": (_fsdp1, "FSDP1"),
    "fsdp2's hook": (_hooked, "set_all_reduce_hook"),
    "parts": (_split, "the data-parallel axis"),
    "objects": (lambda: _replayed(make_net(), batch=[torch.device("cpu")]), "holds a device"),
    "meta": (lambda: _replayed(make_net().to("meta")), "materialise"),
    "main_grad": (_in_main_gradients, "main_grad"),
    "nothing seen": (_compiled, "no module of the model was called in Python"),
    "a compiled step": (_compiled_step, "no module of the model was called in Python"),
    "lazy": (lambda: _replayed(nn.LazyLinear(4)), "lazy parameters"),
    "nothing there": (lambda: _replayed(nn.ReLU()), "no parameters"),
}


@pytest.mark.parametrize("what", few(REFUSED, *(REFUSED.keys() - {"a compiled step"})))
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@on_ranks(2)
def test_refused_with_a_reason_on_all_ranks(what: str) -> None:
    call, reason = REFUSED[what]
    with pytest.raises(ConfigurationError) as raised:
        call()
    assert reason in str(raised.value)
    same_on_all_ranks(str(raised.value))


@on_ranks(2)
def test_what_one_rank_refuses_all_refuse() -> None:
    net = make_net()
    before = parameter_bits(net)
    with pytest.raises(ConfigurationError, match=r"\(rank 1\)$"):
        _replayed(net, batch=0 if dist.get_rank() == 0 else object())
    assert parameter_bits(net) == before


@on_ranks(2)
def test_a_communication_hook_of_ddp_is_not_called() -> None:
    """DDP's hook does not run without a reduction, so its state stays."""
    model = _ddp()
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    _settled(model)
    before, gradients = state.iter, gradient_bits(model)
    assert _replayed(model).reproducible
    assert (state.iter, gradient_bits(model)) == (before, gradients)


def test_notes_of_a_gradient_scaler_are_put_back() -> None:
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def step(index: int) -> None:
        x, y = batch(0, index)
        scaler.scale(nn.functional.mse_loss(net(x), y)).backward()
        scaler.unscale_(optimizer)

    for _ in range(2):
        assert fp8dist.replay(net, step, 0, scaler=scaler).reproducible
    step(0)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 8.0


_IN_A_PROCESS_OF_ITS_OWN = r"""
import re, torch, fp8dist
from torch import nn

torch.set_num_threads(1)
model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(4)))
model.register_buffer("table", torch.ones(2048, 4096))

def step(x):
    model(x).square().mean().backward()

def peak():  # Not ru_maxrss: a child begins with its parent's.
    status = open("/proc/self/status").read()
    return int(re.search(r"VmHWM:\s*(\d+)", status)[1])

x = torch.randn(8, 2048)
for _ in range(2):
    step(x)
before = peak()
fp8dist.replay(model, step, x)
print((peak() - before) / 1024)
"""


@pytest.mark.long
def test_memory_is_that_of_gradients_and_buffers_once() -> None:
    """64 MiB of gradients and 32 MiB of buffers, beside some for digests and for one activation."""
    command = [sys.executable, "-c", _IN_A_PROCESS_OF_ITS_OWN]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert 48 < float(found.stdout) < 64 + 32 + 24


@pytest.mark.parametrize(
    "options",
    [{}, {"static_graph": True}, {"bucket_cap_mb": 1e-5, "gradient_as_bucket_view": True}],
    ids=["plain", "static_graph", "bucket views"],
)
@on_ranks(2)
def test_ddp_is_left_as_it_is_between_a_forward_and_its_backward(options: dict[str, Any]) -> None:
    """With gradients of a microbatch that was not reduced."""
    found = []
    for replays in (True, False):
        model = _settled(_ddp(**options))
        if replays and "static_graph" not in options:
            # Its hooks on parameters must not look like hooks of the program afterwards.
            assert _replayed(model, batch=1).reproducible
        with model.no_sync():
            _step_of(model)(2)
        x, y = batch(dist.get_rank(), 3)
        loss = nn.functional.mse_loss(model(x), y)
        if replays:
            with pytest.raises(ConfigurationError, match="between a forward of DDP and its backward"):
                _replayed(model)
        loss.backward()
        found.append(gradient_bits(model))
    assert found[0] == found[1]
    same_on_all_ranks(found[1])


@on_ranks(2)
def test_what_is_frozen_or_hooked_is_no_probe_between_a_forward_and_its_backward() -> None:
    net = make_net()
    small = [parameter for parameter in net.parameters() if parameter.dim() < 2]
    small[0].requires_grad_(False)
    calls: list[int] = []
    hooked = [parameter for parameter in net.parameters() if parameter.requires_grad and parameter is not small[-1]]
    for parameter in hooked:
        parameter.register_hook(lambda _gradient: calls.append(1))
    model = _settled(DistributedDataParallel(net))
    calls.clear()
    loss = model(batch(dist.get_rank(), 3)[0]).square().mean()
    with pytest.raises(ConfigurationError, match="between a forward of DDP and its backward"):
        _replayed(model)
    loss.backward()
    assert len(calls) == len(hooked) > 1
    small[-1].register_hook(lambda _gradient: None)
    assert _replayed(model).reproducible  # Without a probe.


class _Changing(nn.Module):
    """Its forward replaces parameters and buffers, makes a buffer, writes to others and to their memory, resizes one,
    and ends in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.inner = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64), persistent=False)
        self.register_buffer("missing", None)
        self.register_buffer("wide", torch.ones(1).expand(4))
        self.register_buffer("count", torch.arange(4.0))
        self.register_buffer("table", torch.arange(4.0))
        with torch.inference_mode():
            self.register_buffer("constant", torch.ones(4))
            self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.mean = 0.9 * self.mean + x.detach().mean(0)
        self.missing = x.detach()
        if not hasattr(self, "made"):
            self.register_buffer("made", x.detach().mean(0))
        y = self.inner(x) * self.scale * (2 if self.training else 1) + self.count.sum() + self.table.sum()
        y = y * self.calls + self.mean * self.made * self.wide * self.constant + self.frozen
        self.scale = nn.Parameter(2 * self.scale.detach())
        self.count.resize_(8).fill_(1)
        self.table.data = torch.ones(2, dtype=torch.float64)
        self.inner.bias.data = self.inner.bias.data + 1
        self.eval()
        return y


def test_what_a_step_writes_replaces_or_resizes_comes_back() -> None:
    """The same objects, with the same values."""
    net = _Changing()

    def tensors() -> dict[str, Any]:
        return {**dict(net.named_parameters()), **dict(net.named_buffers())}

    before = {name: (tensor, tensor.tolist(), tensor.dtype) for name, tensor in tensors().items()}
    report = fp8dist.replay(net, lambda x: net(x).square().mean().backward(), torch.randn(2, 4))
    assert report.reproducible, str(report)
    assert net.missing is None
    assert tensors().keys() == before.keys()
    for name, (tensor, values, dtype) in before.items():
        assert tensors()[name] is tensor
        assert (tensor.tolist(), tensor.dtype) == (values, dtype)
    assert all(module.training for module in net.modules())


@pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated:DeprecationWarning")
def test_buffers_of_a_scripted_module_come_back() -> None:
    net = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.BatchNorm1d(4)))
    before = {name: bits(tensor) for name, tensor in net.state_dict().items()}
    assert fp8dist.replay(net, lambda x: net(x).square().mean().backward(), torch.randn(3, 4)).reproducible
    assert {name: bits(tensor) for name, tensor in net.state_dict().items()} == before


def test_a_graph_from_before_can_still_run_backward() -> None:
    """It has saved a buffer that the replay puts back."""
    norm = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16))
    x = torch.randn(4, 16)
    loss = (norm(x) * norm[1].running_var.sqrt()).sum() + (norm[0](x) * norm[1].running_mean).sum()
    fp8dist.replay(norm, lambda x: norm(x).square().mean().backward(), x)
    loss.backward()
    assert norm[0].weight.grad is not None

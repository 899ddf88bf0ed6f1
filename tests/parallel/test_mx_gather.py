"""FSDP2 gathers MXFP8 weights: one copy for a forward, both for a backward, and the numbers of a job that does not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.exc import InternalTorchDynamoError
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import fp8dist
from fp8dist import CurrentScaling, MXFP8Scaling
from fp8dist.errors import ConfigurationError
from tests.support import sharded_experts
from tests.support.collectives import CountingAllGather
from tests.support.ranks import on_ranks
from tests.support.sharded import full
from tests.support.suite import few
from tests.support.training import bits

pytestmark = pytest.mark.slow

INLET = {"overrides": {"inlet": CurrentScaling()}}
EXPERTS = sharded_experts.Job(recipe=MXFP8Scaling(), settings=INLET, inner=64)


class Repeated(nn.Module):
    """A block whose forward runs again in the backward."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)
        self.reentrant = reentrant

    def _forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return self._forward(x)
        out: Tensor = checkpoint(self._forward, x, use_reentrant=self.reentrant)
        return out


def _blocks(
    reentrant: bool | None,
    gathers: bool,
    reshards: bool = True,
    steps: int = 2,
    mesh: DeviceMesh | None = None,
    assigns: bool = False,
) -> tuple[nn.Module, list[bytes], fp8dist.StateManager]:
    """Return a model after some steps, each with an evaluation before it, and all that it computed."""
    torch.manual_seed(0)
    model = nn.Sequential(Repeated(reentrant), Repeated(reentrant), nn.Linear(64, 64))
    manager = fp8dist.prepare(model, MXFP8Scaling(), group=dist.group.WORLD, fp8_all_gather=gathers)
    for block in model[:2]:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshards)
    fully_shard(model, mesh=mesh)
    if assigns:  # FSDP2 learns of the new parameters at the first forward only.
        model.load_state_dict({name: p.detach().clone() for name, p in model.state_dict().items()}, assign=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    manager.attach(model, optimizer=optimizer)
    seen = []
    for index in range(steps):
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(8 * index + dist.get_rank()))
        with torch.no_grad():
            seen.append(bits(model.eval()(x)))
        output = model.train()(x.requires_grad_())
        output.square().mean().backward()
        assert x.grad is not None
        seen += [bits(output.detach()), bits(x.grad)]
        optimizer.step()
        optimizer.zero_grad()
    return model, [*seen, *map(bits, full(model).values())], manager


@pytest.mark.parametrize("reentrant", few([None, False, True], None, True))
@on_ranks(2)
def test_repeated_and_kept_forwards_give_the_same(reentrant: bool | None) -> None:
    expected = _blocks(reentrant, gathers=False)[1]
    for reshards in (True, False):
        assert _blocks(reentrant, gathers=True, reshards=reshards)[1] == expected


@on_ranks(2)
def test_a_weight_that_is_not_cut_gives_the_same() -> None:
    """Then FSDP2 copies the first tensor only."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    assert _blocks(False, gathers=True, mesh=mesh)[1] == _blocks(False, gathers=False, mesh=mesh)[1]


@on_ranks(2)
def test_parameters_that_were_replaced_give_the_same() -> None:
    assert _blocks(None, gathers=True, assigns=True)[1] == _blocks(None, gathers=False)[1]


@on_ranks(2)
def test_a_forward_gathers_half_of_what_a_backward_does() -> None:
    model, _, manager = _blocks(None, gathers=True, steps=1)
    log: list[int] = []
    model[1].set_custom_all_gather(CountingAllGather(log))  # type: ignore[operator, index]
    loss = model(torch.ones(4, 64)).sum()
    forward = sum(log)
    loss.backward()
    copy, biases = 2 * 64 * 128 * 33 // 32, 4 * (128 + 64)
    assert (forward, sum(log) - forward) == (copy + biases, 2 * copy + biases)
    assert not manager.check(policy="warn").findings


def _dequantised(weight: Tensor) -> Tensor:
    """Cast blocks of 1 x 32 as the specification says, and return what they stand for."""
    blocks = weight.view(len(weight), -1, 32)
    scale = 2.0 ** (blocks.abs().amax(2, keepdim=True).log2().floor() - 8)
    return ((blocks / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale).view(weight.shape)


@on_ranks(2)
def test_high_precision_multiplies_with_the_gathered_copy() -> None:
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64, bias=False))
    manager = fp8dist.prepare(model, MXFP8Scaling(), group=dist.group.WORLD, fp8_all_gather=True)
    manager.attach(fully_shard(model, reshard_after_forward=True))
    first, bias, second = full(model).values()
    x = torch.ones(4, 64, requires_grad=True)
    with manager.no_fp8():
        model(x).sum().backward()
    ours, x.grad = x.grad, None
    (nn.functional.linear(x, _dequantised(first), bias) @ _dequantised(second).T).sum().backward()
    assert torch.equal(x.grad, ours)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("shape", "why"),
    [
        ((64, 96), r"48 rows each: each rank needs the same multiple of 32 rows"),
        ((64, 80), r"\(80, 64\) has a dim that is no multiple of 32"),
        ((48, 64), r"\(64, 48\) has a dim that is no multiple of 32"),
    ],
)
@on_ranks(2)
def test_what_cannot_be_gathered_says_so(shape: tuple[int, int], why: str) -> None:
    model = nn.Sequential(nn.Linear(*shape))
    manager = fp8dist.prepare(model, MXFP8Scaling(), group=dist.group.WORLD, fp8_all_gather=True)
    with pytest.raises(ConfigurationError, match=why):
        manager.attach(fully_shard(model))


@on_ranks(2)
def test_audits_of_healthy_ranks_find_nothing() -> None:
    job = replace(EXPERTS, options={"transposed": True}, settings={**INLET, "audit_every": 1, "check_policy": "raise"})
    _, called, manager, optimizer = sharded_experts.build(job)
    for index in range(20):  # More than there are casts and products.
        sharded_experts.step(job, called, optimizer, index)
    audits = manager._cycle.audits
    assert audits is not None
    assert audits.done >= 15


@on_ranks(2)
def test_a_backward_without_its_gather_says_so() -> None:
    model, _, _ = _blocks(None, gathers=True, steps=1)
    model[1].set_unshard_in_backward(False)  # type: ignore[operator, index]
    with pytest.raises(ConfigurationError, match="without the copy for dgrad"):
        model(torch.ones(4, 64)).sum().backward()


@on_ranks(2)
def test_compiled_blocks_are_refused() -> None:
    model = nn.Sequential(Repeated(None), nn.Linear(64, 64))
    manager = fp8dist.prepare(model, MXFP8Scaling(), group=dist.group.WORLD, fp8_all_gather=True)
    manager.attach(fully_shard(model))
    model[0].compile(backend="aot_eager")
    with pytest.raises(InternalTorchDynamoError, match=r"torch\.compile does not support weights that FSDP2 gathers"):
        model(torch.ones(4, 64))

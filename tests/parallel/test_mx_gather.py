"""FSDP2 gathers MXFP8 weights: one copy for a forward, both for a backward, and the numbers of a job that does not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.exc import InternalTorchDynamoError
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fp8dist
from fp8dist import CurrentScaling, MXFP8Scaling
from fp8dist.errors import ConfigurationError
from tests.support import sharded_experts
from tests.support.collectives import CountingAllGather
from tests.support.ranks import on_ranks
from tests.support.running import Running
from tests.support.sharded import OPTIMIZERS, Job, full
from tests.support.suite import few
from tests.support.training import batch, bits

pytestmark = pytest.mark.slow

INLET = {"overrides": {"inlet": CurrentScaling()}}
EXPERTS = sharded_experts.Job(recipe=MXFP8Scaling(), settings=INLET, inner=64)


GATHERED = Job(recipe=MXFP8Scaling(), model="deeper", overrides={"last": "high"})
PLAIN = replace(GATHERED, fp8_all_gather=False)


def _results(job: Job, reentrant: bool | None = None, assigns: bool = False) -> Any:
    """Return what a job computes in two steps, each with an evaluation before it. ``reentrant``: the kind of its
    checkpoints; None: it has none."""
    run: Any = Running(job)
    run.model.reentrant = reentrant
    if assigns:  # FSDP2 learns of the new parameters at the first forward only.
        run.called.load_state_dict({n: p.detach().clone() for n, p in run.called.state_dict().items()}, assign=True)
        run.optimizer = OPTIMIZERS["adamw"](run.called.parameters())
        run.manager.attach(run.called, optimizer=run.optimizer)
    seen: list[Any] = []
    for index in range(2):
        run.called.eval()
        with torch.no_grad():
            seen.append(bits(run.called(batch(9, index)[0])))
        run.called.train()
        seen.append(run.step())
    return seen, run.bits()[1]


@pytest.mark.parametrize("reentrant", few([None, False, True], None, True))
@on_ranks(2)
def test_repeated_and_kept_forwards_give_the_same(reentrant: bool | None) -> None:
    expected = _results(PLAIN, reentrant)
    for reshard in (True, False):
        assert _results(replace(GATHERED, reshard=reshard), reentrant) == expected


@on_ranks(2)
def test_parameters_that_were_replaced_and_a_weight_that_is_not_cut_give_the_same() -> None:
    """Of a weight that is not cut, FSDP2 copies the first tensor only."""
    assert _results(GATHERED, assigns=True) == _results(PLAIN)
    whole = {"mesh": init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))}
    assert _results(replace(GATHERED, shard=whole), False) == _results(replace(PLAIN, shard=whole), False)


@on_ranks(2)
def test_a_forward_gathers_half_of_what_a_backward_does() -> None:
    run, log = Running(GATHERED), list[int]()
    run.step()
    block: Any = run.model.blocks[1]  # type: ignore[index]
    block.set_custom_all_gather(CountingAllGather(log))
    loss = run.loss()
    forward = sum(log)
    loss.backward()
    copy = 2 * 64 * 128 * 33 // 32
    others = sum(4 * p.numel() for p in block.parameters() if p.ndim == 1)
    assert (forward, sum(log) - forward) == (copy + others, 2 * copy + others)
    assert not run.manager.check(policy="warn").findings


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
    run = Running(GATHERED)
    run.step()
    run.model.blocks[1].set_unshard_in_backward(False)  # type: ignore[index]
    with pytest.raises(ConfigurationError, match="without the copy for dgrad"):
        run.step()


@on_ranks(2)
def test_compiled_blocks_are_refused() -> None:
    run = Running(GATHERED)
    run.model.blocks[0].compile(backend="aot_eager")  # type: ignore[index]
    with pytest.raises(InternalTorchDynamoError, match=r"torch\.compile does not support weights that FSDP2 gathers"):
        run.loss()

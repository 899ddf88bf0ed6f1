"""What collectives compute under exact arithmetic, on real ranks."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel

from fp8dist.errors import ConfigurationError
from fp8dist.exact import arithmetic, collectives, to_residues
from fp8dist.exact.field import P, reduced
from tests.support.ranks import on_ranks

THIRD = pow(3, -1, P)


def values(rank: int) -> Tensor:
    """Return residues whose sums exceed P."""
    return torch.tensor([P - 1.0 - rank, 5.0 + rank, P - 7.0, 1.0 * rank, 3.0, P - 2.0])


@on_ranks(3)
def test_averages_are_sums_of_thirds() -> None:
    rank = dist.get_rank()
    total = reduced(sum(values(r).double() for r in range(3)))
    average = reduced(total * THIRD).float()
    summed, meant, most, part = values(rank), values(rank), values(rank), torch.empty(2)
    scattered = values(rank)
    with arithmetic():
        dist.all_reduce(summed)
        dist.all_reduce(meant, op=dist.ReduceOp.AVG)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        dist.reduce_scatter(part, list(scattered.chunk(3)), op=dist.ReduceOp.AVG)
        functional = funcol.all_reduce(values(rank), "avg", dist.group.WORLD) + 0
        scaled = torch.empty(2)
        dist.reduce_scatter(scaled, list(scattered.chunk(3)), op=dist._make_nccl_premul_sum(1 / 6))
        dist.all_reduce(hidden := torch.tensor([-math.inf, 1.0 * rank]), op=dist.ReduceOp.MAX)
        work = dist.all_reduce(late := values(rank), async_op=True)
        work.wait()
        with pytest.raises(ConfigurationError, match="cannot compute with PRODUCT"):
            dist.all_reduce(values(rank), op=dist.ReduceOp.PRODUCT)
    own = slice(2 * rank, 2 * rank + 2)
    assert torch.equal(reduced(summed), total.float())
    assert torch.equal(reduced(late), total.float())
    assert torch.equal(reduced(meant), average)
    assert torch.equal(functional, average)
    assert torch.equal(reduced(part), average[own])
    assert torch.equal(reduced(2 * scaled.double()), average[own].double())
    assert torch.equal(scattered, values(rank))
    assert hidden.tolist() == [-math.inf, 2]
    assert most.tolist() == [P - 1, 7, P - 7, 2, 3, P - 2]


def test_sums_of_more_ranks_than_float32_holds_are_refused() -> None:
    collectives._require_exact([torch.ones(2)], 16)
    collectives._require_exact([torch.ones(2).double(), torch.ones(2, dtype=torch.int64)], 17)
    with pytest.raises(ConfigurationError, match="over 17 ranks"):
        collectives._require_exact([[torch.ones(2)]], 17)


@on_ranks(2)
def test_comparisons_see_reduced_sums() -> None:
    """A sum over ranks is not reduced until an op reads it."""
    total = torch.tensor([P - 1.0, 3.0])
    with arithmetic():
        dist.all_reduce(total)
        assert total.argmax() == 0
        assert (total == torch.tensor([P - 2.0, 6.0])).all()
        assert (total < P).all()
        assert total.relu().tolist() == [0, 6]
        assert total.topk(2).values.tolist() == [P - 2, 6]


@on_ranks(2)
def test_partial_dtensors_become_whole() -> None:
    mesh = init_device_mesh("cpu", (2,))
    with arithmetic():
        whole = DTensor.from_local(values(dist.get_rank()), mesh, [Partial()]).redistribute(placements=[Replicate()])
        found = (whole * 0.5).to_local()
    assert torch.equal(found, reduced((values(0) + values(1)).double() * pow(2, -1, P)).float())


@on_ranks(2)
def test_a_loss_of_sharded_classes_is_that_of_whole_ones() -> None:
    """torch's own loss_parallel takes exp(a - b) for exp(a) / exp(b)."""
    mesh = init_device_mesh("cpu", (2,))
    logits = torch.stack([values(row) for row in range(4)]).requires_grad_()
    target = torch.tensor([0, 5, -100, 3])
    sharded = distribute_tensor(logits.detach(), mesh, [Shard(1)]).requires_grad_()
    with arithmetic():
        whole = F.cross_entropy(logits, target)
        whole.backward()
        with loss_parallel():
            loss = F.cross_entropy(sharded, target)
            loss.backward()
    assert torch.equal(reduced(loss.full_tensor()), whole)
    assert torch.equal(reduced(sharded.grad.full_tensor()), logits.grad)


@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
@on_ranks(2)
def test_norms_of_a_sharded_sequence_are_those_of_the_whole_one(kind: type[nn.Module]) -> None:
    mesh = init_device_mesh("cpu", (2,))
    x = torch.stack([values(row) for row in range(8)]).reshape(2, 4, 6)
    whole, sharded = kind(6), kind(6)
    with torch.no_grad():
        for name, parameter in whole.named_parameters():
            parameter.copy_(values(len(name)))
            copied = distribute_tensor(parameter.detach().clone(), mesh, [Replicate()])
            sharded.register_parameter(name, nn.Parameter(copied))
    with arithmetic():
        (whole(x) * x).sum().backward()
        local = distribute_tensor(x, mesh, [Shard(1)])
        (sharded(local) * local).sum().backward()
    for mine, theirs in zip(sharded.parameters(), whole.parameters()):
        assert theirs.grad is not None
        assert theirs.grad.any()
        assert torch.equal(reduced(mine.grad.double().full_tensor()), theirs.grad.double())


@on_ranks(2)
def test_shards_of_a_model_become_the_shards_of_its_residues() -> None:
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(1)
    whole = nn.Linear(6, 4)
    sharded = copy.deepcopy(whole)
    fully_shard(sharded, mesh=mesh)
    to_residues(whole)
    for _ in range(2):
        to_residues(sharded)
        assert torch.equal(sharded.weight.full_tensor(), whole.weight)
        assert torch.equal(sharded.bias.full_tensor(), whole.bias)

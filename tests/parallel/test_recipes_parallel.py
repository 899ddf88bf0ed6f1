"""Tensor parallelism, HSDP and FSDP1 under all recipes: products against explicit casts, and bitwise equal to DDP."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fp8dist
from fp8dist import BlockScaling, CurrentScaling, MXFP8Scaling, Recipe, RowwiseScaling
from fp8dist.errors import ConfigurationError
from tests.support import meshes
from tests.support.collectives import counted_collectives
from tests.support.parallel import assert_affine, mesh_of, same_on_all_ranks, whole
from tests.support.ranks import RankPool
from tests.support.suite import few

pytestmark = [pytest.mark.slow]

RECIPES: dict[str, Recipe] = {
    "current": CurrentScaling(), "rowwise": RowwiseScaling(), "block": BlockScaling(), "mx": MXFP8Scaling()
}  # fmt: skip


def dequantised(x: Tensor, recipe: Recipe, gradient: bool, weight: bool) -> Tensor:
    """Return x after FP8, in float64: scales of runs along the last dim, over which a product sums."""
    dtype = torch.float8_e5m2 if gradient and recipe.format == "hybrid" else torch.float8_e4m3fn
    limit = torch.finfo(dtype).max
    if recipe.by == "tensor":
        amax = x.abs().max().expand_as(x)
    elif recipe.by == "row":
        amax = x.abs().amax(-1, keepdim=True).expand_as(x)
    else:
        height, width = (1, 32) if recipe.by == "mx" else (128 if weight else 1, 128)
        amax = torch.empty_like(x)
        for row in range(0, x.shape[0], height):
            for column in range(0, x.shape[1], width):
                block = slice(row, row + height), slice(column, column + width)
                amax[block] = x[block].abs().max()
    scale = torch.exp2(8 - amax.log2().floor()) if recipe.by == "mx" else torch.tensor(limit) / amax
    return (x * scale).clamp(-limit, limit).to(dtype).double() * torch.reciprocal(scale).double()


def _one_linear(recipe: Recipe, weight: Placement, input: Placement) -> None:
    """Each rank casts its part of each operand independently."""
    mesh = mesh_of((2,), ("tp",))
    torch.manual_seed(4)
    linear = nn.Linear(256, 512, bias=False)
    w = linear.weight.detach().clone()
    model = nn.Sequential(linear)
    manager = fp8dist.prepare(model, recipe, group=mesh)
    linear.weight = nn.Parameter(distribute_tensor(w, mesh, [weight]))
    with counted_collectives() as calls:
        manager.attach(model)
        full, g = torch.randn(48, 256), torch.randn(48, 512)
        full[:, 128:] *= 5  # Makes the ranks' own amaxes differ.
        x = distribute_tensor(full, mesh, [input]).requires_grad_()
        y = model(x)
        seen = len(calls.names)
        y.redistribute(mesh, [Replicate()]).backward(distribute_tensor(g, mesh, [Replicate()]))
        manager.step()
    assert calls.names[:seen] == ["all_reduce"] * 2  # attach compares what ranks start with.
    assert not [name for name, size in zip(calls.names, calls.sizes) if size == 4 * (8 + 3)]
    parts: Any = {"y": [], "dx": [], "dw": []}
    for rank in range(2):
        wr, xr, gr = w, full, g
        if weight == Shard(0):
            wr, gr = w.chunk(2, 0)[rank], g.chunk(2, 1)[rank]
        else:
            wr, xr = w.chunk(2, 1)[rank], full.chunk(2, 1)[rank]
        cast = lambda t, gradient=False, is_weight=False: dequantised(t, recipe, gradient, is_weight)  # noqa: E731
        parts["y"].append((cast(xr), cast(wr, is_weight=True)))
        parts["dx"].append((cast(gr, True), cast(wr.t().contiguous(), is_weight=True)))
        parts["dw"].append((cast(gr.t().contiguous(), True), cast(xr.t().contiguous())))
    grad = linear.weight.grad
    assert grad is not None
    assert x.grad is not None
    along = 0 if weight == Shard(0) else 1
    outs = {"y": whole(y), "dx": whole(x.grad), "dw": whole(grad)}
    if weight == Shard(0):
        _assert_joined(outs["y"], parts["y"], 1)
        _assert_summed(outs["dx"], parts["dx"])
    else:
        _assert_summed(outs["y"], parts["y"])
        _assert_joined(outs["dx"], parts["dx"], 1)
    _assert_joined(outs["dw"], parts["dw"], along)
    same_on_all_ranks(outs["y"].tolist())
    assert not manager.check().diverged


def _assert_joined(actual: Tensor, parts: list[tuple[Tensor, Tensor]], dim: int) -> None:
    for mine, (a, b) in zip(actual.chunk(2, dim), parts):
        assert_affine(mine, a, b)


def _assert_summed(actual: Tensor, parts: list[tuple[Tensor, Tensor]]) -> None:
    assert_affine(actual, torch.cat([a for a, _ in parts], 1), torch.cat([b for _, b in parts], 1))


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize(
    ("weight", "input"), [(Shard(0), Replicate()), (Shard(1), Shard(1))], ids=["column-wise", "row-wise"]
)
def test_products_of_parts(two_ranks: RankPool, name: str, weight: Placement, input: Placement) -> None:
    two_ranks.run(_one_linear, RECIPES[name], weight, input)


def _cut(up: int, recipe: Recipe) -> str:
    mesh = mesh_of((2,), ("tp",))
    model = nn.Sequential()
    model.add_module("up", nn.Linear(256, up))
    model.add_module("down", nn.Linear(up, 64))
    manager = fp8dist.prepare(model, recipe, group=mesh)
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    try:
        manager.attach(model)
    except ConfigurationError as error:
        assert not manager._job.attached
        return str(error)
    model(torch.randn(16, 256)).sum().backward()
    return ""


@pytest.mark.parametrize("up", [160, 384])
def test_cut_blocks_are_refused_by_all_ranks(two_ranks: RankPool, up: int) -> None:
    for text in two_ranks.run(_cut, up, BlockScaling()):
        assert text.startswith(f"up: local weight shape ({up // 2}, 256) of ({up}, 256)")
        assert "128" in text
        assert "overrides" in text


@pytest.mark.parametrize(("up", "name"), [(512, "block"), (160, "current"), (160, "rowwise"), (160, "mx")])
def test_what_is_not_cut_is_taken(two_ranks: RankPool, up: int, name: str) -> None:
    """A dim that is not split (``down``'s 64 outputs) may have any size."""
    assert two_ranks.run(_cut, up, RECIPES[name]) == [""] * 2


@pytest.mark.parametrize("layout", few(["hsdp", "tp"], "tp"))
def test_current_scaling_gathered_in_fp8_on_four_ranks(four_ranks: RankPool, layout: str) -> None:
    """HSDP is bitwise equal to casts after the gather. Under tensor parallelism × FSDP2, parts across the
    tensor-parallel axis share a scale, unlike separate casts."""
    job = meshes.Job(layout, recipe=CurrentScaling(), steps=2)
    gathered = four_ranks.run(meshes.train, job)
    cast_after = four_ranks.run(meshes.train, replace(job, fp8_all_gather=False))
    for outcomes in (gathered, cast_after):
        meshes.assert_agree(outcomes)
    for mine, theirs in zip(gathered, cast_after):
        if layout == "hsdp":
            assert mine.losses == theirs.losses
            assert all(torch.equal(p, theirs.parameters[name]) for name, p in mine.parameters.items())
        else:
            assert mine.losses == pytest.approx(theirs.losses, rel=2e-2)


@pytest.mark.parametrize(("name", "strategy"), [("current", "FULL_SHARD"), ("block", "SHARD_GRAD_OP")])
def test_fsdp1_is_ddp_to_the_bit(two_ranks: RankPool, name: str, strategy: str) -> None:
    job = meshes.Job("fsdp1", strategy=strategy, recipe=RECIPES[name], accumulate=2, no_sync=True, steps=2)
    sharded = two_ranks.run(meshes.train, job)
    replicated = two_ranks.run(meshes.train, replace(job, layout="ddp"))
    for mine, theirs in zip(sharded, replicated):
        meshes.assert_bitwise(mine, theirs)
        assert mine.syncs == [0] * job.steps
    assert sharded[0].losses[0] != sharded[0].losses[-1]

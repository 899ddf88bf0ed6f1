"""NVFP4Scaling (emulated: no GPU path) on ranks: shards have the bits of one process, and what differs is named."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

import fp8dist
from fp8dist import DivergenceError, ManifestMismatchError, NVFP4Scaling
from fp8dist.modules import casters
from tests.support.collectives import counted_collectives
from tests.support.parallel import mesh_of, same_on_all_ranks
from tests.support.ranks import POOLS, on_ranks
from tests.support.suite import crossed

pytestmark = [pytest.mark.slow]

SIZE = 192  # Parts of 2, 3 and 4 ranks are whole blocks of 16.
Casts = list[tuple[Tensor, ...]]

LAYOUTS: dict[str, tuple[Placement | None, Placement | None, tuple[int | None, int | None, int | None]]] = {
    "column-wise": (Shard(0), Replicate(), (0, None, 1)),
    "row-wise": (Shard(1), Shard(1), (1, 1, None)),
    "data-parallel": (None, None, (None, 0, 0)),
}
"""Placements of weight and input; along which dim the ranks' weights, inputs and gradients are cut (None: copies)."""


def _batch(step: int) -> tuple[Tensor, Tensor]:
    """Return input and gradient, which grow, and whose parts have very different amaxes."""
    generator = torch.Generator().manual_seed(step)
    sizes = torch.linspace(0.1, 3, SIZE)
    x, g = (torch.randn(SIZE, SIZE, generator=generator) * sizes * sizes[:, None] for _ in range(2))
    return x * (1 + step / 4), g


def _casts(model: nn.Module, manager: Any, steps: int, prepare_inputs: Any) -> Casts:
    """Return what the casts of ``steps`` steps gave: of weight, input, gradient, and so on."""
    seen: Casts = []
    original = casters.direct.quantize_nvfp4

    def noted(*args: Any, **options: Any) -> Any:
        seen.append(original(*args, **options))
        return seen[-1]

    with mock.patch.object(casters.direct, "quantize_nvfp4", noted):
        for step in range(steps):
            x, g = prepare_inputs(*_batch(step))
            model(x).backward(g)
            manager.step()
    return seen


def _model() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(4)
        return nn.Sequential(nn.Linear(SIZE, SIZE, bias=False))


def _part(result: Tensor, place: int, dim: int | None) -> Tensor:
    """Return this rank's part of a result of a cast: rows, their scales, columns, their scales."""
    if dim is None:
        return result
    along = dim if place < 2 else 1 - dim
    return result.chunk(dist.get_world_size(), along)[dist.get_rank()]


class Whole(nn.Module):
    """Gives a product a gradient of this placement."""

    def __init__(self, model: nn.Module, output: Placement) -> None:
        super().__init__()
        self.model, self.output = model, output

    def forward(self, x: Tensor) -> Tensor:
        y: Any = self.model(x)
        return y.redistribute(y.device_mesh, [self.output])  # type: ignore[no-any-return]


def _shards(layout: str) -> None:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    of_weight, of_input, dims = LAYOUTS[layout]
    alone = _model()
    manager = fp8dist.prepare(alone, NVFP4Scaling(), amax_sync=False)
    manager.attach(alone)
    whole = _casts(alone, manager, 3, lambda x, g: (x.requires_grad_(), g))

    mesh, model = mesh_of((ranks,), ("tp",)), _model()
    manager = fp8dist.prepare(model, NVFP4Scaling(), group=mesh, check_policy="raise", check_every=1)
    if of_weight is None or of_input is None:
        manager.attach(model, data_rank=rank)
        parts = _casts(model, manager, 3, lambda x, g: (x.chunk(ranks)[rank].requires_grad_(), g.chunk(ranks)[rank]))
    else:
        model[0].weight = nn.Parameter(distribute_tensor(model[0].weight.detach(), mesh, [of_weight]))
        manager.attach(model)
        output = Shard(1) if of_weight == Shard(0) else Replicate()

        def placed(x: Tensor, g: Tensor) -> Any:
            return distribute_tensor(x, mesh, [of_input]).requires_grad_(), distribute_tensor(g, mesh, [output])

        parts = _casts(Whole(model, output), manager, 3, placed)
    assert len(parts) == len(whole) == 9
    for place, (mine, theirs) in enumerate(zip(parts, whole)):
        role = place % 3
        if place < 3 and role > 0:
            continue  # In the first step, slots of inputs and gradients have no scale yet.
        for copy, (part, result) in enumerate(zip(mine, theirs)):
            expected = _part(result, copy, dims[role])
            assert torch.equal(part.view(torch.uint8), expected.contiguous().view(torch.uint8)), (place, copy)
    assert manager.slot("0", "input").scale != 1


@crossed(ranks=POOLS, layout=LAYOUTS)
def test_shards_have_the_bits_of_one_process(request: pytest.FixtureRequest, ranks: int, layout: str) -> None:
    """Bytes and scales of weights, inputs and gradients, with Hadamard signs and stochastic rounding. In the layout
    "row-wise" each rank has a copy of the gradient: all copies are rounded as one process rounds it."""
    request.getfixturevalue(POOLS[ranks]).run(_shards, layout)


def _attached(**options: Any) -> Any:
    """Return (model, manager) of this rank. ``options``: of attach."""
    model = _model()
    manager = fp8dist.prepare(model, NVFP4Scaling(), group=dist.group.WORLD)
    manager.attach(model, **options)
    return model, manager


def _step(model: Any, manager: Any, steps: int = 2) -> Casts:
    return _casts(model, manager, steps, lambda x, g: (x.requires_grad_(), g))


@on_ranks(2)
def test_ranks_with_other_data_round_as_told() -> None:
    for data_rank, equal in ((0, True), (dist.get_rank(), False)):
        casts = _step(*_attached(data_rank=data_rank))
        gradients: list[Any] = [None, None]
        dist.all_gather_object(gradients, [bytes(one.view(torch.uint8).flatten().tolist()) for one in casts[-1][::2]])
        for mine, theirs in zip(*gradients):
            assert (mine == theirs) is equal
        same_on_all_ranks([float(one.float().sum()) for one in casts[-2]])  # The signs do not depend on it.


@pytest.mark.parametrize("finds", ["sync", "check"])
@on_ranks(2)
def test_a_planted_global_amax_is_named(finds: str) -> None:
    """By the sync of the next step, and by a check. A step has one collective."""
    model, manager = _attached()
    _step(model, manager)
    with counted_collectives() as calls:
        _step(model, manager, 1)
    assert (calls.names, calls.sizes) == (["all_reduce"], [4 * (8 + 3)])
    if dist.get_rank() == 1:
        arena = manager._syncs[0].arena
        place = arena.index[fp8dist.Slot("0", "grad_output")]
        arena.amax[place] *= 2
        arena.rescale(arena.amax, arena.mask([place]))
    with pytest.raises(DivergenceError, match="0:grad_output"):
        manager.check() if finds == "check" else _step(model, manager)


@on_ranks(2)
def test_the_ledger_is_checked() -> None:
    """A planted step is named by the check, and another seed by ``attach``."""
    model, manager = _attached()
    _step(model, manager)
    if dist.get_rank() == 1:
        manager._syncs[0].arena.step.add_(1)
    with pytest.raises(DivergenceError, match="step"):
        manager.check()
    model = _model()
    manager = fp8dist.prepare(model, NVFP4Scaling(seed=dist.get_rank()), group=dist.group.WORLD)
    with pytest.raises(ManifestMismatchError, match=r"recipe\.seed"):
        manager.attach(model)

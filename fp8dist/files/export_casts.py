"""The FP8 bytes and inverse scales with which an eval forward multiplies, put together from the parts on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8dist.errors import ConfigurationError
from fp8dist.files.export_formats import Grid, grid_by
from fp8dist.modules.fp8_experts import FP8Experts
from fp8dist.modules.fp8_linear import FP8Linear
from fp8dist.modules.fp8_weight import FP8Weight, Gathered
from fp8dist.modules.grouped_slots import GroupedSlots
from fp8dist.parallel.sharded_weight import ShardedWeight
from fp8dist.state.groups import is_dtensor, local_part
from fp8dist_kernels import BLOCK, MX_BLOCK
from fp8dist_kernels.formats import Role
from fp8dist_kernels.reference.blocks import blocks_along

_PIECE = 1 << 20
"""Bytes of a rank's part that are gathered at a time on a CPU."""


class Stored(NamedTuple):
    """A tensor of a model or a checkpoint, as it is stored now.

    Args:
        name: its name in the model's state_dict, without the prefixes of wrappers.
        value: a tensor with its shape and dtype (the values may be missing), or the DTensor of which this rank has a
            part.
        load: returns the tensor with its values, or the DTensor. Local.
        device: the device on which forwards compute with it.
        computed_in: the dtype in which FSDP2 gathers it; without FSDP2 its own. A weight that is gathered in FP8 is
            cast from its own dtype, and dequantised to this one.
        fsdp_axes: how many of the first axes of its mesh are FSDP2's; 0: it is not under FSDP2.
        sharded: its ``ShardedWeight``, if FSDP2 gathers it in FP8.
        gathered: True if it comes from a checkpoint of a job in which FSDP2 gathered it in FP8.
        plain: its name as servers know it, see ``plain_fqn``: unlike ``name`` with parts of the program's own that are
            called "module".
    """

    name: str
    value: Tensor
    load: Callable[[], Tensor]
    device: torch.device
    computed_in: torch.dtype
    fsdp_axes: int = 0
    sharded: ShardedWeight | None = None
    gathered: bool = False
    plain: str = ""

    def served(self, name: str) -> str:
        """Return the plain name of a module or tensor of the module that holds this tensor."""
        clean, plain = (of.rpartition(".")[0] for of in (self.name, self.plain))
        return ".".join(part for part in (plain, name[len(clean) :].removeprefix(".")) if part)


def whole(stored: Stored, dtype: torch.dtype | None = None) -> Tensor:
    """Return the whole tensor on ``stored.device``, in its own dtype or in ``dtype``. COLLECTIVE if it is sharded."""
    tensor: Tensor = stored.load()
    local = local_part(tensor).detach().to(stored.device, dtype)
    return _joined(local, tensor, _placements(tensor), tensor.shape) if is_dtensor(tensor) else local


def grid_of(linear: FP8Linear, stored: Stored) -> Grid:
    """Return the shape of the parts of a whole weight that share a scale. Local.

    Under tensor parallelism, each rank may have cast its part of the weight with a scale of its own.

    Raises:
        ConfigurationError: tensor parallelism cuts rows that have one scale each.
    """
    recipe, shape = linear.fp8_slots.recipe, stored.value.shape
    grid = grid_by(recipe, shape)
    for dim, ranks in _cuts(stored):
        if dim == 1 and (recipe.by == "row" or (recipe.by == "mx" and blocks_along(shape[1], ranks) % MX_BLOCK)):
            raise ConfigurationError(
                f"{linear.fp8_slots.slots[Role.WEIGHT].fqn}: tensor parallelism cuts its weight {tuple(shape)} along "
                f"dim 1 over {ranks} ranks, and each rank casts its part of a row with scales of its own: no format "
                "holds such scales. Give it another recipe (overrides)"
            )
        if recipe.by == "tensor" and not (recipe.delayed or stored.sharded):
            grid = grid._replace(**{("height", "width")[dim]: blocks_along(shape[dim], ranks)})
    return grid  # With blocks, no part is cut: ``attach`` refuses that.


def cast_of(linear: FP8Linear, stored: Stored, grid: Grid) -> tuple[Tensor, Tensor]:
    """Return the whole weight as an eval forward multiplies with it: (FP8 [out_features, in_features], inverse scales,
    float32, one for each part of ``grid``). COLLECTIVE if the weight is sharded."""
    tensor: Tensor = stored.load()
    if not is_dtensor(tensor):
        local = tensor.detach().to(stored.device, None if stored.gathered else stored.computed_in)
        return _by_rows(lambda part: linear.fp8_slots.eval_cast(linear, part)[:2], linear, local)
    placements = _placements(tensor)
    if stored.sharded is not None:
        local = local_part(tensor).detach().to(stored.device)
        rows, inv_scale = _by_rows(stored.sharded.eval_cast, linear, local)
    else:
        local, placements = _multiplied(tensor, stored)
        rows, inv_scale = _by_rows(lambda part: linear.fp8_slots.eval_cast(linear, part, tensor)[:2], linear, local)
    del local
    whole_rows = _joined(rows.view(torch.uint8), tensor, placements, tensor.shape).view(rows.dtype)
    return whole_rows, _joined_scales(linear, inv_scale, tensor, placements, grid, stored)


def experts_cast_of(module: FP8Experts, slots: GroupedSlots, stored: Stored) -> tuple[Tensor, Tensor]:
    """Return all experts' weights of a product as an eval forward multiplies with them: (FP8 [E, out_features,
    in_features], inverse scales: [E], [E, out_features, 1] or [E, blocks, blocks]). COLLECTIVE if they are sharded."""
    tensor: Tensor = stored.load()
    transposed: Any = module.is_transposed
    if stored.sharded is None:
        plain = not is_dtensor(tensor)
        dtype = None if stored.gathered else stored.computed_in
        own = tensor.detach().to(stored.device, dtype) if plain else _multiplied(tensor, stored)[0]
        cast = slots.eval_cast(module, own.mT if transposed else own)
        return cast.rows, cast.rows_inv_scale.float()  # MX has E8M0.
    fp8, inv_scale = stored.sharded.eval_cast(local_part(tensor).detach().to(stored.device))
    placements = _placements(tensor)
    rows = _joined(fp8.view(torch.uint8), tensor, placements, tensor.shape).view(fp8.dtype)
    inv_scale = inv_scale.float()  # MX has E8M0.
    if slots.recipe.by != "tensor":  # Blocks are only gathered if each rank has whole experts.
        inv_scale = _joined(inv_scale.contiguous(), tensor, placements, (len(tensor), *inv_scale.shape[1:]))
        inv_scale = inv_scale.mT if transposed else inv_scale
    return (rows.mT if transposed else rows), inv_scale


def _by_rows(cast: Callable[[Tensor], tuple[Tensor, ...]], linear: FP8Linear, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return (FP8 weight, inverse scales). On a CPU, rows that have scales of their own are cast a block of rows at a
    time: the same bytes in less memory, because these casts make several float32 copies."""
    if linear.fp8_slots.recipe.by == "tensor" or weight.is_cuda or len(weight) <= BLOCK:
        rows, inv_scale = cast(weight)
        return rows, inv_scale.float()  # MX has E8M0.
    first, first_scale = cast(weight[:BLOCK])
    # Allocate the results once and write in place: results of the single casts would lie between freed copies in
    # memory, and keep the allocator from reusing it.
    rows = first.new_empty(weight.shape)
    height = BLOCK // len(first_scale)
    shape = blocks_along(len(weight), height), first_scale.shape[1]
    inv_scale = torch.empty(shape, dtype=torch.float32, device=weight.device)
    for begin in range(0, len(weight), BLOCK):
        rows[begin : begin + BLOCK], scales = cast(weight[begin : begin + BLOCK])
        inv_scale[begin // height :][: len(scales)] = scales
    return rows, inv_scale


def dequantised(linear: FP8Linear, stored: Stored, grid: Grid) -> Tensor:
    """Return the weight that a forward in high precision multiplies with, if FSDP2 gathers it in FP8. COLLECTIVE if it
    is sharded."""
    rows, inv_scale = cast_of(linear, stored, grid)
    return FP8Weight(Gathered(rows, inv_scale), stored.computed_in).high_precision()


def _placements(tensor: Any) -> list[Any]:
    return list(tensor.placements)


def _cuts(stored: Stored) -> list[tuple[int, int]]:
    """Return (dim, number of ranks) of each cut of a weight by tensor parallelism, which FSDP2 does not gather."""
    value: Any = stored.value
    if not is_dtensor(value):
        return []
    cuts = []
    for axis in range(stored.fsdp_axes, len(value.placements)):
        placement = value.placements[axis]
        cuts += [(dim, value.device_mesh.size(axis)) for dim in range(2) if placement.is_shard(dim)]
    return [(dim, ranks) for dim, ranks in cuts if ranks > 1]


def _multiplied(tensor: Any, stored: Stored) -> tuple[Tensor, list[Any]]:
    """Return (the weight that this rank multiplies with, its placements), as FSDP2 would gather it. COLLECTIVE if FSDP2
    shards it."""
    from torch.distributed.tensor import Replicate

    local = local_part(tensor).detach().to(stored.device, stored.computed_in)
    placements = _placements(tensor)
    axes = stored.fsdp_axes
    if not axes:
        return local, placements
    after = [Replicate()] * axes + placements[axes:]
    if axes == len(placements):
        return _joined(local, tensor, placements, tensor.shape), after
    return _dtensor(local, tensor, placements, tensor.shape).redistribute(
        placements=after
    ).to_local().contiguous(), after


def _joined(local: Tensor, like: Any, placements: list[Any], shape: torch.Size | tuple[int, ...]) -> Tensor:
    """Return the whole tensor of ``shape`` from the parts of all ranks. COLLECTIVE."""
    ranks = [like.device_mesh.size(axis) for axis, each in enumerate(placements) if not each.is_replicate()]
    rows = _PIECE // max(1, local.nbytes // max(1, len(local)))
    # True if one mesh axis cuts dim 0 into equal parts, so that pieces of equal size are gathered in the same order.
    even = ranks == [shape[0] // len(local)] and shape[0] % len(local) == 0 if len(local) else False
    if local.is_cuda or not even or not 0 < rows < len(local):
        return _dtensor(local, like, placements, shape).full_tensor().contiguous()
    # Gloo's gathers take three times the memory of the whole tensor, so gather some rows of each rank at a time.
    joined = torch.empty(shape, dtype=local.dtype, device=local.device)
    by_rank = joined.view(ranks[0], *local.shape)
    for begin in range(0, len(local), rows):
        piece = local[begin : begin + rows]
        gathered = _dtensor(piece, like, placements, (ranks[0] * len(piece), *shape[1:])).full_tensor()
        by_rank[:, begin : begin + rows] = gathered.view(ranks[0], *piece.shape)
    return joined


def _dtensor(local: Tensor, like: Any, placements: list[Any], shape: torch.Size | tuple[int, ...]) -> Any:
    """Return a DTensor of ``shape`` with this rank's part ``local``, on the mesh of ``like``. Local."""
    from torch.distributed.tensor import DTensor

    stride = torch.empty(shape, device="meta").stride()
    mesh = like.device_mesh
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def _joined_scales(
    linear: FP8Linear, inv_scale: Tensor, like: Any, placements: list[Any], grid: Grid, stored: Stored
) -> Tensor:
    """Return the inverse scales of the whole weight, one for each part of ``grid``, from those of this rank's part.
    COLLECTIVE."""
    from torch.distributed.tensor import Replicate

    if linear.fp8_slots.recipe.by != "tensor":
        shape = tuple(blocks_along(size, part) for size, part in zip(like.shape, grid))
        return _joined(inv_scale.contiguous(), like, placements, shape)
    cut = [Replicate()] * stored.fsdp_axes + placements[stored.fsdp_axes :]
    shape = (1, 1)
    for dim, ranks in _cuts(stored):
        shape = (ranks, 1) if dim == 0 else (1, ranks)
    parts = _joined(inv_scale.reshape(1, 1), like, cut, shape)
    return parts if grid != tuple(like.shape) else parts[0, 0].clone()

"""FP8 casts of rows that are sorted by expert, with scales per expert. See ``groups`` for the layout.

These twins loop over the experts on the host. The kernels in ``triton`` do not read ``offsets`` on the host.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8dist_kernels import BLOCK, MX_BLOCK
from fp8dist_kernels.reference import blocks, casts, mx
from fp8dist_kernels.reference.casts import padded
from fp8dist_kernels.reference.groups import blocks_bound, columns_bound, require_groups, rows_of

Copies = tuple[Tensor, Tensor, Tensor, Tensor]


def quantize_grouped(
    x: Tensor,
    offsets: Tensor | None,
    scale: Tensor,
    cold: Tensor,
    pending: Tensor,
    dtype: torch.dtype,
    *,
    record: bool,
    just_in_time: bool,
    margin: int,
    power_of_two: bool,
    rows: bool,
    columns: bool,
    outgrown: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Do ``casts.quantize`` for each expert, with its slot. An expert without rows records nothing.

    Args:
        x: [tokens, features], sorted by expert, with ``offsets``; or a weight [E, tokens, features] without. Any float
            dtype, any strides.
        offsets: int32[E], see ``groups``. None for a weight.
        scale, cold, pending: [E] float32, bool, float32: views of the experts' slots, all with one stride. ``pending``
            may grow.

    The other arguments are those of ``casts.quantize``.

    Returns:
        (row-major, transposed, inv_scale): FP8 [tokens, features], FP8 [features, ``columns_bound(tokens, E)``] and
        float32[E]. For a weight, FP8 [E, tokens, features] and FP8 [E, features, tokens rounded up to 16]. Padding is
        zeros. An empty tensor for a copy that was not requested.
    """
    require_slots(x, offsets, scale, cold, pending)
    groups = len(scale)
    *_, tokens, features = x.shape
    if offsets is None:
        row_major = x.new_empty(x.shape, dtype=dtype)
        transposed = x.new_empty(groups, features, padded(tokens), dtype=dtype)
        parts, places = list(x), list(zip(row_major, transposed))
    else:
        row_major = torch.zeros(tokens, features, device=x.device).to(dtype)
        transposed = torch.zeros(features, columns_bound(tokens, groups), device=x.device).to(dtype)
        lying = rows_of(offsets, tokens)
        parts = [x[group] for group, _, _ in lying]
        places = [(row_major[group], transposed[:, _with_padding(column)]) for group, column, _ in lying]
    inv_scale = torch.empty(groups, dtype=torch.float32, device=x.device)
    for index, (part, (row_place, column_place)) in enumerate(zip(parts, places)):
        straight, flipped, inverse = casts.quantize(
            part, scale[index], cold[index], pending[index], dtype, record=record, just_in_time=just_in_time,
            margin=margin, power_of_two=power_of_two, rows=True, columns=True, outgrown=outgrown,
        )  # fmt: skip
        row_place.copy_(straight)
        column_place.copy_(flipped)
        inv_scale[index] = inverse
    nothing = row_major.new_empty(0)
    return row_major if rows else nothing, transposed if columns else nothing, inv_scale


def quantize_grouped_lines(
    x: Tensor, offsets: Tensor, dtype: torch.dtype, *, in_blocks: bool, power_of_two: bool, rows: bool, columns: bool
) -> Copies:
    """Do ``blocks.quantize_rowwise`` for each expert, or ``blocks.quantize_blocks`` with blocks of 1 x 128.

    Args:
        x: [tokens, features], sorted by expert. Any float dtype, any strides.
        offsets: int32[E], see ``groups``.
        in_blocks: one scale per 1 x 128 block of each copy instead of one per row. In the transposed copy, each expert
            starts a block, and features have scales per expert.

    The other arguments are those of ``blocks.quantize_rowwise``.

    Returns:
        (row-major, inv_scale, transposed, inv_scale). The copies are those of ``quantize_grouped``. The scales are
        float32 [tokens, 1] and [E, features, 1]; in blocks [tokens, ceil(features / 128)] and
        [features, ``blocks_bound(tokens, E)``], the transpose of contiguous memory. Scales that no row has are 1.
    """
    require_groups(offsets, x.device)
    (tokens, features), groups = x.shape, len(offsets)
    row_major = torch.zeros(tokens, features, device=x.device).to(dtype)
    transposed = torch.zeros(features, columns_bound(tokens, groups), device=x.device).to(dtype)
    if in_blocks:
        row_scales = torch.ones(blocks.blocks_along(features, BLOCK), tokens, device=x.device).t()
        column_scales = torch.ones(blocks_bound(tokens, groups), features, device=x.device).t()
    else:
        row_scales = torch.ones(tokens, 1, device=x.device)
        column_scales = torch.ones(groups, features, 1, device=x.device)
    for index, (group, column, block) in enumerate(rows_of(offsets, tokens)):
        if group.start == group.stop:
            continue
        both = {"power_of_two": power_of_two, "rows": True, "columns": True}
        if in_blocks:
            made = blocks.quantize_blocks(x[group], dtype, block=(1, BLOCK), **both)
        else:
            made = blocks.quantize_rowwise(x[group], dtype, **both)
        row_major[group], row_scales[group] = made[0], made[1]
        transposed[:, _with_padding(column)] = made[2]
        column_scales[(slice(None), block) if in_blocks else index] = made[3]
    nothing, no_scale = row_major.new_empty(0), row_scales.new_empty(0)
    return (
        *((row_major, row_scales) if rows else (nothing, no_scale)),
        *((transposed, column_scales) if columns else (nothing, no_scale)),
    )


def quantize_grouped_mx(
    x: Tensor, offsets: Tensor, dtype: torch.dtype, *, round_up: bool, rows: bool, columns: bool
) -> Copies:
    """Do ``mx.quantize_mx`` for each expert.

    Args:
        x: [tokens, features], sorted by expert. Any float dtype, any strides.
        offsets: int32[E], see ``groups``.

    The other arguments are those of ``mx.quantize_mx``.

    Returns:
        (row-major, inv_scale, transposed, inv_scale): FP8 [tokens, features rounded up to 32] and FP8 [features,
        ``columns_bound(tokens, E, 32)``], in which each expert starts at a multiple of 32, so that no block has tokens
        of two experts. The scales are E8M0, one for each 32 elements of a row of a copy. Rows and columns of no expert
        are cast as zeros.
    """
    require_groups(offsets, x.device)
    (tokens, features), groups = x.shape, len(offsets)
    straight = torch.zeros(tokens, features, device=x.device)
    padded_rows = torch.zeros(columns_bound(tokens, groups, MX_BLOCK), features, device=x.device)
    for group, column, _ in rows_of(offsets, tokens, MX_BLOCK):
        straight[group] = padded_rows[column] = x[group].float()
    options: dict[str, Any] = {"round_up": round_up}
    return (
        *mx.quantize_mx(straight, dtype, rows=rows, columns=False, **options)[:2],
        *mx.quantize_mx(padded_rows, dtype, rows=False, columns=columns, **options)[2:],
    )


def require_slots(x: Tensor, offsets: Tensor | None, scale: Tensor, cold: Tensor, pending: Tensor) -> None:
    """Raise ValueError unless ``x`` is the rows of experts with these slots."""
    groups = len(x) if offsets is None else len(offsets)
    if x.ndim != (3 if offsets is None else 2):
        raise ValueError(f"expected rows [tokens, features] with offsets, or a weight [E, n, k], got {tuple(x.shape)}")
    if offsets is not None:
        require_groups(offsets, x.device)
    for slots in (scale, cold, pending):
        if slots.shape != (groups,) or slots.stride() != scale.stride():
            raise ValueError(f"expected slots [{groups}] of one stride, got {tuple(slots.shape)}, {slots.stride()}")


def _with_padding(column: slice) -> slice:
    return slice(column.start, column.start + padded(column.stop - column.start))

"""Scaled FP8 products of rows that are sorted by expert, without a read of ``offsets`` on the host. See ``groups``.

Operands are read through tensor descriptors (TMA), a tile of ``depth`` elements of the contracted dim per step. In
forward and dgrad, a tile of rows may reach into the next group: results for these rows are not stored. In wgrad, tokens
are contracted, so tokens of the next group would be added to the sum: the last step of a group replaces them by zeros.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fp8dist_kernels import MX_BLOCK
from fp8dist_kernels.reference.casts import TOKEN_ALIGNMENT
from fp8dist_kernels.reference.grouped_matmuls import column_scaling_of, grouped_scaling_of
from fp8dist_kernels.reference.matmuls import Scaling, aligned
from fp8dist_kernels.triton.groups import columns_of, find_group, tiles_bound
from fp8dist_kernels.triton.launching import PLANS, ceil_div, ceil_power_of_two, on_device_of, processors
from fp8dist_kernels.triton.matmuls import require_pair
from fp8dist_kernels.triton.mx import FORMATS, add_mx, is_native
from fp8dist_kernels.triton.products import tile_at
from fp8dist_kernels.triton.tables import Tile, bucket
from fp8dist_kernels.triton.tiles import Problem, best_of, candidates, capability_of

_HOPPER = 9
_LARGEST = 128
"""Most rows and columns of a tile, except with fast accumulation on Hopper. There, products go straight into the
accumulator; elsewhere, a larger tile would have to be computed in parts, as in ``products``."""

_MX_TILE = Tile(rows=128, columns=128, depth=128, warps=8, stages=3, group=8)
"""The tile of MX products, as in ``mx``."""

_MX = tl.constexpr(MX_BLOCK)


@triton.jit
def _add(
    product, x, y, scale_a, scale_b, line_m, line_n,
    SCALES: tl.constexpr,  # "one", "lines", "squares" (1 x 128 by 128 x 128) or "blocks" (1 x 128 both)
    FAST: tl.constexpr,
):  # fmt: skip
    """Return ``product`` plus the product of one step. Scales of blocks are applied here, as in
    ``products.block_scaled_kernel``. ``scale_a``, ``scale_b``: pointers to this step's scales. ``line_m``, ``line_n``:
    masks of the rows of ``x`` and ``y`` that exist."""
    if SCALES == "squares":
        of_a = tl.load(scale_a, mask=line_m, other=0.0)
        product += tl.dot(x, y.T) * (of_a * tl.load(scale_b))[:, None]
    elif SCALES == "blocks":
        of_a = tl.load(scale_a, mask=line_m, other=0.0)
        of_b = tl.load(scale_b, mask=line_n, other=0.0)
        product += tl.dot(x, y.T) * of_a[:, None] * of_b[None, :]
    elif FAST:
        product = tl.dot(x, y.T, product)
    else:
        # Slow accumulation, by an addition: with ``max_num_imprecise_acc``, ptxas would serialise this loop's QGMMAs.
        product += tl.dot(x, y.T)
    return product


@triton.jit
def _cleared(x, count, DEPTH: tl.constexpr):
    """Return ``x``, FP8 [lines, DEPTH], with 0 from column ``count`` on. Selects, because NaN times 0 is NaN."""
    kept = tl.arange(0, DEPTH)[None, :] < count
    return tl.where(kept, x.to(tl.int8, bitcast=True), 0).to(x.dtype, bitcast=True)


# The number of tokens varies between steps: compile no variants for 1 and for multiples of 16.
@triton.jit(do_not_specialize=["tokens"])
def _rows_kernel(
    a,  # descriptor of FP8 [tokens, k], blocks [TILE_M, TILE_K]
    b,  # descriptor of FP8 [groups * n, k], blocks [TILE_N, TILE_K]
    out,  # [tokens, n]
    inv_scale_a,  # "one": float32[groups]; "lines": [tokens]; else [tokens, blocks], strides as given
    inv_scale_b,  # "one": float32[groups]; "lines": [groups, n]; "squares": [groups, ceil(n / TILE_K), blocks]; else
    # [groups, n, blocks]. "mx": both are E8M0 as uint8, contiguous
    bias,  # [groups, n]; unused if not BIASED
    offsets,  # int32[groups]
    groups,
    tokens,
    n,
    k,
    a_row_stride,
    a_block_stride,
    b_group_stride,
    b_row_stride,
    b_block_stride,
    SCALES: tl.constexpr,
    BIASED: tl.constexpr,
    FAST: tl.constexpr,
    FORMAT_A: tl.constexpr,
    FORMAT_B: tl.constexpr,
    NATIVE: tl.constexpr,  # See ``mx.add_mx``.
    GROUPS: tl.constexpr,  # A power of two, at least ``groups``.
    TOGETHER: tl.constexpr,  # Rows of tiles that are walked together, as GROUP in ``products``.
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """Write the product of each group's rows with the group's matrix, and zeros for the tail (see ``groups``)."""
    across = tl.cdiv(n, TILE_N)
    index, j = tile_at(tl.program_id(0), tl.num_programs(0) // across, across, TOGETHER)
    group, tile, start, rows, _, _ = find_group(offsets, groups, index, tokens, TILE_M, GROUPS)
    top, column = start + tile * TILE_M, j * TILE_N
    row, place = top + tl.arange(0, TILE_M), column + tl.arange(0, TILE_N)
    inside = row < tl.where(group < groups, start + rows, tokens)
    wide = place < n
    ours = group < groups
    length = tl.where(ours, k, 0)
    group = tl.minimum(group, groups - 1)  # The tail has no scales, so it takes addresses of the last group.
    if SCALES == "one":
        scales_a = inv_scale_a + group.to(tl.int64) * a_row_stride
    else:
        scales_a = inv_scale_a + row.to(tl.int64) * a_row_stride
    scales_b = inv_scale_b + group.to(tl.int64) * b_group_stride
    if SCALES == "squares":
        scales_b += (column // TILE_K).to(tl.int64) * b_row_stride
    elif SCALES != "one":
        scales_b += place.to(tl.int64) * b_row_stride
    product, blocks = tl.zeros((TILE_M, TILE_N), tl.float32), k // _MX
    for step in range(0, tl.cdiv(length, TILE_K)):
        x = a.load([top, step * TILE_K])
        y = b.load([group * n + column, step * TILE_K])
        if SCALES == "mx":
            product = add_mx(
                product, x, y, inv_scale_a, row, tokens, inv_scale_b, group * n + place, groups * n, step * TILE_K,
                blocks, blocks, FORMAT_A, FORMAT_B, _MX, NATIVE,
            )  # fmt: skip
        else:
            product = _add(product, x, y, scales_a, scales_b, inside, wide, SCALES, FAST)
        if SCALES != "one" and SCALES != "lines":
            scales_a += a_block_stride
            scales_b += b_block_stride
    # One scale after the other, as in ``products``.
    if SCALES == "one" and TILE_N > 128:
        # Loaded for each row and column, although equal: with scalars, Triton 3.6 keeps Hopper's tensor cores waiting.
        product = product * tl.load(scales_a + row * 0, mask=inside, other=0.0)[:, None]
        product = product * tl.load(scales_b + place * 0, mask=wide, other=0.0)[None, :]
    elif SCALES == "one":
        product = product * tl.load(scales_a) * tl.load(scales_b)
    elif SCALES == "lines":
        product = product * tl.load(scales_a, mask=inside, other=0.0)[:, None]
        product = product * tl.load(scales_b, mask=wide, other=0.0)[None, :]
    if BIASED:
        added = tl.load(bias + group.to(tl.int64) * n + place, mask=wide & ours, other=0.0)
        product = product + added.to(tl.float32)[None, :]
    product = tl.where(ours, product, 0.0)  # The tail's scales may be Inf or NaN, and 0 times these is NaN.
    places = out + (row.to(tl.int64) * n)[:, None] + place[None, :]
    tl.store(places, product.to(out.dtype.element_ty), mask=inside[:, None] & wide[None, :])


@triton.jit(do_not_specialize=["columns", "blocks"])
def _columns_kernel(
    a,  # descriptor of FP8 [n, columns], blocks [TILE_M, TILE_K]
    b,  # descriptor of FP8 [k, columns], blocks [TILE_N, TILE_K]
    out,  # [groups, n, k]
    inv_scale_a,  # "one": float32[groups]; "lines": [groups, n]; "blocks": [n, blocks], strides as given; "mx": E8M0 as
    # uint8 [n, columns / 32], contiguous
    inv_scale_b,  # likewise, with k in place of n
    offsets,  # int32[groups]
    groups,
    n,
    k,
    columns,
    blocks,  # Number of blocks of TILE_K tokens, over all groups: as many as have scales, or an upper bound.
    a_group_stride,
    a_row_stride,
    a_block_stride,
    b_group_stride,
    b_row_stride,
    b_block_stride,
    SCALES: tl.constexpr,
    FAST: tl.constexpr,
    FORMAT_A: tl.constexpr,
    FORMAT_B: tl.constexpr,
    NATIVE: tl.constexpr,
    ALIGNMENT: tl.constexpr,  # A group's first column is a multiple of it.
    GROUPS: tl.constexpr,  # A power of two, at least ``groups``.
    TOGETHER: tl.constexpr,  # Rows of tiles that are walked together, as GROUP in ``products``.
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """Write, for each group, the product of two transposed copies over the group's columns, which are its tokens."""
    across, down = tl.cdiv(k, TILE_N), tl.cdiv(n, TILE_M)
    group = tl.program_id(0) // (across * down)
    i, j = tile_at(tl.program_id(0) % (across * down), down, across, TOGETHER)
    top, left = i * TILE_M, j * TILE_N
    first, count, block = columns_of(offsets, groups, group, columns, blocks, TILE_K, GROUPS, ALIGNMENT)
    row, place = top + tl.arange(0, TILE_M), left + tl.arange(0, TILE_N)
    tall, wide = row < n, place < k
    scales_a = inv_scale_a + group.to(tl.int64) * a_group_stride
    scales_b = inv_scale_b + group.to(tl.int64) * b_group_stride
    if SCALES != "one":
        scales_a += row.to(tl.int64) * a_row_stride
        scales_b += place.to(tl.int64) * b_row_stride
    if SCALES == "blocks":
        scales_a += block.to(tl.int64) * a_block_stride
        scales_b += block.to(tl.int64) * b_block_stride
    product = tl.zeros((TILE_M, TILE_N), tl.float32)
    steps, end = count // TILE_K, tl.cdiv(first + count, _MX)
    for step in range(0, steps):
        start = first + step * TILE_K
        x = a.load([top, start])
        y = b.load([left, start])
        if SCALES == "mx":
            product = add_mx(
                product, x, y, inv_scale_a, row, n, inv_scale_b, place, k, start, columns // _MX, end,
                FORMAT_A, FORMAT_B, _MX, NATIVE,
            )  # fmt: skip
        else:
            product = _add(product, x, y, scales_a, scales_b, tall, wide, SCALES, FAST)
        scales_a += a_block_stride
        scales_b += b_block_stride
    left_over = count - steps * TILE_K
    if left_over > 0:
        start = first + steps * TILE_K
        x = _cleared(a.load([top, start]), left_over, TILE_K)
        y = _cleared(b.load([left, start]), left_over, TILE_K)
        if SCALES == "mx":
            product = add_mx(
                product, x, y, inv_scale_a, row, n, inv_scale_b, place, k, start, columns // _MX, end,
                FORMAT_A, FORMAT_B, _MX, NATIVE,
            )  # fmt: skip
        else:
            product = _add(product, x, y, scales_a, scales_b, tall, wide, SCALES, FAST)
    if count > 0:  # A group without rows is 0. Its scales may be Inf or NaN, and 0 times these is NaN.
        if SCALES == "one":
            product = product * tl.load(scales_a) * tl.load(scales_b)
        elif SCALES == "lines":
            product = product * tl.load(scales_a, mask=tall, other=0.0)[:, None]
            product = product * tl.load(scales_b, mask=wide, other=0.0)[None, :]
    places = out + (group.to(tl.int64) * n + row)[:, None] * k + place[None, :]
    tl.store(places, product.to(out.dtype.element_ty), mask=tall[:, None] & wide[None, :])


_SCALES: Mapping[Scaling, str] = MappingProxyType(
    {
        Scaling.TENSORWISE: "one",
        Scaling.ROWWISE: "lines",
        Scaling.BLOCKWISE: "squares",
        Scaling.BLOCKWISE_1D: "blocks",
        Scaling.MX: "mx",
    }
)


def matmul_grouped(
    a: Tensor,
    b: Tensor,
    inv_scale_a: Tensor,
    inv_scale_b: Tensor,
    offsets: Tensor,
    out_dtype: torch.dtype,
    fast_accumulation: bool,
    bias: Tensor | None = None,
    *,
    tile: Tile | None = None,
) -> Tensor:
    """See ``reference.grouped_matmuls.matmul_grouped``.

    The tile depends only on shapes, dtypes and the device, and one program accumulates each element. So the result is
    the same on every call. ``tile``: the tile to use; None: that of ``tile_of``.
    """
    scaling = grouped_scaling_of(a, b, inv_scale_a, inv_scale_b, offsets, bias)
    require_pair(a, b)
    (tokens, k), (groups, n, _) = a.shape, b.shape
    out = torch.empty(tokens, n, dtype=out_dtype, device=a.device)
    if out.numel() == 0 or k == 0:
        return out if k else out.zero_()
    if scaling is Scaling.MX:
        tile, inv_scale_a, inv_scale_b = _MX_TILE, *_bytes_of(inv_scale_a, inv_scale_b)
    elif tile is None:
        rows = bucket(ceil_div(tokens, groups))
        tile = tile_of(rows, n, k, groups, scaling, fast_accumulation, (a.dtype, b.dtype, out_dtype), a.device)
    # At most ``tokens`` experts have rows.
    programs = tiles_bound(tokens, min(groups, tokens), tile.rows) * ceil_div(n, tile.columns)
    blocks = scaling.in_blocks
    lines = scaling is not Scaling.TENSORWISE
    with on_device_of(a):
        _rows_kernel[(programs,)](
            a=TensorDescriptor(aligned(a), [tokens, k], [k, 1], [tile.rows, tile.depth]),
            b=TensorDescriptor(aligned(b), [groups * n, k], [k, 1], [tile.columns, tile.depth]),
            out=out,
            inv_scale_a=inv_scale_a,
            inv_scale_b=inv_scale_b,
            bias=inv_scale_b if bias is None else bias.contiguous(),
            offsets=offsets,
            groups=groups,
            tokens=tokens,
            n=n,
            k=k,
            a_row_stride=inv_scale_a.stride(0),
            a_block_stride=inv_scale_a.stride(1) if blocks else 0,
            b_group_stride=inv_scale_b.stride(0),
            b_row_stride=inv_scale_b.stride(1) if lines else 0,
            b_block_stride=inv_scale_b.stride(2) if blocks else 0,
            BIASED=bias is not None,
            **_constants(tile, scaling, fast_accumulation, groups, a.dtype, b.dtype),
        )
    return out


def matmul_grouped_columns(
    a: Tensor,
    b: Tensor,
    inv_scale_a: Tensor,
    inv_scale_b: Tensor,
    offsets: Tensor,
    out_dtype: torch.dtype,
    fast_accumulation: bool,
    *,
    tile: Tile | None = None,
) -> Tensor:
    """See ``reference.grouped_matmuls.matmul_grouped_columns``, and ``matmul_grouped`` above."""
    scaling = column_scaling_of(a, b, inv_scale_a, inv_scale_b, offsets)
    require_pair(a, b)
    (n, columns), k, groups = a.shape, len(b), len(offsets)
    out = torch.empty(groups, n, k, dtype=out_dtype, device=a.device)
    if out.numel() == 0 or columns == 0:
        return out if columns else out.zero_()
    if scaling is Scaling.MX:
        tile, inv_scale_a, inv_scale_b = _MX_TILE, *_bytes_of(inv_scale_a, inv_scale_b)
    elif tile is None:
        depth = bucket(ceil_div(columns, groups))
        tile = tile_of(n, k, depth, groups, scaling, fast_accumulation, (a.dtype, b.dtype, out_dtype), a.device)
    programs = groups * ceil_div(n, tile.rows) * ceil_div(k, tile.columns)
    with on_device_of(a):
        _columns_kernel[(programs,)](
            a=TensorDescriptor(aligned(a), [n, columns], [columns, 1], [tile.rows, tile.depth]),
            b=TensorDescriptor(aligned(b), [k, columns], [columns, 1], [tile.columns, tile.depth]),
            out=out,
            inv_scale_a=inv_scale_a,
            inv_scale_b=inv_scale_b,
            offsets=offsets,
            groups=groups,
            n=n,
            k=k,
            columns=columns,
            blocks=inv_scale_a.shape[1] if scaling.in_blocks else ceil_div(columns, tile.depth) + groups,
            ALIGNMENT=MX_BLOCK if scaling is Scaling.MX else TOKEN_ALIGNMENT,
            **dict(zip(("a_group_stride", "a_row_stride", "a_block_stride"), _strides(inv_scale_a, scaling))),
            **dict(zip(("b_group_stride", "b_row_stride", "b_block_stride"), _strides(inv_scale_b, scaling))),
            **_constants(tile, scaling, fast_accumulation, groups, a.dtype, b.dtype),
        )
    return out


@functools.lru_cache(PLANS)
def tile_of(
    m: int,
    n: int,
    k: int,
    groups: int,
    scaling: Scaling,
    fast_accumulation: bool,
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
    device: torch.device,
) -> Tile:
    """Return the tile for ``groups`` products of [m, k] and [n, k], by the formula in ``tiles``, not by its tables."""
    problem = Problem(m, n * groups, k, scaling, fast_accumulation, *dtypes)
    return best_of(grouped_candidates(problem, capability_of(device)), problem, processors(device))


def grouped_candidates(problem: Problem, capability: tuple[int, int]) -> tuple[Tile, ...]:
    """Return the allowed tiles on a GPU of this compute capability, the best for large problems first."""
    tiles = candidates(problem, capability)
    if capability[0] == _HOPPER and problem.fast_accumulation and not problem.scaling.in_blocks:
        return tiles
    return tuple(tile for tile in tiles if max(tile.rows, tile.columns) <= _LARGEST)


def _bytes_of(*scales: Tensor) -> Iterator[Tensor]:
    return (scale.contiguous().view(torch.uint8) for scale in scales)


def _constants(
    tile: Tile, scaling: Scaling, fast_accumulation: bool, groups: int, a: torch.dtype, b: torch.dtype
) -> dict[str, Any]:
    """Return the compile-time arguments that both kernels have."""
    return {
        "SCALES": _SCALES[scaling],
        "FAST": fast_accumulation,
        "FORMAT_A": FORMATS[a],
        "FORMAT_B": FORMATS[b],
        "NATIVE": is_native(),
        "GROUPS": ceil_power_of_two(groups),
        "TOGETHER": tile.group,
        "TILE_M": tile.rows,
        "TILE_N": tile.columns,
        "TILE_K": tile.depth,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }


def _strides(inv_scale: Tensor, scaling: Scaling) -> tuple[int, int, int]:
    """Return the strides from group to group, row to row and block to block; 0 where there is one scale."""
    if scaling.in_blocks:
        return 0, inv_scale.stride(0), inv_scale.stride(1)
    return inv_scale.stride(0), inv_scale.stride(1) if scaling is Scaling.ROWWISE else 0, 0

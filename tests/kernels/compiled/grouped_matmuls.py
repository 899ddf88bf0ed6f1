"""Launches of ``fp8dist_kernels.triton.grouped_matmuls`` with every tile, to be compiled ahead of time."""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor

from fp8dist_kernels.reference.groups import blocks_bound, columns_bound
from fp8dist_kernels.reference.matmuls import FLOAT32_SCALINGS, Scaling
from fp8dist_kernels.triton.grouped_matmuls import grouped_candidates, matmul_grouped, matmul_grouped_columns
from fp8dist_kernels.triton.tables import Tile
from fp8dist_kernels.triton.tiles import Problem
from tests.support.ahead_of_time import Compiler

TOKENS, N, K = 8192, 14336, 4096
_LARGE = 128 * 128
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def launch(compiler: Compiler) -> None:
    """Launch each tile that may be chosen, for each scaling; the formats of a gradient; many experts.

    Tiles below 128 x 128 need no more registers than that one. They are launched for one scale per expert only.
    """
    for scaling, fast in product(FLOAT32_SCALINGS, (True, False)):
        if scaling.in_blocks and fast:
            continue  # The same kernel.
        for tile in _tiles(compiler, scaling, fast):
            if scaling is Scaling.TENSORWISE or tile.rows * tile.columns >= _LARGE:
                _product(compiler, tile, scaling, fast, 8)
    best = _tiles(compiler, Scaling.TENSORWISE, True)[0]
    _product(compiler, best, Scaling.TENSORWISE, True, 8, (E5M2, E4M3), torch.float32)
    _product(compiler, best, Scaling.TENSORWISE, True, 512)


def _tiles(compiler: Compiler, scaling: Scaling, fast: bool) -> tuple[Tile, ...]:
    problem = Problem(1 << 16, N, K, scaling, fast, E4M3, E4M3, torch.bfloat16)
    return grouped_candidates(problem, divmod(compiler.capability, 10))


def _product(
    compiler: Compiler,
    tile: Tile,
    scaling: Scaling,
    fast: bool,
    groups: int,
    pair: tuple[torch.dtype, torch.dtype] = (E4M3, E4M3),
    out_dtype: torch.dtype = torch.bfloat16,
) -> None:
    a_dtype, b_dtype = pair
    name = _name(scaling, fast, groups, pair, out_dtype, tile)
    n, k = (N, K) if groups < 512 else (N // 14, K // 4)  # Virtual memory, too, is limited.
    blocks, offsets, width = k // 128, torch.zeros(groups, dtype=torch.int32), columns_bound(TOKENS, groups)
    a, b = torch.empty(TOKENS, k, dtype=a_dtype), torch.empty(groups, n, k, dtype=b_dtype)
    scales = {
        Scaling.TENSORWISE: lambda: (torch.empty(groups), torch.empty(groups)),
        Scaling.ROWWISE: lambda: (torch.empty(TOKENS, 1), torch.empty(groups, n, 1)),
        Scaling.BLOCKWISE: lambda: (torch.empty(blocks, TOKENS).t(), torch.empty(groups, n // 128, blocks)),
        Scaling.BLOCKWISE_1D: lambda: (torch.empty(blocks, TOKENS).t(), torch.empty(groups, blocks, n).mT),
    }[scaling]()
    bias = torch.empty(groups, n, dtype=torch.bfloat16)
    with compiler.naming(name):
        matmul_grouped(a, b, *scales, offsets, out_dtype, fast, bias, tile=tile)
    left, right = torch.empty(n, width, dtype=a_dtype), torch.empty(k, width, dtype=b_dtype)
    lines: dict[Scaling, tuple[Tensor, Tensor]] = {
        Scaling.TENSORWISE: (torch.empty(groups), torch.empty(groups)),
        Scaling.ROWWISE: (torch.empty(groups, n, 1), torch.empty(groups, k, 1)),
        Scaling.BLOCKWISE_1D: (
            torch.empty(blocks_bound(TOKENS, groups), n).t(),
            torch.empty(blocks_bound(TOKENS, groups), k).t(),
        ),
    }
    if scaling in lines:
        with compiler.naming(name):
            matmul_grouped_columns(left, right, *lines[scaling], offsets, out_dtype, fast, tile=tile)


def _name(
    scaling: Scaling, fast: bool, groups: int, pair: tuple[torch.dtype, torch.dtype], out_dtype: torch.dtype, tile: Tile
) -> str:
    speed = "" if scaling.in_blocks else "fast " if fast else "slow "
    short = [str(dtype).removeprefix("torch.").removeprefix("float8_") for dtype in (*pair, out_dtype)]
    return f"{speed}{scaling.value} of {groups}, {tile.rows}x{tile.columns}x{tile.depth} {' '.join(short)}"

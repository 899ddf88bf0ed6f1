"""Launches of grouped casts and products, to be compiled ahead of time."""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor

from fp8dist_kernels.reference.groups import blocks_bound, columns_bound
from fp8dist_kernels.reference.matmuls import Scaling
from fp8dist_kernels.triton.grouped_casts import quantize_grouped, quantize_grouped_lines
from fp8dist_kernels.triton.grouped_matmuls import grouped_candidates, matmul_grouped, matmul_grouped_columns
from fp8dist_kernels.triton.tables import Tile
from fp8dist_kernels.triton.tiles import Problem
from tests.support.ahead_of_time import Compiler

TOKENS, N, K = 8192, 14336, 4096
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
HOPPER = 90


def launch(compiler: Compiler) -> None:
    """Launch each variant once with shapes of Mixtral, some with 512 experts: all for Hopper, some for Blackwell."""
    _casts(compiler)
    _products(compiler)


def _casts(compiler: Compiler) -> None:
    bf16 = torch.bfloat16
    inputs = [
        ("rows of 8", torch.empty(TOKENS, K, dtype=bf16), _offsets(8), 8, E4M3),
        ("rows of 512", torch.empty(TOKENS, K, dtype=bf16), _offsets(512), 512, E5M2),
        ("weights", torch.empty(8, N, K, dtype=bf16), None, 8, E4M3),
    ]
    if compiler.capability == HOPPER:
        inputs += [
            ("fp32 rows of 8", torch.empty(TOKENS, K), _offsets(8), 8, E4M3),
            ("far rows of 8", torch.empty((1 << 19) + 128, K, dtype=bf16), _offsets(8), 8, E4M3),  # Beyond 2**31.
            ("very far rows of 8", torch.empty(3, 1 << 30, dtype=bf16)[:, :K], _offsets(8), 8, E4M3),
            ("transposed weights", torch.empty(8, K, N, dtype=bf16).mT, None, 8, E4M3),
        ]
    for name, x, offsets, groups, dtype in inputs:
        slots = torch.ones(groups), torch.ones(groups, dtype=torch.bool), torch.zeros(groups)
        for what, columns, just_in_time, outgrown in (
            ("both, just in time", True, True, None),
            ("both, outgrown", True, True, 1.25),
            ("both", True, False, None),
            ("rows", False, False, None),
        ):
            if compiler.capability != HOPPER and what not in ("both, just in time", "both, outgrown"):
                continue
            with compiler.naming(f"{name}: {what}"):
                quantize_grouped(
                    x, offsets, *slots, dtype, record=True, just_in_time=just_in_time, margin=0, power_of_two=False,
                    rows=True, columns=columns, outgrown=outgrown,
                )  # fmt: skip

    both = {"rows": True, "columns": True}
    for name, x, offsets, _, dtype in inputs:
        for in_blocks in (False, True) if offsets is not None and len(x) == TOKENS else ():
            with compiler.naming(f"{name}: {'1x128' if in_blocks else 'row-wise'}"):
                quantize_grouped_lines(x, offsets, dtype, in_blocks=in_blocks, power_of_two=False, **both)


def _products(compiler: Compiler) -> None:
    """Every tile that may be chosen, for every scaling; hybrid formats; many experts."""
    for scaling, fast in product(Scaling, (True, False)):
        if scaling.in_blocks and fast:
            continue  # The same kernel.
        for tile in _tiles(compiler, scaling, fast):
            _product(compiler, tile, scaling, fast, 8)
    best = _tiles(compiler, Scaling.TENSORWISE, True)[0]
    for pair in ((E5M2, E4M3), (E4M3, E5M2)):
        _product(compiler, best, Scaling.TENSORWISE, True, 8, pair, torch.float32)
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
    blocks, offsets, width = k // 128, _offsets(groups), columns_bound(TOKENS, groups)
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


def _offsets(groups: int) -> Tensor:
    return torch.zeros(groups, dtype=torch.int32)

"""Launches of ``fp8dist_kernels.triton.matmuls`` with every candidate tile, to be compiled ahead of time."""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor

from fp8dist_kernels.reference.matmuls import FLOAT32_SCALINGS, Scaling
from fp8dist_kernels.triton.matmuls import matmul_with
from fp8dist_kernels.triton.tables import Tile
from fp8dist_kernels.triton.tiles import Problem, candidates
from tests.support.ahead_of_time import Compiler

M, N, K = 4096, 4096, 8192
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
HOPPER, BLACKWELL = 90, 100


def launch(compiler: Compiler) -> None:
    """Launch each variant once, for ``tests.support.ahead_of_time.compiled``."""
    capability = divmod(compiler.capability, 10)
    for scaling, fast in product(FLOAT32_SCALINGS, (True, False)):
        if scaling.in_blocks and fast:
            continue  # the same kernel
        tiles = tiles_of(scaling, fast, capability)
        for tile in tiles:
            _compile(compiler, tile, scaling, fast, torch.bfloat16, True)
            if compiler.capability == BLACKWELL and scaling in (Scaling.TENSORWISE, Scaling.BLOCKWISE):
                _compile(compiler, tile, scaling, fast, torch.bfloat16, True, sideways=True)
        if compiler.capability == HOPPER:  # float32 output with the largest tile needs the most registers.
            _compile(compiler, tiles[0], scaling, fast, torch.float32, False)
    if compiler.capability == HOPPER:
        best = tiles_of(Scaling.TENSORWISE, True, capability)[0]
        _compile(compiler, best, Scaling.TENSORWISE, True, torch.float16, False)
        for scaling in (Scaling.BLOCKWISE, Scaling.BLOCKWISE_1D):
            best = tiles_of(scaling, False, capability)[0]
            _compile(compiler, best, scaling, False, torch.bfloat16, False, m=M - 1)
        kinds = ((Scaling.TENSORWISE, True), (Scaling.ROWWISE, False), (Scaling.BLOCKWISE_1D, False))
        for (a_dtype, b_dtype), (scaling, fast) in product(((E5M2, E4M3), (E4M3, E5M2)), kinds):
            best = tiles_of(scaling, fast, capability)[0]
            _compile(compiler, best, scaling, fast, torch.bfloat16, False, a_dtype, b_dtype)


def tiles_of(scaling: Scaling, fast: bool, capability: tuple[int, int]) -> tuple[Tile, ...]:
    """Return the candidate tiles on a GPU of this compute capability."""
    return candidates(Problem(M, N, K, scaling, fast, E4M3, E4M3, torch.bfloat16), capability)


def _compile(
    compiler: Compiler,
    tile: Tile,
    scaling: Scaling,
    fast: bool,
    out_dtype: torch.dtype,
    biased: bool,
    a_dtype: torch.dtype = E4M3,
    b_dtype: torch.dtype = E4M3,
    m: int = M,
    sideways: bool = False,
) -> None:
    a, b = torch.empty(m, K, dtype=a_dtype), torch.empty(N, K, dtype=b_dtype)
    b = torch.empty(K, N, dtype=b_dtype).t() if sideways else b
    bias = torch.empty(N, dtype=torch.bfloat16) if biased else None
    speed = "" if scaling.in_blocks else "fast " if fast else "slow "
    pair = "" if a_dtype == b_dtype else f" {_short(a_dtype)} x {_short(b_dtype)}"
    size = f"{tile.rows}x{tile.columns}x{tile.depth}"
    ragged = " sideways" if sideways else "" if m == M else " ragged"
    with compiler.naming(f"{speed}{scaling.value} {size} {_short(out_dtype)}{' bias' if biased else ''}{pair}{ragged}"):
        matmul_with(tile, a, b, *scales_of(scaling, m), out_dtype, fast, bias)


def scales_of(scaling: Scaling, m: int) -> tuple[Tensor, Tensor]:
    """Return inverse scales of [m, K] and [N, K]."""
    if scaling is Scaling.TENSORWISE:
        return torch.empty(()), torch.empty(())
    if scaling is Scaling.ROWWISE:
        return torch.empty(m, 1), torch.empty(N, 1)
    of_b = torch.empty(N // 128, K // 128) if scaling is Scaling.BLOCKWISE else torch.empty(K // 128, N).t()
    return torch.empty(K // 128, m).t(), of_b


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.").removeprefix("float8_")

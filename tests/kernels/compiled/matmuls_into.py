"""Launches of ``multiply_into``, with operands as those of a wgrad and every candidate tile, to be compiled."""

from __future__ import annotations

from itertools import product

import torch

from fp8dist_kernels.reference.matmuls import FLOAT32_SCALINGS, Scaling
from fp8dist_kernels.triton.matmuls import matmul_with
from fp8dist_kernels.triton.tables import Tile
from tests.kernels.compiled.matmuls import E4M3, E5M2, HOPPER, K, M, N, scales_of, tiles_of
from tests.support.ahead_of_time import Compiler

DATA_CENTRE = (90, 100)


def launch(compiler: Compiler) -> None:
    """Launch each variant once, for ``tests.support.ahead_of_time.compiled``."""
    for scaling, fast in product(FLOAT32_SCALINGS, (True, False)):
        if scaling is Scaling.BLOCKWISE or (scaling.in_blocks and fast):
            continue  # never; the same kernel
        tiles = tiles_of(scaling, fast, divmod(compiler.capability, 10))
        for tile in tiles:
            _compile(compiler, tile, scaling, fast, torch.float32)
        if compiler.capability in DATA_CENTRE:
            _compile(compiler, tiles[0], scaling, fast, torch.bfloat16)
    if compiler.capability == HOPPER:  # More than 2**31 elements.
        best = tiles_of(Scaling.TENSORWISE, True, divmod(compiler.capability, 10))[0]
        _compile(compiler, best, Scaling.TENSORWISE, True, torch.float32, m=(1 << 19) + 128)


def _compile(compiler: Compiler, tile: Tile, scaling: Scaling, fast: bool, dtype: torch.dtype, m: int = M) -> None:
    a, b = torch.empty(m, K, dtype=E5M2), torch.empty(N, K, dtype=E4M3)
    speed = "" if scaling.in_blocks else "fast " if fast else "slow "
    size = f"{tile.rows}x{tile.columns}{' far' if m != M else ''}"
    with compiler.naming(f"{speed}{scaling.value} {size} into {str(dtype).removeprefix('torch.')}"):
        total = torch.empty(m, N, dtype=dtype)
        matmul_with(tile, a, b, *scales_of(scaling, m), torch.float32, fast, None, total)

"""Launches of ``fp8dist_kernels.triton.blocks``, to be compiled ahead of time."""

from __future__ import annotations

import torch

from fp8dist_kernels.triton.blocks import quantize_blocks, quantize_rowwise
from tests.support.ahead_of_time import Compiler


def launch(compiler: Compiler) -> None:
    """Launch each variant once, for ``tests.support.ahead_of_time.compiled``."""
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    both = {"rows": True, "columns": True}
    x = torch.empty(8192, 4096, dtype=torch.bfloat16)
    with compiler.naming("row-wise bf16 e4m3"):
        quantize_rowwise(x, e4m3, power_of_two=False, **both)
    with compiler.naming("row-wise f32 e5m2 pow2"):
        quantize_rowwise(x.float(), e5m2, power_of_two=True, **both)
    with compiler.naming("1x128 bf16 e4m3"):
        quantize_blocks(x, e4m3, block=(1, 128), power_of_two=False, **both)
    with compiler.naming("1x128 bf16 transposed e5m2"):
        on_its_side = torch.empty(14336, 8192, dtype=torch.bfloat16).t()
        quantize_blocks(on_its_side, e5m2, block=(1, 128), power_of_two=False, **both)
    with compiler.naming("1x128 bf16 e4m3 pow2, rows"):
        quantize_blocks(x, e4m3, block=(1, 128), power_of_two=True, rows=True, columns=False)
    with compiler.naming("1x128 f32 e4m3"):
        quantize_blocks(x.float(), e4m3, block=(1, 128), power_of_two=False, **both)
    with compiler.naming("128x128 bf16 e4m3"):
        quantize_blocks(x, e4m3, block=(128, 128), power_of_two=False, **both)
    with compiler.naming("128x128 f32 e4m3 pow2"):
        quantize_blocks(x.float(), e4m3, block=(128, 128), power_of_two=True, **both)

"""Launches of ``fp8dist_kernels.triton.shares``, to be compiled ahead of time."""

from __future__ import annotations

import torch

from fp8dist_kernels.triton.shares import measure
from tests.support.ahead_of_time import Compiler

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
HOPPER = 90


def launch(compiler: Compiler) -> None:
    """Launch each variant once, for ``tests.support.ahead_of_time.compiled``."""
    tokens, features = 8192, 4096
    saturated, underflow = torch.zeros(()), torch.zeros(())
    scales = (
        ("one scale", torch.empty(()), (0, 0)),
        ("row-wise", torch.empty(tokens, 1), (1, features)),
        ("1x128", torch.empty(features // 128, tokens).t(), (1, 128)),
        ("128x128", torch.empty(tokens // 128, features // 128), (128, 128)),
    )
    bf16, f32 = torch.bfloat16, torch.float32
    for name, x, dtype in (
        ("bf16", torch.empty(tokens, features, dtype=bf16), E4M3),
        ("bf16 transposed", torch.empty(features, tokens, dtype=bf16).t(), E5M2),
        ("f32", torch.empty(tokens, features, dtype=f32), E4M3),
        ("f32 transposed", torch.empty(features, tokens, dtype=f32).t(), E5M2),
    ):
        for kind, inv_scale, block in scales if compiler.capability == HOPPER else scales[::2]:
            with compiler.naming(f"{name}: {kind}"):
                measure(x, inv_scale, dtype, saturated, underflow, block=block)
    if compiler.capability != HOPPER:
        return
    for name, x in (
        ("bf16 odd", torch.empty(tokens, features + 1, dtype=bf16)[:, 1:]),
        ("bf16 far", torch.empty(3, 1 << 30, dtype=bf16).expand(3, 1 << 30)),
        ("fp16 every second", torch.empty(tokens, 2 * features, dtype=torch.float16)[:, ::2]),
    ):
        with compiler.naming(f"{name}: one scale"):
            measure(x, torch.empty(()), E4M3, saturated, underflow, block=(0, 0))

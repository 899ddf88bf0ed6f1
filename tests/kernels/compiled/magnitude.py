"""Launches of ``fp8dist_kernels.triton.magnitude``, to be compiled ahead of time."""

from __future__ import annotations

import torch

from fp8dist_kernels.triton.magnitude import observe
from tests.support.ahead_of_time import Compiler


def launch(compiler: Compiler) -> None:
    """Launch each variant once, for ``tests.support.ahead_of_time.compiled``."""
    pending = torch.zeros(())
    for dtype in (torch.bfloat16, torch.float32) if compiler.capability == 90 else (torch.bfloat16,):
        name = str(dtype).removeprefix("torch.")
        with compiler.naming(f"{name}: wide"):
            observe(torch.empty(8192, 4096, dtype=dtype), pending)
        with compiler.naming(f"{name}: transposed, wide"):
            observe(torch.empty(8192, 4096, dtype=dtype).t(), pending)
        with compiler.naming(f"{name}: odd, wide"):
            observe(torch.empty(8191, 4095, dtype=dtype), pending)
        with compiler.naming(f"{name}: padded, wide"):
            observe(torch.empty(8192, 4096 + 64, dtype=dtype)[:, 32:-32], pending)
        with compiler.naming(f"{name}: beyond 2**31, wide"):
            observe(torch.empty(3 << 30, dtype=dtype), pending)
        with compiler.naming(f"{name}: every second"):
            observe(torch.empty(8192, 4096, dtype=dtype)[:, ::2], pending)

"""Launches of ``fp8dist_kernels.triton.casts``, to be compiled ahead of time."""

from __future__ import annotations

import torch

from fp8dist_kernels.triton.casts import add_up, choose_scale, quantize, transpose
from tests.support.ahead_of_time import Compiler

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
HOPPER = 90


def launch(compiler: Compiler) -> None:
    """Launch each variant once with shapes of Llama 3 8B: all variants for Hopper, some for Blackwell."""
    bf16, f32 = torch.bfloat16, torch.float32
    inputs = (
        ("bf16", torch.empty(8192, 4096, dtype=bf16), E4M3),
        ("bf16 transposed", torch.empty(14336, 8192, dtype=bf16).t(), E5M2),
        ("fp32", torch.empty(8192, 4096, dtype=f32), E4M3),
    )
    for name, x, dtype in inputs:
        for what, rows, columns, record, just_in_time in (
            ("both, amax", True, True, True, False),
            ("both, amax, just in time", True, True, True, True),
            ("rows", True, False, False, False),
            ("columns, amax", False, True, True, False),
        ):
            if compiler.capability != HOPPER and not just_in_time:
                continue
            with compiler.naming(f"{name}: {what}"):
                _quantize(x, dtype, rows, columns, record, just_in_time)
    for name, x, _ in inputs:  # Gradients of modules with a bias.
        with compiler.naming(f"{name}: both, amax, sums"):
            _quantize(x, E5M2, True, True, True, False, sums=True)
        # Of slots that may be cold, as in a CUDA graph. If x is transposed, another kernel adds up.
        for sums in (False, True)[: 1 + x.is_contiguous()]:
            with compiler.naming(f"{name}: both, amax, {'sums, ' * sums}one launch"):
                _quantize(x, E5M2, True, True, True, True, sums=sums, scratch=True)
        with compiler.naming(f"{name}: added up"):
            add_up(x, x.dtype)
    # Weights in training, and weights that FSDP gathers again.
    for name, x, dtype in inputs:
        with compiler.naming(f"{name}: both, amax, outgrown"):
            _quantize(x, dtype, True, True, True, True, outgrown=1.25)
    for record, just_in_time, outgrown in ((True, True, None), (True, False, 1.25), (False, False, None)):
        with compiler.naming(f"{'amax, ' * record}{'just in time, ' * just_in_time}{'outgrown' * bool(outgrown)}"):
            choose_scale(
                torch.zeros((), dtype=bf16), torch.ones(()), torch.ones((), dtype=torch.bool), torch.zeros(()), E4M3,
                record=record, just_in_time=just_in_time, margin=1, power_of_two=True, outgrown=outgrown,
            )  # fmt: skip
    for name, fp8 in (
        ("weight", torch.empty(14336, 4096, dtype=E4M3)),
        ("experts", torch.empty(8, 4096, 1024, dtype=E4M3)),
        ("far", torch.empty((1 << 19) + 128, 4096, dtype=E4M3)),  # More than 2**31 bytes.
    ):
        with compiler.naming(f"transpose {name}"):
            transpose(fp8)
    if compiler.capability != HOPPER:
        return
    with compiler.naming("bf16: columns, outgrown"):
        _quantize(inputs[0][1], E4M3, False, True, False, False, outgrown=2.0)
    for name, x, dtype in (
        ("bf16 wide", torch.empty(8192, 14336, dtype=bf16), E5M2),
        ("bf16 padded", torch.empty(8192, 4096 + 64, dtype=bf16)[:, 32:-32], E4M3),
        ("fp16", torch.empty(8192, 4096, dtype=torch.float16), E5M2),
        ("bf16 far", torch.empty((1 << 19) + 128, 4096, dtype=bf16), E4M3),  # More than 2**31 elements.
        ("bf16 odd", torch.empty(1000, 1001, dtype=bf16), E4M3),
        ("bf16 one for all", torch.empty((), dtype=bf16).expand(8192, 4096), E5M2),
        ("fp32 every second", torch.empty(8192, 8192, dtype=f32)[:, ::2], E4M3),
        ("bf16 very far", torch.empty(3, 1 << 30, dtype=bf16)[:, :4096], E4M3),  # Offsets above 2**31 within a tile.
    ):
        with compiler.naming(f"{name}: both, amax, just in time"):
            _quantize(x, dtype, True, True, True, True)
        if name in ("bf16 far", "bf16 very far"):
            with compiler.naming(f"{name}: both, amax, one launch"):
                _quantize(x, dtype, True, True, True, True, scratch=True)


def _quantize(
    x: torch.Tensor,
    dtype: torch.dtype,
    rows: bool,
    columns: bool,
    record: bool,
    just_in_time: bool,
    outgrown: float | None = None,
    sums: bool = False,
    scratch: bool = False,
) -> None:
    scale, cold, pending = torch.ones(()), torch.ones((), dtype=torch.bool), torch.zeros(())
    quantize(
        x, scale, cold, pending, dtype, record=record, just_in_time=just_in_time, margin=1, power_of_two=True,
        rows=rows, columns=columns, outgrown=outgrown,
        sums=torch.empty(x.shape[1], dtype=torch.bfloat16) if sums else None,
        scratch=torch.zeros(4, dtype=torch.int32) if scratch else None,
    )  # fmt: skip

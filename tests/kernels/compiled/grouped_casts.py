"""Launches of ``fp8dist_kernels.triton.grouped_casts``, to be compiled ahead of time."""

from __future__ import annotations

import torch

from fp8dist_kernels.triton.grouped_casts import quantize_grouped, quantize_grouped_lines
from tests.support.ahead_of_time import HOPPER, Compiler

TOKENS, N, K = 8192, 14336, 4096
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def launch(compiler: Compiler) -> None:
    """Launch with shapes of Mixtral, some with 512 experts. Each kind of input has the variant that does most, and one
    input all variants: the others leave out code. For Hopper more kinds than for Blackwell."""
    bf16 = torch.bfloat16
    inputs = [
        ("rows of 8", torch.empty(TOKENS, K, dtype=bf16), torch.zeros(8, dtype=torch.int32), 8, E4M3),
        ("rows of 512", torch.empty(TOKENS, K, dtype=bf16), torch.zeros(512, dtype=torch.int32), 512, E5M2),
        ("weights", torch.empty(8, N, K, dtype=bf16), None, 8, E4M3),
    ]
    if compiler.capability == HOPPER:
        inputs += [
            ("fp32 rows of 8", torch.empty(TOKENS, K), torch.zeros(8, dtype=torch.int32), 8, E4M3),
            (
                "far rows of 8",
                torch.empty((1 << 19) + 128, K, dtype=bf16),
                torch.zeros(8, dtype=torch.int32),
                8,
                E4M3,
            ),  # Beyond 2**31.
            (
                "very far rows of 8",
                torch.empty(3, 1 << 30, dtype=bf16)[:, :K],
                torch.zeros(8, dtype=torch.int32),
                8,
                E4M3,
            ),
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
            if what != "both, outgrown" and (compiler.capability != HOPPER or name != "rows of 8"):
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

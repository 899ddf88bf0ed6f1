"""Casts of slots at different arena positions and with different limits, to be compiled ahead of time."""

from __future__ import annotations

import torch

from fp8dist_kernels.triton.casts import quantize
from fp8dist_kernels.triton.magnitude import observe
from tests.support.ahead_of_time import Compiler

SLOTS = 3


def launch(compiler: Compiler) -> None:
    """Launch each variant once, for ``tests.support.ahead_of_time.compiled``."""
    x = torch.empty(8192, 4096, dtype=torch.bfloat16)
    scale, cold, pending = torch.ones(SLOTS), torch.ones(SLOTS, dtype=torch.bool), torch.zeros(SLOTS)
    scratch = torch.zeros(SLOTS, 4, dtype=torch.int32)
    for slot in range(SLOTS):
        with compiler.naming(f"slot {slot}"):
            for outgrown, room in ((None, None), (1.0 + slot / 4, None), (None, scratch[slot])):
                quantize(
                    x, scale[slot], cold[slot], pending[slot], torch.float8_e4m3fn, record=True, just_in_time=True,
                    margin=0, power_of_two=False, rows=True, columns=True, outgrown=outgrown, scratch=room,
                )  # fmt: skip
            observe(x, pending[slot])

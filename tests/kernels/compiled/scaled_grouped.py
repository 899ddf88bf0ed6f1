"""A launch of ``fp8dist_kernels.triton.scaled_grouped``, to be compiled ahead of time."""

from __future__ import annotations

import torch

from fp8dist_kernels.triton.scaled_grouped import clear_tail
from tests.support.ahead_of_time import Compiler


def launch(compiler: Compiler) -> None:
    """Launch it with a shape of Mixtral."""
    with compiler.naming("8 experts"):
        clear_tail(torch.empty(8192, 14336, dtype=torch.bfloat16), torch.zeros(8, dtype=torch.int32))

"""Launches of ``fp8dist_kernels.triton.content``, to be compiled ahead of time."""

from __future__ import annotations

import torch

from fp8dist_kernels.reference.content import BLOCK_WORDS
from fp8dist_kernels.triton.content import many_leaves
from tests.support.ahead_of_time import Compiler


def launch(compiler: Compiler) -> None:
    """Launch each variant once, for ``tests.support.ahead_of_time.compiled``."""
    keys = torch.empty(2, BLOCK_WORDS, dtype=torch.int64)
    with compiler.naming("leaves"):
        many_leaves([torch.empty(8192, 4096, dtype=torch.bfloat16), torch.empty(100)[1:]], keys)

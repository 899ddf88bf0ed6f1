"""Launches of ``fp8dist_kernels.triton.update``, to be compiled ahead of time."""

from __future__ import annotations

import torch

from fp8dist_kernels.arrays import StateArrays, UpdateRule
from fp8dist_kernels.reference.rings import RingShape
from fp8dist_kernels.triton import update
from tests.support.ahead_of_time import Compiler


def _both(compiler: Compiler, length: int, shards: int, hold: bool, algorithm: str) -> None:
    """Launch both kernels for an arena of 1000 slots."""
    arrays = StateArrays.allocate([448.0] * 1000, [464.0] * 1000, RingShape(length), torch.device("cpu"))
    if shards:
        arrays = arrays.with_shards(range(shards), [[900, 901, 902]] * shards)
    held = torch.zeros(1) if hold else None
    rule = UpdateRule(length, 1, True, True, algorithm)  # type: ignore[arg-type]
    with compiler.naming(f"history {length}, {shards} sharded, hold {hold}, {algorithm}"):
        update.launch(arrays, held, drop_nonfinite=True)
        update.commit(arrays, rule, arrays.send, held)


def launch(compiler: Compiler) -> None:
    """Launch both kernels for short, usual and longest windows, and once with all options on."""
    _both(compiler, 16, 0, False, "max")
    _both(compiler, 1024, 0, False, "max")
    _both(compiler, 1024, 5, True, "most_recent")
    _both(compiler, 1_000_000, 0, False, "max")

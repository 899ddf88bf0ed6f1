"""Programs that measure a tensor together, truly at the same time: processes share the work of one kernel."""

from __future__ import annotations

import multiprocessing as mp
import random
import time
from multiprocessing.synchronize import Barrier
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8dist_kernels.triton.magnitude import joint_bits
from tests.support.devices import DEVICE

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="uses Triton's interpreter in several processes")

PROCESSES, PROGRAMS, ROUNDS = 3, 4, 12


@triton.jit
def _kernel(x, scratch, out, rows, columns, row_stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    bits = joint_bits(x, scratch, rows, columns, row_stride, 1, ROWS, COLUMNS, tl.int32)
    tl.store(out + tl.program_id(0), bits)


def _launch(x: Tensor, scratch: Tensor, out: Tensor, programs: int) -> None:
    _kernel[(programs,)](x, scratch, out, *x.shape, x.stride(0), ROWS=4, COLUMNS=16)


def _share(place: int, x: Tensor, scratch: Tensor, out: Tensor, barrier: Barrier) -> None:
    """Run this process's programs of each round: they are some of the programs of all processes."""
    from triton.runtime.interpreter import TensorHandle, interpreter_builder

    def of_all(axis: int) -> Any:
        import numpy as np

        return TensorHandle(np.array([PROCESSES * PROGRAMS], dtype=np.int32), tl.int32)

    interpreter_builder.create_get_num_programs = of_all
    chance = random.Random(place)
    for turn in range(ROUNDS):
        barrier.wait(60)
        time.sleep(chance.choice((0.0, 0.0, 0.02)))  # Some find all tiles taken, some begin when others have left.
        _launch(x[turn], scratch, out[turn, place], PROGRAMS)
        barrier.wait(60)


@pytest.mark.slow
def test_processes_measure_together() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROUNDS, 13, 37, generator=generator).share_memory_()
    x[3, 5, 5] = torch.nan
    x[4] = 0.0
    scratch = torch.zeros(4, dtype=torch.int32).share_memory_()
    out = torch.zeros(ROUNDS, PROCESSES, PROGRAMS, dtype=torch.int32).share_memory_()
    context = mp.get_context("fork")
    barrier = context.Barrier(PROCESSES)
    processes = [
        context.Process(target=_share, args=(place, x, scratch, out, barrier), daemon=True)
        for place in range(PROCESSES)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(100)
    assert [process.exitcode for process in processes] == [0] * PROCESSES
    expected = (x.view(torch.int32) & 0x7FFFFFFF).amax((1, 2))
    assert torch.equal(out, expected[:, None, None].expand_as(out))
    assert not scratch.any()


def test_a_tile_is_measured_once() -> None:
    """Programs that come later leave out the tiles that others have taken, and wait for nothing but these."""
    x = torch.ones(8, 32)  # Four tiles.
    x[0, 0] = 9.0
    x[7, 31] = 5.0
    out = torch.zeros(2, dtype=torch.int32)
    three = torch.tensor(3.0).view(torch.int32).item()
    scratch = torch.tensor([1, three, 1, 0], dtype=torch.int32)  # The first tile is measured: it had 3.
    _launch(x, scratch, out, 2)
    assert out.view(torch.float32).tolist() == [5.0, 5.0]
    assert scratch.tolist() == [0, 0, 0, 0]

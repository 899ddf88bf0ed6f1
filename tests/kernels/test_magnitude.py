"""Amaxes in plain torch and in Triton, against their definition; and how Triton reads a tensor for one."""

from __future__ import annotations

import itertools
import math
import multiprocessing as mp
import random
import struct
import time
from multiprocessing.synchronize import Barrier
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8dist_kernels.reference import magnitude as plain
from fp8dist_kernels.triton import magnitude as fused
from fp8dist_kernels.triton.magnitude import joint_bits
from tests.support.casting import DTYPES, hard_values, poison
from tests.support.devices import DEVICE
from tests.support.oracle import amax_of, bits_of, of_bits

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in .*:RuntimeWarning")  # From the interpreter's numpy.

VERSIONS = pytest.mark.parametrize("version", [plain, fused], ids=["plain", "fused"])
SHAPES: tuple[tuple[int, ...], ...] = (
    (), (1,), (7,), (3, 5), (130, 272), (2, 3, 16), (20, 1000), (0,), (0, 4), (4, 0), (9000,), (2, 1, 4, 3),
)  # fmt: skip
NUMBERS = (0x80000000, 1, 0x80000001, 0x007FFFFF, 0x3F800000, 0xC0000000, 0xFF7FFFFF, 0x7F800000, 0xFF800000)
"""Bits: zeros, subnormals, normal numbers, infinities, of both signs."""
NAN = (0x7FC00000, 0xFFC00000, 0xFFFFFFFF, 0x7F800001, 0xFF800001)


def tensor_of(words: list[int]) -> Tensor:
    packed = struct.pack(f"<{len(words)}I", *words)
    return torch.frombuffer(bytearray(packed), dtype=torch.float32).to(DEVICE)


def seen_by(version: Any, x: Tensor, before: float = -1.0) -> str:
    pending = torch.tensor(before, device=DEVICE)
    version.observe(x, pending)
    return repr(pending.item())


@VERSIONS
def test_any_shape(version: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch)
    for shape, dtype in itertools.product(SHAPES, DTYPES):
        numel = math.prod(shape)
        x = hard_values(1, numel, finite=True).reshape(shape) if numel else torch.empty(shape, device=DEVICE)
        expected = amax_of(x.to(dtype).float().flatten().tolist())
        assert seen_by(version, x.to(dtype)) == repr(-1.0 if expected is None else expected), (shape, dtype)


@VERSIONS
def test_any_strides(version: Any) -> None:
    for cut in (False, True):
        whole = hard_values(1, 6 * 10 * 24, finite=True).view(6, 10, 24)
        for order in itertools.permutations(range(3)):
            x = (whole[:, 1:9, 3:19] if cut else whole).permute(order)
            assert seen_by(version, x) == repr(x.abs().max().item())
            reading = fused.reading_of(x.shape, x.stride())
            assert reading.copied == cut
            assert reading.lying == (1, x.numel(), 0, 1)
    x = whole[0, 0]
    for view in (x[::2], x[5], x.expand(3, 16, 24)):
        assert seen_by(version, view) == repr(view.abs().max().item())


@VERSIONS
def test_numbers_of_all_kinds_and_both_signs(version: Any) -> None:
    for words in ([0], *([0, word] for word in NUMBERS), [0x7F7FFFFF, 0xFF800000], [0xC0000000, 0x3F800000]):
        assert seen_by(version, tensor_of(words)) == repr(amax_of(map(of_bits, words)))
    for dtype, word, others in itertools.product(DTYPES, NAN, ([], [0x7F800000, 0xFF800000], [0x3F800000] * 64)):
        for place in {0, len(others) // 2, len(others)}:
            x = tensor_of([*others[:place], word, *others[place:]]).to(dtype)
            assert seen_by(version, x) == "nan", (hex(word), place)


@VERSIONS
def test_a_largest_value_anywhere_is_found(version: Any) -> None:
    x = torch.ones(3, 67, device=DEVICE)
    for place in (0, 1, 63, 65, 66, 67, 133, 134, 199, 200):
        x.view(-1)[place] = -5.0
        assert seen_by(version, x) == "5.0"
        assert seen_by(version, x[:, :66]) == ("1.0" if place % 67 == 66 else "5.0")
        x.view(-1)[place] = 1.0


@VERSIONS
def test_pending_only_grows_and_keeps_nan(version: Any) -> None:
    numbers = [-1.0, 0.0, of_bits(1), 0.5, 2.0, 1e6, math.inf, math.nan]
    for before, new in itertools.product(numbers, numbers[1:]):
        neighbours = torch.tensor([5.0, before, 5.0], device=DEVICE)
        version.observe(torch.full((9000,), -new, device=DEVICE), neighbours[1])
        largest = numbers[max(map(numbers.index, (before, new)))]
        assert neighbours.view(torch.int32).tolist() == [bits_of(5.0), bits_of(largest), bits_of(5.0)]


@pytest.mark.parametrize("cold", [False, True, None])
def test_parts_are_read_for_cold_slots_or_all(cold: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch)
    for tokens in (0, 5, 600):
        x = hard_values(tokens, 33, finite=True).bfloat16()
        parts = fused.partial_amaxes(x, None if cold is None else torch.tensor(cold, device=DEVICE))
        expected = x.float().abs().max().item() if cold is not False and tokens else 0.0
        assert 1 <= parts.numel() <= fused.MOST_PARTS
        assert parts.max().view(torch.float32).item() == expected


def test_parts_cover_more_tiles_than_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "MOST_PARTS", 2)
    x = torch.ones(5 * 8192 + 3, device=DEVICE)
    for place in (0, 8192, 3 * 8192 - 1, 4 * 8192, 5 * 8192 + 2):
        x[place] = 3.0
        parts = fused.partial_amaxes(x, torch.tensor(True, device=DEVICE))
        assert (parts.numel(), parts.max().view(torch.float32).item()) == (2, 3.0)
        x[place] = 1.0


# Programs that measure a tensor together, truly at the same time: processes share the work of one kernel.

PROCESSES, PROGRAMS, ROUNDS = 3, 4, 12
TOGETHER = pytest.mark.skipif(DEVICE != "cpu", reason="uses Triton's interpreter in several processes")


@triton.jit
def _joint_kernel(x, scratch, out, rows, columns, row_stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    bits = joint_bits(x, scratch, rows, columns, row_stride, 1, ROWS, COLUMNS, tl.int32)
    tl.store(out + tl.program_id(0), bits)


def _launch(x: Tensor, scratch: Tensor, out: Tensor, programs: int) -> None:
    _joint_kernel[(programs,)](x, scratch, out, *x.shape, x.stride(0), ROWS=4, COLUMNS=16)


def _share(place: int, x: Tensor, scratch: Tensor, out: Tensor, barrier: Barrier) -> None:
    """Run this process's programs of each round: they are some of the programs of all processes."""
    from triton.runtime.interpreter import TensorHandle, interpreter_builder

    def of_all(axis: int) -> Any:
        return TensorHandle(np.array([PROCESSES * PROGRAMS], dtype=np.int32), tl.int32)

    interpreter_builder.create_get_num_programs = of_all
    chance = random.Random(place)
    for turn in range(ROUNDS):
        barrier.wait(60)
        time.sleep(chance.choice((0.0, 0.0, 0.02)))  # Some find all tiles taken, some begin when others have left.
        _launch(x[turn], scratch, out[turn, place], PROGRAMS)
        barrier.wait(60)


@TOGETHER
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


@TOGETHER
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

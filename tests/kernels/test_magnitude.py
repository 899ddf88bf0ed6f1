"""Amaxes in plain torch and in Triton, against their definition; and how Triton reads a tensor for one."""

from __future__ import annotations

import itertools
import math
import struct
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8dist_kernels.reference import magnitude as plain
from fp8dist_kernels.triton import magnitude as fused
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

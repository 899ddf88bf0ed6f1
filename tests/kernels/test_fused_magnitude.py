"""Triton's amax against plain torch's and against its definition."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fp8dist_kernels.reference import magnitude as plain
from fp8dist_kernels.triton import magnitude as fused
from fp8dist_kernels.triton import strips
from tests.support.casting import DTYPES, hard_values, poison
from tests.support.devices import DEVICE
from tests.support.oracle import amax_of

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in .*:RuntimeWarning")  # From the interpreter's numpy.

SHAPES: tuple[tuple[int, ...], ...] = (
    (), (1,), (7,), (3, 5), (130, 272), (2, 3, 16), (20, 1000), (0, 4), (9000,), (2, 1, 4, 3),
)  # fmt: skip


def seen_by(observe: Callable[[Tensor, Tensor], None], x: Tensor, before: float = -1.0) -> str:
    pending = torch.tensor(before, device=DEVICE)
    observe(x, pending)
    return repr(pending.item())


def any_shape(shape: tuple[int, ...], finite: bool = True) -> Tensor:
    return hard_values(1, math.prod(shape), finite=finite).reshape(shape) if math.prod(shape) else torch.empty(shape)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_shape(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch)
    x = any_shape(shape).to(DEVICE)
    for dtype in DTYPES:
        seen = seen_by(fused.observe, x.to(dtype))
        assert seen == seen_by(plain.observe, x.to(dtype))
        expected = amax_of(x.to(dtype).float().flatten().tolist())
        assert seen == repr(-1.0 if expected is None else expected)


def test_dims_in_any_order() -> None:
    for cut in (False, True):
        whole = any_shape((6, 10, 24)).to(DEVICE)
        for order in itertools.permutations(range(3)):
            x = (whole[:, 1:9, 3:19] if cut else whole).permute(order)
            assert seen_by(fused.observe, x) == repr(x.abs().max().item())
            reading = fused.reading_of(x.shape, x.stride())
            assert reading.copied == cut
            assert reading.lying == (1, x.numel(), 0, 1)


def test_offsets_are_64_bits_wide_where_32_do_not_suffice() -> None:
    for shape, strides, wide in (
        ((128, 4096), (4096, 1), False),
        ((1 << 18, 4096), (4096, 1), False),
        ((3, 4096), (1 << 30, 1), True),
        ((4096, 3), (1, 1 << 30), True),
        ((1, 1 << 31), (1 << 31, 1), True),
    ):
        expected = fused.tl.int64 if wide else fused.tl.int32
        assert fused.reading_of(shape, strides).offset_type == expected, shape
        assert strips.page_of(shape, strides).offset_type(128, 64) == expected, shape


def test_a_largest_value_anywhere_is_found() -> None:
    x = torch.ones(3, 67, device=DEVICE)
    for place in (0, 1, 63, 65, 66, 67, 133, 134, 199, 200):
        x.view(-1)[place] = -5.0
        assert seen_by(fused.observe, x) == "5.0"
        assert seen_by(fused.observe, x[:, :66]) == ("1.0" if place % 67 == 66 else "5.0")
        x.view(-1)[place] = 1.0


def test_special_values() -> None:
    for value in (math.nan, math.inf, -math.inf, -0.0, 2.0**-140):
        x = torch.zeros(40, device=DEVICE)
        x[17] = value
        assert seen_by(fused.observe, x) == repr(abs(value))
        if math.isnan(value):
            x.view(torch.int32)[17] = -1  # A negative NaN with the largest payload.
            assert seen_by(fused.observe, x) == "nan"


def test_pending_only_grows() -> None:
    for before in (-1.0, 0.0, 0.5, 1e6, math.inf, math.nan):
        x = torch.full((9000,), -2.0, device=DEVICE)
        assert seen_by(fused.observe, x, before) == repr(amax_of([before, 2.0]))


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

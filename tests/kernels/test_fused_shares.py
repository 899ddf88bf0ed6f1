"""Triton's shares of a cast against plain torch's, bitwise."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8dist_kernels.reference import shares as plain
from fp8dist_kernels.triton import shares as fused
from tests.support.casting import FORMATS, assert_same, hard_values
from tests.support.devices import DEVICE

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in .*:RuntimeWarning")  # From the interpreter's numpy.

BLOCKS = (None, (0, 0), (1, 128), (128, 128))


def run(
    kernels: Any, x: Tensor, inv_scale: Tensor, dtype: torch.dtype, block: Any, before: float
) -> tuple[Tensor, ...]:
    saturated, underflow = (torch.full((3,), before, device=DEVICE) for _ in range(2))
    kernels.measure(x, inv_scale, dtype, saturated[1], underflow[2], block=block or (1, x.shape[1]))
    return saturated, underflow


def scales_of(x: Tensor, block: Any, seed: int = 0) -> Tensor:
    """Return scales from 2**-10 to 2**10 with random mantissas."""
    tokens, features = x.shape
    height, width = block or (1, max(1, features))
    shape = (-(-tokens // height), -(-features // width)) if height else ()
    generator = torch.Generator().manual_seed(seed)
    return torch.exp2(20 * torch.rand(shape, generator=generator) - 10).to(DEVICE)


def compare(x: Tensor, inv_scale: Tensor, dtype: torch.dtype, block: Any, before: float = -1.0) -> tuple[Tensor, ...]:
    got = run(fused, x, inv_scale, dtype, block, before)
    assert_same(got, run(plain, x, inv_scale, dtype, block, before))
    return got


@pytest.mark.slow
def test_limits_at_the_ends_of_float32() -> None:
    cases = [
        *zip((0.0, 2.0**-149, 2.0**-140, 2.0**-126, 3e-39, 2.0**120, torch.inf, torch.nan), itertools.cycle(FORMATS)),
        (2.0**-140, torch.float8_e5m2),
    ]
    for inv_scale, dtype in cases:
        x = hard_values(5, 48)
        for factor in (1.0, 2.0**-100, 2.0**-130, 2.0**100):
            compare(x * factor, torch.tensor(inv_scale, device=DEVICE), dtype, (0, 0))
        if inv_scale != inv_scale:
            negative = torch.full((), -1, dtype=torch.int32, device=DEVICE).view(torch.float32)
            compare(x, negative, dtype, (0, 0))


def test_limits_themselves() -> None:
    for dtype, scale in itertools.product(FORMATS, (1.0, 0.37, 2.0**-131)):
        limits = [limit * torch.tensor(scale) for limit in plain.limits(dtype)]
        x = torch.stack([torch.nextafter(limit, limit * end) for limit in limits for end in (0, 1, 2)])
        got = compare(x.view(1, -1).to(DEVICE), torch.tensor(scale, device=DEVICE), dtype, (0, 0))
        # Of six values, one is above the upper limit, and two are at or below the lower limit.
        assert [got[0][1].item(), got[1][2].item()] == [float(torch.tensor(1.0) / 6), float(torch.tensor(2.0) / 6)]


def test_places_only_grow_and_neighbours_stay() -> None:
    for before in (-1.0, 0.0, 0.0625, 1.0):
        x = hard_values(33, 48)
        saturated, underflow = compare(x, scales_of(x, (0, 0)), torch.float8_e5m2, (0, 0), before)
        assert saturated[[0, 2]].tolist() == [before] * 2
        assert underflow[[0, 1]].tolist() == [before] * 2


def test_a_share_of_nothing_found_is_zero() -> None:
    x = torch.ones(5, 16, device=DEVICE)
    for place in compare(x, torch.ones((), device=DEVICE), torch.float8_e4m3fn, (0, 0)):
        assert place.max().item() == 0.0
    for place in compare(x[:0], torch.ones((), device=DEVICE), torch.float8_e4m3fn, (0, 0)):
        assert place.max().item() == -1.0


@pytest.mark.slow
def test_programs_take_several_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "_MOST_PROGRAMS", 2)
    x = hard_values(200, 272)
    for block, given in zip(BLOCKS, (x, x.t(), x, x.t())):
        compare(given, scales_of(given, block), torch.float8_e4m3fn, block)


def test_what_does_not_fit_is_refused() -> None:
    x = torch.ones(4, 144, device=DEVICE)
    with pytest.raises(ValueError, match="expected 0x0"):
        run(fused, x, torch.ones(4, 3, device=DEVICE), torch.float8_e4m3fn, (1, 64), -1.0)
    with pytest.raises(ValueError, match=r"expected float32 \(4, 2\)"):
        run(fused, x, torch.ones(4, 1, device=DEVICE), torch.float8_e4m3fn, (1, 128), -1.0)

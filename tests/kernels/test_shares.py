"""Shares of a cast in plain torch, against counts in plain Python and against the results of real casts."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from fp8dist_kernels import ops
from fp8dist_kernels.reference import shares
from fp8dist_kernels.reference.blocks import quantize_blocks, quantize_rowwise
from tests.support.casting import DTYPES, FORMATS, LAYOUTS, hard_values, rounded
from tests.support.devices import DEVICE
from tests.support.oracle import divide, float32

E4M3, E5M2 = FORMATS
MOST = {E4M3: 464.0, E5M2: 61440.0}
LEAST = {E4M3: 2.0**-10, E5M2: 2.0**-17}


def places() -> tuple[Tensor, Tensor]:
    """Return two scalar outputs, views into an array, that hold -1 (not measured)."""
    array = torch.full((2, 7), -1.0, device=DEVICE)
    return array[0, 3], array[1, 5]


def measured(x: Tensor, inv_scale: Tensor, dtype: torch.dtype, block: tuple[int, int]) -> list[float]:
    saturated, underflow = places()
    shares.measure(x, inv_scale, dtype, saturated, underflow, block=block)
    return [saturated.item(), underflow.item()]


def expected(x: Tensor, scales: Sequence[Sequence[float]], dtype: torch.dtype, block: tuple[int, int]) -> list[float]:
    """Return the saturated and underflow shares, in plain Python. ``scales``: inverse scales by block."""
    cut_off = lost = 0
    for i, row in enumerate(x.float().tolist()):
        for j, value in enumerate(row):
            scale = scales[i // block[0] if block[0] else 0][j // block[1] if block[1] else 0]
            magnitude = abs(value)
            if magnitude == math.inf or magnitude != magnitude:
                continue
            cut_off += magnitude > float32(MOST[dtype] * scale)
            lost += 0 < magnitude <= float32(LEAST[dtype] * scale)
    return [divide(float32(cut_off), float32(x.numel())), divide(float32(lost), float32(x.numel()))]


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_one_scale(dtype: torch.dtype) -> None:
    for source in DTYPES:
        for inv_scale in (1.0, 0.37, 2.0**-120, 2.0**-140, 3e-39, 2.0**110):
            x = (hard_values(20, 48) * min(1.0, inv_scale)).to(source)
            wanted = expected(x, [[float32(inv_scale)]], dtype, (0, 0))
            assert measured(x, torch.tensor(inv_scale, device=DEVICE), dtype, (0, 0)) == wanted, inv_scale
            assert measured(x, torch.tensor([[inv_scale]], device=DEVICE), dtype, (0, 0)) == wanted, inv_scale


@pytest.mark.parametrize("blocks", [None, (1, 128), (128, 128)], ids=str)
def test_scales_as_casts_make_them(blocks: tuple[int, int] | None) -> None:
    for tokens, features, dtype in ((1, 16, E4M3), (130, 140, E5M2), (129, 48, E4M3)):
        x = hard_values(tokens, features, finite=True)
        options = {"power_of_two": False, "rows": True, "columns": False}
        block = blocks or (1, features)
        if blocks is None:
            inv_scale = quantize_rowwise(x, dtype, **options)[1]
        else:
            inv_scale = quantize_blocks(x, dtype, block=block, **options)[1]
        got = measured(x, inv_scale, dtype, block)
        assert got == expected(x, inv_scale.tolist(), dtype, block)
        assert got[0] == 0.0, "such scales cut nothing off"
        assert got[1] > 0.0
        grown = inv_scale / 1000
        assert measured(x, grown, dtype, block) == expected(x, grown.tolist(), dtype, block)
        assert measured(x, grown, dtype, block)[0] > 0.0


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_what_is_counted_is_what_the_cast_does(dtype: torch.dtype) -> None:
    """Power-of-two scaling is exact: ``lost`` counts values cast to zero, ``cut_off`` values too large to round."""
    least, most = LEAST[dtype], MOST[dtype]
    steps = (1 - 2.0**-8, 1.0, 1 + 2.0**-8)
    x = torch.tensor([[sign * limit * step for limit in (least, most) for step in steps for sign in (1, -1)]])
    x = torch.cat([x, hard_values(1, 300, finite=True).cpu() * 100], 1).to(DEVICE)
    for scale in (1.0, 0.25, 8.0):
        scaled = (x * scale).flatten().tolist()
        lost = sum(value != 0 and rounded(value, dtype) == 0 for value in scaled)
        cut_off = sum(abs(value) > most for value in scaled)
        got = measured(x, torch.tensor(1 / scale, device=DEVICE), dtype, (0, 0))
        assert got == [float32(cut_off / len(scaled)), float32(lost / len(scaled))]


def test_strides_do_not_matter() -> None:
    scale = torch.rand(2, 20, device=DEVICE).t()
    block = (1, 128)
    for layout in LAYOUTS:
        x = LAYOUTS[layout](hard_values(20, 144))
        assert measured(x, scale, E4M3, block) == measured(x.clone(), scale.contiguous(), E4M3, block), layout
        assert measured(x, scale, E4M3, block) == expected(x, scale.tolist(), E4M3, block), layout


def test_inf_and_nan_are_in_the_denominator_only() -> None:
    x = torch.tensor([[math.nan, -math.nan, math.inf, -math.inf, 0.0, -0.0, 1e6, 1e-6]], device=DEVICE)
    one = torch.ones((), device=DEVICE)
    assert measured(x, one, E4M3, (0, 0)) == [0.125, 0.125]
    assert measured(x[:, :6], one, E4M3, (0, 0)) == [0.0, 0.0], "measured, and nothing found"
    assert measured(x, one * math.inf, E4M3, (0, 0)) == [0.0, 0.25]
    assert measured(x, one * math.nan, E4M3, (0, 0)) == [0.0, 0.0]
    assert measured(x, -one * math.nan, E4M3, (0, 0)) == [0.0, 0.0]


def test_places_only_grow() -> None:
    saturated, underflow = places()
    one = torch.ones((), device=DEVICE)
    seen = []
    for cut_off, lost in ((1, 0), (3, 1), (2, 3), (0, 0)):
        x = torch.ones(1, 8, device=DEVICE)
        x[0, :cut_off] = 1e4
        x[0, cut_off : cut_off + lost] = -1e-4
        shares.measure(x, one, E4M3, saturated, underflow, block=(0, 0))
        seen.append((saturated.item(), underflow.item()))
    assert seen == [(0.125, 0.0), (0.375, 0.125), (0.375, 0.375), (0.375, 0.375)]


def test_nothing_changes_nothing() -> None:
    for shape in ((0, 32), (4, 0)):
        assert measured(torch.empty(shape, device=DEVICE), torch.ones((), device=DEVICE), E4M3, (0, 0)) == [-1.0, -1.0]


def test_float64_is_read_as_float32() -> None:
    x = torch.tensor([[1e300, -1e300, 1e-300, 1e30]], dtype=torch.float64, device=DEVICE)
    assert measured(x, torch.ones((), device=DEVICE), E5M2, (0, 0)) == [0.25, 0.0]


def test_scales_that_do_not_fit_are_refused() -> None:
    for block, shape in (
        ((0, 0), (2,)),
        ((1, 128), (4, 2)),
        ((1, 144), (4, 2)),
        ((128, 128), (4, 2)),
        ((128, 128), (2,)),
    ):
        x = torch.ones(4, 144 if shape == (4, 2) and block != (1, 128) else 272, device=DEVICE)
        with pytest.raises(ValueError, match=r"inverse scales are torch.float32 .* expected float32"):
            measured(x, torch.ones(shape, device=DEVICE), E4M3, block)


def test_other_blocks_and_dtypes_of_scales_are_refused() -> None:
    x, one = torch.ones(4, 16, device=DEVICE), torch.ones((), device=DEVICE)
    for block in ((1, 64), (128, 1), (0, 1)):
        with pytest.raises(ValueError, match="expected 0x0"):
            measured(x, one, E4M3, block)
    with pytest.raises(ValueError, match=r"inverse scales are torch\.float64"):
        measured(x, one.double(), E4M3, (0, 0))


@pytest.mark.parametrize("backend", ["auto", "torch", "reference", "triton"])
def test_the_op(backend: str) -> None:
    x = hard_values(33, 48)
    scales = torch.rand(33, 1, device=DEVICE)
    wanted = expected(x, scales.tolist(), E4M3, (1, 48))
    array = torch.full((2, 5), -1.0, device=DEVICE)
    assert ops.measure(x, scales, E4M3, array[0, 1], array[1, 3], block=[1, 48], backend=backend) is None
    assert array[0].tolist() == [-1.0, wanted[0], -1.0, -1.0, -1.0]
    assert array[1].tolist() == [-1.0, -1.0, -1.0, wanted[1], -1.0]


@pytest.mark.slow
def test_the_op_is_one_for_torch() -> None:
    array = torch.full((2, 5), -1.0, device=DEVICE)
    scales = torch.rand(33, 1, device=DEVICE)
    torch.library.opcheck(
        ops.measure, (hard_values(33, 48), scales, E4M3, array[0, 1], array[1, 3]), {"block": [1, 48]}
    )


def test_limits() -> None:
    for dtype in FORMATS:
        assert shares.limits(dtype) == (MOST[dtype], LEAST[dtype])

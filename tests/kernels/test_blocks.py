"""Casts with many scales, against FP8 arithmetic written from its definition."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8dist_kernels.reference.blocks import quantize_blocks, quantize_rowwise
from tests.support.casting import FORMATS, hard_values, rounded
from tests.support.oracle import amax_of, divide, float32, scale_for

Lines = Sequence[Sequence[float]]


def expected(lines: Lines, height: int, width: int, dtype: torch.dtype, power_of_two: bool) -> tuple[Lines, Lines]:
    """Return (FP8 values, inv_scales) of a matrix with one scale per block of height x width, in plain Python."""
    limit = 448.0 if dtype is torch.float8_e4m3fn else 57344.0
    fp8 = [[0.0] * len(line) for line in lines]
    inv_scales: list[list[float]] = []
    for top in range(0, len(lines), height):
        inv_scales.append([])
        for left in range(0, len(lines[0]), width):
            places = [
                (i, j)
                for i in range(top, min(top + height, len(lines)))
                for j in range(left, min(left + width, len(lines[0])))
            ]
            amax = amax_of(lines[i][j] for i, j in places)
            assert amax is not None
            scale = scale_for(amax, 1.0, limit, power_of_two=power_of_two)
            inv_scales[-1].append(divide(1.0, scale))
            for i, j in places:
                value = lines[i][j]
                fp8[i][j] = rounded(float32(value * scale) if math.isfinite(value) else value, dtype)
    return fp8, inv_scales


def check(got: tuple[Tensor, ...], x: Tensor, block: Any, dtype: torch.dtype, power_of_two: bool) -> None:
    fp8, inv_scale, fp8_t, inv_scale_t = got
    tokens, features = x.shape
    for copy, scales, source in ((fp8, inv_scale, x), (fp8_t[:, :tokens], inv_scale_t, x.t())):
        height, width = block or (1, source.shape[1])
        values, inverse = expected(source.float().tolist(), height, width, dtype, power_of_two)
        assert repr(copy.float().tolist()) == repr(values)
        assert scales.tolist() == inverse
    assert fp8_t.shape == (features, -(-tokens // 16) * 16)
    assert not fp8_t[:, tokens:].view(torch.uint8).any()


@pytest.mark.parametrize("block", [None, (1, 128), (128, 128)], ids=str)
@pytest.mark.parametrize(("dtype", "power_of_two"), [*zip(FORMATS, (False, True))])
def test_numbers_are_those_of_the_definition(dtype: torch.dtype, block: Any, power_of_two: bool) -> None:
    x = hard_values(19, 140, finite=True).cpu().bfloat16()
    x[3, 5], x[4, 7], x[5, 130] = math.nan, -math.inf, 0.0
    options: Any = {"power_of_two": power_of_two, "rows": True, "columns": True}
    got = quantize_blocks(x, dtype, block=block, **options) if block else quantize_rowwise(x, dtype, **options)
    check(got, x, block, dtype, power_of_two)


def test_shapes_and_strides() -> None:
    x = torch.ones(130, 272)
    options: Any = {"power_of_two": False, "rows": True, "columns": True}
    shapes = [(tuple(t.shape), t.stride()) for t in quantize_rowwise(x, torch.float8_e4m3fn, **options)]
    copies = ((130, 272), (272, 1)), ((272, 144), (144, 1))
    assert shapes == [copies[0], ((130, 1), (1, 1)), copies[1], ((272, 1), (1, 1))]
    shapes = [(tuple(t.shape), t.stride()) for t in quantize_blocks(x, torch.float8_e4m3fn, block=(1, 128), **options)]
    assert shapes == [copies[0], ((130, 3), (1, 130)), copies[1], ((272, 2), (1, 272))]
    square = quantize_blocks(x, torch.float8_e4m3fn, block=(128, 128), **options)
    shapes = [(tuple(t.shape), t.stride()) for t in square]
    assert shapes == [copies[0], ((2, 3), (3, 1)), copies[1], ((3, 2), (2, 1))]


@pytest.mark.parametrize("block", [None, (1, 128), (128, 128)], ids=str)
def test_empty_tensors_for_what_was_not_asked_for_and_of_nothing(block: Any) -> None:
    def run(x: Tensor, **which: bool) -> list[tuple[int, ...]]:
        options: Any = {"power_of_two": False, **which}
        if block is None:
            return [tuple(t.shape) for t in quantize_rowwise(x, torch.float8_e5m2, **options)]
        return [tuple(t.shape) for t in quantize_blocks(x, torch.float8_e5m2, block=block, **options)]

    x = torch.ones(5, 32)
    assert run(x, rows=True, columns=False)[2:] == [(0,), (0,)]
    assert run(x, rows=False, columns=True)[:2] == [(0,), (0,)]
    lines = {None: ((0, 1), (32, 1)), (1, 128): ((0, 1), (32, 0)), (128, 128): ((0, 1), (1, 0))}[block]
    assert run(x[:0], rows=True, columns=True) == [(0, 32), lines[0], (32, 0), lines[1]]


@pytest.mark.parametrize("experts", [0, 2])
def test_weights_of_experts_under_autocast_and_of_none(experts: int) -> None:
    weight, each = torch.randn(experts, 130, 48), {"power_of_two": False, "rows": True, "columns": True}
    with torch.autocast("cpu", torch.bfloat16):
        made = quantize_blocks(weight, torch.float8_e4m3fn, block=(128, 128), **each)
    assert [tuple(t.shape[1:]) for t in made] == [(130, 48), (2, 1), (48, 144), (1, 2)]
    for expert, part in enumerate(weight):
        check(tuple(t[expert] for t in made), part, (128, 128), torch.float8_e4m3fn, False)
    assert all(len(t) == experts for t in made)


def test_other_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="blocks of 64x64; expected 1x128 or 128x128"):
        quantize_blocks(
            torch.ones(2, 2), torch.float8_e4m3fn, block=(64, 64), power_of_two=False, rows=True, columns=True
        )

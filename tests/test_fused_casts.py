"""Triton's casts against plain torch's, bitwise, and against FP8 arithmetic written from its definition."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8dist.kernels import casts as plain
from fp8dist.kernels.fused import casts as fused
from tests.support.casting import DTYPES, FORMATS, LAYOUTS, assert_same, hard_values, poison, rounded
from tests.support.devices import DEVICE
from tests.support.oracle import amax_of, divide, float32, scale_for

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in .*:RuntimeWarning")  # Of the interpreter's numpy.

SHAPES = ((1, 16), (5, 48), (33, 80), (130, 272), (17, 3), (0, 32))


def run(kernels: Any, x: Tensor, dtype: torch.dtype, before: float = -1.0, **changes: Any) -> tuple[Tensor, ...]:
    """Row-major, transposed, inv_scale and ``pending`` of one call."""
    options: dict[str, Any] = {
        "scale": 0.37, "cold": False, "record": True, "just_in_time": False, "margin": 0, "power_of_two": False,
        "rows": True, "columns": True, **changes,
    }  # fmt: skip
    scale = torch.tensor(options.pop("scale"), device=DEVICE)
    cold = torch.tensor(options.pop("cold"), device=DEVICE)
    pending = torch.tensor(before, device=DEVICE)
    return (*kernels.quantize(x, scale, cold, pending, dtype, **options), pending)


def compare(x: Tensor, dtype: torch.dtype, **options: Any) -> None:
    assert_same(run(fused, x, dtype, **options), run(plain, x, dtype, **options))


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "shifted"])
def test_a_cast_is_the_twins(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch)
    compare(LAYOUTS[layout](hard_values(33, 80).bfloat16()), torch.float8_e4m3fn)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("source", DTYPES, ids=str)
def test_all_shapes_and_strides(source: torch.dtype, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch)
    for index, ((tokens, features), layout) in enumerate(itertools.product(SHAPES, LAYOUTS)):
        finite = index % 2 == 0
        x = LAYOUTS[layout](hard_values(tokens, features, index, finite).to(source))
        compare(x, dtype, just_in_time=finite, cold=finite)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["contiguous", pytest.param("transposed", marks=pytest.mark.long)])
def test_all_options(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch)
    x = LAYOUTS[layout](hard_values(37, 48, finite=True).bfloat16())
    flags = itertools.product((False, True), repeat=6)
    for (record, just_in_time, cold, power_of_two, rows, columns), margin in itertools.product(flags, (0, 3, -2)):
        compare(
            x, torch.float8_e5m2, record=record, just_in_time=just_in_time, cold=cold, power_of_two=power_of_two,
            rows=rows, columns=columns, margin=margin,
        )  # fmt: skip


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("just_in_time", [False, True])
def test_numbers_are_those_of_the_definition(dtype: torch.dtype, just_in_time: bool) -> None:
    x = hard_values(12, 20, seed=3, finite=just_in_time)
    row_major, transposed, inv_scale, pending = run(
        fused, x, dtype, scale=5.3, cold=just_in_time, just_in_time=just_in_time, margin=1
    )
    values = x.flatten().tolist()
    amax = amax_of(values)
    assert amax is not None
    scale = scale_for(amax, 1.0, 448.0 if dtype == FORMATS[0] else 57344.0, margin=1) if just_in_time else float32(5.3)
    expected = [rounded(float32(v * scale) if math.isfinite(v) else v, dtype) for v in values]
    got = row_major.float().flatten().tolist()
    assert list(map(repr, got)) == list(map(repr, expected))
    assert repr(transposed[:, :12].float().t().flatten().tolist()) == repr(got)
    assert not transposed[:, 12:].view(torch.uint8).any()
    assert inv_scale.item() == divide(1.0, scale)
    assert repr(pending.item()) == repr(amax)


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0])
def test_a_cold_slot_without_a_usable_amax_casts_with_one(value: float) -> None:
    x = torch.full((3, 16), 0.0, device=DEVICE)
    x[1, 2] = value
    got = run(fused, x, torch.float8_e4m3fn, scale=8.0, cold=True, just_in_time=True)
    assert got[2].item() == 1.0
    assert_same(got, run(plain, x, torch.float8_e4m3fn, scale=8.0, cold=True, just_in_time=True))


@pytest.mark.parametrize("before", [-1.0, 0.5, 1e6, math.inf, math.nan])
def test_pending_only_grows(before: float) -> None:
    x = torch.full((5, 16), -2.0, device=DEVICE)
    pending = run(fused, x, torch.float8_e4m3fn, before=before)[3].item()
    assert repr(pending) == repr(amax_of([before, 2.0]))


def test_nothing_is_recorded_without_being_asked_nor_of_nothing() -> None:
    x = torch.ones(5, 16, device=DEVICE)
    assert run(fused, x, torch.float8_e4m3fn, record=False)[3].item() == -1.0
    assert run(fused, x[:0], torch.float8_e4m3fn, cold=True, just_in_time=True)[3].item() == -1.0


def test_a_negative_nan_is_recorded_as_nan() -> None:
    x = torch.ones(5, 16, device=DEVICE)
    x.view(torch.int32)[3, 3] = -1
    assert run(fused, x.bfloat16(), torch.float8_e4m3fn)[3].isnan()


@pytest.mark.slow
def test_the_same_again_is_bitwise_the_same() -> None:
    x = hard_values(130, 144).bfloat16()
    assert_same(run(fused, x, torch.float8_e4m3fn), run(fused, x, torch.float8_e4m3fn))


@pytest.mark.parametrize(("tokens", "stride"), [(3, 2**30), (260, 2**23)], ids=["in a tile", "between tiles"])
@pytest.mark.parametrize("on_its_side", [False, True])
def test_offsets_beyond_32_bits(tokens: int, stride: int, on_its_side: bool) -> None:
    # Memory that is not touched costs nothing.
    room = torch.empty((tokens - 1) * stride + 16, dtype=torch.float16, device=DEVICE)
    x = room.as_strided((tokens, 16), (stride, 1))
    x.copy_(hard_values(tokens, 16, finite=True))
    far = x.t() if on_its_side else x
    near = x.clone().t() if on_its_side else x.clone()
    options = {"cold": True, "just_in_time": True}
    assert_same(run(fused, far, torch.float8_e4m3fn, **options), run(plain, near, torch.float8_e4m3fn, **options))


def test_float64_beyond_float32_is_infinite() -> None:
    """In either version: it is read as float32."""
    x = torch.full((16, 16), 1e300, dtype=torch.float64, device=DEVICE)
    one, cold = torch.ones((), device=DEVICE), torch.zeros((), dtype=torch.bool, device=DEVICE)
    for version in (plain, fused):
        rows, _, _ = version.quantize(
            x, one, cold, one.clone(), torch.float8_e4m3fn, record=False, just_in_time=False, margin=0,
            power_of_two=False, rows=True, columns=False,
        )  # fmt: skip
        assert rows.float().isnan().all()

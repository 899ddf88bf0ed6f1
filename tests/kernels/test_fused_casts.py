"""Casts with a slot's scale, in plain torch and in Triton, against FP8 arithmetic written from its definition: which
scale is taken, what is recorded, and how often a tensor is read. ``test_twins.py`` compares the two bitwise."""

from __future__ import annotations

import itertools
import math
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fp8dist_kernels.reference import casts as plain
from fp8dist_kernels.triton import casts as fused
from tests.support.casting import FORMATS, LAYOUTS, assert_same, hard_values, poison, rounded
from tests.support.devices import DEVICE
from tests.support.oracle import FLOAT32_MAX, amax_of, divide, float32, scale_for

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in .*:RuntimeWarning")  # From the interpreter's numpy.

VERSIONS = pytest.mark.parametrize("version", [plain, fused], ids=["plain", "fused"])
THOROUGH = pytest.mark.parametrize(
    "version", [plain, pytest.param(fused, marks=pytest.mark.slow)], ids=["plain", "fused"]
)
FP8_MAX = MappingProxyType(dict(zip(FORMATS, (448.0, 57344.0))))


def run(kernels: Any, x: Tensor, dtype: torch.dtype, before: float = -1.0, **changes: Any) -> tuple[Tensor, ...]:
    """Return (row-major copy, transposed copy, inv_scale, ``pending``) of one call."""
    options: dict[str, Any] = {
        "scale": 0.37, "cold": False, "record": True, "just_in_time": False, "margin": 0, "power_of_two": False,
        "rows": True, "columns": True, **changes,
    }  # fmt: skip
    scale = torch.tensor(options.pop("scale"), device=DEVICE)
    cold = torch.tensor(options.pop("cold"), device=DEVICE)
    pending = torch.tensor(before, device=DEVICE)
    return (*kernels.quantize(x, scale, cold, pending, dtype, **options), pending)


def has_outgrown(amax: float, scale: float, outgrown: float, dtype: torch.dtype) -> bool:
    """Return True if the tensor has outgrown its scale, by definition. ``amax`` and ``scale`` are float32 values."""
    return math.isfinite(amax) and float32(amax * scale) > float32(outgrown * FP8_MAX[dtype])


def scales_at_the_limit(amax: float, outgrown: float, dtype: torch.dtype) -> tuple[float, float]:
    """Return the largest float32 scale that a tensor with this amax has not outgrown, and the next float32 above it."""
    fits = np.float32(outgrown * FP8_MAX[dtype] / amax)
    while has_outgrown(amax, float(fits), outgrown, dtype):
        fits = np.nextafter(fits, np.float32(0))
    while not has_outgrown(amax, float(following := np.nextafter(fits, np.float32(np.inf))), outgrown, dtype):
        fits = following
    return float(fits), float(following)


def of_amax(amax: float, source: torch.dtype = torch.float32) -> Tensor:
    """Return a tensor [5, 48] whose amax (>= 1) is that of a negative element."""
    x = hard_values(5, 48, finite=True).clamp(-1, 1)
    x[4, 33] = -amax
    return x.to(source)


def check(version: Any, x: Tensor, dtype: torch.dtype, **options: Any) -> bool:
    """Cast and compare with the definition. Return True if the scale must be computed just in time."""
    values = x.flatten().tolist()
    amax = amax_of([float32(v) for v in values])
    assert amax is not None
    scale, margin, power_of_two = options["scale"], options.get("margin", 0), options.get("power_of_two", False)
    cold, outgrown = options.get("cold", False), options.get("outgrown")
    fresh = not cold and outgrown is not None and has_outgrown(amax, scale, outgrown, dtype)
    fresh |= cold and options.get("just_in_time", False)
    used = scale_for(amax, 1.0, FP8_MAX[dtype], margin, power_of_two) if fresh else scale
    row_major, transposed, inv_scale, pending = run(version, x, dtype, **options)
    assert inv_scale.item() == divide(1.0, used)
    assert repr(pending.item()) == repr(amax if options.get("record", True) else -1.0)
    expected = rounded([float32(float32(v) * used) if math.isfinite(v) else v for v in values], dtype).tolist()
    if options.get("rows", True):
        assert repr(row_major.float().flatten().tolist()) == repr(expected)
    if options.get("columns", True):
        assert repr(transposed[:, : x.shape[0]].float().t().flatten().tolist()) == repr(expected)
        assert not transposed[:, x.shape[0] :].view(torch.uint8).any()
    return fresh


@pytest.mark.slow
@pytest.mark.parametrize("outgrown", [None, 2.0])
def test_all_options(outgrown: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain torch against the definition, and Triton against plain torch."""
    poison(monkeypatch)
    turns = itertools.cycle(itertools.product((100.0, 1.0), ("contiguous", "transposed"), ((0, False), (3, True))))
    for record, just_in_time, cold, rows, columns in itertools.product((False, True), repeat=5):
        amax, layout, (margin, power_of_two) = next(turns)
        x = LAYOUTS[layout](of_amax(amax).bfloat16())
        options = {
            "scale": 2e3, "outgrown": outgrown, "record": record, "just_in_time": just_in_time, "cold": cold,
            "rows": rows, "columns": columns, "margin": margin, "power_of_two": power_of_two,
        }  # fmt: skip
        fresh = check(plain, x, FORMATS[1], **options)
        assert fresh == (just_in_time if cold else outgrown is not None and amax > 50)
        assert_same(run(fused, x, FORMATS[1], **options), run(plain, x, FORMATS[1], **options))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_a_scale_is_chosen_as_by_a_cast(dtype: torch.dtype) -> None:
    """``choose_scale`` of an amax does what ``quantize`` does with a tensor of this amax, in both versions."""
    amaxes = (0.0, 2.0**-140, 0.3, 900.0, 3e38, math.inf, math.nan)
    limits = itertools.cycle(((None, 0, -1.0), (1.25, 2, 0.5), (1.25, -1, math.nan)))
    for amax, scale in itertools.product(amaxes, (0.37, 3e-3, 2.0**120)):
        x = torch.tensor([[amax]], device=DEVICE)
        for record, just_in_time, cold in itertools.product((False, True), repeat=3):
            outgrown, margin, before = next(limits)
            options = {
                "record": record, "just_in_time": just_in_time, "power_of_two": margin < 0, "margin": margin,
                "outgrown": outgrown,
            }  # fmt: skip
            inverse, pending = run(plain, x, dtype, before, cold=cold, scale=scale, **options)[2:]
            for version in (plain, fused):
                place = torch.tensor(before, device=DEVICE)
                slot = torch.tensor(scale, device=DEVICE), torch.tensor(cold, device=DEVICE), place
                needed = record or just_in_time or outgrown is not None
                chosen = version.choose_scale(x[0, 0] if needed else None, *slot, dtype, **options)
                assert_same((chosen[1], torch.reciprocal(chosen[0]), place), (inverse, inverse, pending))


@VERSIONS
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_numbers_are_those_of_the_definition(version: Any, dtype: torch.dtype) -> None:
    """A slot's scale or, of a cold slot, one that is computed just in time: 1 if the amax gives none."""
    check(version, hard_values(12, 20, seed=3), dtype, scale=float32(5.3))
    assert check(version, hard_values(12, 20, seed=3, finite=True), dtype, scale=5.5, cold=True, just_in_time=True)
    for value in (math.nan, math.inf, 0.0):
        x = torch.zeros(3, 16, device=DEVICE)
        x[1, 2] = value
        assert check(version, x, dtype, scale=8.0, cold=True, just_in_time=True)
    # Both versions read float64 as float32.
    x = torch.full((16, 16), 1e300, dtype=torch.float64, device=DEVICE)
    assert run(version, x, dtype)[0].float().isnan().all()


@VERSIONS
def test_pending_only_grows(version: Any) -> None:
    x = torch.full((5, 16), -2.0, device=DEVICE)
    for before in (-1.0, 0.5, 1e6, math.inf, math.nan):
        assert repr(run(version, x, FORMATS[0], before=before)[3].item()) == repr(amax_of([before, 2.0]))
    assert run(version, x[:0], FORMATS[0], cold=True, just_in_time=True)[3].item() == -1.0, "of nothing"
    x.view(torch.int32)[3, 3] = -1  # A negative NaN.
    assert run(version, x.bfloat16(), FORMATS[0])[3].isnan()


def _bytes(*shape: int) -> Tensor:
    return torch.arange(math.prod(shape), device=DEVICE).mul(37).to(torch.uint8).view(shape).view(torch.float8_e5m2)


def test_experts_and_nothing_are_transposed() -> None:
    for fp8 in (_bytes(3, 33, 48), _bytes(4, 16, 33)[::2], _bytes(2, 48, 16).mT, _bytes(0, 16, 32), _bytes(0, 16)):
        assert_same((fused.transpose(fp8),), (plain.transpose(fp8),))


@VERSIONS
def test_columns_are_added_in_the_documented_order(version: Any) -> None:
    """Written from the definition, in float32: numpy's scalars round each addition."""
    x = hard_values(170, 16, finite=True)

    def halved(rows: list[Any]) -> Any:
        while len(rows) > 1:
            rows = [low + high for low, high in zip(rows[: len(rows) // 2], rows[len(rows) // 2 :])]
        return rows[0]

    rows = [*x.cpu().numpy(), *np.zeros((256 - 170, 16), np.float32)]
    fours = [(rows[i] + rows[i + 1]) + (rows[i + 2] + rows[i + 3]) for i in range(0, 256, 4)]
    tiles = [halved(fours[:32]), halved(fours[32:])]
    expected = np.float32(0) + halved(tiles + [np.zeros(16, np.float32)] * 30)
    assert_same((version.add_up(x, torch.float32),), (torch.from_numpy(expected).to(DEVICE),))


def test_sums_of_many_tokens() -> None:
    """More sums of 128 than are added at a time."""
    x = torch.randn(4300, 16, device=DEVICE)
    assert_same((fused.add_up(x, torch.float32),), (plain.add_up(x, torch.float32),))


@THOROUGH
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_a_tensor_has_outgrown_its_scale_above_the_limit(version: Any, dtype: torch.dtype) -> None:
    # For each of these amaxes, a float32 division in place of the product gives another result: limit / amax,
    # limit / scale or product / FP8 max. (1.1 and 1.1 * 448 are not float32 values.)
    for outgrown, amax in ((1.25, 1.55342495), (2.0, 2.73025084), (1.1, 2.0)):
        fits, does_not = scales_at_the_limit(float32(amax), outgrown, dtype)
        assert not check(version, of_amax(amax), dtype, scale=fits, outgrown=outgrown)
        assert check(version, of_amax(amax), dtype, scale=does_not, outgrown=outgrown)
    for source in (torch.bfloat16, torch.float16, torch.float64):
        x = of_amax(2.33289218, source)
        fits, does_not = scales_at_the_limit(float32(x.abs().max().item()), 1.25, dtype)
        assert not check(version, x, dtype, scale=fits, outgrown=1.25)
        assert check(version, x, dtype, scale=does_not, outgrown=1.25)
    exactly = float32(1.25 * FP8_MAX[dtype]) / 2.0
    assert not check(version, of_amax(2.0), dtype, scale=exactly, outgrown=1.25)
    # A product beyond float32.
    assert check(version, of_amax(2.0), dtype, scale=FLOAT32_MAX, outgrown=1.25)
    # Without the keyword.
    assert not check(version, of_amax(1e6), dtype, scale=1e6, outgrown=None, just_in_time=True)


@THOROUGH
def test_an_amax_that_is_not_finite_or_zero_outgrows_nothing(version: Any) -> None:
    """The cast uses the slot's scale, or 1 if the slot is cold and ``just_in_time``."""
    negative_nan = of_amax(1e6)
    negative_nan.view(torch.int32)[0, 0] = -1  # A NaN with the largest payload.
    for x, cold, just_in_time in (
        (of_amax(math.inf), False, True), (of_amax(math.inf), True, True), (of_amax(-math.inf), False, False),
        (of_amax(math.nan), True, False), (negative_nan, False, True), (negative_nan, True, True),
    ):  # fmt: skip
        options = {"scale": 8.0, "outgrown": 1.25, "cold": cold, "just_in_time": just_in_time}
        assert check(version, x, FORMATS[0], **options) == (cold and just_in_time)
    for tokens, cold in itertools.product((0, 5), (False, True)):
        zeros = torch.zeros(tokens, 48, device=DEVICE)
        options = {"scale": FLOAT32_MAX, "outgrown": 1.25, "cold": cold, "just_in_time": True}
        rows, _, inv_scale, pending = run(version, zeros, FORMATS[0], **options)
        assert inv_scale.item() == (1.0 if cold else divide(1.0, FLOAT32_MAX))
        assert pending.item() == (0.0 if tokens else -1.0)
        assert not rows.float().any()


def test_parts_of_a_hot_slot_are_read_only_where_it_may_be_outgrown(monkeypatch: pytest.MonkeyPatch) -> None:
    read, partial_amaxes = [], fused.partial_amaxes
    monkeypatch.setattr(fused, "partial_amaxes", lambda *args: (read.append(partial_amaxes(*args)), read[-1])[1])
    for outgrown, just_in_time in itertools.product((None, 1.25), (False, True)):
        read.clear()
        run(fused, of_amax(3.0), FORMATS[0], just_in_time=just_in_time, outgrown=outgrown)
        largest = [parts.max().view(torch.float32).item() for parts in read]
        assert largest == ([3.0] if outgrown else [0.0] * just_in_time)


@pytest.mark.slow
def test_a_cold_slot_in_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``scratch``; of an amax that gives a scale, or none. ``test_twins.py`` has other shapes and strides."""
    monkeypatch.setattr(fused, "partial_amaxes", lambda *_: pytest.fail("a launch of its own"))
    scratch = torch.zeros(4, dtype=torch.int32, device=DEVICE)
    for cold, value in ((True, 3.0), (True, math.nan), (True, 0.0), (False, 3.0)):
        x = LAYOUTS["shifted"]((hard_values(33, 80, finite=True) * value).bfloat16())
        sums = [torch.empty(80, device=DEVICE) for _ in range(2)]
        options = {"just_in_time": True, "cold": cold, "margin": 1, "record": bool(value)}
        got = run(fused, x, FORMATS[1], scratch=scratch, sums=sums[0], **options)
        assert not scratch.any()
        assert_same((*got, sums[0]), (*run(plain, x, FORMATS[1], sums=sums[1], **options), sums[1]))


@pytest.mark.skipif(DEVICE != "cpu", reason="on a GPU the flag is not looked at")
def test_on_a_cpu_an_amax_is_taken_once_and_only_if_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, amax_bits = [], plain.amax_bits
    monkeypatch.setattr(plain, "amax_bits", lambda x: (calls.append(x), amax_bits(x))[1])
    for record, cold, outgrown in itertools.product((False, True), (False, True), (None, 1.25)):
        calls.clear()
        run(plain, of_amax(3.0), FORMATS[0], record=record, cold=cold, just_in_time=True, outgrown=outgrown)
        assert len(calls) == (record or cold or outgrown is not None)

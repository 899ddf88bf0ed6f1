"""Triton's casts against plain torch's, bitwise, and against FP8 arithmetic written from its definition."""

from __future__ import annotations

import itertools
import math
import random
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
SHAPES = ((1, 16), (33, 80), (130, 272), (17, 3), (0, 32))


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


def compare(x: Tensor, dtype: torch.dtype, **options: Any) -> None:
    assert_same(run(fused, x, dtype, **options), run(plain, x, dtype, **options))


@pytest.mark.slow
def test_all_options(monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch)
    x = hard_values(37, 48, finite=True).bfloat16()
    chance = random.Random(0)
    for record, just_in_time, cold, rows, columns in itertools.product((False, True), repeat=5):
        compare(
            LAYOUTS[chance.choice(("contiguous", "transposed"))](x), torch.float8_e5m2, record=record,
            just_in_time=just_in_time, cold=cold, rows=rows, columns=columns, power_of_two=chance.random() < 0.5,
            margin=chance.choice((0, 3, -2)),
        )  # fmt: skip


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
                chosen = version.choose_scale(x[0, 0], *slot, dtype, **options)
                assert_same((chosen[1], torch.reciprocal(chosen[0]), place), (inverse, inverse, pending))


@VERSIONS
def test_without_an_amax_the_slots_scale_is_chosen(version: Any) -> None:
    slot = torch.tensor(0.3, device=DEVICE), torch.tensor(False, device=DEVICE), torch.tensor(-1.0, device=DEVICE)
    options: dict[str, Any] = {"record": False, "just_in_time": False, "margin": 0, "power_of_two": False}
    chosen = version.choose_scale(None, *slot, FORMATS[0], **options)
    assert chosen.tolist() == [slot[0].item(), divide(1.0, slot[0].item())]
    assert slot[2] == -1.0


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


def test_a_cold_slot_without_a_usable_amax_casts_with_one() -> None:
    for value in (math.nan, math.inf, 0.0):
        x = torch.full((3, 16), 0.0, device=DEVICE)
        x[1, 2] = value
        got = run(fused, x, torch.float8_e4m3fn, scale=8.0, cold=True, just_in_time=True)
        assert got[2].item() == 1.0
        assert_same(got, run(plain, x, torch.float8_e4m3fn, scale=8.0, cold=True, just_in_time=True))


def test_pending_only_grows() -> None:
    for before in (-1.0, 0.5, 1e6, math.inf, math.nan):
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


def test_sums_of_many_and_of_far_tokens() -> None:
    """More sums of 128 than are added at a time, and offsets beyond 32 bits."""
    x = torch.randn(4300, 16, device=DEVICE)
    assert_same((fused.add_up(x, torch.float32),), (plain.add_up(x, torch.float32),))
    room = torch.empty(2**31 + 64, dtype=torch.float16, device=DEVICE)
    far = room.as_strided((3, 16), (2**30, 1))
    far.copy_(hard_values(3, 16, finite=True))
    assert_same((fused.add_up(far, torch.float32),), (plain.add_up(far.clone(), torch.float32),))


def test_float64_beyond_float32_is_infinite() -> None:
    """Both versions read float64 as float32."""
    x = torch.full((16, 16), 1e300, dtype=torch.float64, device=DEVICE)
    one, cold = torch.ones((), device=DEVICE), torch.zeros((), dtype=torch.bool, device=DEVICE)
    for version in (plain, fused):
        rows, _, _ = version.quantize(
            x, one, cold, one.clone(), torch.float8_e4m3fn, record=False, just_in_time=False, margin=0,
            power_of_two=False, rows=True, columns=False,
        )  # fmt: skip
        assert rows.float().isnan().all()


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


def check_outgrown(version: Any, x: Tensor, dtype: torch.dtype, **options: Any) -> bool:
    """Cast and compare with the definition. Return True if the scale must be computed just in time."""
    values = x.flatten().tolist()
    amax = amax_of([float32(v) for v in values])
    assert amax is not None
    scale, margin, power_of_two = options["scale"], options.get("margin", 0), options.get("power_of_two", False)
    cold = options.get("cold", False)
    fresh = not cold and options["outgrown"] is not None and has_outgrown(amax, scale, options["outgrown"], dtype)
    fresh |= cold and options.get("just_in_time", False)
    used = scale_for(amax, 1.0, FP8_MAX[dtype], margin, power_of_two) if fresh else scale
    row_major, transposed, inv_scale, pending = run(version, x, dtype, **options)
    assert inv_scale.item() == divide(1.0, used)
    assert repr(pending.item()) == repr(amax if options.get("record", True) else -1.0)
    expected = [rounded(float32(float32(v) * used) if math.isfinite(v) else v, dtype) for v in values]
    if options.get("rows", True):
        assert repr(row_major.float().flatten().tolist()) == repr(expected)
    if options.get("columns", True):
        assert repr(transposed[:, : x.shape[0]].float().t().flatten().tolist()) == repr(expected)
    return fresh


@THOROUGH
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_a_tensor_has_outgrown_its_scale_above_the_limit(version: Any, dtype: torch.dtype) -> None:
    # For each of these amaxes, a float32 division in place of the product gives another result: limit / amax,
    # limit / scale or product / FP8 max. (1.1 and 1.1 * 448 are not float32 values.)
    for outgrown, amax in ((1.25, 1.55342495), (2.0, 2.73025084), (1.1, 2.0)):
        fits, does_not = scales_at_the_limit(float32(amax), outgrown, dtype)
        assert not check_outgrown(version, of_amax(amax), dtype, scale=fits, outgrown=outgrown)
        assert check_outgrown(version, of_amax(amax), dtype, scale=does_not, outgrown=outgrown)
    exactly = float32(1.25 * FP8_MAX[dtype]) / 2.0
    assert not check_outgrown(version, of_amax(2.0), dtype, scale=exactly, outgrown=1.25)


@THOROUGH
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_a_tensor_of_any_type_outgrows_its_scale(version: Any, source: torch.dtype) -> None:
    x = of_amax(2.33289218, source)
    fits, does_not = scales_at_the_limit(float32(x.abs().max().item()), 1.25, FORMATS[0])
    assert not check_outgrown(version, x, FORMATS[0], scale=fits, outgrown=1.25)
    assert check_outgrown(version, x, FORMATS[0], scale=does_not, outgrown=1.25)


@pytest.mark.slow
def test_all_programs_of_a_cast_decide_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch)
    x = hard_values(130, 80, finite=True).clamp(-1, 1).bfloat16()  # 2 x 2 programs.
    scales = scales_at_the_limit(3.0, 1.25, FORMATS[0])
    for place, scale, fresh in (((0, 0), scales[1], True), ((129, 79), scales[0], False), ((129, 79), scales[1], True)):
        x[place] = 3.0
        options = {"scale": scale, "outgrown": 1.25}
        got = run(fused, x, FORMATS[0], **options)
        assert_same(got, run(plain, x, FORMATS[0], **options))
        assert got[2].item() == divide(1.0, scale_for(3.0, 1.0, 448.0) if fresh else scale)
        x[place] = 0.5


@VERSIONS
def test_without_the_keyword_nothing_is_outgrown(version: Any) -> None:
    assert not check_outgrown(version, of_amax(1e6), FORMATS[0], scale=1e6, outgrown=None, just_in_time=True)


@THOROUGH
def test_outgrown_and_cold(version: Any) -> None:
    """An outgrown slot gets a new scale. A cold slot gets one only with ``just_in_time``; else its scale stays 1."""
    rules = itertools.cycle(((False, 0), (True, 1), (False, -2)))
    for amax, cold, just_in_time in itertools.product((1.0, 100.0), (False, True), (False, True)):
        power_of_two, margin = next(rules)
        fresh = check_outgrown(
            version, of_amax(amax), FORMATS[0], scale=10.0, outgrown=2.0, cold=cold, just_in_time=just_in_time,
            power_of_two=power_of_two, margin=margin,
        )  # fmt: skip
        assert fresh == (just_in_time if cold else amax > 50)


@pytest.mark.slow
@pytest.mark.parametrize(("record", "rows", "columns"), [*itertools.product((False, True), repeat=3)])
def test_outgrown_whichever_copies_are_written(
    record: bool, rows: bool, columns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch)
    options: dict[str, Any] = {"scale": 2e3, "outgrown": 2.0, "record": record, "rows": rows, "columns": columns}
    for layout, amax in (("contiguous", 100.0), ("transposed", 100.0), ("contiguous", 1.0)):
        x = LAYOUTS[layout](of_amax(amax).bfloat16())
        assert check_outgrown(plain, x, FORMATS[1], **options) == (amax > 50)
        if amax > 50 and (layout == "transposed") == (record and rows):
            compare(x, FORMATS[1], **options)


@THOROUGH
def test_an_amax_that_is_not_finite_outgrows_nothing(version: Any) -> None:
    """The cast uses the slot's scale, or 1 if the slot is cold and ``just_in_time``."""
    negative_nan = of_amax(1e6)
    negative_nan.view(torch.int32)[0, 0] = -1  # A NaN with the largest payload.
    for x, cold, just_in_time in (
        (of_amax(math.inf), False, False), (of_amax(math.inf), False, True), (of_amax(math.inf), True, True),
        (of_amax(-math.inf), False, False), (of_amax(math.nan), False, True), (of_amax(math.nan), True, False),
        (negative_nan, False, True), (negative_nan, True, True),
    ):  # fmt: skip
        options = {"scale": 8.0, "outgrown": 1.25, "cold": cold, "just_in_time": just_in_time}
        assert check_outgrown(version, x, FORMATS[0], **options) == (cold and just_in_time)


@VERSIONS
def test_a_product_beyond_float32_is_outgrown(version: Any) -> None:
    assert check_outgrown(version, of_amax(2.0), FORMATS[0], scale=FLOAT32_MAX, outgrown=1.25)
    assert check_outgrown(version, of_amax(1e38), FORMATS[1], scale=1e38, outgrown=2.0)


@VERSIONS
def test_zeros_and_nothing_outgrow_no_scale(version: Any) -> None:
    for tokens, cold in ((0, False), (0, True), (5, True), (5, False)):
        x = torch.zeros(tokens, 48, device=DEVICE)
        options: dict[str, Any] = {"scale": FLOAT32_MAX, "outgrown": 1.25, "cold": cold, "just_in_time": True}
        rows, _, inv_scale, pending = run(version, x, FORMATS[0], **options)
        assert inv_scale.item() == (1.0 if cold else divide(1.0, FLOAT32_MAX))
        assert pending.item() == (0.0 if tokens else -1.0)
        assert not rows.float().any()


@pytest.mark.parametrize("outgrown", [None, 1.25])
@pytest.mark.parametrize("just_in_time", [False, True])
def test_parts_of_a_hot_slot_are_read_only_where_it_may_be_outgrown(
    outgrown: float | None, just_in_time: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    largest = []

    def listened(*args: Any) -> Tensor:
        parts = partial_amaxes(*args)
        largest.append(parts.max().view(torch.float32).item())
        return parts

    partial_amaxes = fused.partial_amaxes
    monkeypatch.setattr(fused, "partial_amaxes", listened)
    run(fused, of_amax(3.0), FORMATS[0], just_in_time=just_in_time, outgrown=outgrown)
    assert largest == ([3.0] if outgrown else [0.0] * just_in_time)


def in_one_launch(x: Tensor, dtype: torch.dtype, **options: Any) -> None:
    """Assert that a cast with ``scratch`` is one launch, is the twin's, and leaves the memory as it was."""
    scratch = torch.zeros(4, dtype=torch.int32, device=DEVICE)
    sums = [torch.empty(x.shape[1], device=DEVICE) for _ in range(2)]
    for _ in range(2):
        got = run(fused, x, dtype, just_in_time=True, scratch=scratch, sums=sums[0], **options)
        assert not scratch.any()
    assert_same((*got, sums[0]), (*run(plain, x, dtype, just_in_time=True, sums=sums[1], **options), sums[1]))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "shifted"])
def test_a_cold_slot_in_one_launch(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch)
    monkeypatch.setattr(fused, "partial_amaxes", lambda *_: pytest.fail("a launch of its own"))
    for tokens, features in (*SHAPES[:2], (1, 1), (0, 32)):
        for cold, value in ((True, 3.0), (True, math.nan), (True, 0.0), (False, 3.0)):
            x = hard_values(tokens, features, finite=True) * value
            in_one_launch(LAYOUTS[layout](x.bfloat16()), FORMATS[1], cold=cold, margin=1, record=bool(value))


@pytest.mark.skipif(DEVICE != "cpu", reason="on a GPU the flag is not looked at")
@pytest.mark.parametrize(
    ("record", "cold", "outgrown"), [*itertools.product((False, True), (False, True), (None, 1.25))]
)
def test_on_a_cpu_an_amax_is_taken_once_and_only_if_wanted(
    record: bool, cold: bool, outgrown: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Tensor] = []

    def listened(x: Tensor) -> Tensor:
        calls.append(x)
        return amax_bits(x)

    amax_bits = plain.amax_bits
    monkeypatch.setattr(plain, "amax_bits", listened)
    run(plain, of_amax(3.0), FORMATS[0], record=record, cold=cold, just_in_time=True, outgrown=outgrown)
    assert len(calls) == (record or cold or outgrown is not None)

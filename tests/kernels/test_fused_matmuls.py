"""Triton's products against float64: bitwise if sums are exact, else within the accumulator's error."""

from __future__ import annotations

from itertools import cycle

import pytest
import torch
from torch import Tensor

from fp8dist_kernels.reference.matmuls import FLOAT32_SCALINGS, Scaling, matmul_reference
from fp8dist_kernels.triton.matmuls import matmul, matmul_with
from fp8dist_kernels.triton.tables import Tile
from tests.support.devices import DEVICE
from tests.support.products import E4M3, E5M2, PAIRS, Product, random_numbers, small_integers

OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SCALINGS = pytest.mark.parametrize("scaling", FLOAT32_SCALINGS, ids=lambda scaling: scaling.value)
KINDS = pytest.mark.parametrize(  # With scales in blocks, both speeds are one kernel.
    ("scaling", "fast"),
    [(scaling, fast) for scaling in FLOAT32_SCALINGS for fast in (False, True) if not (fast and scaling.in_blocks)],
)
COLUMNS = (16, 48, 144)
SHAPES = tuple(  # Each pair of sizes occurs.
    (m, COLUMNS[(i + j) % 3], k) for i, m in enumerate((1, 17, 129)) for j, k in enumerate((16, 80, 144, 272))
)

TILES = (
    Tile(rows=64, columns=32, depth=128, warps=4, stages=2, group=2),
    Tile(rows=64, columns=128, depth=128, warps=4, stages=3, group=1),
    Tile(rows=128, columns=128, depth=128, warps=8, stages=3, group=8),
)
WIDE = Tile(rows=128, columns=256, depth=128, warps=8, stages=3, group=2)
"""A tile that is written in several pieces, computed in halves (slow accumulation) or quarters (block scales)."""

ACCUMULATOR = 2.0**-10 if DEVICE == "cuda" else 2.0**-16
"""Tolerance relative to the sum of magnitudes. Hopper's FP8 tensor cores drop bits 2**-13 below the largest summand;
the interpreter does 272 float32 additions."""


@pytest.fixture
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill new outputs with NaN, so that unwritten memory shows."""
    empty = torch.empty

    def nan(*args: object, **kwargs: object) -> Tensor:
        made = empty(*args, **kwargs)
        return made.fill_(torch.nan) if made.dtype in OUT_DTYPES else made

    monkeypatch.setattr(torch, "empty", nan)


def _assert_exact(got: Tensor, given: Product, out_dtype: torch.dtype) -> None:
    expected = given.exact().float().to(out_dtype)
    assert got.dtype == out_dtype
    assert got.shape == expected.shape
    wrong = (got.cpu() != expected).nonzero()
    assert not len(wrong), f"first at {wrong[0].tolist()}, {len(wrong)} in all"


@pytest.mark.slow
@pytest.mark.usefixtures("_poisoned")
@KINDS
def test_every_shape_is_exact_where_sums_are(scaling: Scaling, fast: bool) -> None:
    variants = zip(cycle(PAIRS), cycle((*OUT_DTYPES, torch.bfloat16)), cycle((False, True, True)), cycle(TILES[::-1]))
    for m, n, k in SHAPES:
        pair, out_dtype, biased, tile = next(variants)
        given = small_integers(m, n, k, scaling, pair, biased)
        _assert_exact(matmul_with(tile, *given.operands, out_dtype, fast, given.bias), given, out_dtype)


@pytest.mark.usefixtures("_poisoned")
@SCALINGS
def test_ragged_shapes_are_exact_where_sums_are(scaling: Scaling) -> None:
    for (m, n, k), pair, out_dtype in zip(((129, 144, 272), (17, 48, 80), (1, 16, 16)), PAIRS, OUT_DTYPES):
        given = small_integers(m, n, k, scaling, pair, biased=True)
        _assert_exact(matmul(*given.operands, out_dtype, False, given.bias), given, out_dtype)
        assert torch.equal(
            matmul(*given.operands, out_dtype, True, given.bias),
            matmul_reference(*given.operands, out_dtype, given.bias),
        )


@pytest.mark.slow
@pytest.mark.usefixtures("_poisoned")
@KINDS
def test_wide_tiles_are_exact_where_sums_are(scaling: Scaling, fast: bool) -> None:
    shapes = ((200, 272, 272), (130, 528, 16), (1, 144, 144), (300, 48, 80))
    for (m, n, k), out_dtype in zip(shapes, cycle(OUT_DTYPES)):
        given = small_integers(m, n, k, scaling, biased=True)
        _assert_exact(matmul_with(WIDE, *given.operands, out_dtype, fast, given.bias), given, out_dtype)


@pytest.mark.slow
@KINDS
def test_random_numbers_within_the_error_of_the_accumulator(scaling: Scaling, fast: bool) -> None:
    for pair, out_dtype in zip(PAIRS, OUT_DTYPES):
        given = random_numbers(97, 144, 272, scaling, pair, biased=True)
        got = matmul(*given.operands, out_dtype, fast, given.bias).cpu().double()
        expected = given.exact()
        rounding = torch.finfo(out_dtype).eps / 2 * expected.abs()
        tolerance = rounding + ACCUMULATOR * (given.exact(magnitudes=True) + 4)
        assert ((got - expected).abs() <= tolerance).all(), (pair, out_dtype)
    again = matmul(*given.operands, out_dtype, fast, given.bias).cpu().double()
    assert torch.equal(got, again)


@SCALINGS
def test_a_nan_stays_in_its_row(scaling: Scaling) -> None:
    for fast in (True, False):
        given = small_integers(70, 144, 144, scaling)
        given.a[37, 131] = given.b[90, 5] = torch.nan
        got = matmul(*given.operands, torch.bfloat16, fast).isnan().cpu()
        expected = torch.zeros(70, 144, dtype=torch.bool)
        expected[37] = True
        expected[:, 90] = True
        assert torch.equal(got, expected)


def test_infinite_elements_of_e5m2_and_scales_are_not_hidden() -> None:
    given = small_integers(17, 48, 80, Scaling.ROWWISE, (E5M2, E4M3))
    given.a[3] = 1.0
    given.b[5] = 1.0
    given.a[3, 7] = torch.inf
    assert matmul(*given.operands, torch.float32, False)[3, 5].item() == torch.inf
    given = small_integers(17, 48, 80, Scaling.ROWWISE)
    given.inv_scale_a[4] = torch.nan
    assert matmul(*given.operands, torch.float32, False).isnan().any(1).nonzero().flatten().tolist() == [4]


@pytest.mark.parametrize("scaling", [Scaling.BLOCKWISE, Scaling.BLOCKWISE_1D])
def test_scales_of_blocks_and_lines_may_have_any_strides(scaling: Scaling) -> None:
    given = small_integers(130, 272, 272, scaling)
    a, b, inv_scale_a, inv_scale_b = given.operands
    for lying_a, lying_b in (
        (inv_scale_a.T.contiguous().T, inv_scale_b.T.contiguous().T),
        (inv_scale_a.repeat(2, 3)[:130, :3], inv_scale_b.repeat_interleave(2, 1)[:, ::2]),
    ):
        _assert_exact(matmul(a, b, lying_a, lying_b, torch.float32, False), given, torch.float32)


def test_row_scales_and_biases_may_have_any_strides() -> None:
    given = small_integers(33, 48, 80, Scaling.ROWWISE, biased=True)
    a, b, inv_scale_a, inv_scale_b = given.operands
    assert given.bias is not None
    got = matmul(a, b, inv_scale_a.repeat(1, 3)[:, 1:2], inv_scale_b.repeat_interleave(2, 0)[::2], torch.float32, True,
                 given.bias.repeat_interleave(2)[::2])  # fmt: skip
    _assert_exact(got, given, torch.float32)


def test_operands_may_begin_anywhere() -> None:
    given = small_integers(33, 48, 80, Scaling.TENSORWISE)
    room = torch.zeros(given.a.numel() + 1, dtype=torch.uint8, device=DEVICE).view(E4M3)
    shifted = room[1:].view(33, 80)
    shifted.copy_(given.a)
    assert shifted.data_ptr() % 16 != 0
    got = matmul(shifted, given.b, given.inv_scale_a, given.inv_scale_b, torch.float32, True)
    _assert_exact(got, given, torch.float32)


def _sideways(b: Tensor) -> Tensor:
    """Return b [n, k] as a view of [k, n], which begins at an address that TMA cannot read."""
    room = torch.zeros(b.numel() + 1, dtype=torch.uint8, device=DEVICE)[1:].view(b.dtype)
    lying = room.view(b.shape[1], b.shape[0])
    lying.copy_(b.t())
    return lying.t()


@pytest.mark.usefixtures("_poisoned")
@KINDS
def test_a_weight_may_lie_sideways(scaling: Scaling, fast: bool) -> None:
    shapes = ((17, 48, 80), (129, 144, 272), (1, 16, 16))
    for (m, n, k), pair, out_dtype, tile in zip(shapes, PAIRS, OUT_DTYPES, (TILES[0], TILES[2], WIDE)):
        given = small_integers(m, n, k, scaling, pair, biased=True)
        a, b, *scales = given.operands
        for got in (
            matmul(a, _sideways(b), *scales, out_dtype, fast, given.bias),
            matmul_with(tile, a, _sideways(b), *scales, out_dtype, fast, given.bias),
        ):
            _assert_exact(got, given, out_dtype)


def test_other_pairs_of_operands_are_refused() -> None:
    for pair in ((E5M2, E5M2), (torch.bfloat16, E4M3), (E4M3, torch.int8)):
        given = small_integers(16, 16, 16, Scaling.TENSORWISE, pair)
        with pytest.raises(ValueError, match="expected E4M3, or E4M3 and E5M2"):
            matmul(*given.operands, torch.bfloat16, True)


def test_what_no_backend_takes_is_refused() -> None:
    for n, k, problem in ((24, 16, "multiples of 16"), (16, 24, "multiples of 16")):
        given = small_integers(16, n, k, Scaling.TENSORWISE)
        with pytest.raises(ValueError, match=problem):
            matmul(*given.operands, torch.bfloat16, True)


def test_scales_and_layouts_that_fit_nothing_are_refused() -> None:
    given = small_integers(16, 16, 16, Scaling.TENSORWISE)
    with pytest.raises(ValueError, match="expected one element each"):
        matmul(given.a, given.b, torch.ones(16, device=DEVICE), given.inv_scale_b, torch.bfloat16, True)
    with pytest.raises(ValueError, match="contiguous"):
        matmul(given.a.T, given.b, given.inv_scale_a, given.inv_scale_b, torch.bfloat16, True)


def test_inverse_scales_whose_product_is_no_float32() -> None:
    """The two inverse scales are applied in turn: zeros stay zeros, small numbers keep their bits."""
    a, b = (torch.ones(16, 32, device=DEVICE).to(torch.float8_e4m3fn) for _ in range(2))
    large = torch.tensor(2.0**100, device=DEVICE)
    zeros = torch.zeros_like(a)
    assert not matmul(zeros, b, large, large, torch.float32, True).any()
    small, tiny = torch.tensor(2.0**-70, device=DEVICE), torch.tensor(1.0 + 2.0**-20, device=DEVICE)
    assert (matmul(a, b, small, small, torch.float32, True) == 32 * 2.0**-140).all()
    assert (matmul(a, b, small, tiny, torch.float32, True) == 32 * 2.0**-70 * tiny.item()).all()


def test_inverse_scales_of_lines_whose_product_is_no_float32() -> None:
    """In each block, the inverse scale of ``a`` is applied first, then that of ``b``."""
    a, b = (torch.ones(16, 144, device=DEVICE).to(E4M3) for _ in range(2))
    zeros = torch.zeros_like(a)

    def got(left: Tensor, of_a: float, of_b: float) -> Tensor:
        of_lines = [torch.full((16, 2), scale, device=DEVICE) for scale in (of_a, of_b)]
        expected = matmul_reference(left, b, *of_lines, torch.float32)
        found = matmul(left, b, *of_lines, torch.float32, False)
        assert ((found - expected).abs() <= 2.0**-20 * expected).all()
        return found

    assert not got(zeros, 2.0**100, 2.0**100).any()
    assert (got(a, 2.0**-70, 2.0**-70) == 144 * 2.0**-140).all()
    assert (got(a, 2.0**-70, 1.0 + 2.0**-20) == 144 * 2.0**-70 * (1.0 + 2.0**-20)).all()
    for of_a, of_b in ((2.0**100, 2.0**-100), (2.0**-100, 2.0**100), (2.0**-140, 2.0**120), (2.0**119, 2.0**-119)):
        assert (got(a, of_a, of_b) == 144 * of_a * of_b).all()


def test_a_single_row_with_strides_that_mean_nothing() -> None:
    a = torch.ones(32, 1, device=DEVICE).to(torch.float8_e4m3fn).t()
    assert a.is_contiguous()
    b, one = torch.ones(16, 32, device=DEVICE).to(torch.float8_e4m3fn), torch.ones((), device=DEVICE)
    assert (matmul(a, b, one, one, torch.float32, True) == 32).all()

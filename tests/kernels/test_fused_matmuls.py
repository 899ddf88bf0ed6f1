"""Triton's products against float64: bitwise if sums are exact, else within the accumulator's error. Products that are
added to what a buffer holds have the bits of a product in float32 and an addition."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fp8dist_kernels import ops
from fp8dist_kernels.reference.matmuls import FLOAT32_SCALINGS, Scaling, matmul_reference
from fp8dist_kernels.triton.matmuls import matmul, matmul_with
from fp8dist_kernels.triton.products import _write_piece
from fp8dist_kernels.triton.tables import Tile
from tests.support.devices import DEVICE
from tests.support.products import E4M3, E5M2, PAIRS, Product, random_numbers, small_integers

OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SCALINGS = pytest.mark.parametrize("scaling", FLOAT32_SCALINGS, ids=lambda scaling: scaling.value)
EACH = [(scaling, fast) for scaling in FLOAT32_SCALINGS for fast in (False, True) if not (fast and scaling.in_blocks)]
KINDS = pytest.mark.parametrize(("scaling", "fast"), EACH)  # With scales in blocks, both speeds are one kernel.
COLUMNS = (16, 48, 144)
SHAPES = (  # Each pair of sizes occurs; wide ones.
    *((m, COLUMNS[(i + j) % 3], k) for i, m in enumerate((1, 17, 129)) for j, k in enumerate((16, 80, 144, 272))),
    *((200, 272, 272), (130, 528, 16)),
)
TILES = (
    Tile(rows=64, columns=32, depth=128, warps=4, stages=2, group=2),
    Tile(rows=64, columns=128, depth=128, warps=4, stages=3, group=1),
    Tile(rows=128, columns=128, depth=128, warps=8, stages=3, group=8),
    Tile(rows=128, columns=256, depth=128, warps=8, stages=3, group=2),
)
"""The last is written in several pieces, computed in halves (slow accumulation) or quarters (block scales)."""

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


def _assert_exact(got: Tensor, given: Product, out_dtype: torch.dtype = torch.float32) -> None:
    expected = given.exact().float().to(out_dtype)
    assert got.dtype == out_dtype
    assert got.shape == expected.shape
    wrong = (got.cpu() != expected).nonzero()
    assert not len(wrong), f"first at {wrong[0].tolist()}, {len(wrong)} in all"


def _sideways(b: Tensor) -> Tensor:
    """Return b [n, k] as a view of [k, n], which begins at an address that TMA cannot read."""
    room = torch.zeros(b.numel() + 1, dtype=torch.uint8, device=DEVICE)[1:].view(b.dtype)
    lying = room.view(b.shape[1], b.shape[0])
    lying.copy_(b.t())
    return lying.t()


@pytest.mark.slow
@pytest.mark.usefixtures("_poisoned")
@KINDS
def test_every_shape_is_exact_where_sums_are(scaling: Scaling, fast: bool) -> None:
    """With each tile, and of a weight that lies sideways."""
    variants = zip(cycle(PAIRS), cycle((*OUT_DTYPES, torch.bfloat16)), cycle((False, True, True)), cycle(TILES[::-1]))
    for index, ((m, n, k), (pair, out_dtype, biased, tile)) in enumerate(zip(SHAPES, variants)):
        given = small_integers(m, n, k, scaling, pair, biased)
        a, b, *scales = given.operands
        b = _sideways(b) if index % 5 == 1 else b
        _assert_exact(matmul_with(tile, a, b, *scales, out_dtype, fast, given.bias), given, out_dtype)


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
    given.a[3] = given.b[5] = 1.0
    given.a[3, 7] = torch.inf
    assert matmul(*given.operands, torch.float32, False)[3, 5].item() == torch.inf
    given = small_integers(17, 48, 80, Scaling.ROWWISE)
    given.inv_scale_a[4] = torch.nan
    assert matmul(*given.operands, torch.float32, False).isnan().any(1).nonzero().flatten().tolist() == [4]


def test_arguments_may_lie_anywhere() -> None:
    for scaling in (Scaling.BLOCKWISE, Scaling.BLOCKWISE_1D):
        given = small_integers(130, 272, 272, scaling)
        a, b, of_a, of_b = given.operands
        for lying in (
            (of_a.T.contiguous().T, of_b.T.contiguous().T),
            (of_a.repeat(2, 3)[:130, :3], _every_second(of_b)),
        ):
            _assert_exact(matmul(a, b, *lying, torch.float32, False), given)
    given = small_integers(33, 48, 80, Scaling.ROWWISE, biased=True)
    a, b, of_a, of_b = given.operands
    assert given.bias is not None
    bias, of_b = given.bias.repeat_interleave(2)[::2], of_b.repeat_interleave(2, 0)[::2]
    shifted = torch.zeros(a.numel() + 1, dtype=torch.uint8, device=DEVICE).view(E4M3)[1:].view(33, 80)
    shifted.copy_(a)
    assert shifted.data_ptr() % 16 != 0
    for left in (a, shifted):
        _assert_exact(matmul(left, b, of_a.repeat(1, 3)[:, 1:2], of_b, torch.float32, True, bias), given)
    # A single row with strides that mean nothing.
    a = torch.ones(32, 1, device=DEVICE).to(E4M3).t()
    assert a.is_contiguous()
    b, one = torch.ones(16, 32, device=DEVICE).to(E4M3), torch.ones((), device=DEVICE)
    assert (matmul(a, b, one, one, torch.float32, True) == 32).all()


def _every_second(x: Tensor) -> Tensor:
    return x.repeat_interleave(2, 1)[:, ::2]


def test_pairs_that_no_kernel_takes_are_refused() -> None:
    """``test_matmuls.py`` has what no backend takes."""
    for pair in ((E5M2, E5M2), (torch.bfloat16, E4M3), (E4M3, torch.int8)):
        given = small_integers(16, 16, 16, Scaling.TENSORWISE, pair)
        with pytest.raises(ValueError, match="expected E4M3, or E4M3 and E5M2"):
            matmul(*given.operands, torch.bfloat16, True)


def test_inverse_scales_whose_product_is_no_float32() -> None:
    """That of ``a`` is applied first, then that of ``b``: zeros stay zeros, small numbers keep their bits. Of lines, in
    each block."""
    a, b = (torch.ones(16, 144, device=DEVICE).to(E4M3) for _ in range(2))

    def got(left: Tensor, shape: tuple[int, ...], of_a: float, of_b: float) -> Tensor:
        scales = [torch.full(shape, scale, device=DEVICE) for scale in (of_a, of_b)]
        found = matmul(left, b, *scales, torch.float32, not shape)
        expected = matmul_reference(left, b, *scales, torch.float32)
        assert ((found - expected).abs() <= 2.0**-20 * expected).all()
        if not shape:  # Halves of a wide tile are scaled elsewhere.
            wide = matmul_with(TILES[-1], left, b.repeat(9, 1), *scales, torch.float32, False)
            assert torch.equal(wide, found.repeat(1, 9))
        return found

    for shape in ((), (16, 1), (16, 2)):
        assert not got(torch.zeros_like(a), shape, 2.0**100, 2.0**100).any()
        assert (got(a, shape, 2.0**-70, 2.0**-70) == 144 * 2.0**-140).all()
        assert (got(a, shape, 2.0**-70, 1.0 + 2.0**-20) == 144 * 2.0**-70 * (1.0 + 2.0**-20)).all()
    for of_a, of_b in ((2.0**100, 2.0**-100), (2.0**-100, 2.0**100), (2.0**-140, 2.0**120), (2.0**119, 2.0**-119)):
        assert (got(a, (16, 2), of_a, of_b) == 144 * of_a * of_b).all()


# Sums with what a buffer holds -----------------------------------------------------------------------------

TOTALS = (torch.float32, torch.bfloat16, torch.float16)


def _total(m: int, n: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(m, n, generator=torch.Generator().manual_seed(m * n)).to(dtype).to(DEVICE)


def _assert_same_bits(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype
    assert torch.equal(found.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


def _sum(total: Tensor, product: Tensor) -> Tensor:
    """Return the sum, computed in float32 and rounded once."""
    assert product.dtype is torch.float32
    return (total.float() + product).to(total.dtype)


@pytest.mark.slow
@pytest.mark.parametrize(("scaling", "fast"), [each for each in EACH if each[0] is not Scaling.BLOCKWISE])
def test_each_tile_adds_the_product_of_the_same_tile(scaling: Scaling, fast: bool) -> None:
    shapes = zip(cycle(((17, 48, 272), (129, 272, 144))), cycle(PAIRS), (*TILES, TILES[-1]))
    for ((m, n, k), pair, tile), dtype in zip(shapes, cycle(TOTALS)):
        given, total = random_numbers(m, n, k, scaling, pair), _total(m, n, dtype)
        expected = _sum(total, matmul_with(tile, *given.operands, torch.float32, fast))
        assert matmul_with(tile, *given.operands, torch.float32, fast, None, total) is total
        _assert_same_bits(total, expected)


def test_a_total_may_lie_anywhere() -> None:
    """``tests/modules/test_main_grad.py`` has the other backends, and listeners."""
    given = random_numbers(33, 48, 80, Scaling.ROWWISE)
    product, (a, b, *scales) = matmul(*given.operands, torch.float32, False), given.operands
    options: dict[str, Any] = {"fast_accumulation": False, "backend": "triton"}
    for dtype in (*TOTALS, torch.float64):
        for first, strides in ((0, (48, 1)), (8, (48, 1)), (1, (48, 1)), (0, (64, 1)), (0, (1, 33)), (3, (200, 4))):
            room = _total(1, 8000, dtype)[0]
            expected = room.clone()
            lying, there = (torch.as_strided(x, (33, 48), strides, first) for x in (room, expected))
            there.copy_((there.to(torch.promote_types(dtype, torch.float32)) + product).to(dtype))
            ops.matmul_into(a, _sideways(b) if first else b, *scales, lying, **options)
            _assert_same_bits(room, expected)
    total = torch.ones(4, 16, device=DEVICE)
    ops.matmul_into(*small_integers(4, 16, 0, Scaling.ROWWISE).operands, total, **options)
    assert (total == 1).all()
    for shape in ((48, 33), (1, 48), (48,)):
        with pytest.raises(ValueError, match=r"a product \[33, 48\] cannot be added"):
            ops.matmul_into(*given.operands, torch.zeros(shape, device=DEVICE), **options)


@triton.jit
def _one_piece(out, product, one, row, column, n, ROWS: tl.constexpr, PIECE: tl.constexpr):
    piece = tl.load(product + (tl.arange(0, ROWS) * PIECE)[:, None] + tl.arange(0, PIECE)[None, :])
    _write_piece(out, piece, 1.0, one, one, row, column, n, PIECE, "none", "total")


def test_a_total_with_more_elements_than_an_int32_counts() -> None:
    rows, columns, top, left = 2**16 + 100, 2**15, 2**16 + 20, 2**15 - 32
    total = torch.empty(rows, columns, dtype=torch.bfloat16, device=DEVICE)  # Untouched pages take no CPU memory.
    given, wrapped = total[top : top + 64, left:], total.view(-1)[(top * columns + left) % 2**31 :][:64]
    given.copy_(_total(64, 32, total.dtype))
    wrapped.zero_()
    product = torch.randn(64, 32, device=DEVICE)
    expected = _sum(given, product)
    out = TensorDescriptor(total, [rows, columns], [columns, 1], [64, 32])
    _one_piece[(1,)](out, product, torch.ones(1, device=DEVICE), top, left, columns, 64, 32)
    _assert_same_bits(given, expected)
    assert not wrapped.any()

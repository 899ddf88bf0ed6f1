"""Products that are added to what a buffer holds: the bits are those of a product in float32, and an addition."""

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
from fp8dist_kernels.multipliers import ProductError
from fp8dist_kernels.reference.matmuls import Scaling
from fp8dist_kernels.taps import tap_on
from fp8dist_kernels.triton import matmuls
from fp8dist_kernels.triton.products import _write_piece
from tests.kernels.test_fused_matmuls import SCALINGS, TILES, WIDE
from tests.support.devices import DEVICE
from tests.support.products import PAIRS, random_numbers, small_integers

TOTALS = (torch.float32, torch.bfloat16, torch.float16)
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def _total(m: int, n: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(m, n, generator=torch.Generator().manual_seed(m * n)).to(dtype).to(DEVICE)


def _assert_same_bits(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype
    kind = BITS[found.itemsize]
    assert torch.equal(found.contiguous().view(kind), expected.contiguous().view(kind))


def _sum(total: Tensor, product: Tensor) -> Tensor:
    """Return the sum, computed in float32 and rounded once."""
    assert product.dtype is torch.float32
    return (total.float() + product).to(total.dtype)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scaling", "fast"),
    [
        *((scaling, fast) for scaling in (Scaling.TENSORWISE, Scaling.ROWWISE) for fast in (True, False)),
        (Scaling.BLOCKWISE_1D, False),
    ],
    ids=str,
)
def test_each_tile_adds_the_product_of_the_same_tile(scaling: Scaling, fast: bool) -> None:
    shapes = zip(cycle(((129, 272, 144), (17, 48, 272))), cycle(PAIRS), (*TILES, WIDE, WIDE))
    for ((m, n, k), pair, tile), dtype in zip(shapes, cycle(TOTALS)):
        given = random_numbers(m, n, k, scaling, pair)
        total = _total(m, n, dtype)
        expected = _sum(total, matmuls.matmul_with(tile, *given.operands, torch.float32, fast))
        assert matmuls.matmul_with(tile, *given.operands, torch.float32, fast, None, total) is total
        _assert_same_bits(total, expected)


@pytest.mark.slow
@SCALINGS
@pytest.mark.parametrize("backend", ["triton", "torch", "reference"])
def test_all_backends_add_their_product_and_round_once(scaling: Scaling, backend: str) -> None:
    options: dict[str, Any] = {"fast_accumulation": False, "backend": backend}
    for (m, n, k), dtype in zip(((129, 144, 272), (17, 48, 80), (1, 16, 16)), TOTALS):
        given, total = random_numbers(m, n, k, scaling), _total(m, n, dtype)
        if backend == "torch" and scaling.in_blocks and DEVICE == "cpu":
            with pytest.raises(ProductError, match="not a Hopper GPU"):
                ops.matmul_into(*given.operands, total, **options)
            return
        expected = _sum(total, ops.matmul(*given.operands, torch.float32, **options))
        ops.matmul_into(*given.operands, total, **options)
        _assert_same_bits(total, expected)
        exact = small_integers(m, n, k, scaling)
        total = torch.full((m, n), 3.0, device=DEVICE)
        for _ in range(2):
            ops.matmul_into(*exact.operands, total, **options)
        assert torch.equal(total.cpu().double(), 3 + 2 * exact.exact())


def test_a_total_may_lie_anywhere() -> None:
    given = random_numbers(33, 48, 80, Scaling.ROWWISE)
    product = matmuls.matmul(*given.operands, torch.float32, False)
    for dtype in (*TOTALS, torch.float64):
        for first, strides in ((0, (48, 1)), (8, (48, 1)), (1, (48, 1)), (0, (64, 1)), (0, (1, 33)), (3, (200, 4))):
            room = _total(1, 8000, dtype)[0]
            expected = room.clone()
            lying, there = (torch.as_strided(x, (33, 48), strides, first) for x in (room, expected))
            there.copy_((there.to(torch.promote_types(dtype, torch.float32)) + product).to(dtype))
            ops.matmul_into(*given.operands, lying, fast_accumulation=False, backend="triton")
            _assert_same_bits(room, expected)


@SCALINGS
@pytest.mark.parametrize("read", [True, False])
def test_an_operand_may_lie_sideways(scaling: Scaling, read: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """``b`` is [k, n] in memory: products of Blackwell read it so, others transpose it first."""
    monkeypatch.setattr(ops, "reads_sideways", lambda *_: read)
    a, b, *scales = random_numbers(33, 48, 80, scaling).operands
    totals = [_total(33, 48, torch.float32) for _ in range(2)]
    for total, operand in zip(totals, (b, b.t().contiguous().t())):
        ops.matmul_into(a, operand, *scales, total, fast_accumulation=False, backend="triton")
    _assert_same_bits(*totals)


@SCALINGS
def test_nothing_is_added_if_there_is_nothing(scaling: Scaling) -> None:
    for m, k in ((0, 32), (4, 0), (0, 0)):
        given = small_integers(m, 16, k, scaling)
        for backend in ("triton", "torch", "reference"):
            total = torch.ones(m, 16, device=DEVICE)
            ops.matmul_into(*given.operands, total, fast_accumulation=True, backend=backend)
            assert torch.equal(total, torch.ones_like(total))


def test_a_total_of_another_shape_is_refused() -> None:
    given = small_integers(32, 16, 16, Scaling.TENSORWISE)
    for shape in ((16, 32), (1, 16), (16,)):
        with pytest.raises(ValueError, match=r"a product \[32, 16\] cannot be added"):
            ops.matmul_into(*given.operands, torch.zeros(shape, device=DEVICE), fast_accumulation=True)


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_a_listener_gets_the_product_and_changes_no_bit(backend: str) -> None:
    given, calls = random_numbers(33, 48, 80, Scaling.ROWWISE), []
    totals = [_total(33, 48, torch.bfloat16) for _ in range(2)]
    options: dict[str, Any] = {"fast_accumulation": True, "backend": backend}
    ops.matmul_into(*given.operands, totals[0], **options)
    tap = tap_on(torch.device(DEVICE), lambda *call: calls.append(call))
    ops.matmul_into(*given.operands, totals[1], **options, site=5, tap=tap)
    _assert_same_bits(*totals)
    ((op, site, args, told, (product,)),) = calls
    assert (op, site, args[4], told) == ("matmul", 5, torch.float32, options)
    _assert_same_bits(product, ops.matmul(*args, **told))


def test_what_a_listener_changes_is_added() -> None:
    given, total = random_numbers(33, 48, 80, Scaling.ROWWISE), torch.ones(33, 48, device=DEVICE)
    tap = tap_on(torch.device(DEVICE), lambda *call: call[-1][0].fill_(2.0))
    ops.matmul_into(*given.operands, total, fast_accumulation=True, backend="triton", tap=tap)
    assert (total == 3).all()


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

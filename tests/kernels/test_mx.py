"""MX casts and products against an oracle written from the OCP specification, and torchao. ``test_twins.py`` compares
Triton's casts."""

from __future__ import annotations

import itertools
import math
import struct

import pytest
import torch
from torch import Tensor

from fp8dist_kernels import direct
from fp8dist_kernels.reference import mx as plain
from fp8dist_kernels.reference.matmuls import Scaling, matmul_reference, scaling_of
from fp8dist_kernels.triton import matmuls as fused_matmuls
from tests.support import fp8_oracle
from tests.support.casting import FORMAT_OF, FORMATS, assert_same, codes, hard_values
from tests.support.devices import DEVICE
from tests.support.elements import value_of
from tests.support.gemms import assert_operand, numbers
from tests.support.products import small_integers

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in .*:RuntimeWarning")  # From the interpreter's numpy.

UP = pytest.mark.parametrize("up", [False, True], ids=["ocp", "up"])
E4M3, E5M2, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu


def assert_by_hand(x: Tensor, dtype: torch.dtype, up: bool) -> None:
    """Compare a cast with the oracle, which follows the specification."""
    expected = fp8_oracle.cast(numbers(x), FORMAT_OF[dtype], (1, 32), False, by="mx up" if up else "mx down")
    fp8, scales, *_ = plain.quantize_mx(x, dtype, round_up=up, rows=True, columns=False)
    assert_operand(fp8, scales, expected, str(dtype))


def float_of(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits))[0]


@UP
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_every_exponent_and_edge_of_the_largest_element(dtype: torch.dtype, up: bool) -> None:
    """Mantissas: 1, those at which rounding changes (1.75 is the mantissa of both formats' largest number), and 2."""
    mantissas = (0, 1, 0x5FFFFF, 0x600000, 0x600001, 0x680000, 0x7FFFFF)
    largest = [float_of(exponent << 23 | mantissa) for exponent in range(255) for mantissa in mantissas]
    x = torch.tensor(largest, dtype=torch.float32)[:, None].repeat(1, 32)
    x[:, 1:] *= torch.logspace(0, -20, 31, 2.0) * torch.tensor([1.0, -1.0]).repeat(16)[:31]
    assert_by_hand(x.to(DEVICE), dtype, up)
    tiny = float_of(1)
    blocks = [[0.0, -0.0], [tiny, -tiny], [math.inf, 1.0], [1.0, -math.inf], [math.nan, math.inf], [2.0**127, tiny]]
    x = torch.tensor([block * 16 for block in blocks], device=DEVICE)
    assert_by_hand(x, dtype, up)
    scales = plain.quantize_mx(x, dtype, round_up=up, rows=True, columns=False)[1].view(torch.uint8)
    assert scales.flatten().tolist() == [0, 0, 255, 255, 255, 254 - (8 if dtype is E4M3 else 15)]


@pytest.mark.slow
@UP
def test_torchao_gives_the_same_bytes(up: bool) -> None:
    """Where its rules are these: it takes an amax of Inf for a number, has other elements in NaN blocks, whose value is
    NaN in any case, and for X = 2**-127 scales by another power."""
    formats = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    mode = formats.ScaleCalculationMode.RCEIL if up else formats.ScaleCalculationMode.FLOOR
    for dtype, of in itertools.product(FORMATS, (torch.bfloat16, torch.float32)):
        x = hard_values(32, 96).to(of).masked_fill_(hard_values(32, 96).isinf(), 3.0)
        scales, fp8 = formats.to_mx(x, dtype, 32, mode)
        got = plain.quantize_mx(x, dtype, round_up=up, rows=True, columns=False)[:2]
        assert_same(tuple(one.view(torch.uint8) for one in got[1:]), (scales.view(torch.uint8),))
        numbers = (scales.view(torch.uint8) < 255).repeat_interleave(32, 1)
        assert 0 < numbers.sum() < numbers.numel()
        assert torch.equal(codes(got[0])[numbers], codes(fp8)[numbers])


def test_copies_and_parts() -> None:
    """Each copy is cast from the tensor itself, never one from the other. A part cut at a multiple of 32 has the bytes
    of the whole, as under tensor parallelism of 2, 3 and 4 ranks."""
    options = {"round_up": False, "rows": True, "columns": True}
    x = hard_values(40, 96, finite=True).bfloat16()
    rows, row_scales, columns, column_scales = plain.quantize_mx(x, E4M3, **options)
    turned = plain.quantize_mx(x.t(), E4M3, **options)
    assert (columns.shape, column_scales.shape) == ((96, 64), (96, 2))
    assert_same((columns, column_scales, rows, row_scales), turned)
    assert not columns[:, 40:].float().any()
    x = hard_values(96, 384)
    whole = plain.quantize_mx(x, E4M3, **options)
    for ranks, dim in ((3, 0), (2, 1), (3, 1), (4, 1)):
        casts = [plain.quantize_mx(part, E4M3, **options) for part in x.chunk(ranks, dim)]
        for index, parts in enumerate(zip(*casts)):
            along = dim if index < 2 else 1 - dim
            joined = torch.cat([part.view(torch.uint8) for part in parts], along)
            assert torch.equal(joined, whole[index].view(torch.uint8)), (ranks, dim, index)


def test_products_are_exact_where_sums_are() -> None:
    pairs, out_dtypes = ((E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)), (torch.float32, torch.bfloat16, torch.float16)
    for (m, n, k), pair, out_dtype in zip(((1, 16, 32), (130, 144, 288), (40, 48, 96)), pairs, out_dtypes):
        given = small_integers(m, n, k, Scaling.MX, pair, biased=True)
        expected = given.exact().float().to(out_dtype)
        assert scaling_of(*given.operands) is Scaling.MX
        assert torch.equal(matmul_reference(*given.operands, out_dtype, given.bias).cpu(), expected), (m, n, k)
        got = fused_matmuls.matmul(*given.operands, out_dtype, False, given.bias)
        assert torch.equal(got.cpu(), expected), (m, n, k)
        assert given.bias is not None
        total = torch.zeros(m, n, device=DEVICE) + given.bias
        direct.matmul_into(*given.operands, total, fast_accumulation=False, backend="triton")
        assert torch.equal(total.cpu().double(), given.exact())


@pytest.mark.parametrize("byte", [0, 1, 254, 255])
def test_scales_of_every_size_reach_the_product(byte: int) -> None:
    """The smallest, a subnormal float32; the largest; and NaN, which stays in its row."""
    scale_a, scale_b = (torch.full((lines, 2), 127, dtype=torch.uint8, device=DEVICE) for lines in (33, 16))
    scale_a[3, 1] = byte
    scale_b[5] = 254 - byte if byte < 255 else 127
    ones = [torch.ones(lines, 64, device=DEVICE).to(E4M3) for lines in (33, 16)]
    powers = [[[value_of(bytes([one]), E8M0) for one in row] for row in x.tolist()] for x in (scale_a, scale_b)]
    rows, columns = (torch.tensor(of, dtype=torch.float64) for of in powers)
    expected = (32 * rows @ columns.T).float().to(DEVICE)
    for got in (
        matmul_reference(*ones, scale_a.view(E8M0), scale_b.view(E8M0), torch.float32),
        fused_matmuls.matmul(*ones, scale_a.view(E8M0), scale_b.view(E8M0), torch.float32, False),
    ):
        assert torch.equal(codes(got), codes(expected))

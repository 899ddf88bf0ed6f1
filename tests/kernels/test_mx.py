"""MX casts and products: an oracle written from the OCP specification, torchao, and the Triton twins."""

from __future__ import annotations

import itertools
import math
import struct
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8dist_kernels import direct
from fp8dist_kernels.reference import mx as plain
from fp8dist_kernels.reference.matmuls import Scaling, matmul_reference, scaling_of
from fp8dist_kernels.reference.torch_matmuls import mx_scales_for_torch
from fp8dist_kernels.triton import matmuls as fused_matmuls
from fp8dist_kernels.triton import mx as fused
from tests.support import fp8_oracle
from tests.support.casting import DTYPES, FORMATS, LAYOUTS, assert_same, codes, hard_values, poison
from tests.support.devices import DEVICE
from tests.support.elements import value_of
from tests.support.gemms import assert_operand, numbers
from tests.support.products import small_integers

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in .*:RuntimeWarning")  # From the interpreter's numpy.

E4M3, E5M2, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu


def assert_by_hand(x: Tensor, dtype: torch.dtype, up: bool) -> None:
    """Compare a cast with the oracle, which follows the specification."""
    format = {E4M3: fp8_oracle.E4M3, E5M2: fp8_oracle.E5M2}[dtype]
    expected = fp8_oracle.cast(numbers(x), format, (1, 32), False, by="mx up" if up else "mx down")
    fp8, scales, *_ = plain.quantize_mx(x, dtype, round_up=up, rows=True, columns=False)
    assert_operand(fp8, scales, expected, str(dtype))


def float_of(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits))[0]


@pytest.mark.parametrize("up", [False, True], ids=["ocp", "up"])
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_every_exponent_and_edge_of_the_largest_element(dtype: torch.dtype, up: bool) -> None:
    """Mantissas: 1, those at which rounding changes (1.75 is the mantissa of both formats' largest number), and 2."""
    mantissas = (0, 1, 0x5FFFFF, 0x600000, 0x600001, 0x680000, 0x7FFFFF)
    largest = [float_of(exponent << 23 | mantissa) for exponent in range(255) for mantissa in mantissas]
    x = torch.tensor(largest, dtype=torch.float32)[:, None].repeat(1, 32)
    x[:, 1:] *= torch.logspace(0, -20, 31, 2.0) * torch.tensor([1.0, -1.0]).repeat(16)[:31]
    assert_by_hand(x.to(DEVICE), dtype, up)


@pytest.mark.parametrize("up", [False, True], ids=["ocp", "up"])
def test_blocks_of_zeros_infinities_and_nan(up: bool) -> None:
    tiny = float_of(1)
    blocks = [[0.0, -0.0], [tiny, -tiny], [math.inf, 1.0], [1.0, -math.inf], [math.nan, math.inf], [2.0**127, tiny]]
    x = torch.tensor([block * 16 for block in blocks], device=DEVICE)
    for dtype in FORMATS:
        assert_by_hand(x, dtype, up)
    scales = plain.quantize_mx(x, E4M3, round_up=up, rows=True, columns=False)[1].view(torch.uint8)
    assert scales.flatten().tolist() == [0, 0, 255, 255, 255, 254 - 8]


def test_rounding_up_saturates_nothing_and_equals_a_division() -> None:
    """X is amax / max, correctly rounded in float32, rounded up to a power of two: cuBLAS's rule."""
    bits = torch.randint(127 << 23, 128 << 23, (4096,), dtype=torch.int32)
    amax = torch.cat([bits.view(torch.float32), torch.tensor([1.75, float_of(0x3FE00001)])])
    byte = plain.exponents(amax.view(torch.int32), E4M3, True)
    quotient = [math.frexp(float(each)) for each in amax / 448]
    assert byte.tolist() == [exponent + 127 - (mantissa == 0.5) for mantissa, exponent in quotient]
    down = plain.exponents(amax.view(torch.int32), E4M3, False)
    assert (amax * 2.0 ** (127 - byte) <= 448).all()
    assert torch.equal(byte - down, (amax > 1.75).int())


@pytest.mark.slow
@pytest.mark.parametrize("up", [False, True], ids=["floor", "rceil"])
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


def test_each_copy_is_cast_from_the_tensor_itself() -> None:
    """Never one from the other: their blocks lie across each other."""
    x = hard_values(40, 96, finite=True).bfloat16()
    rows, row_scales, columns, column_scales = plain.quantize_mx(x, E4M3, round_up=False, rows=True, columns=True)
    turned = plain.quantize_mx(x.t(), E4M3, round_up=False, rows=True, columns=True)
    assert (columns.shape, column_scales.shape) == ((96, 64), (96, 2))
    assert_same((columns, column_scales), (turned[0], turned[1]))
    assert_same((rows, row_scales), (turned[2], turned[3]))
    assert not columns[:, 40:].float().any()


def test_a_part_cut_at_a_multiple_of_32_has_the_bytes_of_the_whole() -> None:
    """As under tensor parallelism, of 2, 3 and 4 ranks."""
    x, options = hard_values(96, 384), {"round_up": False, "rows": True, "columns": True}
    whole = plain.quantize_mx(x, E4M3, **options)
    for ranks, dim in itertools.product((2, 3, 4), (0, 1)):
        if x.shape[dim] // ranks % 32:
            continue
        casts = [plain.quantize_mx(part, E4M3, **options) for part in x.chunk(ranks, dim)]
        for index, parts in enumerate(zip(*casts)):
            along = dim if index < 2 else 1 - dim
            joined = torch.cat([part.view(torch.uint8) for part in parts], along)
            assert torch.equal(joined, whole[index].view(torch.uint8)), (ranks, dim, index)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_triton_casts_as_the_twin(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch)
    shapes = zip(((1, 16), (70, 130), (33, 272), (0, 32)), itertools.cycle(DTYPES), itertools.cycle(FORMATS))
    for up, ((tokens, features), of, dtype) in zip(itertools.cycle((False, True)), shapes):
        x = LAYOUTS[layout](hard_values(max(1, tokens), features).to(of))[:tokens]
        for rows, columns in ((True, True), (False, True)):
            options: dict[str, Any] = {"round_up": up, "rows": rows, "columns": columns}
            expected = plain.quantize_mx(x, dtype, **options)
            got = fused.quantize_mx(x, dtype, **options)
            assert_same(*(tuple(one.view(torch.uint8) if one.dtype == E8M0 else one for one in each)
                          for each in (got, expected)))  # fmt: skip


def test_products_are_exact_where_sums_are() -> None:
    pairs, out_dtypes = ((E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)), (torch.float32, torch.bfloat16, torch.float16)
    for (m, n, k), pair, out_dtype in zip(((1, 16, 32), (130, 144, 288), (40, 48, 96)), pairs, out_dtypes):
        given = small_integers(m, n, k, Scaling.MX, pair, biased=True)
        expected = given.exact().float().to(out_dtype)
        assert scaling_of(*given.operands) is Scaling.MX
        assert torch.equal(matmul_reference(*given.operands, out_dtype, given.bias).cpu(), expected), (m, n, k)
        assert torch.equal(fused_matmuls.matmul(*given.operands, out_dtype, False, given.bias).cpu(), expected), (
            m,
            n,
            k,
        )
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


def test_what_is_no_mx_product() -> None:
    a, b, scale_a, scale_b = small_integers(16, 32, 64, Scaling.MX).operands
    for wrong in ((a, b, scale_a[:, :1], scale_b), (a[:, :48].contiguous(), b[:, :48].contiguous(), scale_a, scale_b)):
        with pytest.raises(ValueError, match="MX products need k in multiples of 32 and a scale for each"):
            scaling_of(*wrong)
    with pytest.raises(ValueError, match="inverse scales must be float32, or E8M0 for MX"):
        scaling_of(a, b, scale_a, scale_b.float())


def test_scales_lie_as_cublas_reads_them() -> None:
    """Offset of line i and block j: cuBLAS's documentation of the 1D block scaling factors layout."""
    for lines, blocks in ((1, 1), (130, 5), (128, 4), (300, 9)):
        scales = torch.arange(1, lines * blocks + 1).remainder(251).to(torch.uint8).view(lines, blocks)
        laid_out = mx_scales_for_torch(scales.view(E8M0)).view(torch.uint8)
        across, used = -(-blocks // 4), torch.zeros(len(laid_out), dtype=torch.bool)
        assert len(laid_out) == -(-lines // 128) * across * 512
        for line, block in itertools.product(range(lines), range(blocks)):
            tile = line // 128 * across + block // 4
            offset = tile * 512 + line % 32 * 16 + line % 128 // 32 * 4 + block % 4
            assert laid_out[offset] == scales[line, block]
            used[offset] = True
        assert not laid_out[~used].any()

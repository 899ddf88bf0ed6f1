"""Scaled products in plain torch: the scaling that shapes imply, and the numbers of each backend."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fp8dist_kernels.multipliers import ProductError
from fp8dist_kernels.reference.matmuls import FLOAT32_SCALINGS, Scaling, matmul_reference, scaling_of
from fp8dist_kernels.reference.torch_matmuls import block_scales_for_torch, matmul_torch
from fp8dist_kernels.triton.matmuls import matmul
from tests.support.devices import DEVICE
from tests.support.products import E4M3, PAIRS, random_numbers, shapes_of_scales, small_integers

SCALINGS = pytest.mark.parametrize("scaling", FLOAT32_SCALINGS, ids=lambda scaling: scaling.value)
OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FLOAT32_SUM = 2.0**-16  # 272 additions of relative error 2**-24


@SCALINGS
def test_the_reference_is_exact_where_float32_is(scaling: Scaling) -> None:
    columns = (16, 144, 256)
    for (i, m), (j, k) in itertools.product(enumerate((1, 17, 200)), enumerate((16, 128, 272))):
        for out_dtype, pair, biased in zip(OUT_DTYPES, PAIRS, (False, True, True)):
            given = small_integers(m, columns[(i + j) % 3], k, scaling, pair, biased)
            got = matmul_reference(*given.operands, out_dtype, given.bias)
            assert got.dtype == out_dtype
            assert torch.equal(got.cpu(), given.exact().float().to(out_dtype)), (m, k, out_dtype)


@SCALINGS
def test_the_reference_is_as_good_as_float32(scaling: Scaling) -> None:
    given = random_numbers(33, 144, 272, scaling, biased=True)
    got = matmul_reference(*given.operands, torch.float32, given.bias).cpu().double()
    assert ((got - given.exact()).abs() <= FLOAT32_SUM * (given.exact(magnitudes=True) + 4)).all()


def test_the_reference_of_one_scale_each_is_the_plain_expression() -> None:
    given = random_numbers(33, 48, 80, Scaling.TENSORWISE)
    a, b, inv_scale_a, inv_scale_b = given.operands
    expected = ((a.float() * inv_scale_a) @ (b.float() * inv_scale_b).T).to(torch.bfloat16)
    assert torch.equal(matmul_reference(*given.operands, torch.bfloat16), expected)


@pytest.mark.slow
@pytest.mark.parametrize("scaling", [Scaling.TENSORWISE, Scaling.ROWWISE])
def test_torch_agrees(scaling: Scaling) -> None:
    for out_dtype, bias_dtype in itertools.product(OUT_DTYPES, (None, *OUT_DTYPES)):
        given = small_integers(48, 144, 272, scaling, biased=bias_dtype is not None)
        bias = None if bias_dtype is None or given.bias is None else given.bias.to(bias_dtype)
        got = matmul_torch(*given.operands, out_dtype, False, bias)
        assert torch.equal(got.cpu(), given.exact().float().to(out_dtype)), (out_dtype, bias_dtype)


def test_scales_of_one_block_per_row_may_lie_as_a_row() -> None:
    """As block casts of at most 128 columns lay them out: [m, 1] with strides (1, m)."""
    given = small_integers(48, 144, 128, Scaling.ROWWISE)
    a, b, *scales = given.operands
    lying = [scale.t().contiguous().t().as_strided(scale.shape, (1, len(scale))) for scale in scales]
    assert torch.equal(matmul_torch(a, b, *lying, torch.float32, False).cpu().double(), given.exact())


def test_a_bias_is_added_before_rounding() -> None:
    """bfloat16 has 256 and 258. 256.5 + 0.75 rounds to 258; if 256.5 is rounded to 256 first, the sum stays 256."""
    a = torch.full((16, 16), 16.0).to(E4M3).to(DEVICE)
    b = torch.ones(16, 16).to(E4M3).to(DEVICE)
    inv_scale_a, inv_scale_b = torch.tensor(256.5 / 256.0, device=DEVICE), torch.tensor(1.0, device=DEVICE)
    for bias in (torch.full((16,), 0.75, device=DEVICE, dtype=dtype) for dtype in OUT_DTYPES):
        for out in (
            matmul_reference(a, b, inv_scale_a, inv_scale_b, torch.bfloat16, bias),
            matmul_torch(a, b, inv_scale_a, inv_scale_b, torch.bfloat16, False, bias),
            matmul(a, b, inv_scale_a, inv_scale_b, torch.bfloat16, True, bias),
        ):
            assert out.unique().tolist() == [258.0]


@SCALINGS
def test_products_of_nothing(scaling: Scaling) -> None:
    for m, k in ((0, 32), (4, 0), (0, 0)):
        a, b = torch.empty(m, k, device=DEVICE).to(E4M3), torch.empty(16, k, device=DEVICE).to(E4M3)
        scales = [torch.ones(shape, device=DEVICE) for shape in shapes_of_scales(m, 16, k, scaling)]
        bias = torch.arange(16.0, device=DEVICE)
        for given in (None, bias):
            expected = torch.zeros(m, 16) if given is None else bias.cpu().expand(m, 16)
            for got in (
                matmul_torch(a, b, *scales, torch.bfloat16, False, given),
                matmul_reference(a, b, *scales, torch.bfloat16, given),
                matmul(a, b, *scales, torch.bfloat16, True, given),
            ):
                assert torch.equal(got.float().cpu(), expected)


@SCALINGS
def test_shapes_tell_what_scales_belong_to(scaling: Scaling) -> None:
    for m, n, k in ((2, 16, 16), (200, 256, 272), (128, 128, 128), (3, 16, 1024)):
        given = small_integers(m, n, k, scaling)
        one_block = scaling is Scaling.BLOCKWISE_1D and k <= 128  # With one block, the scales are row-wise.
        assert scaling_of(*given.operands) is (Scaling.ROWWISE if one_block else scaling), (m, n, k)


def test_one_row_and_one_block_are_all_the_same() -> None:
    given = small_integers(1, 16, 16, Scaling.BLOCKWISE)
    assert scaling_of(*given.operands) is Scaling.TENSORWISE
    assert torch.equal(matmul_reference(*given.operands, torch.float32).cpu().double(), given.exact())


def test_scales_that_change_along_the_contracted_dim() -> None:
    assert [scaling for scaling in FLOAT32_SCALINGS if scaling.in_blocks] == [Scaling.BLOCKWISE, Scaling.BLOCKWISE_1D]


def test_scales_that_fit_nothing_are_refused() -> None:
    cases = [
        ((), (64, 1)),
        ((48, 1), ()),
        ((48,), (64,)),
        ((48, 1), (1, 64)),
        ((48, 3), (48, 3)),
        ((48, 2), (1, 3)),
        ((48, 3, 1), (1, 3)),
        ((1, 3), (1, 3)),
        ((1, 3), (64, 3)),
        ((48, 3), (64, 2)),
    ]
    for shape_a, shape_b in cases:
        a, b = torch.zeros(48, 272).to(E4M3), torch.zeros(64, 272).to(E4M3)
        with pytest.raises(ValueError, match=r"one element each .* \(48, 3\) and \(1, 3\) .* \(48, 3\) and \(64, 3\)"):
            scaling_of(a, b, torch.ones(shape_a), torch.ones(shape_b))
        with pytest.raises(ValueError, match="expected one element each"):
            matmul_torch(a, b, torch.ones(shape_a), torch.ones(shape_b), torch.bfloat16, False)
        with pytest.raises(ValueError, match="expected one element each"):
            matmul_reference(a, b, torch.ones(shape_a), torch.ones(shape_b), torch.bfloat16)


def test_scales_of_another_dtype_are_refused() -> None:
    a, one = torch.zeros(16, 16).to(E4M3), torch.tensor(1.0)
    with pytest.raises(ValueError, match="must be float32"):
        matmul_reference(a, a, one, one.double(), torch.bfloat16)


def test_operands_and_biases_that_do_not_fit_are_refused() -> None:
    a, b, one = torch.zeros(16, 32).to(E4M3), torch.zeros(16, 16).to(E4M3), torch.tensor(1.0)
    with pytest.raises(ValueError, match="same last dim"):
        matmul_reference(a, b, one, one, torch.bfloat16)
    for bias in (torch.zeros(15), torch.zeros(1, 16), torch.zeros(16, dtype=torch.int32)):
        with pytest.raises(ValueError, match="bias must be"):
            matmul_torch(b, b, one, one, torch.bfloat16, False, bias)


@pytest.mark.skipif(DEVICE == "cuda", reason="torch has it there")
@pytest.mark.parametrize("scaling", [Scaling.BLOCKWISE, Scaling.BLOCKWISE_1D])
def test_torch_refuses_block_scales_on_a_cpu(scaling: Scaling) -> None:
    given = small_integers(48, 144, 272, scaling)
    with pytest.raises(ProductError, match="blocks: not a Hopper GPU"):
        matmul_torch(*given.operands, torch.bfloat16, False)


def _laid_out(m: int, n: int, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    given = small_integers(m, n, k, Scaling.BLOCKWISE)
    scales = given.inv_scale_a, given.inv_scale_b
    return *scales, *block_scales_for_torch(*scales, Scaling.BLOCKWISE)


def test_block_scales_are_laid_out_for_torch() -> None:
    for m, n, k in ((1, 16, 272), (48, 144, 128), (48, 144, 1024), (128, 256, 272)):
        inv_scale_a, inv_scale_b, scale_a, scale_b = _laid_out(m, n, k)
        blocks = inv_scale_a.shape[1]
        padded = (blocks + 3) // 4 * 4
        assert torch.equal(scale_a, inv_scale_a)
        assert scale_a.stride() == (1, m)
        assert scale_b.shape == (padded, inv_scale_b.shape[0])
        assert scale_b.stride() == (1, padded)
        assert torch.equal(scale_b[:blocks], inv_scale_b.T)
        assert not scale_b[blocks:].any()
        assert block_scales_for_torch(scale_a, inv_scale_b, Scaling.BLOCKWISE)[0] is scale_a


def test_scales_of_lines_are_laid_out_for_torch() -> None:
    for m, n, k in ((1, 16, 272), (48, 144, 128), (48, 144, 1024)):
        given = small_integers(m, n, k, Scaling.BLOCKWISE_1D)
        laid_out = block_scales_for_torch(given.inv_scale_a, given.inv_scale_b, Scaling.BLOCKWISE_1D)
        for inv_scale, scale, lines in zip((given.inv_scale_a, given.inv_scale_b), laid_out, (m, n)):
            assert torch.equal(scale, inv_scale)
            assert scale.stride() == (1, lines)
        again = block_scales_for_torch(*laid_out, Scaling.BLOCKWISE_1D)
        assert all(scale is same for scale, same in zip(laid_out, again))


@pytest.mark.parametrize("scaling", [Scaling.BLOCKWISE, Scaling.BLOCKWISE_1D])
def test_torch_takes_block_scales_that_are_so_laid_out(scaling: Scaling) -> None:
    """On the meta device, torch only checks its arguments."""
    m, n, k = 64, 256, 1280
    given = small_integers(m, n, k, scaling)
    scale_a, scale_b = block_scales_for_torch(given.inv_scale_a, given.inv_scale_b, scaling)
    a, b = torch.empty(m, k, dtype=E4M3, device="meta"), torch.empty(n, k, dtype=E4M3, device="meta")
    lines, squares = functional.ScalingType.BlockWise1x128, functional.ScalingType.BlockWise128x128
    of_b = lines if scaling is Scaling.BLOCKWISE_1D else squares
    out = functional.scaled_mm(a, b.T, scale_a.to("meta"), lines, scale_b.to("meta"), of_b, output_dtype=torch.float32)
    assert out.shape == (m, n)

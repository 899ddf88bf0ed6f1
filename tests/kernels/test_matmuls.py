"""Scaled products in plain torch: the scaling that shapes imply, the numbers of each backend, and what is refused."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fp8dist_kernels import ops
from fp8dist_kernels.reference.matmuls import FLOAT32_SCALINGS, Scaling, matmul_reference, scaling_of
from fp8dist_kernels.reference.torch_matmuls import block_scales_for_torch, matmul_torch
from fp8dist_kernels.triton.matmuls import matmul
from tests.support.devices import DEVICE
from tests.support.products import E4M3, PAIRS, random_numbers, shapes_of_scales, small_integers

SCALINGS = pytest.mark.parametrize("scaling", FLOAT32_SCALINGS, ids=lambda scaling: scaling.value)
E8M0 = torch.float8_e8m0fnu
OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FLOAT32_SUM = 2.0**-16  # 272 additions of relative error 2**-24


@SCALINGS
def test_the_reference_is_exact_where_float32_is_and_else_as_good(scaling: Scaling) -> None:
    columns = (16, 144, 256)
    for (i, m), (j, k) in itertools.product(enumerate((1, 17, 200)), enumerate((16, 128, 272))):
        for out_dtype, pair, biased in zip(OUT_DTYPES, PAIRS, (False, True, True)):
            given = small_integers(m, columns[(i + j) % 3], k, scaling, pair, biased)
            got = matmul_reference(*given.operands, out_dtype, given.bias)
            assert got.dtype == out_dtype
            assert torch.equal(got.cpu(), given.exact().float().to(out_dtype)), (m, k, out_dtype)
    given = random_numbers(33, 144, 272, scaling, biased=True)
    got = matmul_reference(*given.operands, torch.float32, given.bias).cpu().double()
    assert ((got - given.exact()).abs() <= FLOAT32_SUM * (given.exact(magnitudes=True) + 4)).all()


@pytest.mark.slow
@pytest.mark.parametrize("scaling", [Scaling.TENSORWISE, Scaling.ROWWISE])
def test_torch_agrees(scaling: Scaling) -> None:
    for out_dtype, bias_dtype in itertools.product(OUT_DTYPES, (None, *OUT_DTYPES)):
        given = small_integers(16, 48, 144, scaling, biased=bias_dtype is not None)  # torch is slow on a CPU.
        a, b, *scales = given.operands
        bias = None if bias_dtype is None or given.bias is None else given.bias.to(bias_dtype)
        # As block casts of at most 128 columns lay them out: [m, 1] with strides (1, m).
        lying = [scale.as_strided(scale.shape, (1, len(scale))) if scale.ndim else scale for scale in scales]
        for of in (scales, lying) if bias is None else (scales,):
            got = matmul_torch(a, b, *of, out_dtype, False, bias)
            assert torch.equal(got.cpu(), given.exact().float().to(out_dtype)), (out_dtype, bias_dtype)


def all_products(a: Tensor, b: Tensor, scales: list[Tensor], bias: Tensor | None) -> list[Tensor]:
    """Return the bfloat16 products of torch, of the reference, and of Triton."""
    return [
        matmul_torch(a, b, *scales, torch.bfloat16, False, bias),
        matmul_reference(a, b, *scales, torch.bfloat16, bias),
        matmul(a, b, *scales, torch.bfloat16, True, bias),
    ]


def test_a_bias_is_added_before_rounding() -> None:
    """bfloat16 has 256 and 258. 256.5 + 0.75 rounds to 258; if 256.5 is rounded to 256 first, the sum stays 256."""
    a, b = (torch.full((16, 16), value, device=DEVICE).to(E4M3) for value in (16.0, 1.0))
    scales = [torch.tensor(scale, device=DEVICE) for scale in (256.5 / 256.0, 1.0)]
    for dtype in OUT_DTYPES:
        bias = torch.full((16,), 0.75, device=DEVICE, dtype=dtype)
        assert [out.unique().tolist() for out in all_products(a, b, scales, bias)] == [[258.0]] * 3


@SCALINGS
def test_products_of_nothing(scaling: Scaling) -> None:
    for m, k in ((0, 32), (4, 0), (0, 0)):
        a, b = torch.empty(m, k, device=DEVICE).to(E4M3), torch.empty(16, k, device=DEVICE).to(E4M3)
        scales = [torch.ones(shape, device=DEVICE) for shape in shapes_of_scales(m, 16, k, scaling)]
        for bias in (None, torch.arange(16.0, device=DEVICE)):
            expected = torch.zeros(m, 16) if bias is None else bias.cpu().expand(m, 16)
            for got in all_products(a, b, scales, bias):
                assert torch.equal(got.float().cpu(), expected)


@SCALINGS
def test_shapes_tell_what_scales_belong_to(scaling: Scaling) -> None:
    for m, n, k in ((2, 16, 16), (200, 256, 272), (128, 128, 128), (3, 16, 1024)):
        given = small_integers(m, n, k, scaling)
        one_block = scaling is Scaling.BLOCKWISE_1D and k <= 128  # With one block, the scales are row-wise.
        assert scaling_of(*given.operands) is (Scaling.ROWWISE if one_block else scaling), (m, n, k)
    if scaling is Scaling.BLOCKWISE:  # One row and one block.
        given = small_integers(1, 16, 16, scaling)
        assert scaling_of(*given.operands) is Scaling.TENSORWISE
        assert torch.equal(matmul_reference(*given.operands, torch.float32).cpu().double(), given.exact())


WRONG_SCALES = (
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
)


def test_what_does_not_fit_is_refused() -> None:
    a, b, one = torch.zeros(48, 272).to(E4M3), torch.zeros(64, 272).to(E4M3), torch.tensor(1.0)
    fits = r"one element each .* \(48, 3\) and \(1, 3\) .* \(48, 3\) and \(64, 3\)"
    cases = [(a, b, *map(torch.ones, shapes), None, fits) for shapes in WRONG_SCALES]
    cases += [
        (a, a, one, one.double(), None, "must be float32"),
        (a, b[:, :16].contiguous(), one, one, None, "same last dim"),
        (a, b[:24], one, one, None, "multiples of 16"),
        (a[:, :24].contiguous(), b[:, :24].contiguous(), one, one, None, "multiples of 16"),
        (a.t().contiguous().t(), b, one, one, None, "must be contiguous"),
        (a, torch.zeros(64, 300).to(E4M3)[:, :272], one, one, None, "must be contiguous"),  # Nor sideways.
        (a, b, torch.ones(48, 8).to(E8M0), torch.ones(64, 8).to(E8M0), None, "MX products need k in multiples of 32"),
        (a, b, torch.ones(48, 9).to(E8M0), torch.ones(64, 9), None, "must be float32, or E8M0 for MX"),
        (a, b, one, one, torch.zeros(63), "bias must be"),
        (a, b, one, one, torch.zeros(1, 64), "bias must be"),
        (a, b, one, one, torch.zeros(64, dtype=torch.int32), "bias must be"),
    ]
    for left, right, of_left, of_right, bias, problem in cases:
        for version in (
            matmul_reference,
            lambda *given: matmul_torch(*given[:5], False, given[5]),
            lambda *given: matmul(*given[:5], True, given[5]),
        ):
            with pytest.raises(ValueError, match=problem):
                version(left, right, of_left, of_right, torch.bfloat16, bias)
    with pytest.raises(ValueError, match="cutlass"):
        ops.matmul(a, b, one, one, torch.float32, fast_accumulation=False, backend="cutlass")


@pytest.mark.parametrize("scaling", [Scaling.BLOCKWISE, Scaling.BLOCKWISE_1D])
def test_block_scales_are_laid_out_for_torch(scaling: Scaling) -> None:
    """So that torch takes them: on the meta device, it only checks its arguments. Without a copy of those that lie so.
    ``test_multipliers.py`` has their numbers."""
    m, n, k = 64, 256, 1280
    a, b = (torch.empty(size, k, dtype=E4M3, device="meta") for size in (m, n))
    given = small_integers(m, n, k, scaling)
    scale_a, scale_b = block_scales_for_torch(given.inv_scale_a, given.inv_scale_b, scaling)
    assert block_scales_for_torch(scale_a, given.inv_scale_b, scaling)[0] is scale_a
    lines, squares = functional.ScalingType.BlockWise1x128, functional.ScalingType.BlockWise128x128
    of_b = lines if scaling is Scaling.BLOCKWISE_1D else squares
    out = functional.scaled_mm(a, b.T, scale_a.to("meta"), lines, scale_b.to("meta"), of_b, output_dtype=torch.float32)
    assert out.shape == (m, n)

"""Triton's interpreter: its FP8 conversion bug, and our fix for tests."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.support.interpreter import convert_float, convert_float_upstream

FORMATS = pytest.mark.parametrize(
    ("ours", "theirs"), [(torch.float8_e4m3fn, tl.float8e4nv), (torch.float8_e5m2, tl.float8e5)], ids=["e4m3", "e5m2"]
)
needs_interpreter = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU here")


def _numbers() -> Tensor:
    """Return values that hit mantissa carries, ties and subnormals of both formats."""
    generator = torch.Generator().manual_seed(0)
    mantissas = torch.randn(4096, generator=generator)
    return torch.cat(
        [torch.tensor([31.9, 2.0**-9, 3 * 2.0**-10, 2.0**-16, 17.0, 19.0, -0.0]), mantissas, mantissas * 1e-4]
    )


@FORMATS
def test_upstream_still_converts_wrongly(ours: torch.dtype, theirs: tl.dtype) -> None:
    """If this fails, Triton has fixed its interpreter: delete ``tests/support/interpreter.py``."""
    numbers = _numbers()
    got = convert_float_upstream(numbers.numpy(), tl.float32, theirs, None)
    assert (got.view(np.uint8) != numbers.to(ours).view(torch.uint8).numpy()).any()


@triton.jit
def _convert_kernel(x, out, n, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = place < n
    tl.store(out + place, tl.load(x + place, mask=mask).to(out.dtype.element_ty), mask=mask)


@needs_interpreter
@FORMATS
def test_kernels_convert_as_torch_does(ours: torch.dtype, theirs: tl.dtype) -> None:
    numbers = _numbers()
    out = torch.full((len(numbers),), torch.nan).to(ours)
    _convert_kernel[(triton.cdiv(len(numbers), 1024),)](numbers, out, len(numbers), BLOCK=1024)
    assert torch.equal(out.view(torch.uint8), numbers.to(ours).view(torch.uint8))
    assert out[0].float() == 32.0


@FORMATS
def test_conversions_into_fp8_saturate_and_keep_nan(ours: torch.dtype, theirs: tl.dtype) -> None:
    limit = torch.finfo(ours).max
    numbers = torch.tensor([1e30, -1e30, torch.inf, -torch.inf, torch.nan])
    got = torch.from_numpy(convert_float(numbers.numpy(), tl.float32, theirs, None)).view(ours).float()
    assert got[:4].tolist() == [limit, -limit, limit, -limit]
    assert got[4].isnan()


@FORMATS
def test_nan_codes_of_fp8_are_nan(ours: torch.dtype, theirs: tl.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    got = torch.from_numpy(convert_float(codes.numpy(), theirs, tl.float32, None)).view(torch.float32)
    assert torch.equal(got.isnan(), codes.view(ours).float().isnan())


def test_bfloat16_rounds_to_nearest_even() -> None:
    numbers = torch.tensor([1.00390625, 1.01171875, 1.0000001, -3.389e38])
    got = torch.from_numpy(convert_float(numbers.numpy(), tl.float32, tl.bfloat16, None)).view(torch.int16)
    assert torch.equal(got, numbers.bfloat16().view(torch.int16))

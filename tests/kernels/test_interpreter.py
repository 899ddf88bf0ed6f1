"""Triton's interpreter: its FP8 conversion bug, and our fix for tests."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton.language as tl
from torch import Tensor

from tests.support.interpreter import convert_float, convert_float_upstream

FORMATS = pytest.mark.parametrize(
    ("ours", "theirs"), [(torch.float8_e4m3fn, tl.float8e4nv), (torch.float8_e5m2, tl.float8e5)], ids=["e4m3", "e5m2"]
)


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


@FORMATS
def test_conversions(ours: torch.dtype, theirs: tl.dtype) -> None:
    """As torch's, but into FP8 they saturate, and NaN stays. ``test_twins.py`` has kernels that convert."""
    limit = torch.finfo(ours).max
    numbers = torch.cat([_numbers(), torch.tensor([1e30, -1e30, torch.inf, -torch.inf, torch.nan])])
    got = torch.from_numpy(convert_float(numbers.numpy(), tl.float32, theirs, None))
    assert torch.equal(got, numbers.clamp(-limit, limit).to(ours).view(torch.uint8))
    back = torch.from_numpy(convert_float(got.numpy(), theirs, tl.bfloat16, None)).view(torch.bfloat16)
    assert torch.equal(back.nan_to_num(7.0), got.view(ours).bfloat16().nan_to_num(7.0))

"""Records the operands of a Linear's FP8 products as they are dispatched."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fp8dist_kernels import ops
from tests.support.casting import FORMAT_OF
from tests.support.fp8_oracle import E5M2, Operand


class Gemm(NamedTuple):
    """One product ``a @ b.T``: copies of its operands, and the result."""

    a: Tensor
    b: Tensor
    inv_scale_a: Tensor
    inv_scale_b: Tensor
    result: Tensor


class Gemms(TorchDispatchMode):
    """Records all FP8 products inside, in order: fprop, then dgrad, then wgrad."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Gemm] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is ops.matmul:
            self.seen.append(Gemm(*(tensor.clone() for tensor in (*args[:4], result))))
        return result


def numbers(x: Tensor) -> npt.NDArray[np.float32]:
    """Return the elements of a tensor of any float dtype, as float32 on the CPU."""
    array: npt.NDArray[np.float32] = x.detach().float().cpu().numpy()
    return array


def assert_gemm(gemm: Gemm, expected: tuple[Operand, Operand], what: str) -> None:
    """Assert that the operands are bitwise the expected ones, except for the kind of NaN. Contracted tokens are padded
    with zeros to a multiple of 16; all that MX contracts to one of 32, in a NaN block with NaN."""
    assert_operand(gemm.a, gemm.inv_scale_a, expected[0], f"{what} a")
    assert_operand(gemm.b, gemm.inv_scale_b, expected[1], f"{what} b")


def assert_operand(codes: Tensor, inv_scale: Tensor, expected: Operand, what: str) -> None:
    format = expected.format
    assert FORMAT_OF[codes.dtype] is format, what
    got = codes.view(torch.uint8).cpu().numpy()
    lines, width = expected.codes.shape
    multiple = 32 if expected.block == (1, 32) else 16
    assert got.shape == (lines, -(-width // multiple) * multiple), what
    assert not got[np.isfinite(expected.inv_scale[:, -1]) if multiple == 32 else slice(None), width:].any(), what
    got = got[:, :width]
    if format is E5M2:
        assert not ((got & 0x7F) == 0x7C).any(), f"{what}: Inf"
    got = np.where((got & 0x7F) > format.largest, 0x7F, got)
    wrong = np.argwhere(got != expected.codes)
    assert not len(wrong), (what, wrong[0], got[tuple(wrong[0])], expected.codes[tuple(wrong[0])])
    scales = inv_scale.float().cpu().numpy()
    scales = scales.reshape(1, 1) if scales.size == 1 else scales
    assert scales.shape == expected.inv_scale.shape, what
    assert _bits(scales) == _bits(expected.inv_scale), what


def _bits(scales: npt.NDArray[np.float32]) -> Any:
    """Return the bits of numbers, with one kind of NaN."""
    return np.where(np.isnan(scales), 0x7FC00000, np.ascontiguousarray(scales).view(np.int32)).tolist()

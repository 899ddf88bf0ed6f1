"""Scaled FP8 matrix products, NT layout: both operands are row-major with the contracted dim last."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8dist.kernels.casts import dequantize

__all__ = ["ALIGNMENT", "matmul_reference", "matmul_torch"]

ALIGNMENT = 16
"""cuBLASLt wants the contracted dim and the rows of ``b`` in multiples of 16. The CPU accepts
anything; it is held to the same rule, so that a test that passes on a CPU means something."""


def matmul_torch(
    a: Tensor,
    b: Tensor,
    inv_scale_a: Tensor,
    inv_scale_b: Tensor,
    out_dtype: torch.dtype,
    fast_accumulation: bool,
) -> Tensor:
    """``(a * inv_scale_a) @ (b * inv_scale_b).T`` by ``torch._scaled_mm``.

    Args:
        a: FP8 [m, k] contiguous. m is free.
        b: FP8 [n, k] contiguous. n and k are multiples of 16.
        inv_scale_a: 0-d float32; ``inv_scale_b`` likewise.
        out_dtype: dtype of the [m, n] result.
        fast_accumulation: let Hopper accumulate in its reduced-precision registers.

    Raises:
        ValueError: layout or alignment that CUDA would refuse.
    """
    _require_layout(a, b)
    if a.shape[0] == 0 or a.shape[1] == 0:
        return torch.zeros(a.shape[0], b.shape[0], dtype=out_dtype, device=a.device)
    return torch._scaled_mm(
        a,
        b.t(),
        scale_a=inv_scale_a,
        scale_b=inv_scale_b,
        out_dtype=out_dtype,
        use_fast_accum=fast_accumulation,
    )


def matmul_reference(a: Tensor, b: Tensor, inv_scale_a: Tensor, inv_scale_b: Tensor, out_dtype: torch.dtype) -> Tensor:
    """The same product, dequantised and multiplied in float32. Shapes as ``matmul_torch``."""
    _require_layout(a, b)
    product = dequantize(a, inv_scale_a) @ dequantize(b, inv_scale_b).t()
    return product.to(out_dtype)


def _require_layout(a: Tensor, b: Tensor) -> None:
    if not (a.is_contiguous() and b.is_contiguous()):
        raise ValueError("FP8 operands must be contiguous with the contracted dim last")
    if a.shape[1] % ALIGNMENT or b.shape[0] % ALIGNMENT:
        raise ValueError(
            f"FP8 matmul needs k and n in multiples of {ALIGNMENT}, got a {tuple(a.shape)}, b {tuple(b.shape)}"
        )

"""Scaled FP8 products ``a @ b.T``: both operands are row-major with the contracted dim last (NT layout).

``b`` may also be a transposed view: [n, k] of a contiguous [k, n], such as a gathered weight in dgrad.
"""

from __future__ import annotations

import functools
from enum import Enum

import torch
from torch import Tensor

from fp8dist_kernels import BLOCK, MX_BLOCK, NVFP4_BLOCK
from fp8dist_kernels.reference.blocks import blocks_along
from fp8dist_kernels.reference.casts import dequantize

ALIGNMENT = 16
"""cuBLASLt needs the contracted dim and the rows of ``b`` in multiples of 16. The CPU does not, but follows the same
rule, so that code that passes tests on a CPU also runs on CUDA."""

_TMA_ALIGNMENT = 16
_SHAPES_KEPT = 512  # More kinds of products than a model has.


class Scaling(Enum):
    """Granularity of the scales, for a [m, k] and b [n, k]. Follows from the dtype (E8M0 for MX, else
    float32) and the shapes of the inverse scales."""

    TENSORWISE = "tensorwise"  # one each: any shape with one element
    ROWWISE = "rowwise"  # a [m, 1], b [n, 1]
    BLOCKWISE = "blockwise"  # a [m, ceil(k / 128)] (1 x 128), b [ceil(n / 128), ceil(k / 128)] (128 x 128)
    BLOCKWISE_1D = "blockwise_1d"  # a [m, ceil(k / 128)], b [n, ceil(k / 128)] (1 x 128 both)
    MX = "mx"  # a [m, k / 32], b [n, k / 32] (1 x 32 both)
    NVFP4 = "nvfp4"  # a [m, k / 16], b [n, k / 16] (1 x 16 both); emulated: no GPU path

    @property
    def in_blocks(self) -> bool:
        """True if float32 scales change along the contracted dim. Products are then accumulated in float32 after each
        block. (Powers of two of MX blocks are applied by the tensor cores.)"""
        return self in (Scaling.BLOCKWISE, Scaling.BLOCKWISE_1D)


FLOAT32_SCALINGS = tuple(scaling for scaling in Scaling if scaling not in (Scaling.MX, Scaling.NVFP4))
"""The kinds of FP8 whose inverse scales are float32."""


def scaling_of(a: Tensor, b: Tensor, inv_scale_a: Tensor, inv_scale_b: Tensor, bias: Tensor | None = None) -> Scaling:
    """Check the arguments of a product, and return the scaling that the shapes of the inverse scales imply.

    If the shapes fit two kinds, both kinds give the same product. Strides of the scales may be arbitrary.

    Raises:
        ValueError: operands or a bias that no backend accepts; scales whose shapes fit no kind or that are not float32.
    """
    if not (a.is_contiguous() and (b.is_contiguous() or b.t().is_contiguous())):
        raise ValueError("FP8 operands must be contiguous with the contracted dim last; b may be transposed")
    if bias is not None and (bias.shape != b.shape[:1] or not bias.is_floating_point()):
        raise ValueError(f"bias must be floating point [{b.shape[0]}], got {bias.dtype} {tuple(bias.shape)}")
    mx = inv_scale_a.dtype == inv_scale_b.dtype == torch.float8_e8m0fnu
    if not mx and (inv_scale_a.dtype != torch.float32 or inv_scale_b.dtype != torch.float32):
        raise ValueError(
            f"inverse scales must be float32, or E8M0 for MX, got {inv_scale_a.dtype} and {inv_scale_b.dtype}"
        )
    return _scaling_of(a.shape, b.shape, inv_scale_a.shape, inv_scale_b.shape, mx)


@functools.lru_cache(_SHAPES_KEPT)
def _scaling_of(
    shape_a: torch.Size, shape_b: torch.Size, scales_a: torch.Size, scales_b: torch.Size, mx: bool
) -> Scaling:
    """Do the part of ``scaling_of`` that depends on shapes alone."""
    if shape_a[1] != shape_b[1]:
        raise ValueError(f"a {tuple(shape_a)} and b {tuple(shape_b)} must have the same last dim, which is contracted")
    if shape_a[1] % ALIGNMENT or shape_b[0] % ALIGNMENT:
        raise ValueError(
            f"FP8 matmul needs k and n in multiples of {ALIGNMENT}, got a {tuple(shape_a)}, b {tuple(shape_b)}"
        )
    if mx:
        expected = tuple((shape[0], shape[1] // MX_BLOCK) for shape in (shape_a, shape_b))
        if shape_a[1] % MX_BLOCK or (scales_a, scales_b) != expected:
            raise ValueError(
                f"MX products need k in multiples of {MX_BLOCK} and a scale for each, got a {tuple(shape_a)}, b "
                f"{tuple(shape_b)} with scales {tuple(scales_a)} and {tuple(scales_b)}"
            )
        return Scaling.MX
    if scales_a.numel() == 1 and scales_b.numel() == 1:
        return Scaling.TENSORWISE
    (m, k), n = shape_a, shape_b[0]
    blocks, blocks_of_n = blocks_along(k, BLOCK), blocks_along(n, BLOCK)
    shapes = (tuple(scales_a), tuple(scales_b))
    if shapes == ((m, 1), (n, 1)):
        return Scaling.ROWWISE
    if shapes == ((m, blocks), (blocks_of_n, blocks)):
        return Scaling.BLOCKWISE
    if shapes == ((m, blocks), (n, blocks)):
        return Scaling.BLOCKWISE_1D
    if shapes == ((m, k // NVFP4_BLOCK), (n, k // NVFP4_BLOCK)):
        return Scaling.NVFP4
    raise ValueError(
        f"inverse scales of shapes {shapes[0]} and {shapes[1]} for a {(m, k)} and b {(n, k)}: expected one element "
        f"each (tensorwise), {(m, 1)} and {(n, 1)} (row-wise), {(m, blocks)} and {(blocks_of_n, blocks)} (1x128 by "
        f"128x128), {(m, blocks)} and {(n, blocks)} (1x128 by 1x128), or {(m, k // NVFP4_BLOCK)} and "
        f"{(n, k // NVFP4_BLOCK)} (NVFP4)"
    )


def matmul_reference(
    a: Tensor,
    b: Tensor,
    inv_scale_a: Tensor,
    inv_scale_b: Tensor,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Tensor:
    """Return the same product as ``matmul_torch``, dequantised and multiplied in float32. Same shapes, bias and errors,
    but block scaling works on any device."""
    scaling = scaling_of(a, b, inv_scale_a, inv_scale_b, bias)
    return multiply_reference(scaling, a, b, inv_scale_a, inv_scale_b, out_dtype, False, bias)


def multiply_reference(
    scaling: Scaling,
    a: Tensor,
    b: Tensor,
    inv_scale_a: Tensor,
    inv_scale_b: Tensor,
    out_dtype: torch.dtype,
    fast_accumulation: bool,
    bias: Tensor | None,
) -> Tensor:
    """Do ``matmul_reference`` for arguments that ``scaling_of`` has checked. Ignores ``fast_accumulation``."""
    if scaling is Scaling.MX:
        inv_scale_a, inv_scale_b = (x.float().repeat_interleave(MX_BLOCK, 1) for x in (inv_scale_a, inv_scale_b))
    if scaling is Scaling.NVFP4:
        inv_scale_a, inv_scale_b = (x.repeat_interleave(NVFP4_BLOCK, 1) for x in (inv_scale_a, inv_scale_b))
    if scaling.in_blocks:
        inv_scale_a = inv_scale_a.repeat_interleave(BLOCK, 1)[:, : a.shape[1]]
        inv_scale_b = inv_scale_b.repeat_interleave(BLOCK, 1)[:, : b.shape[1]]
    if scaling is Scaling.BLOCKWISE:
        inv_scale_b = inv_scale_b.repeat_interleave(BLOCK, 0)[: b.shape[0]]
    product = dequantize(a, inv_scale_a) @ dequantize(b, inv_scale_b).t()
    return (product if bias is None else product.add_(bias)).to(out_dtype)


def product_of_nothing(a: Tensor, b: Tensor, out_dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    """Return the product of a [m, k] and b [n, k] where m, n or k is 0: zeros, plus the bias."""
    product = torch.zeros(a.shape[0], b.shape[0], dtype=out_dtype, device=a.device)
    return product if bias is None else product.add_(bias)


def aligned(operand: Tensor) -> Tensor:
    """Return ``operand`` at an address that TMA can read, a multiple of 16 bytes. Rows are such multiples, but a view
    may begin elsewhere."""
    return operand.clone() if operand.data_ptr() % _TMA_ALIGNMENT else operand


def column_major(scale: Tensor) -> Tensor:
    """Return [lines, blocks] with strides (1, lines): the tensor itself, or a copy."""
    lines = scale.shape[0]
    if scale.stride() == (1, lines):
        return scale
    return torch.empty_strided(scale.shape, (1, lines), dtype=scale.dtype, device=scale.device).copy_(scale)

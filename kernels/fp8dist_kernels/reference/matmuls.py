"""Scaled FP8 matrix products, NT layout: both operands are row-major with the contracted dim last."""

from __future__ import annotations

import functools
from enum import Enum

import torch
from torch import Tensor
from torch.nn import functional

from fp8dist_kernels.reference.casts import dequantize

__all__ = [
    "ALIGNMENT",
    "SCALE_BLOCK",
    "Scaling",
    "aligned",
    "block_scales_for_torch",
    "column_major",
    "matmul_reference",
    "matmul_torch",
    "multiply_reference",
    "multiply_torch",
    "product_of_nothing",
    "scaling_of",
    "torch_can",
]

ALIGNMENT = 16
"""cuBLASLt needs the contracted dim and the rows of ``b`` in multiples of 16. The CPU does not, but follows the same
rule, so that code that passes tests on a CPU also runs on CUDA."""

SCALE_BLOCK = 128
"""Elements of the contracted dim, and rows of ``b``, that share a scale under block scaling."""

_HOPPER = 9
_TMA_ALIGNMENT = 16
_SHAPES_KEPT = 512  # More kinds of products than a model has.


class Scaling(Enum):
    """Granularity of the scales, for a [m, k] and b [n, k]. Follows from the shapes of the inverse scales."""

    TENSORWISE = "tensorwise"  # one each: any shape with one element
    ROWWISE = "rowwise"  # a [m, 1], b [n, 1]
    BLOCKWISE = "blockwise"  # a [m, ceil(k / 128)] (1 x 128), b [ceil(n / 128), ceil(k / 128)] (128 x 128)
    BLOCKWISE_1D = "blockwise_1d"  # a [m, ceil(k / 128)], b [n, ceil(k / 128)] (1 x 128 both)

    @property
    def in_blocks(self) -> bool:
        """True if scales change along the contracted dim. Products are then accumulated in float32 after each block."""
        return self in (Scaling.BLOCKWISE, Scaling.BLOCKWISE_1D)


def scaling_of(a: Tensor, b: Tensor, inv_scale_a: Tensor, inv_scale_b: Tensor, bias: Tensor | None = None) -> Scaling:
    """Check the arguments of a product, and return the scaling that the shapes of the inverse scales imply.

    If the shapes fit two kinds, both kinds give the same product. Strides of the scales may be arbitrary.

    Raises:
        ValueError: operands or a bias that no backend accepts; scales whose shapes fit no kind or that are not float32.
    """
    if not (a.is_contiguous() and b.is_contiguous()):
        raise ValueError("FP8 operands must be contiguous with the contracted dim last")
    if bias is not None and (bias.shape != b.shape[:1] or not bias.is_floating_point()):
        raise ValueError(f"bias must be floating point [{b.shape[0]}], got {bias.dtype} {tuple(bias.shape)}")
    if inv_scale_a.dtype != torch.float32 or inv_scale_b.dtype != torch.float32:
        raise ValueError(f"inverse scales must be float32, got {inv_scale_a.dtype} and {inv_scale_b.dtype}")
    return _scaling_of(a.shape, b.shape, inv_scale_a.shape, inv_scale_b.shape)


@functools.lru_cache(_SHAPES_KEPT)
def _scaling_of(shape_a: torch.Size, shape_b: torch.Size, scales_a: torch.Size, scales_b: torch.Size) -> Scaling:
    """Do the part of ``scaling_of`` that depends on shapes alone."""
    if shape_a[1] != shape_b[1]:
        raise ValueError(f"a {tuple(shape_a)} and b {tuple(shape_b)} must have the same last dim, which is contracted")
    if shape_a[1] % ALIGNMENT or shape_b[0] % ALIGNMENT:
        raise ValueError(
            f"FP8 matmul needs k and n in multiples of {ALIGNMENT}, got a {tuple(shape_a)}, b {tuple(shape_b)}"
        )
    if scales_a.numel() == 1 and scales_b.numel() == 1:
        return Scaling.TENSORWISE
    (m, k), n = shape_a, shape_b[0]
    blocks = _blocks(k)
    shapes = (tuple(scales_a), tuple(scales_b))
    if shapes == ((m, 1), (n, 1)):
        return Scaling.ROWWISE
    if shapes == ((m, blocks), (_blocks(n), blocks)):
        return Scaling.BLOCKWISE
    if shapes == ((m, blocks), (n, blocks)):
        return Scaling.BLOCKWISE_1D
    raise ValueError(
        f"inverse scales of shapes {shapes[0]} and {shapes[1]} for a {(m, k)} and b {(n, k)}: expected one element "
        f"each (tensorwise), {(m, 1)} and {(n, 1)} (row-wise), {(m, blocks)} and {(_blocks(n), blocks)} (1x128 by "
        f"128x128), or {(m, blocks)} and {(n, blocks)} (1x128 by 1x128)"
    )


def torch_can(scaling: Scaling, device: torch.device) -> bool:
    """True if torch has a product with this scaling on ``device``. Block scaling needs Hopper."""
    if not scaling.in_blocks:
        return True
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == _HOPPER


def matmul_torch(
    a: Tensor,
    b: Tensor,
    inv_scale_a: Tensor,
    inv_scale_b: Tensor,
    out_dtype: torch.dtype,
    fast_accumulation: bool,
    bias: Tensor | None = None,
) -> Tensor:
    """Return ``(a * inv_scale_a) @ (b * inv_scale_b).T + bias``, by torch's own scaled product (cuBLASLt on CUDA).

    Args:
        a: FP8 [m, k] contiguous. m is arbitrary.
        b: FP8 [n, k] contiguous. n and k are multiples of 16.
        inv_scale_a: float32, and ``inv_scale_b`` likewise; shapes as in ``Scaling``. Scales of
            1 x 128 blocks are cheapest as the transpose of contiguous memory: [ceil(k / 128), m] for ``a``.
        out_dtype: bfloat16, float16 or float32: dtype of the [m, n] result.
        fast_accumulation: let Hopper accumulate in its reduced-precision registers. No effect on block-scaled
            products, which accumulate in float32 after each block.
        bias: [n] of any float dtype, added in float32 before the result is rounded.

    Raises:
        ValueError: layout, alignment or scales that CUDA would refuse; a block-scaled product on a CPU.
    """
    scaling = scaling_of(a, b, inv_scale_a, inv_scale_b, bias)
    return multiply_torch(scaling, a, b, inv_scale_a, inv_scale_b, out_dtype, fast_accumulation, bias)


def multiply_torch(
    scaling: Scaling,
    a: Tensor,
    b: Tensor,
    inv_scale_a: Tensor,
    inv_scale_b: Tensor,
    out_dtype: torch.dtype,
    fast_accumulation: bool,
    bias: Tensor | None,
) -> Tensor:
    """Do ``matmul_torch`` for arguments that ``scaling_of`` has checked."""
    if a.numel() == 0 or b.numel() == 0:
        return product_of_nothing(a, b, out_dtype, bias)
    if bias is not None and not (bias.dtype == out_dtype and out_dtype.itemsize == 2 and a.is_cuda):
        # cuBLASLt takes a bias only in the result's dtype, and never with float32.
        product = multiply_torch(scaling, a, b, inv_scale_a, inv_scale_b, torch.float32, fast_accumulation, None)
        return product.add_(bias).to(out_dtype)
    if scaling.in_blocks:
        return _block_scaled(a, b, inv_scale_a, inv_scale_b, scaling, out_dtype, bias)
    if scaling is Scaling.ROWWISE:
        # Through one dim, because a column of any strides is contiguous to torch, and scaled_mm wants (1, 1).
        inv_scale_a, inv_scale_b = inv_scale_a.reshape(-1)[:, None], inv_scale_b.reshape(-1)[None, :]
    return torch._scaled_mm(
        a,
        b.t(),
        scale_a=inv_scale_a,
        scale_b=inv_scale_b,
        bias=None if bias is None else bias.contiguous(),
        out_dtype=out_dtype,
        use_fast_accum=fast_accumulation,
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
    if scaling.in_blocks:
        inv_scale_a = inv_scale_a.repeat_interleave(SCALE_BLOCK, 1)[:, : a.shape[1]]
        inv_scale_b = inv_scale_b.repeat_interleave(SCALE_BLOCK, 1)[:, : b.shape[1]]
    if scaling is Scaling.BLOCKWISE:
        inv_scale_b = inv_scale_b.repeat_interleave(SCALE_BLOCK, 0)[: b.shape[0]]
    product = dequantize(a, inv_scale_a) @ dequantize(b, inv_scale_b).t()
    return (product if bias is None else product.add_(bias)).to(out_dtype)


def product_of_nothing(a: Tensor, b: Tensor, out_dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    """Return the product of a [m, k] and b [n, k] where m, n or k is 0: zeros, plus the bias."""
    product = torch.zeros(a.shape[0], b.shape[0], dtype=out_dtype, device=a.device)
    return product if bias is None else product.add_(bias)


def block_scales_for_torch(inv_scale_a: Tensor, inv_scale_b: Tensor, scaling: Scaling) -> tuple[Tensor, Tensor]:
    """Return block scales in the layout of ``torch.nn.functional.scaled_mm`` (checked in ATen's ScaledBlas.cpp).

    Returns:
        For ``a``, [m, blocks] with strides (1, m), not copied if it has them. For ``b``, [n, blocks] likewise under
        BLOCKWISE_1D, else [blocks rounded up to 4, ceil(n / 128)], columns contiguous, padded with zeros.
    """
    scale_a = column_major(inv_scale_a)
    if scaling is Scaling.BLOCKWISE_1D:
        return scale_a, column_major(inv_scale_b)
    blocks = inv_scale_b.shape[1]
    scale_b = inv_scale_b.new_zeros(inv_scale_b.shape[0], -(-blocks // 4) * 4)
    scale_b[:, :blocks] = inv_scale_b
    return scale_a, scale_b.t()


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


def _blocks(size: int) -> int:
    return -(-size // SCALE_BLOCK)


def _block_scaled(
    a: Tensor,
    b: Tensor,
    inv_scale_a: Tensor,
    inv_scale_b: Tensor,
    scaling: Scaling,
    out_dtype: torch.dtype,
    bias: Tensor | None,
) -> Tensor:
    if not a.is_cuda:
        raise ValueError('torch has no block-scaled product on a CPU: use the backend "reference"')
    lines, squares = functional.ScalingType.BlockWise1x128, functional.ScalingType.BlockWise128x128
    scale_a, scale_b = block_scales_for_torch(inv_scale_a, inv_scale_b, scaling)
    return functional.scaled_mm(
        a,
        b.t(),
        scale_a,
        lines,
        scale_b,
        lines if scaling is Scaling.BLOCKWISE_1D else squares,
        bias=bias,
        output_dtype=out_dtype,
        use_fast_accum=False,
    )

"""Scaled FP8 products by torch's own ops, with the detours of ``multipliers.ROWS``."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from fp8dist_kernels import BLOCK
from fp8dist_kernels.multipliers import ROW_MULTIPLE, Detour, Product, machine_of, refused, row_of
from fp8dist_kernels.reference.matmuls import Scaling, column_major, product_of_nothing, scaling_of


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
        ValueError: layout, alignment or scales that CUDA would refuse.
        ProductError: a product that torch does not compute on this device.
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
    (m, k), n = a.shape, b.shape[0]
    product = Product(scaling, m, n, k, a.dtype, b.dtype, out_dtype, None if bias is None else bias.dtype)
    row = row_of(product, machine_of(a.device))
    if row is None or 0 in (m, n, k):
        return multiply_directly(scaling, a, b, inv_scale_a, inv_scale_b, out_dtype, fast_accumulation, bias)
    if row.detour is None:
        raise refused(product, a.device, row.name)
    if row.detour is Detour.PADDED_ROWS:
        more = -m % ROW_MULTIPLE
        a, inv_scale_a = _with_more_rows(a, more), _with_more_rows(inv_scale_a, more)
        padded = multiply_torch(scaling, a, b, inv_scale_a, inv_scale_b, out_dtype, fast_accumulation, bias)
        return padded[:m]
    if row.detour is Detour.SCALES_OF_ROWS:
        inv_scale_b = inv_scale_b.repeat_interleave(BLOCK, 0)[:n]
        scales = inv_scale_a, inv_scale_b
        return multiply_torch(Scaling.ROWWISE, a, b, *scales, out_dtype, fast_accumulation, bias)
    if row.detour is Detour.SCALES_AFTER:
        one = inv_scale_a.new_ones(())
        exact = multiply_torch(Scaling.TENSORWISE, a, b, one, one, torch.float32, fast_accumulation, None)
        exact.mul_(inv_scale_a.reshape(m, 1)).mul_(inv_scale_b.reshape(1, n))
    else:
        exact = multiply_torch(scaling, a, b, inv_scale_a, inv_scale_b, torch.float32, fast_accumulation, None)
    return (exact if bias is None else exact.add_(bias)).to(out_dtype)


def _with_more_rows(x: Tensor, more: int) -> Tensor:
    """Return ``x`` with rows of zeros below it."""
    lines, width = x.shape
    padded = x.new_zeros(lines + more, width)
    padded[:lines].copy_(x)
    return padded


def multiply_directly(
    scaling: Scaling,
    a: Tensor,
    b: Tensor,
    inv_scale_a: Tensor,
    inv_scale_b: Tensor,
    out_dtype: torch.dtype,
    fast_accumulation: bool,
    bias: Tensor | None,
) -> Tensor:
    """Do ``multiply_torch`` for a product to which no row of the table applies."""
    if 0 in a.shape or 0 in b.shape:  # Not numel(), which is a call for each.
        return product_of_nothing(a, b, out_dtype, bias)
    try:
        if scaling is Scaling.MX:
            blocks, swizzle = functional.ScalingType.BlockWise1x32, functional.SwizzleType.SWIZZLE_32_4_4
            scale_a, scale_b = mx_scales_for_torch(inv_scale_a), mx_scales_for_torch(inv_scale_b)
            return functional.scaled_mm(
                a, b.t(), scale_a, blocks, scale_b, blocks, swizzle, swizzle, bias=bias, output_dtype=out_dtype
            )
        if scaling.in_blocks:
            lines, squares = functional.ScalingType.BlockWise1x128, functional.ScalingType.BlockWise128x128
            of_b = lines if scaling is Scaling.BLOCKWISE_1D else squares
            scale_a, scale_b = block_scales_for_torch(inv_scale_a, inv_scale_b, scaling)
            return functional.scaled_mm(
                a, b.t(), scale_a, lines, scale_b, of_b, bias=bias, output_dtype=out_dtype, use_fast_accum=False
            )
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
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except (RuntimeError, ValueError) as error:
        (m, k), n, of_bias = a.shape, b.shape[0], None if bias is None else bias.dtype
        product = Product(scaling, m, n, k, a.dtype, b.dtype, out_dtype, of_bias)
        raise refused(product, a.device, error) from error


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


def mx_scales_for_torch(inv_scale: Tensor) -> Tensor:
    """Return E8M0 scales [lines, blocks] in the order of cuBLASLt's "1D block scaling factors layout".

    It has tiles of 128 lines x 4 blocks, row by row. A tile is 32 rows of 16 bytes: line ``32 j + i`` of the tile is at
    row i, bytes ``4 j`` to ``4 j + 3``.

    Returns:
        E8M0, one dim: lines rounded up to 128, times blocks rounded up to 4, filled with bytes of 0.
    """
    lines, blocks = inv_scale.shape
    down, across = -(-lines // 128), -(-blocks // 4)
    whole = torch.zeros(down * 128, across * 4, dtype=torch.uint8, device=inv_scale.device)
    whole[:lines, :blocks] = inv_scale.view(torch.uint8)
    tiles = whole.view(down, 4, 32, across, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(-1).view(torch.float8_e8m0fnu)

"""Scaled FP8 matrix products in Triton, NT layout: selects the kernel and the tile."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fp8dist_kernels.reference.matmuls import Scaling, column_major, product_of_nothing, require_layout, scaling_of
from fp8dist_kernels.triton.launching import on_device_of, processors
from fp8dist_kernels.triton.products import block_scaled_kernel, scaled_kernel, wide_block_scaled_kernel
from fp8dist_kernels.triton.tables import Tile
from fp8dist_kernels.triton.tiles import Problem, tile_for

__all__ = ["matmul", "matmul_with"]

_PAIRS = (
    (torch.float8_e4m3fn, torch.float8_e4m3fn),
    (torch.float8_e5m2, torch.float8_e4m3fn),
    (torch.float8_e4m3fn, torch.float8_e5m2),
)

_STAGING_BYTES = 1 << 15
"""Shared memory through which the result is written piece by piece. More would cost a stage of operands."""

_MOST_PROMOTED_COLUMNS = 128
"""Widest tile whose products are accumulated in registers at once. Wider tiles are split, or never chosen."""

_PART_ROW_BYTES = 128
"""Bytes written at once per row of a tile that is split. More would not fit beside the accumulators."""

_DESCRIPTOR_ALIGNMENT = 16


def matmul(
    a: Tensor,
    b: Tensor,
    inv_scale_a: Tensor,
    inv_scale_b: Tensor,
    out_dtype: torch.dtype,
    fast_accumulation: bool,
    bias: Tensor | None = None,
) -> Tensor:
    """See ``reference.matmuls.matmul_torch``. Block scaling works wherever Triton runs.

    The tile depends only on the ``Problem`` and the device (``tile_for``), and one program accumulates each element. So
    the result is the same on every call, and on every rank with such a device.

    Raises:
        ValueError: as ``matmul_torch``; operands that are not FP8, or both E5M2 (which cuBLASLt refuses as well).
    """
    require_layout(a, b, bias)
    if (a.dtype, b.dtype) not in _PAIRS:
        raise ValueError(f"operands are {a.dtype} and {b.dtype}: expected E4M3, or E4M3 and E5M2 in either order")
    scaling = scaling_of(a, b, inv_scale_a, inv_scale_b)
    if a.numel() == 0 or b.numel() == 0:
        return product_of_nothing(a, b, out_dtype, bias)
    tile = tile_for(Problem.of(a, b, scaling, fast_accumulation, out_dtype), a.device)
    return matmul_with(tile, a, b, inv_scale_a, inv_scale_b, out_dtype, fast_accumulation, bias)


def matmul_with(
    tile: Tile,
    a: Tensor,
    b: Tensor,
    inv_scale_a: Tensor,
    inv_scale_b: Tensor,
    out_dtype: torch.dtype,
    fast_accumulation: bool,
    bias: Tensor | None = None,
) -> Tensor:
    """Run ``matmul`` with the given tile. The operands must be valid for ``matmul``, and not empty."""
    scaling = scaling_of(a, b, inv_scale_a, inv_scale_b)
    parts = _parts(tile, scaling, fast_accumulation)
    out = torch.empty(a.shape[0], b.shape[0], dtype=out_dtype, device=a.device)
    common = _arguments(tile, a, b, out, parts)
    common.update(BIASED=bias is not None, bias=inv_scale_b if bias is None else bias.contiguous())
    tiles = triton.cdiv(a.shape[0], tile.rows) * triton.cdiv(b.shape[0], tile.columns)
    programs = (min(tiles, processors(a.device)),)
    with on_device_of(a):
        if scaling.in_blocks:
            lines = scaling is Scaling.BLOCKWISE_1D
            if lines:
                inv_scale_b = column_major(inv_scale_b)
            if parts == 1:
                common.update(LINES=lines)
            kernel = block_scaled_kernel if parts == 1 else wide_block_scaled_kernel
            kernel[programs](
                inv_scale_a=inv_scale_a,
                inv_scale_b=inv_scale_b,
                a_row_stride=inv_scale_a.stride(0),
                a_block_stride=inv_scale_a.stride(1),
                b_row_stride=inv_scale_b.stride(0),
                b_block_stride=inv_scale_b.stride(1),
                **common,
            )
        else:
            scaled_kernel[programs](
                inv_scale_a=inv_scale_a.contiguous(),
                inv_scale_b=inv_scale_b.contiguous(),
                ROWWISE=scaling is Scaling.ROWWISE,
                FAST=fast_accumulation,
                HALVED=parts == 2,
                **common,
            )
    return out


def _parts(tile: Tile, scaling: Scaling, fast_accumulation: bool) -> int:
    """Return the number of parts that a tile is computed in."""
    if tile.columns <= _MOST_PROMOTED_COLUMNS or scaling is Scaling.BLOCKWISE_1D:
        return 1
    if scaling is Scaling.BLOCKWISE:
        return 4
    return 1 if fast_accumulation else 2


def _arguments(tile: Tile, a: Tensor, b: Tensor, out: Tensor, parts: int) -> dict[str, Any]:
    """Return the arguments that all kernels share."""
    columns = tile.columns // parts
    row_bytes = _PART_ROW_BYTES if parts > 1 else _STAGING_BYTES // tile.rows
    piece = min(columns, row_bytes // out.dtype.itemsize)
    return {
        "a": TensorDescriptor.from_tensor(_aligned(a), [tile.rows, tile.depth]),
        "b": TensorDescriptor.from_tensor(_aligned(b), [columns, tile.depth]),
        "out": TensorDescriptor.from_tensor(out, [tile.rows, piece]),
        "m": a.shape[0],
        "n": b.shape[0],
        "k": a.shape[1],
        "TILE_M": tile.rows,
        "TILE_N": tile.columns,
        "TILE_K": tile.depth,
        "PIECE": piece,
        "GROUP": tile.group,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }


def _aligned(operand: Tensor) -> Tensor:
    """Return ``operand`` at an address that TMA can read, with the strides of contiguous rows.

    TMA reads from multiples of 16 bytes. Rows are such multiples, but a view may begin elsewhere, and the stride of a
    single row is arbitrary.
    """
    if operand.data_ptr() % _DESCRIPTOR_ALIGNMENT:
        operand = operand.clone()
    return operand.as_strided(operand.shape, (operand.shape[1], 1))

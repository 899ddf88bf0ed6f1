"""Scaled FP8 products ``a @ b.T`` in Triton: selects the kernel and the tile, and launches."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fp8dist_kernels.reference.matmuls import Scaling, aligned, column_major, product_of_nothing, scaling_of
from fp8dist_kernels.triton.launching import PLANS, ceil_div, on_device_of, processors
from fp8dist_kernels.triton.mx import multiply_mx
from fp8dist_kernels.triton.products import block_scaled_kernel, scaled_kernel, wide_block_scaled_kernel
from fp8dist_kernels.triton.tables import Tile
from fp8dist_kernels.triton.tiles import Problem, tile_for

_PAIRS = (
    (torch.float8_e4m3fn, torch.float8_e4m3fn),
    (torch.float8_e5m2, torch.float8_e4m3fn),
    (torch.float8_e4m3fn, torch.float8_e5m2),
)

_TOTALS = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of a ``total`` to which the kernels add."""

_STAGING_BYTES = 1 << 15
"""Shared memory through which the result is written piece by piece. More would leave room for one stage less."""

_MOST_PROMOTED_COLUMNS = 128
"""Widest tile whose steps can be added in float32 registers as a whole. Wider tiles are computed in parts."""

_PART_ROW_BYTES = 128
"""Bytes per row of a piece of the result, for a tile in parts. More would not fit beside the accumulators."""


def matmul(
    a: Tensor,
    b: Tensor,
    inv_scale_a: Tensor,
    inv_scale_b: Tensor,
    out_dtype: torch.dtype,
    fast_accumulation: bool,
    bias: Tensor | None = None,
) -> Tensor:
    """See ``reference.torch_matmuls.matmul_torch``. Scales of blocks work wherever Triton runs, not only on Hopper.

    The tile depends only on the ``Problem`` and the device (``tile_for``), and one program accumulates each element. So
    the result is the same on every call, and on every rank with such a device.

    Raises:
        ValueError: as ``matmul_torch``; operands that are not FP8, or both E5M2 (which cuBLASLt refuses as well).
    """
    scaling = scaling_of(a, b, inv_scale_a, inv_scale_b, bias)
    return multiply(scaling, a, b, inv_scale_a, inv_scale_b, out_dtype, fast_accumulation, bias)


def multiply(
    scaling: Scaling,
    a: Tensor,
    b: Tensor,
    inv_scale_a: Tensor,
    inv_scale_b: Tensor,
    out_dtype: torch.dtype,
    fast_accumulation: bool,
    bias: Tensor | None,
) -> Tensor:
    """Compute ``matmul`` for arguments that ``scaling_of`` has checked. ``scaling``: its result."""
    require_pair(a, b)
    if a.numel() == 0 or b.numel() == 0:
        return product_of_nothing(a, b, out_dtype, bias)
    if scaling is Scaling.MX:
        return multiply_mx(a, b, inv_scale_a, inv_scale_b, out_dtype, bias)
    dtypes, added = (a.dtype, b.dtype, out_dtype), "nothing" if bias is None else "bias"
    sideways = not b.is_contiguous()
    plan = _plan_for(a.shape, b.shape, dtypes, scaling, fast_accumulation, added, out_dtype, sideways, a.device)
    out = torch.empty((a.shape[0], b.shape[0]), dtype=out_dtype, device=a.device)
    return _run(plan, a, b, inv_scale_a, inv_scale_b, out, bias)


def multiply_into(
    scaling: Scaling,
    a: Tensor,
    b: Tensor,
    inv_scale_a: Tensor,
    inv_scale_b: Tensor,
    fast_accumulation: bool,
    total: Tensor,
) -> None:
    """Add the float32 result of ``multiply`` to ``total`` [m, n]. The sum is rounded to the total's dtype once.

    The bits are those of ``total.add_(multiply(…))``, because the tile is the same. These two operations run instead
    where TMA cannot write to ``total`` (it is not contiguous, not aligned, or of another dtype), and with scales of
    128 x 128 blocks: a wide tile has no registers left for the addition, and no gradient of weights has such scales.
    With MX, too: its kernel has a result of its own.
    """
    if a.numel() == 0 or b.numel() == 0:
        return
    writable = total.is_contiguous() and aligned(total) is total and total.dtype in _TOTALS
    if scaling in (Scaling.BLOCKWISE, Scaling.MX) or not writable:
        total.add_(multiply(scaling, a, b, inv_scale_a, inv_scale_b, torch.float32, fast_accumulation, None))
        return
    require_pair(a, b)
    dtypes, sideways = (a.dtype, b.dtype, torch.float32), not b.is_contiguous()
    plan = _plan_for(a.shape, b.shape, dtypes, scaling, fast_accumulation, "total", total.dtype, sideways, a.device)
    _run(plan, a, b, inv_scale_a, inv_scale_b, total, None)


def require_pair(a: Tensor, b: Tensor) -> None:
    """Raise ValueError unless both operands are FP8 and at most one is E5M2, as cuBLASLt requires."""
    if (a.dtype, b.dtype) not in _PAIRS:
        raise ValueError(f"operands are {a.dtype} and {b.dtype}: expected E4M3, or E4M3 and E5M2 in either order")


def matmul_with(
    tile: Tile,
    a: Tensor,
    b: Tensor,
    inv_scale_a: Tensor,
    inv_scale_b: Tensor,
    out_dtype: torch.dtype,
    fast_accumulation: bool,
    bias: Tensor | None = None,
    total: Tensor | None = None,
) -> Tensor:
    """Run ``matmul`` with the given tile, or ``multiply_into`` if there is a ``total``, which is returned then. The
    operands must be valid for ``matmul``, and not empty."""
    scaling = scaling_of(a, b, inv_scale_a, inv_scale_b)
    added = "total" if total is not None else "nothing" if bias is None else "bias"
    out = torch.empty((a.shape[0], b.shape[0]), dtype=out_dtype, device=a.device) if total is None else total
    sideways = not b.is_contiguous()
    plan = _plan(tile, a.shape, b.shape, scaling, fast_accumulation, added, out.dtype, sideways, a.device)
    return _run(plan, a, b, inv_scale_a, inv_scale_b, out, bias)


class _ProductPlan(NamedTuple):
    """The arguments of a product's launch, except addresses. All fields are on the host."""

    kernel: Any
    scaling: Scaling
    programs: tuple[int]
    block_a: list[int]
    block_b: list[int]
    block_out: list[int]
    constants: dict[str, Any]


@functools.lru_cache(PLANS)
def _plan_for(
    shape_a: torch.Size,
    shape_b: torch.Size,
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
    scaling: Scaling,
    fast_accumulation: bool,
    added: str,
    out_dtype: torch.dtype,
    sideways: bool,
    device: torch.device,
) -> _ProductPlan:
    """Return the plan of a product. ``dtypes``: of ``a``, ``b`` and the result, which select the tile. ``added``: as
    ADDED in ``products``. ``out_dtype``: that of the memory that is written, a result or a total. ``sideways``: ``b``
    lies in memory as [k, n]."""
    tile = tile_for(Problem(shape_a[0], shape_b[0], shape_a[1], scaling, fast_accumulation, *dtypes), device)
    return _plan(tile, shape_a, shape_b, scaling, fast_accumulation, added, out_dtype, sideways, device)


def _plan(
    tile: Tile,
    shape_a: torch.Size,
    shape_b: torch.Size,
    scaling: Scaling,
    fast_accumulation: bool,
    added: str,
    out_dtype: torch.dtype,
    sideways: bool,
    device: torch.device,
) -> _ProductPlan:
    """Return the plan for a tile. Other arguments as in ``_plan_for``."""
    parts = _parts(tile, scaling, fast_accumulation)
    columns = tile.columns // parts
    pieces = 2 if added == "total" else 1  # One is read while another is written.
    row_bytes = _PART_ROW_BYTES if parts > 1 else _STAGING_BYTES // pieces // tile.rows
    piece = min(columns, row_bytes // out_dtype.itemsize)
    constants = {
        "m": shape_a[0],
        "n": shape_b[0],
        "k": shape_a[1],
        "TILE_M": tile.rows,
        "TILE_N": tile.columns,
        "TILE_K": tile.depth,
        "PIECE": piece,
        "GROUP": tile.group,
        "ADDED": added,
        "SIDEWAYS": sideways,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
    kernel = scaled_kernel
    if not scaling.in_blocks:
        constants |= {"ROWWISE": scaling is Scaling.ROWWISE, "FAST": fast_accumulation, "HALVED": parts == 2}
        if added == "total":  # Scaling and addition in one instruction would round once: bits would differ.
            constants["enable_fp_fusion"] = False
    elif parts == 1:
        kernel = block_scaled_kernel
        constants |= {"LINES": scaling is Scaling.BLOCKWISE_1D}
    else:
        kernel = wide_block_scaled_kernel
    tiles = ceil_div(shape_a[0], tile.rows) * ceil_div(shape_b[0], tile.columns)
    block_b = [tile.depth, columns] if sideways else [columns, tile.depth]
    blocks = [tile.rows, tile.depth], block_b, [tile.rows, piece]
    return _ProductPlan(kernel, scaling, (min(tiles, processors(device)),), *blocks, constants)


def _run(
    plan: _ProductPlan,
    a: Tensor,
    b: Tensor,
    inv_scale_a: Tensor,
    inv_scale_b: Tensor,
    out: Tensor,
    bias: Tensor | None,
) -> Tensor:
    """Launch the kernel of a plan. It writes to ``out``, which is returned."""
    (m, k), n = a.shape, b.shape[0]
    b = b.t() if plan.constants["SIDEWAYS"] else b
    scales: dict[str, Any] = {}
    if plan.scaling.in_blocks:
        if plan.scaling is Scaling.BLOCKWISE_1D:
            inv_scale_b = column_major(inv_scale_b)
        scales["a_row_stride"], scales["a_block_stride"] = inv_scale_a.stride()
        scales["b_row_stride"], scales["b_block_stride"] = inv_scale_b.stride()
    else:
        inv_scale_a, inv_scale_b = inv_scale_a.contiguous(), inv_scale_b.contiguous()
    with on_device_of(a):
        plan.kernel[plan.programs](
            a=TensorDescriptor(aligned(a), [m, k], [k, 1], plan.block_a),
            b=TensorDescriptor(aligned(b), list(b.shape), [b.shape[1], 1], plan.block_b),
            out=TensorDescriptor(out, [m, n], [n, 1], plan.block_out),
            inv_scale_a=inv_scale_a,
            inv_scale_b=inv_scale_b,
            bias=inv_scale_b if bias is None else bias.contiguous(),
            **scales,
            **plan.constants,
        )
    return out


def _parts(tile: Tile, scaling: Scaling, fast_accumulation: bool) -> int:
    """Return the number of parts in which a tile is computed: 1, 2 or 4. See ``products``."""
    if tile.columns <= _MOST_PROMOTED_COLUMNS or scaling is Scaling.BLOCKWISE_1D:
        return 1
    if scaling is Scaling.BLOCKWISE:
        return 4
    return 1 if fast_accumulation else 2

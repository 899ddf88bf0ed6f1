"""Scaled FP8 products of rows that are sorted by expert: each expert's rows with its weight. See ``groups``.

The forward product and dgrad are ``matmul_grouped``: for dgrad, ``b`` is the transposed copy of the weight. wgrad is
``matmul_grouped_columns``, of the transposed copies of output gradient and input.

These twins loop over the experts on the host. The kernels in ``triton`` do not read ``offsets`` on the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8dist_kernels import BLOCK, MX_BLOCK
from fp8dist_kernels.reference.casts import TOKEN_ALIGNMENT
from fp8dist_kernels.reference.groups import require_groups, rows_of
from fp8dist_kernels.reference.matmuls import ALIGNMENT, Scaling, multiply_reference


def matmul_grouped(
    a: Tensor,
    b: Tensor,
    inv_scale_a: Tensor,
    inv_scale_b: Tensor,
    offsets: Tensor,
    out_dtype: torch.dtype,
    fast_accumulation: bool,
    bias: Tensor | None = None,
) -> Tensor:
    """Return [tokens, n]: for each expert e, ``(a * inv_scale_a) @ (b[e] * inv_scale_b[e]).T + bias[e]`` of its rows.

    Rows of no expert are 0, without bias.

    Args:
        a: FP8 [tokens, k] contiguous, sorted by expert.
        b: FP8 [E, n, k] contiguous. n and k are multiples of 16.
        inv_scale_a, inv_scale_b: float32: [E] and [E] (per tensor of an expert), [tokens, 1] and [E, n, 1] (per row),
            or [tokens, ceil(k / 128)] with [E, ceil(n / 128), ceil(k / 128)] (1 x 128 by 128 x 128) or
            [E, n, ceil(k / 128)] (1 x 128 both). Any strides. For MX E8M0 [tokens, k / 32] and [E, n, k / 32].
        offsets: int32[E], see ``groups``.
        out_dtype, fast_accumulation: as in ``torch_matmuls.matmul_torch``.
        bias: [E, n] of any float dtype.

    Raises:
        ValueError: layouts, alignment or scales that do not fit.
    """
    scaling = grouped_scaling_of(a, b, inv_scale_a, inv_scale_b, offsets, bias)
    out = torch.zeros(len(a), b.shape[1], dtype=out_dtype, device=a.device)
    for index, (group, _, _) in enumerate(rows_of(offsets, len(a))):
        scale_a = inv_scale_a[index] if scaling is Scaling.TENSORWISE else inv_scale_a[group]
        added = None if bias is None else bias[index]
        out[group] = multiply_reference(
            scaling, a[group], b[index], scale_a, inv_scale_b[index], out_dtype, fast_accumulation, added
        )
    return out


def matmul_grouped_columns(
    a: Tensor,
    b: Tensor,
    inv_scale_a: Tensor,
    inv_scale_b: Tensor,
    offsets: Tensor,
    out_dtype: torch.dtype,
    fast_accumulation: bool,
) -> Tensor:
    """Return [E, n, k]: for each expert, ``a @ b.T`` over its own columns, dequantised. Zeros for one without rows.

    Args:
        a: FP8 [n, columns] contiguous: a transposed copy of ``quantize_grouped``. n is a multiple of 16.
        b: FP8 [k, columns] likewise, of the same offsets. k is a multiple of 16.
        inv_scale_a, inv_scale_b: float32: [E] and [E] (per tensor of an expert), [E, n, 1] and [E, k, 1] (per row), or
            [n, blocks] and [k, blocks] (1 x 128), as the cast returns them. Any strides. For MX E8M0 [n, columns / 32]
            and [k, columns / 32].
        offsets: int32[E] of the rows, see ``groups``.

    Raises:
        ValueError: layouts, alignment or scales that do not fit.
    """
    scaling = column_scaling_of(a, b, inv_scale_a, inv_scale_b, offsets)
    out = torch.zeros(len(offsets), len(a), len(b), dtype=out_dtype, device=a.device)
    multiple = MX_BLOCK if scaling is Scaling.MX else TOKEN_ALIGNMENT
    for index, (_, column, block) in enumerate(rows_of(offsets, None, multiple)):
        wide = slice(column.start, -(-column.stop // multiple) * multiple)
        if scaling is Scaling.MX:
            block = slice(wide.start // MX_BLOCK, wide.stop // MX_BLOCK)
        of = (slice(None), block) if scaling.in_blocks or scaling is Scaling.MX else index
        out[index] = multiply_reference(
            scaling, a[:, wide], b[:, wide], inv_scale_a[of], inv_scale_b[of], out_dtype, fast_accumulation, None
        )
    return out


def grouped_scaling_of(
    a: Tensor, b: Tensor, inv_scale_a: Tensor, inv_scale_b: Tensor, offsets: Tensor, bias: Tensor | None
) -> Scaling:
    """Check the arguments of ``matmul_grouped``, and return the scaling that the shapes of the scales imply."""
    require_groups(offsets, a.device)
    tokens, groups = len(a), len(offsets)
    if a.ndim != 2 or b.ndim != 3 or len(b) != groups or a.shape[1] != b.shape[2]:
        raise ValueError(f"expected a [tokens, k] and b [{groups}, n, k], got {tuple(a.shape)} and {tuple(b.shape)}")
    n, k = b.shape[1:]
    _require_operands(a, b, inv_scale_a, inv_scale_b, (n, k))
    if bias is not None and (bias.shape != (groups, n) or not bias.is_floating_point()):
        raise ValueError(f"bias must be floating point [{groups}, {n}], got {bias.dtype} {tuple(bias.shape)}")
    blocks = -(-k // BLOCK)
    kinds = {
        Scaling.TENSORWISE: ((groups,), (groups,)),
        Scaling.ROWWISE: ((tokens, 1), (groups, n, 1)),
        Scaling.BLOCKWISE: ((tokens, blocks), (groups, -(-n // BLOCK), blocks)),
        Scaling.BLOCKWISE_1D: ((tokens, blocks), (groups, n, blocks)),
    }
    if inv_scale_a.dtype == torch.float8_e8m0fnu:
        kinds = {Scaling.MX: ((tokens, k // MX_BLOCK), (groups, n, k // MX_BLOCK))}
        _require_whole_blocks(k)
    return _kind(kinds, inv_scale_a, inv_scale_b)


def column_scaling_of(a: Tensor, b: Tensor, inv_scale_a: Tensor, inv_scale_b: Tensor, offsets: Tensor) -> Scaling:
    """Check the arguments of ``matmul_grouped_columns``, and return the scaling that the shapes imply."""
    require_groups(offsets, a.device)
    groups = len(offsets)
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1] or a.shape[1] % ALIGNMENT:
        raise ValueError(f"expected transposed copies of one length, got {tuple(a.shape)} and {tuple(b.shape)}")
    _require_operands(a, b, inv_scale_a, inv_scale_b, (len(a), len(b)))
    kinds = {
        Scaling.TENSORWISE: ((groups,), (groups,)),
        Scaling.ROWWISE: ((groups, len(a), 1), (groups, len(b), 1)),
        Scaling.BLOCKWISE_1D: ((len(a), inv_scale_a.shape[-1]), (len(b), inv_scale_a.shape[-1])),
    }
    if inv_scale_a.dtype == torch.float8_e8m0fnu:
        blocks = a.shape[1] // MX_BLOCK
        kinds = {Scaling.MX: ((len(a), blocks), (len(b), blocks))}
        _require_whole_blocks(a.shape[1])
    return _kind(kinds, inv_scale_a, inv_scale_b)


def _require_operands(a: Tensor, b: Tensor, inv_scale_a: Tensor, inv_scale_b: Tensor, aligned: tuple[int, int]) -> None:
    if not (a.is_contiguous() and b.is_contiguous()):
        raise ValueError("FP8 operands must be contiguous with the contracted dim last")
    if inv_scale_a.dtype != inv_scale_b.dtype or inv_scale_a.dtype not in (torch.float32, torch.float8_e8m0fnu):
        raise ValueError(
            f"inverse scales must be float32, or E8M0 for MX, got {inv_scale_a.dtype} and {inv_scale_b.dtype}"
        )
    if any(size % ALIGNMENT for size in aligned):
        raise ValueError(f"grouped FP8 products need n and k in multiples of {ALIGNMENT}, got {aligned}")


def _require_whole_blocks(length: int) -> None:
    if length % MX_BLOCK:
        raise ValueError(f"MX products contract multiples of {MX_BLOCK}, got {length}")


def _kind(
    kinds: dict[Scaling, tuple[tuple[int, ...], tuple[int, ...]]], inv_scale_a: Tensor, inv_scale_b: Tensor
) -> Scaling:
    shapes = tuple(inv_scale_a.shape), tuple(inv_scale_b.shape)
    for scaling, expected in kinds.items():
        if shapes == expected:
            return scaling
    wanted = ", or ".join(f"{of_a} and {of_b}" for of_a, of_b in kinds.values())
    raise ValueError(f"inverse scales of shapes {shapes[0]} and {shapes[1]}: expected {wanted}")

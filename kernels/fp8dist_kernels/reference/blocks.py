"""FP8 casts with many scales: one per row, or one per block of 128, each from its own amax.

The transposed copy is cast separately: a product contracts over the copy's last dim, and scales may change along this
dim only at block boundaries. So, except for square blocks, the bytes of the transposed copy are not the transpose of
the row-major copy's bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fp8dist_kernels import BLOCK
from fp8dist_kernels.reference.casts import padded_transpose, scaled
from fp8dist_kernels.scaling import scale_from_amax

BLOCK_SHAPES = ((1, BLOCK), (BLOCK, BLOCK))

_MAGNITUDE = 0x7FFFFFFF

Copies = tuple[Tensor, Tensor, Tensor, Tensor]


def quantize_rowwise(x: Tensor, dtype: torch.dtype, *, power_of_two: bool, rows: bool, columns: bool) -> Copies:
    """Cast with one scale for each row of each copy.

    A scale is ``scale_from_amax`` of its row with margin 0, or 1 where the row's amax is 0, Inf or NaN. Inf and NaN
    become NaN.

    Args:
        x: [tokens, features], any float dtype, any strides.
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        power_of_two: round scales down to powers of two.
        rows: write the row-major copy, with one scale per token.
        columns: write the transposed copy, with one scale per feature.

    Returns:
        (row-major fp8 [tokens, features], its inv_scale float32 [tokens, 1],
        transposed fp8 [features, tokens rounded up to 16 with zeros], its inv_scale float32 [features, 1]), all
        contiguous. Empty tensors for a copy that was not requested.
    """
    tokens, features = x.shape
    row_major = _cast(x, dtype, (1, max(1, features)), (tokens, 1), power_of_two) if rows else None
    transposed = _cast(x, dtype, (max(1, tokens), 1), (1, features), power_of_two) if columns else None
    return _copies(x, dtype, row_major, transposed)


def quantize_blocks(
    x: Tensor, dtype: torch.dtype, *, block: tuple[int, int], power_of_two: bool, rows: bool, columns: bool
) -> Copies:
    """Cast with one scale for each block of each copy. Blocks at the edges may be smaller.

    Args:
        x: as there, or the weights of experts [E, tokens, features], which are cast one by one. All results then have
            E in front.
        block: (1, 128) or (128, 128): rows and columns of a block, in either copy.

    The other arguments are those of ``quantize_rowwise``.

    Returns:
        As ``quantize_rowwise``, except for the scales. (1, 128): float32 [tokens, ceil(features / 128)] and
        [features, ceil(tokens / 128)], both the transpose of contiguous memory, as GEMMs expect them.
        (128, 128): contiguous [ceil(tokens / 128), ceil(features / 128)] and its transpose, also contiguous.

    Raises:
        ValueError: any other block.
    """
    require_block(block)
    if x.ndim == 3:
        each = [
            quantize_blocks(part, dtype, block=block, power_of_two=power_of_two, rows=rows, columns=columns)
            for part in (x if len(x) else x.new_zeros(1, *x.shape[1:]))
        ]
        fp8, inv_scale, fp8_t, inv_scale_t = (
            _stacked(parts, len(x)) if parts[0].ndim > 1 else parts[0] for parts in zip(*each)
        )
        if block == (1, BLOCK):
            # Not ``contiguous``: see ``_copies``.
            inv_scale, inv_scale_t = (
                one.mT.clone(memory_format=torch.contiguous_format).mT if wanted else one
                for one, wanted in ((inv_scale, rows), (inv_scale_t, columns))
            )
        return fp8, inv_scale, fp8_t, inv_scale_t
    height, width = block
    tokens, features = x.shape
    row_major = transposed = None
    if rows:
        row_major = _cast(x, dtype, block, (blocks_along(tokens, height), blocks_along(features, width)), power_of_two)
    if columns:
        grid = (blocks_along(tokens, width), blocks_along(features, height))
        transposed = _cast(x, dtype, (width, height), grid, power_of_two)
    fp8, inv_scale, fp8_t, inv_scale_t = _copies(x, dtype, row_major, transposed)
    if block == (1, BLOCK):
        inv_scale = inv_scale.t().contiguous().t() if rows else inv_scale
        inv_scale_t = inv_scale_t.t().contiguous().t() if columns else inv_scale_t
    return fp8, inv_scale, fp8_t, inv_scale_t


def require_block(block: tuple[int, int]) -> None:
    """Raise ValueError unless ``block`` is a supported shape."""
    if block not in BLOCK_SHAPES:
        raise ValueError(f"blocks of {block[0]}x{block[1]}; expected 1x{BLOCK} or {BLOCK}x{BLOCK}")


def blocks_along(size: int, block: int) -> int:
    """Return the number of blocks that cover ``size`` elements."""
    return -(-size // block)


def _stacked(parts: Sequence[Tensor], count: int) -> Tensor:
    """Return the first ``count`` parts as one tensor. ``torch.stack`` refuses FP8 under autocast."""
    whole = parts[0].new_empty(count, *parts[0].shape)
    for place, part in zip(whole, parts):
        place.copy_(part)
    return whole


def _cast(
    x: Tensor, dtype: torch.dtype, block: tuple[int, int], grid: tuple[int, int], power_of_two: bool
) -> tuple[Tensor, Tensor]:
    """Return (FP8 [tokens, features], inv_scale float32 [grid])."""
    tokens, features = x.shape
    bits = torch.zeros(grid[0] * block[0], grid[1] * block[1], dtype=torch.int32, device=x.device)
    bits[:tokens, :features] = x.float().view(torch.int32) & _MAGNITUDE
    one = torch.ones((), device=x.device)
    limit = torch.full((), torch.finfo(dtype).max, device=x.device)
    amax = bits.view(grid[0], block[0], grid[1], block[1]).amax((1, 3)).view(torch.float32)
    scale = scale_from_amax(amax, one, limit, 0, power_of_two)
    each = scale.repeat_interleave(block[0], 0)[:tokens].repeat_interleave(block[1], 1)[:, :features]
    return scaled(x, each, dtype).to(dtype).contiguous(), torch.reciprocal(scale)


def _copies(
    x: Tensor, dtype: torch.dtype, row_major: tuple[Tensor, Tensor] | None, transposed: tuple[Tensor, Tensor] | None
) -> Copies:
    nothing = x.new_empty(0, dtype=dtype), x.new_empty(0, dtype=torch.float32)
    if transposed is not None:
        fp8, inv_scale = transposed
        # ``contiguous`` would keep odd strides of dims of size 1.
        transposed = padded_transpose(fp8), inv_scale.t().clone(memory_format=torch.contiguous_format)
    return *(row_major or nothing), *(transposed or nothing)

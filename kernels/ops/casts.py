"""High precision to FP8: saturating cast with a given scale, row-major and transposed."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["CPU_BLOCK", "TOKEN_ALIGNMENT", "dequantize", "saturating_cast"]

TOKEN_ALIGNMENT = 16
"""FP8 GEMMs on CUDA contract over multiples of 16. Only the transposed copy has tokens as the
contracted dim, so only it is padded (with zeros, which add nothing to a product)."""

CPU_BLOCK = 1 << 17
"""Elements that are cast at a time on a CPU."""


def saturating_cast(x: Tensor, scale: Tensor, dtype: torch.dtype, rows: bool, columns: bool) -> tuple[Tensor, Tensor]:
    """``x * scale`` in float32, rounded to nearest even into FP8.

    Finite values beyond the format saturate. Inf and NaN become NaN in either format: a loss
    scaler or a loss guard must see what it would have seen without FP8.

    Args:
        x: [tokens, features], any float dtype, any strides.
        scale: 0-d float32.
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        rows: whether to write the row-major copy.
        columns: whether to write the transposed copy.

    Returns:
        (row-major [tokens, features], transposed [features, tokens rounded up to 16]), both
        contiguous; an empty tensor for one that was not asked for.
    """
    if x.is_cuda or x.numel() <= CPU_BLOCK:
        fp8 = _scaled(x, scale, dtype).to(dtype).contiguous()
    else:  # The float32 copies of a block fit a cache, and take no memory to speak of.
        fp8 = torch.empty(x.shape, dtype=dtype, device=x.device)
        tokens = max(1, CPU_BLOCK // x.shape[1])
        for block, target in zip(x.split(tokens), fp8.split(tokens)):
            target.copy_(_scaled(block, scale, dtype))
    nothing = fp8.new_empty(0)
    return (
        fp8 if rows else nothing,
        _padded_transpose(fp8) if columns else nothing,
    )


def _scaled(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    limit = torch.finfo(dtype).max
    return torch.where(x.isinf(), torch.nan, torch.mul(x.float(), scale).clamp_(-limit, limit))


def dequantize(fp8: Tensor, inv_scale: Tensor) -> Tensor:
    """FP8 back to float32: ``fp8 * inv_scale``. Same shape."""
    return fp8.float() * inv_scale


def _padded_transpose(fp8: Tensor) -> Tensor:
    tokens, features = fp8.shape
    padding = -tokens % TOKEN_ALIGNMENT
    if padding == 0:
        return fp8.t().contiguous()
    transposed = fp8.new_zeros(features, tokens + padding)
    transposed[:, :tokens] = fp8.t()
    return transposed

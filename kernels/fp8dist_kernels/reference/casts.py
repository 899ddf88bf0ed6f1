"""High precision to FP8: saturating cast with a given scale, row-major and transposed."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8dist_kernels.reference.magnitude import amax_bits, record_amax
from fp8dist_kernels.scaling import scale_from_amax

__all__ = [
    "CPU_BLOCK",
    "TOKEN_ALIGNMENT",
    "dequantize",
    "padded",
    "padded_transpose",
    "quantize",
    "saturating_cast",
    "scaled",
]

TOKEN_ALIGNMENT = 16
"""FP8 GEMMs on CUDA contract over multiples of 16. Only the transposed copy has tokens as the
contracted dim, so only it is padded (with zeros, which add nothing to a product)."""

CPU_BLOCK = 1 << 17
"""Elements that are cast at a time on a CPU."""


def quantize(
    x: Tensor,
    scale: Tensor,
    cold: Tensor,
    pending: Tensor,
    dtype: torch.dtype,
    *,
    record: bool,
    just_in_time: bool,
    margin: int,
    power_of_two: bool,
    rows: bool,
    columns: bool,
    outgrown: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Cast with a slot's scale, and record the amax in the slot.

    Args:
        x: [tokens, features], any float dtype, any strides.
        scale, cold, pending: 0-d float32, bool, float32: the places of one slot. ``pending`` may grow.
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        record: whether the amax of ``x`` goes into ``pending``; that of an empty ``x`` does not.
        just_in_time: cast with the scale of ``x``'s own amax where the slot is cold (1 if that is 0 or not finite).
        margin, power_of_two: as of ``scale_from_amax``, for a scale of ``x``'s own amax.
        rows, columns: which copies to write, as of ``saturating_cast``.
        outgrown: a number above 0: cast with the scale of ``x``'s own amax also where ``x`` has outgrown the scale
            of a slot that is not cold: its amax is finite and ``amax * scale > outgrown * fp8_max``, whatever
            ``just_in_time`` says.
            Both sides are float32: the left one is a float32 product, which may be Inf; the right one is multiplied in
            float64, then rounded. The slot does not change. None: only cold slots are cast just in time.

    Returns:
        (row-major, transposed, inv_scale): the copies as of ``saturating_cast``, and a new 0-d float32.
    """
    # On the CPU the flag can be looked at, and an eval pass over hot slots need not read x twice.
    may_be_cold = just_in_time and (x.device.type != "cpu" or bool(cold))
    used = scale
    if record or may_be_cold or outgrown is not None:
        bits = amax_bits(x)
        if record:
            record_amax(bits, pending)
        amax, fp8_max = bits.view(torch.float32), torch.finfo(dtype).max
        beyond = None
        if outgrown is not None:
            above = torch.full_like(scale, outgrown * fp8_max)
            beyond = (amax * scale > above).logical_and_(amax < torch.inf).logical_and_(~cold)
            if x.device.type == "cpu" and not bool(beyond):
                beyond = None
        if may_be_cold or beyond is not None:
            current = scale_from_amax(
                amax, torch.ones_like(scale), torch.full_like(scale, fp8_max), margin, power_of_two
            )
            if may_be_cold:
                used = torch.where(cold, current, used)
            if beyond is not None:
                used = torch.where(beyond, current, used)
    row_major, transposed = saturating_cast(x, used, dtype, rows, columns)
    return row_major, transposed, torch.reciprocal(used)


def padded(tokens: int) -> int:
    """Tokens as the transposed copy has them: rounded up to ``TOKEN_ALIGNMENT``."""
    return -(-tokens // TOKEN_ALIGNMENT) * TOKEN_ALIGNMENT


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
        fp8 = scaled(x, scale, dtype).to(dtype).contiguous()
    else:  # The float32 copies of a block fit a cache, and take no memory to speak of.
        fp8 = torch.empty(x.shape, dtype=dtype, device=x.device)
        tokens = max(1, CPU_BLOCK // x.shape[1])
        for block, target in zip(x.split(tokens), fp8.split(tokens)):
            target.copy_(scaled(block, scale, dtype))
    nothing = fp8.new_empty(0)
    return (
        fp8 if rows else nothing,
        padded_transpose(fp8) if columns else nothing,
    )


def scaled(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``x * scale`` in float32, within what ``dtype`` holds, and NaN where ``x`` is Inf. ``scale``: broadcastable."""
    limit = torch.finfo(dtype).max
    x = x.float()
    return torch.where(x.isinf(), torch.nan, torch.mul(x, scale).clamp_(-limit, limit))


def dequantize(fp8: Tensor, inv_scale: Tensor) -> Tensor:
    """FP8 back to float32: ``fp8 * inv_scale``. Same shape."""
    return fp8.float() * inv_scale


def padded_transpose(fp8: Tensor) -> Tensor:
    """fp8 [tokens, features] as contiguous [features, tokens rounded up to 16 with zeros]."""
    tokens, features = fp8.shape
    padding = -tokens % TOKEN_ALIGNMENT
    if padding == 0:
        return fp8.t().contiguous()
    transposed = fp8.new_zeros(features, tokens + padding)
    transposed[:, :tokens] = fp8.t()
    return transposed

"""Casts from high precision to FP8: saturating, with a given scale, row-major and transposed."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8dist_kernels.reference.magnitude import amax_bits, record_amax
from fp8dist_kernels.scaling import scale_from_amax

TOKEN_ALIGNMENT = 16
"""FP8 GEMMs on CUDA need the contracted dim in multiples of 16. Only the transposed copy contracts over tokens, so only
this copy is padded, with zeros, which add nothing to a product."""

SUMMED = 128
"""Tokens that ``column_sums`` adds to one number: as many as a tile of the Triton cast has."""

_ADDED = 32

CPU_BLOCK = 1 << 17
"""Elements cast at a time on a CPU."""


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
    sums: Tensor | None = None,
    scratch: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Cast with a slot's scale, and record the amax in the slot.

    Args:
        x: [tokens, features], any float dtype, any strides.
        scale, cold, pending: 0-d float32, bool, float32: views of one slot. ``pending`` may grow.
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        record: record the amax of ``x`` in ``pending``. An empty ``x`` records nothing.
        just_in_time: if the slot is cold, cast with the scale of ``x``'s own amax (1 if the amax is 0 or not finite).
        margin, power_of_two: as in ``scale_from_amax``, for a scale of ``x``'s own amax.
        rows, columns: the copies to write, as in ``saturating_cast``.
        outgrown: a number above 0, or None: only cold slots are cast just in time. A number also casts with the scale
            of ``x``'s own amax if the slot is not cold and ``x`` has outgrown its scale: the amax is finite and
            ``amax * scale > outgrown * fp8_max``. This does not depend on ``just_in_time``. Both sides are float32: the
            left side is a float32 product, which may be Inf; the right side is multiplied in float64, then rounded. The
            slot does not change.
        sums: [features], any float dtype, for the result of ``add_up``.
        scratch: int32[4], zeros, for a slot that is expected to be hot: lets a GPU do with one launch. Zeros again
            afterwards. No other cast may use it at the same time. Not used here.

    Returns:
        (row-major, transposed, inv_scale): the copies as in ``saturating_cast``, and a new 0-d float32.
    """
    may_be_cold = just_in_time and _may_be(cold)
    bits = amax_bits(x) if record or may_be_cold or outgrown is not None else None
    used = _used(bits, scale, cold, pending, dtype, record, may_be_cold, margin, power_of_two, outgrown)
    row_major, transposed = saturating_cast(x, used, dtype, rows, columns)
    if sums is not None:
        sums.copy_(add_up(x, sums.dtype))
    return row_major, transposed, torch.reciprocal(used)


def choose_scale(
    amax: Tensor | None,
    scale: Tensor,
    cold: Tensor,
    pending: Tensor,
    dtype: torch.dtype,
    *,
    record: bool,
    just_in_time: bool,
    margin: int,
    power_of_two: bool,
    outgrown: float | None = None,
) -> Tensor:
    """Do the part of ``quantize`` that needs no elements: record ``amax``, and return the scale to cast with.

    Args:
        amax: 0-d, the amax of a tensor that is not empty. None: nothing depends on it.

    Returns:
        float32[2]: the scale and its inverse, both new.
    """
    bits = None if amax is None else amax_bits(amax)
    used = _used(bits, scale, cold, pending, dtype, record, just_in_time, margin, power_of_two, outgrown)
    return torch.stack([used, torch.reciprocal(used)])


def _may_be(cold: Tensor) -> bool:
    """True unless the host can tell that the slot is hot. A CPU flag is cheap to read, and saves an eval pass over hot
    slots a second read of x."""
    return cold.device.type != "cpu" or bool(cold)


def _used(
    bits: Tensor | None,
    scale: Tensor,
    cold: Tensor,
    pending: Tensor,
    dtype: torch.dtype,
    record: bool,
    just_in_time: bool,
    margin: int,
    power_of_two: bool,
    outgrown: float | None,
) -> Tensor:
    """Record the amax ``bits``, and return the scale to cast with: ``scale`` itself, or a new 0-d tensor."""
    if bits is None:
        return scale
    if record:
        record_amax(bits, pending)
    used, amax, fp8_max = scale, bits.view(torch.float32), torch.finfo(dtype).max
    beyond = None
    if outgrown is not None:
        above = torch.full_like(scale, outgrown * fp8_max)
        beyond = (amax * scale > above).logical_and_(amax < torch.inf).logical_and_(~cold)
        if beyond.device.type == "cpu" and not bool(beyond):
            beyond = None
    if just_in_time or beyond is not None:
        current = scale_from_amax(amax, torch.ones_like(scale), torch.full_like(scale, fp8_max), margin, power_of_two)
        if just_in_time:
            used = torch.where(cold, current, used)
        if beyond is not None:
            used = torch.where(beyond, current, used)
    return used


def padded(tokens: int) -> int:
    """Return ``tokens`` rounded up to ``TOKEN_ALIGNMENT``, the row length of the transposed copy."""
    return -(-tokens // TOKEN_ALIGNMENT) * TOKEN_ALIGNMENT


def saturating_cast(x: Tensor, scale: Tensor, dtype: torch.dtype, rows: bool, columns: bool) -> tuple[Tensor, Tensor]:
    """Cast ``x * scale`` in float32 to FP8, rounding to nearest even.

    Finite values beyond the format saturate. Inf and NaN become NaN in either format: a loss scaler or a loss guard
    must see the same as without FP8.

    Args:
        x: [tokens, features], any float dtype, any strides.
        scale: 0-d float32.
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        rows: write the row-major copy.
        columns: write the transposed copy.

    Returns:
        (row-major [tokens, features], transposed [features, tokens rounded up to 16]), both contiguous. An empty tensor
        for a copy that was not requested.
    """
    if x.is_cuda or x.numel() <= CPU_BLOCK:
        fp8 = scaled(x, scale, dtype).to(dtype).contiguous()
    else:  # In blocks: their float32 copies fit in cache and take little memory.
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
    """Return ``x * scale`` in float32, clamped to the range of ``dtype``; NaN where ``x`` is Inf."""
    limit = torch.finfo(dtype).max
    x = x.float()
    return torch.where(x.isinf(), torch.nan, torch.mul(x, scale).clamp_(-limit, limit))


def dequantize(fp8: Tensor, inv_scale: Tensor) -> Tensor:
    """Return FP8 as float32: ``fp8 * inv_scale``. Same shape."""
    return fp8.float() * inv_scale


def column_sums(x: Tensor) -> Tensor:
    """Return float32 [ceil(tokens / 128), features]: the sums of each 128 rows of x [tokens, features].

    Added in an order that GPUs can follow, so that all backends give the same bits: four rows as ``(a + b) + (c + d)``,
    then the 32 results as in ``_halved``. Rows beyond the last count as zeros.
    """
    tokens, features = x.shape
    parts = -(-tokens // SUMMED)
    rows = torch.nn.functional.pad(x.float(), (0, 0, 0, parts * SUMMED - tokens)).view(parts, SUMMED // 4, 4, features)
    a, b, c, d = rows.unbind(2)
    return _halved((a + b) + (c + d))


def add_up(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return [features] in ``dtype``: the sums of the columns of x [tokens, features], added in float32.

    32 at a time of the ``column_sums`` are added as in ``_halved``; these results are added one after another to zero.
    """
    sums = column_sums(x)
    total = sums.new_zeros(sums.shape[1])
    for each in sums.split(_ADDED):
        total += _halved(torch.nn.functional.pad(each, (0, 0, 0, _ADDED - len(each))))
    return total.to(dtype)


def _halved(x: Tensor) -> Tensor:
    """Return the sums of 32 rows [..., 32, features]: the second half is added to the first, until one row is left."""
    while x.shape[-2] > 1:
        half = x.shape[-2] // 2
        x = x[..., :half, :] + x[..., half:, :]
    return x.squeeze(-2)


def transpose(fp8: Tensor) -> Tensor:
    """Return FP8 [..., tokens, features], any strides, as a new contiguous [..., features, tokens], byte by byte."""
    return fp8.mT.clone(memory_format=torch.contiguous_format)


def padded_transpose(fp8: Tensor) -> Tensor:
    """Return fp8 [tokens, features] transposed: contiguous [features, tokens rounded up to 16 with zeros]."""
    tokens, features = fp8.shape
    padding = -tokens % TOKEN_ALIGNMENT
    if padding == 0:
        return fp8.t().contiguous()
    transposed = fp8.new_zeros(features, tokens + padding)
    transposed[:, :tokens] = fp8.t()
    return transposed

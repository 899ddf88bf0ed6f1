"""FP8 casts in one pass: row-major copy, transposed copy and amax from a single read."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8dist_kernels.reference.casts import padded
from fp8dist_kernels.triton.launching import on_device_of
from fp8dist_kernels.triton.magnitude import MOST_PARTS, grow, magnitude_bits, newest, partial_amaxes
from fp8dist_kernels.triton.scaling import inverse, scale_from_amax
from fp8dist_kernels.triton.strips import Page, load_strips, scaled, store_flipped, store_straight

__all__ = ["quantize"]

_TALL, _WIDE = 128, 64  # Whole 128-byte lines of the transposed copy; two tiles side by side fill the row-major ones.
_FLAT_TALL, _FLAT_WIDE = 32, 256  # Without a transposed copy: a warp reads 512 contiguous bytes of bf16.
_WARPS = 8  # 32 elements and 64 registers per thread: a multiprocessor runs four tiles at a time.


@triton.jit
def _largest(parts, part_count, MOST_PARTS: tl.constexpr):
    """Return the float32 amax of ``parts``, int32 amax bits."""
    part = tl.arange(0, MOST_PARTS)
    return tl.max(tl.load(parts + part, mask=part < part_count, other=0), 0).to(tl.float32, bitcast=True)


# Slots have any address in their arena: compile no variants for 16-byte alignment.
@triton.jit(do_not_specialize_on_alignment=["scale", "cold", "pending", "parts", "inv_scale"])
def _cast_kernel(
    x,  # [height, width], strides as given
    straight,  # fp8 [height, straight_width]
    flipped,  # fp8 [width, flipped_width]
    scale,  # float32[1]
    cold,  # bool[1]
    pending,  # int32[1], grows
    parts,  # int32[part_count], part_count <= MOST_PARTS: amaxes of parts of x; read if the slot is cold, or OUTGROWN
    inv_scale,  # float32[1], written
    height,
    width,
    row_stride,
    column_stride,
    straight_width,
    flipped_width,
    part_count,
    outgrown_above,  # float32: x has outgrown its scale if amax * scale is above this
    FP8_MAX: tl.constexpr,
    MARGIN: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    STRAIGHT: tl.constexpr,
    FLIPPED: tl.constexpr,
    RECORD: tl.constexpr,
    JUST_IN_TIME: tl.constexpr,
    OUTGROWN: tl.constexpr,
    MOST_PARTS: tl.constexpr,
    TALL: tl.constexpr,
    WIDE: tl.constexpr,
    INDEX: tl.constexpr,
):
    across = tl.cdiv(straight_width, WIDE)
    top = (tl.program_id(0) // across).to(INDEX) * TALL
    left = (tl.program_id(0) % across).to(INDEX) * WIDE
    a, b, c, d = load_strips(x, top, left, height, width, row_stride, column_stride, TALL, WIDE, INDEX)
    if RECORD:
        seen = newest(pending)
    used = tl.load(scale)
    if OUTGROWN:
        amax = _largest(parts, part_count, MOST_PARTS)
        # Comparisons with NaN are false.
        is_cold = tl.load(cold)
        fresh = (amax < float("inf")) & (amax * used > outgrown_above) & (is_cold == 0)
        if JUST_IN_TIME:
            fresh = fresh | is_cold
        if fresh:
            used = scale_from_amax(amax, 1.0, FP8_MAX, MARGIN, POWER_OF_TWO)
    elif JUST_IN_TIME:  # noqa: SIM102 - known at compile time; the inner condition is not.
        if tl.load(cold):
            amax = _largest(parts, part_count, MOST_PARTS)
            used = scale_from_amax(amax, 1.0, FP8_MAX, MARGIN, POWER_OF_TWO)
    if tl.program_id(0) == 0:
        tl.store(inv_scale, inverse(used))
    if RECORD:
        upper = tl.maximum(magnitude_bits(a), magnitude_bits(b))
        lower = tl.maximum(magnitude_bits(c), magnitude_bits(d))
        grow(pending, seen, tl.max(tl.max(tl.maximum(upper, lower), 1), 0))
    a, b, c, d = scaled(a, used), scaled(b, used), scaled(c, used), scaled(d, used)
    if STRAIGHT:
        store_straight(straight, a, b, c, d, top, left, height, straight_width, TALL, WIDE, INDEX)
    if FLIPPED:
        store_flipped(flipped, a, b, c, d, top, left, width, flipped_width, TALL, WIDE, INDEX)


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
    """See ``reference.casts.quantize``."""
    tokens, features = x.shape
    row_major = torch.empty((tokens, features) if rows else 0, dtype=dtype, device=x.device)
    transposed = torch.empty((features, padded(tokens)) if columns else 0, dtype=dtype, device=x.device)
    inv_scale = torch.empty_like(scale)
    page = Page.of(x)
    straight, flipped = page.sides(row_major, transposed)
    tall, wide = (_TALL, _WIDE) if flipped.numel() else (_FLAT_TALL, _FLAT_WIDE)
    fp8_max = torch.finfo(dtype).max
    with on_device_of(x):
        if outgrown is not None:
            parts = partial_amaxes(x)
        else:
            parts = partial_amaxes(x, cold) if just_in_time else pending.view(torch.int32)
        _cast_kernel[(page.tiles(tall, wide),)](
            page.x,
            straight,
            flipped,
            scale,
            cold,
            pending.view(torch.int32),
            parts,
            inv_scale,
            *page.lying,
            parts.numel(),
            # A runtime argument, so that one kernel serves all values. 0.0 is not read.
            0.0 if outgrown is None else outgrown * fp8_max,
            FP8_MAX=fp8_max,
            MARGIN=margin,
            POWER_OF_TWO=power_of_two,
            STRAIGHT=straight.numel() > 0,
            FLIPPED=flipped.numel() > 0,
            RECORD=record and x.numel() > 0,
            JUST_IN_TIME=just_in_time,
            OUTGROWN=outgrown is not None,
            MOST_PARTS=MOST_PARTS,
            TALL=tall,
            WIDE=wide,
            INDEX=page.index(tall, wide),
            num_warps=_WARPS,
        )
    return row_major, transposed, inv_scale

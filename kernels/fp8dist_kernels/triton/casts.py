"""FP8 casts in one pass: row-major copy, transposed copy and amax from a single read.

``strips`` explains straight and flipped copies, strips and pages; ``arrays`` a slot's scale, cold and pending. INDEX is
the integer type of offsets within a tile. What *grows* is set to the maximum of itself and a new value.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8dist_kernels.reference.casts import SUMMED, padded
from fp8dist_kernels.triton.launching import PLANS, on_device_of
from fp8dist_kernels.triton.magnitude import MOST_PARTS, grow, joint_bits, magnitude_bits, newest, partial_amaxes
from fp8dist_kernels.triton.scaling import inverse, scale_from_amax
from fp8dist_kernels.triton.strips import Page, load_strips, page_of, scaled, store_flipped, store_straight

_TALL, _WIDE = 128, 64  # Whole 128-byte lines of the transposed copy; two tiles side by side fill the row-major ones.
_BYTES_TALL, _BYTES_WIDE = 128, 128  # A transposition of bytes: whole 128-byte lines are read and written.
_FLAT_TALL, _FLAT_WIDE = 32, 256  # Without a transposed copy: a warp reads 512 contiguous bytes of bf16.
_ADDED_WIDE = 32  # Columns per program of ``_add_up_kernel``.
_WARPS = 8  # 32 elements and 64 registers per thread: a multiprocessor runs four tiles at a time.


@triton.jit
def _halved(x, WIDE: tl.constexpr):
    """Return float32 [WIDE]: the sums of 32 rows, added in the order of ``reference.casts._halved``. The order of
    Triton's own ``tl.sum`` depends on the layout of the threads."""
    x, y = tl.split(tl.permute(tl.reshape(x, (2, 16, WIDE)), (1, 2, 0)))
    x, y = tl.split(tl.permute(tl.reshape(x + y, (2, 8, WIDE)), (1, 2, 0)))
    x, y = tl.split(tl.permute(tl.reshape(x + y, (2, 4, WIDE)), (1, 2, 0)))
    x, y = tl.split(tl.permute(tl.reshape(x + y, (2, 2, WIDE)), (1, 2, 0)))
    x, y = tl.split(tl.permute(tl.reshape(x + y, (2, WIDE)), (1, 0)))
    return x + y


@triton.jit
def _store_sums(sums, a, b, c, d, top, left, width, TALL: tl.constexpr, WIDE: tl.constexpr, INDEX: tl.constexpr):
    """Store the column sums of a tile of 128 rows, given as strips, in the order of ``reference.casts.column_sums``."""
    tl.static_assert(TALL == 128)
    summed = (a.to(tl.float32) + b.to(tl.float32)) + (c.to(tl.float32) + d.to(tl.float32))
    column = left + tl.arange(0, WIDE).to(INDEX)
    tl.store(sums + (top // TALL).to(tl.int64) * width + column, _halved(summed, WIDE), mask=column < width)


@triton.jit
def _largest(parts, part_count, MOST_PARTS: tl.constexpr):
    """Return the float32 maximum of ``parts``: int32[part_count], amax bits."""
    part = tl.arange(0, MOST_PARTS)
    return tl.max(tl.load(parts + part, mask=part < part_count, other=0), 0).to(tl.float32, bitcast=True)


@triton.jit
def _amax_of_cold(
    x, parts, part_count, height, width, row_stride, column_stride,
    JOINTLY: tl.constexpr, MOST_PARTS: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    """Return the float32 amax of x, whose slot is cold: from ``parts``, or, if JOINTLY, measured by all programs."""
    if JOINTLY:
        bits = joint_bits(x, parts, height, width, row_stride, column_stride, TALL // 4, WIDE, INDEX)
        amax = bits.to(tl.float32, bitcast=True)
    else:
        amax = _largest(parts, part_count, MOST_PARTS)
    return amax


# Slots have any address in their arena: compile no variants for 16-byte alignment.
@triton.jit(do_not_specialize_on_alignment=["scale", "cold", "pending", "parts", "inv_scale"])
def _cast_kernel(
    x,  # [height, width], strides as given
    straight,  # fp8 [height, straight_width]
    flipped,  # fp8 [width, flipped_width]
    scale,  # float32[1]
    cold,  # bool[1]
    pending,  # int32[1], grows
    parts,  # int32[part_count], part_count <= MOST_PARTS: amaxes of parts of x; read if the slot is cold, or OUTGROWN.
    # JOINTLY: int32[4], the scratch of ``joint_bits``, for a cold slot.
    inv_scale,  # float32[1], written
    sums,  # float32 [height / TALL, width], written if SUMS
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
    SUMS: tl.constexpr,
    JOINTLY: tl.constexpr,
    MOST_PARTS: tl.constexpr,
    TALL: tl.constexpr,
    WIDE: tl.constexpr,
    INDEX: tl.constexpr,
):
    """Cast with one scale, and record the amax. A program casts one tile into both copies."""
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
            amax = _amax_of_cold(
                x, parts, part_count, height, width, row_stride, column_stride, JOINTLY, MOST_PARTS, TALL, WIDE, INDEX
            )
            used = scale_from_amax(amax, 1.0, FP8_MAX, MARGIN, POWER_OF_TWO)
    if tl.program_id(0) == 0:
        tl.store(inv_scale, inverse(used))
    if RECORD:
        upper = tl.maximum(magnitude_bits(a), magnitude_bits(b))
        lower = tl.maximum(magnitude_bits(c), magnitude_bits(d))
        grow(pending, seen, tl.max(tl.max(tl.maximum(upper, lower), 1), 0))
    if SUMS:
        _store_sums(sums, a, b, c, d, top, left, width, TALL, WIDE, INDEX)
    a, b, c, d = scaled(a, used), scaled(b, used), scaled(c, used), scaled(d, used)
    if STRAIGHT:
        store_straight(straight, a, b, c, d, top, left, height, straight_width, TALL, WIDE, INDEX)
    if FLIPPED:
        store_flipped(flipped, a, b, c, d, top, left, width, flipped_width, flipped_width, TALL, WIDE, INDEX)


@triton.jit
def _sums_kernel(
    x,  # [height, width], strides as given
    sums,  # float32 [height / TALL, width], written
    height,
    width,
    row_stride,
    column_stride,
    TALL: tl.constexpr,
    WIDE: tl.constexpr,
    INDEX: tl.constexpr,
):
    """Store the column sums of each TALL rows of x, without a cast."""
    across = tl.cdiv(width, WIDE)
    top = (tl.program_id(0) // across).to(INDEX) * TALL
    left = (tl.program_id(0) % across).to(INDEX) * WIDE
    a, b, c, d = load_strips(x, top, left, height, width, row_stride, column_stride, TALL, WIDE, INDEX)
    _store_sums(sums, a, b, c, d, top, left, width, TALL, WIDE, INDEX)


@triton.jit(do_not_specialize=["count"])
def _add_up_kernel(
    sums,  # float32 [count, width]
    out,  # [width], any float dtype, written
    count,
    width,
    WIDE: tl.constexpr,
):
    """Add up the rows of ``sums``, in the order of ``reference.casts.add_up``."""
    column = tl.program_id(0) * WIDE + tl.arange(0, WIDE)
    row = tl.arange(0, 32)
    total = tl.zeros((WIDE,), tl.float32)
    for first in range(0, count, 32):
        places = sums + (first + row).to(tl.int64)[:, None] * width + column[None, :]
        inside = (first + row < count)[:, None] & (column < width)[None, :]
        total += _halved(tl.load(places, mask=inside, other=0.0), WIDE)
    tl.store(out + column, total.to(out.dtype.element_ty), mask=column < width)


@triton.jit
def _transpose_kernel(
    x,  # int8 [matrices, height, width], strides as given
    out,  # int8 [matrices, width, height]
    matrix_stride,
    height,
    width,
    row_stride,
    column_stride,
    TALL: tl.constexpr,
    WIDE: tl.constexpr,
    INDEX: tl.constexpr,
):
    """Transpose matrices of bytes. A program transposes one tile."""
    matrix = tl.program_id(1).to(tl.int64)
    across = tl.cdiv(width, WIDE)
    top = (tl.program_id(0) // across).to(INDEX) * TALL
    left = (tl.program_id(0) % across).to(INDEX) * WIDE
    a, b, c, d = load_strips(
        x + matrix * matrix_stride, top, left, height, width, row_stride, column_stride, TALL, WIDE, INDEX
    )
    out += matrix * height * width
    store_flipped(out, a, b, c, d, top, left, width, height, height, TALL, WIDE, INDEX)


@triton.jit(do_not_specialize_on_alignment=["amax", "scale", "cold", "pending"])
def _choose_kernel(
    amax,  # [1], any float dtype; read if RECORD, JUST_IN_TIME or OUTGROWN
    scale,  # float32[1]
    cold,  # bool[1]
    pending,  # int32[1], grows
    chosen,  # float32[2], written
    outgrown_above,  # float32, as in _cast_kernel
    FP8_MAX: tl.constexpr,
    MARGIN: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    RECORD: tl.constexpr,
    JUST_IN_TIME: tl.constexpr,
    OUTGROWN: tl.constexpr,
):
    """Choose the scale of a cast as ``_cast_kernel`` does, from a given amax. One program."""
    used = tl.load(scale)
    if RECORD or JUST_IN_TIME or OUTGROWN:
        bits = magnitude_bits(tl.load(amax))
        largest = bits.to(tl.float32, bitcast=True)
        fresh = (tl.load(cold) != 0) & JUST_IN_TIME
        if OUTGROWN:
            beyond = (largest < float("inf")) & (largest * used > outgrown_above)
            fresh = fresh | (beyond & (tl.load(cold) == 0))
        if fresh:
            used = scale_from_amax(largest, 1.0, FP8_MAX, MARGIN, POWER_OF_TWO)
        if RECORD:
            tl.atomic_max(pending, bits, sem="relaxed")
    tl.store(chosen, used)
    tl.store(chosen + 1, inverse(used))


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
    """See ``reference.casts.choose_scale``."""
    chosen = torch.empty(2, dtype=torch.float32, device=scale.device)
    fp8_max = torch.finfo(dtype).max
    with on_device_of(scale):
        _choose_kernel[(1,)](
            scale if amax is None else amax,
            scale,
            cold,
            pending.view(torch.int32),
            chosen,
            0.0 if outgrown is None else outgrown * fp8_max,
            FP8_MAX=fp8_max,
            MARGIN=margin,
            POWER_OF_TWO=power_of_two,
            RECORD=record and amax is not None,
            JUST_IN_TIME=just_in_time and amax is not None,
            OUTGROWN=outgrown is not None and amax is not None,
            num_warps=1,
        )
    return chosen


class CastPlan(NamedTuple):
    """The arguments of a cast's launch, except addresses and the value of ``outgrown``. All fields are on the host.
    ``programs``: the grid. ``lying``: see ``Page``. ``constants``: compile-time arguments."""

    rows: tuple[int, ...]
    columns: tuple[int, ...]
    """Shapes of the row-major and the transposed copy; (0,) for a copy that is not requested."""
    sideways: bool
    """True if the transposed copy is the straight one."""
    programs: tuple[int]
    lying: tuple[int, ...]
    constants: dict[str, Any]


@functools.lru_cache(PLANS)
def plan_of(
    shape: tuple[int, int],
    strides: tuple[int, int],
    dtype: torch.dtype,
    record: bool,
    just_in_time: bool,
    margin: int,
    power_of_two: bool,
    rows: bool,
    columns: bool,
    outgrown: bool,
    sums: bool,
    scratch: bool,
) -> CastPlan:
    """Return the plan for [tokens, features] with these strides. Other arguments as in ``quantize``; ``outgrown``:
    True if it is a number; ``sums``, ``scratch``: True if it is a tensor."""
    tokens, features = shape
    of_rows, of_columns = (shape if rows else (0,)), ((features, padded(tokens)) if columns else (0,))
    page = page_of(shape, strides)
    straight, flipped = (columns, rows) if page.on_its_side else (rows, columns)
    flipped = flipped and tokens * features > 0  # An empty x has one program, which writes only the inverse scale.
    tall, wide = (_TALL, _WIDE) if flipped else (_FLAT_TALL, _FLAT_WIDE)
    constants = {
        "FP8_MAX": torch.finfo(dtype).max,
        "MARGIN": margin,
        "POWER_OF_TWO": power_of_two,
        "STRAIGHT": straight and tokens * features > 0,
        "FLIPPED": flipped,
        "RECORD": record and tokens * features > 0,
        "JUST_IN_TIME": just_in_time,
        "OUTGROWN": outgrown,
        "SUMS": sums and flipped and not page.on_its_side,
        "JOINTLY": just_in_time and scratch and not outgrown,
        "MOST_PARTS": MOST_PARTS,
        "TALL": tall,
        "WIDE": wide,
        "INDEX": page.offset_type(tall, wide),
        "num_warps": _WARPS,
    }
    return CastPlan(tuple(of_rows), of_columns, page.on_its_side, (page.tiles(tall, wide),), page.lying, constants)


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
    """See ``reference.casts.quantize``.

    One launch casts. With ``outgrown``, a launch before it measures x. With ``just_in_time`` alone, this launch reads
    ``cold`` on the device, and measures x if the slot is cold. With ``scratch`` as well, it is left out: the programs
    of the cast measure x together if the slot is cold.

    ``sums`` take one more launch. If the tiles of the cast do not have 128 tokens, because x is transposed in memory or
    no transposed copy is requested, they take two, and a second read of x.
    """
    plan = plan_of(
        x.shape, x.stride(), dtype, record, just_in_time, margin, power_of_two, rows, columns, outgrown is not None,
        sums is not None, scratch is not None,
    )  # fmt: skip
    device = x.device
    row_major = torch.empty(plan.rows, dtype=dtype, device=device)
    transposed = torch.empty(plan.columns, dtype=dtype, device=device)
    inv_scale = torch.empty_like(scale)
    straight, flipped = (transposed, row_major) if plan.sideways else (row_major, transposed)
    bits = pending.view(torch.int32)
    above = 0.0  # Not read without ``outgrown``.
    column_parts = inv_scale if sums is None else _room_for_sums(x)
    with on_device_of(x):
        parts = bits  # Read only with ``outgrown`` or ``just_in_time``.
        if outgrown is not None:
            parts, above = partial_amaxes(x), outgrown * plan.constants["FP8_MAX"]
        elif just_in_time:
            parts = partial_amaxes(x, cold) if scratch is None else scratch
        _cast_kernel[plan.programs](
            x,
            straight,
            flipped,
            scale,
            cold,
            bits,
            parts,
            inv_scale,
            column_parts,
            *plan.lying,
            parts.numel(),
            above,  # A runtime argument, so that one kernel serves all values.
            **plan.constants,
        )
        if sums is not None:
            if not plan.constants["SUMS"]:
                _sum_columns(x, column_parts)
            _add_parts(column_parts, sums)
    return row_major, transposed, inv_scale


def add_up(x: Tensor, dtype: torch.dtype) -> Tensor:
    """See ``reference.casts.add_up``. Two launches: sums of 128 rows each, and the sum of these."""
    out, parts = torch.empty(x.shape[1], dtype=dtype, device=x.device), _room_for_sums(x)
    with on_device_of(x):
        _sum_columns(x, parts)
        _add_parts(parts, out)
    return out


def _room_for_sums(x: Tensor) -> Tensor:
    return torch.empty((-(-x.shape[0] // SUMMED), x.shape[1]), dtype=torch.float32, device=x.device)


def _sum_columns(x: Tensor, parts: Tensor) -> None:
    """Write ``reference.casts.column_sums`` of x into ``parts``."""
    if x.numel() == 0:
        return
    (tokens, features), (down, right) = x.shape, x.stride()
    page = Page(tokens, features, down, right, features, padded(tokens), False)
    _sums_kernel[(page.tiles(SUMMED, _WIDE),)](
        x, parts, *page.lying[:4], TALL=SUMMED, WIDE=_WIDE, INDEX=page.offset_type(SUMMED, _WIDE), num_warps=_WARPS
    )


def _add_parts(parts: Tensor, out: Tensor) -> None:
    count, features = parts.shape
    _add_up_kernel[(-(-features // _ADDED_WIDE),)](parts, out, count, features, WIDE=_ADDED_WIDE, num_warps=4)


def transpose(fp8: Tensor) -> Tensor:
    """See ``reference.casts.transpose``. One read and one write of each byte."""
    *leading, tokens, features = fp8.shape
    out = torch.empty((*leading, features, tokens), dtype=fp8.dtype, device=fp8.device)
    if fp8.numel() == 0:
        return out
    x = fp8 if fp8.ndim == 3 else fp8.reshape(-1, tokens, features)
    page = Page(tokens, features, x.stride(1), x.stride(2), features, tokens, False)
    with on_device_of(x):
        # As int8: the interpreter and conversions treat FP8 as numbers, and might change the bits of a NaN.
        _transpose_kernel[(page.tiles(_BYTES_TALL, _BYTES_WIDE), len(x))](
            x.view(torch.int8),
            out.view(torch.int8),
            x.stride(0),
            *page.lying[:4],
            TALL=_BYTES_TALL,
            WIDE=_BYTES_WIDE,
            INDEX=page.offset_type(_BYTES_TALL, _BYTES_WIDE),
            num_warps=_WARPS,
        )
    return out

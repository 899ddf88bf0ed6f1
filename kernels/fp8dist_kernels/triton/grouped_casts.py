"""FP8 casts of rows that are sorted by expert, without a read of ``offsets`` on the host.

The kernels call the matrix of an expert a group. EQUAL: the groups are the weights of the experts, all of one shape.
``groups`` explains offsets and the tail, ``strips`` straight and flipped copies. GROUPS is a power of two, at least
``groups``; ``slot_stride`` the stride of ``scale``, ``cold`` and ``pending``. What *grows* is set to the maximum of
itself and a new value.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8dist_kernels import BLOCK, MX_BLOCK
from fp8dist_kernels.reference.casts import TOKEN_ALIGNMENT, padded
from fp8dist_kernels.reference.grouped_casts import require_slots
from fp8dist_kernels.reference.grouped_shares import expert_of_rows
from fp8dist_kernels.reference.groups import blocks_bound, columns_bound, cut, require_groups
from fp8dist_kernels.triton import mx
from fp8dist_kernels.triton.blocks import write_flipped, write_straight
from fp8dist_kernels.triton.groups import find_group, tiles_bound
from fp8dist_kernels.triton.launching import ceil_div, ceil_power_of_two, on_device_of, scale_strides
from fp8dist_kernels.triton.magnitude import grow, magnitude_bits, newest, tile_bits
from fp8dist_kernels.triton.scaling import inverse, scale_from_amax
from fp8dist_kernels.triton.strips import Page, load_strips, scaled, store_flipped, store_straight

_TALL, _WIDE = 128, 64  # As in ``casts``.
_FLAT_TALL, _FLAT_WIDE = 32, 256
_WARPS = 8

_ALIGNMENT = tl.constexpr(TOKEN_ALIGNMENT)

Copies = tuple[Tensor, Tensor, Tensor, Tensor]


# The number of tokens, here height, varies between steps, and slots have any address: compile no variants for them.
@triton.jit(do_not_specialize=["height"], do_not_specialize_on_alignment=["cold"])
def _amax_kernel(
    x,  # [groups, height, width] if EQUAL, else [tokens, width]; strides as given
    offsets,  # int32[groups]; not read if EQUAL
    cold,  # bool[groups], read IF_COLD: then only cold groups are read
    bits,  # int32[groups], grows
    groups,
    group_stride,
    height,
    width,
    row_stride,
    column_stride,
    slot_stride,
    EQUAL: tl.constexpr,
    IF_COLD: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INDEX: tl.constexpr,
):
    """Set ``bits`` to the maximum of itself and the amax bits of each group. A program reads ROWS rows."""
    # A program reads whole rows: with a program for each tile, searches for groups would take longer than the reads.
    if EQUAL:
        down = tl.cdiv(height, ROWS)
        group, tile, rows = tl.program_id(0) // down, tl.program_id(0) % down, height
        x += group.to(tl.int64) * group_stride
    else:
        group, tile, start, rows, _, _ = find_group(offsets, groups, tl.program_id(0), height, ROWS, GROUPS)
        x += start.to(tl.int64) * row_stride
    wanted = group < groups
    if IF_COLD:
        wanted = wanted & (tl.load(cold + group * slot_stride, mask=wanted, other=0) != 0)
    if wanted:
        largest = 0
        top, none = tile.to(INDEX) * ROWS, tl.zeros((), INDEX)  # ``tile_bits`` takes tensors: ``left`` is a number.
        for left in range(0, width, COLUMNS):
            found = tile_bits(x, top, none + left, rows, width, row_stride, column_stride, ROWS, COLUMNS, INDEX)
            largest = tl.maximum(largest, tl.max(tl.max(found, 1), 0))
        tl.atomic_max(bits + group, largest, sem="relaxed")


@triton.jit
def _used(
    group, groups, scale, cold, bits, slot_stride, outgrown_above,
    FP8_MAX: tl.constexpr, MARGIN: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    JUST_IN_TIME: tl.constexpr, OUTGROWN: tl.constexpr,
):  # fmt: skip
    """Return the scale that a group is cast with; 1 for the tail. Arguments as in ``_cast_kernel``."""
    there = group < groups
    used = tl.load(scale + group * slot_stride, mask=there, other=1.0)
    if JUST_IN_TIME or OUTGROWN:
        is_cold = tl.load(cold + group * slot_stride, mask=there, other=0) != 0
        amax = tl.load(bits + group, mask=there, other=0).to(tl.float32, bitcast=True)
        fresh = is_cold & JUST_IN_TIME
        if OUTGROWN:
            # Comparisons with NaN are false.
            fresh = fresh | ((amax < float("inf")) & (amax * used > outgrown_above) & (is_cold == 0))
        used = tl.where(fresh, scale_from_amax(amax, 1.0, FP8_MAX, MARGIN, POWER_OF_TWO), used)
    return used


@triton.jit(do_not_specialize=["height"], do_not_specialize_on_alignment=["scale", "cold", "pending"])
def _cast_kernel(
    x,  # [groups, height, width] if EQUAL, else [tokens, width]; strides as given
    straight,  # fp8 [groups, height, straight_width] or [tokens, straight_width]
    flipped,  # fp8 [groups, width, flipped_width] or [width, flipped_width]
    offsets,  # int32[groups]; not read if EQUAL
    scale,  # float32[groups], slot_stride
    cold,  # bool[groups], slot_stride
    pending,  # int32[groups], slot_stride, grows
    bits,  # int32[groups]: amaxes; read if the slot is cold, or OUTGROWN
    inv_scale,  # float32[groups], written
    groups,
    group_stride,
    height,
    width,
    row_stride,
    column_stride,
    straight_width,
    flipped_width,
    slot_stride,
    outgrown_above,
    FP8_MAX: tl.constexpr,
    MARGIN: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    STRAIGHT: tl.constexpr,
    FLIPPED: tl.constexpr,
    RECORD: tl.constexpr,
    JUST_IN_TIME: tl.constexpr,
    OUTGROWN: tl.constexpr,
    EQUAL: tl.constexpr,
    GROUPS: tl.constexpr,
    TALL: tl.constexpr,
    WIDE: tl.constexpr,
    INDEX: tl.constexpr,
):
    """Cast each group with the scale of its slot, and record the amaxes. A program casts one tile into both copies."""
    # An empty group has a scale, but no tile, so its scale cannot be written by the program of a tile. The grid has at
    # least one program per group.
    if tl.program_id(0) < groups:
        first = _used(
            tl.program_id(0), groups, scale, cold, bits, slot_stride, outgrown_above,
            FP8_MAX, MARGIN, POWER_OF_TWO, JUST_IN_TIME, OUTGROWN,
        )  # fmt: skip
        tl.store(inv_scale + tl.program_id(0), inverse(first))
    across = tl.cdiv(straight_width, WIDE)
    left = (tl.program_id(0) % across).to(INDEX) * WIDE
    if EQUAL:
        down = tl.cdiv(flipped_width, TALL)
        group, tile = tl.program_id(0) // (across * down), tl.program_id(0) // across % down
        rows, lines, length = height, height, flipped_width
        x += group.to(tl.int64) * group_stride
        straight += group.to(tl.int64) * height * straight_width
        flipped += group.to(tl.int64) * width * flipped_width
    else:
        group, tile, start, rows, column, _ = find_group(
            offsets, groups, tl.program_id(0) // across, height, TALL, GROUPS
        )
        # The tail has no rows to read, but zeros to write.
        lines = tl.where(group < groups, rows, height - start)
        length = tl.where(
            group < groups, (rows + _ALIGNMENT - 1) // _ALIGNMENT, (flipped_width - column) // _ALIGNMENT
        ) * _ALIGNMENT  # fmt: skip
        x += start.to(tl.int64) * row_stride
        straight += start.to(tl.int64) * straight_width
        flipped += column
    top = tile.to(INDEX) * TALL
    a, b, c, d = load_strips(x, top, left, rows, width, row_stride, column_stride, TALL, WIDE, INDEX)
    if RECORD:  # noqa: SIM102 - known at compile time; the inner condition is not.
        if top < rows:
            place = pending + group * slot_stride
            upper = tl.maximum(magnitude_bits(a), magnitude_bits(b))
            lower = tl.maximum(magnitude_bits(c), magnitude_bits(d))
            grow(place, newest(place), tl.max(tl.max(tl.maximum(upper, lower), 1), 0))
    used = _used(
        group, groups, scale, cold, bits, slot_stride, outgrown_above,
        FP8_MAX, MARGIN, POWER_OF_TWO, JUST_IN_TIME, OUTGROWN,
    )  # fmt: skip
    a, b, c, d = scaled(a, used), scaled(b, used), scaled(c, used), scaled(d, used)
    if STRAIGHT:
        store_straight(straight, a, b, c, d, top, left, lines, straight_width, TALL, WIDE, INDEX)
    if FLIPPED:
        store_flipped(flipped, a, b, c, d, top, left, width, length, flipped_width, TALL, WIDE, INDEX)


@triton.jit(do_not_specialize=["height"])
def _line_amax_kernel(
    x,  # [tokens, width], strides as given
    offsets,  # int32[groups]
    row_bits,  # int32[tokens], grows
    column_bits,  # int32[groups, width], grows
    groups,
    height,
    width,
    row_stride,
    column_stride,
    STRAIGHT: tl.constexpr,
    FLIPPED: tl.constexpr,
    GROUPS: tl.constexpr,
    TILE: tl.constexpr,
    INDEX: tl.constexpr,
):
    """Compute the amax bits of each group's rows (STRAIGHT) and columns (FLIPPED), by atomic maxima."""
    across = tl.cdiv(width, TILE)
    group, tile, start, rows, _, _ = find_group(offsets, groups, tl.program_id(0) // across, height, TILE, GROUPS)
    if group < groups:
        top, left = tile.to(INDEX) * TILE, (tl.program_id(0) % across).to(INDEX) * TILE
        x += start.to(tl.int64) * row_stride
        bits = tile_bits(x, top, left, rows, width, row_stride, column_stride, TILE, TILE, INDEX)
        row, column = top + tl.arange(0, TILE), left + tl.arange(0, TILE)
        if STRAIGHT:
            tl.atomic_max(row_bits + start + row, tl.max(bits, 1), mask=row < rows, sem="relaxed")
        if FLIPPED:
            column_bits += group.to(tl.int64) * width
            tl.atomic_max(column_bits + column, tl.max(bits, 0), mask=column < width, sem="relaxed")


@triton.jit(do_not_specialize=["height"])
def _lines_kernel(
    x,  # [height, width], strides as given
    straight,  # fp8 [height, width]
    flipped,  # fp8 [width, flipped_width]
    offsets,  # int32[groups]
    row_bits,  # if PARTS: int32[height], amaxes of whole rows
    column_bits,  # if PARTS: int32[groups, width], amaxes of whole columns of a group
    straight_inverse,  # float32 [height, 1 or blocks], written
    flipped_inverse,  # float32 [groups, width] if PARTS, else [width, blocks], written
    groups,
    height,
    width,
    row_stride,
    column_stride,
    flipped_width,
    straight_line_stride,
    straight_block_stride,
    flipped_line_stride,
    flipped_block_stride,
    FP8_MAX: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    STRAIGHT: tl.constexpr,
    FLIPPED: tl.constexpr,
    PARTS: tl.constexpr,  # 1: a scale for each line; 0: for each block of a line
    GROUPS: tl.constexpr,
    TILE: tl.constexpr,
    INDEX: tl.constexpr,
):
    """``blocks._lines_kernel`` for rows that are sorted by expert. Writes zeros for the tail."""
    # A tile is divided among programs as in ``blocks._lines_kernel``.
    HALF: tl.constexpr = TILE // 2
    part = tl.program_id(0) % (2 * (STRAIGHT + FLIPPED))
    index = tl.program_id(0) // (2 * (STRAIGHT + FLIPPED))
    across = tl.cdiv(width, TILE)
    group, tile, start, rows, column, first = find_group(offsets, groups, index // across, height, TILE, GROUPS)
    top, left = tile.to(INDEX) * TILE, (index % across).to(INDEX) * TILE
    x += start.to(tl.int64) * row_stride
    straight += start.to(tl.int64) * width
    flipped += column
    flips = part >= 2 if STRAIGHT and FLIPPED else FLIPPED
    if flips:
        left += part % 2 * HALF
        if group < groups:
            inv_scale = flipped_inverse
            if PARTS > 0:
                inv_scale += group.to(tl.int64) * width
                column_bits += group.to(tl.int64) * width
            else:
                inv_scale += (first + tile).to(tl.int64) * flipped_block_stride
            length = (rows + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT
            write_flipped(
                flipped, inv_scale, column_bits, x, top, left, rows, width, row_stride, column_stride, length,
                flipped_width, flipped_line_stride, 1, FP8_MAX, POWER_OF_TWO, PARTS, TILE, HALF, INDEX,
            )  # fmt: skip
        else:
            a = tl.zeros((TILE // 4, HALF), tl.float32)
            length = flipped_width - column
            store_flipped(flipped, a, a, a, a, top, left, width, length, flipped_width, TILE, HALF, INDEX)
    else:
        top += part % 2 * HALF
        if group < groups:
            inv_scale = straight_inverse + start.to(tl.int64) * straight_line_stride
            if PARTS == 0:
                inv_scale += (index % across).to(tl.int64) * straight_block_stride
            write_straight(
                straight, inv_scale, row_bits + start, x, top, left, rows, width, row_stride, column_stride, width,
                straight_line_stride, 1, FP8_MAX, POWER_OF_TWO, PARTS, HALF, TILE, INDEX,
            )  # fmt: skip
        else:
            a = tl.zeros((HALF // 4, TILE), tl.float32)
            store_straight(straight, a, a, a, a, top, left, height - start, width, HALF, TILE, INDEX)


def quantize_grouped(
    x: Tensor,
    offsets: Tensor | None,
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
    """See ``reference.grouped_casts.quantize_grouped``. One launch. With ``just_in_time`` or ``outgrown``, a launch
    before it measures the rows of cold experts, or with ``outgrown`` of all experts."""
    require_slots(x, offsets, scale, cold, pending)
    groups, device = len(scale), x.device
    page = _page_of(x, offsets)
    row_shape, column_shape = _shapes(x, offsets, groups)
    row_major = torch.empty(row_shape if rows else (0,), dtype=dtype, device=device)
    transposed = torch.empty(column_shape if columns else (0,), dtype=dtype, device=device)
    straight, flipped = page.sides(row_major, transposed)
    inv_scale = torch.empty(groups, dtype=torch.float32, device=device)
    looks = just_in_time or outgrown is not None
    bits = torch.zeros(groups, dtype=torch.int32, device=device) if looks else pending.view(torch.int32)
    flips = flipped.numel() > 0
    tall, wide = (_TALL, _WIDE) if flips else (_FLAT_TALL, _FLAT_WIDE)
    common = {
        "EQUAL": offsets is None,
        "GROUPS": ceil_power_of_two(groups),
        "INDEX": page.offset_type(_TALL, _FLAT_WIDE),
        "num_warps": _WARPS,
    }
    lying = groups, x.stride(0) if offsets is None else 0
    with on_device_of(x):
        if looks and x.numel():
            _amax_kernel[(_down(page, offsets, groups, _FLAT_TALL),)](
                x, bits if offsets is None else offsets, cold, bits, *lying, *page.lying[:4], scale.stride(0),
                IF_COLD=outgrown is None, ROWS=_FLAT_TALL, COLUMNS=_FLAT_WIDE, **common,
            )  # fmt: skip
        programs = _down(page, offsets, groups, tall) * max(1, ceil_div(page.straight_width, wide))
        fp8_max = torch.finfo(dtype).max
        _cast_kernel[(programs,)](
            x, straight, flipped, bits if offsets is None else offsets, scale, cold, pending.view(torch.int32), bits,
            inv_scale, *lying, *page.lying, scale.stride(0), 0.0 if outgrown is None else outgrown * fp8_max,
            FP8_MAX=fp8_max, MARGIN=margin, POWER_OF_TWO=power_of_two, STRAIGHT=straight.numel() > 0, FLIPPED=flips,
            RECORD=record, JUST_IN_TIME=just_in_time, OUTGROWN=outgrown is not None, TALL=tall, WIDE=wide, **common,
        )  # fmt: skip
    return row_major, transposed, inv_scale


def quantize_grouped_lines(
    x: Tensor, offsets: Tensor, dtype: torch.dtype, *, in_blocks: bool, power_of_two: bool, rows: bool, columns: bool
) -> Copies:
    """See ``reference.grouped_casts.quantize_grouped_lines``. Scales per row take two launches, per block one."""
    require_groups(offsets, x.device)
    (tokens, features), groups, device = x.shape, len(offsets), x.device
    page, (row_shape, column_shape) = _page_of(x, offsets), _shapes(x, offsets, groups)
    row_major = torch.empty(row_shape if rows else (0,), dtype=dtype, device=device)
    transposed = torch.empty(column_shape if columns else (0,), dtype=dtype, device=device)
    of_rows = of_columns = torch.empty(0, device=device)
    # Filled, because the kernels do not write the scales of the tail.
    if in_blocks:
        of_rows = torch.ones(ceil_div(features, BLOCK), tokens, device=device).t() if rows else of_rows
        of_columns = torch.ones(blocks_bound(tokens, groups), features, device=device).t() if columns else of_columns
    else:
        of_rows = torch.ones(tokens, 1, device=device) if rows else of_rows
        of_columns = torch.ones(groups, features, 1, device=device) if columns else of_columns
    bits = torch.zeros(
        0 if in_blocks else tokens * rows + groups * features * columns, dtype=torch.int32, device=device
    )
    row_bits, column_bits = bits[: tokens * rows], bits[tokens * rows :]
    tiles = _down(page, offsets, groups, BLOCK) * ceil_div(features, BLOCK)
    common = {
        "STRAIGHT": row_major.numel() > 0,
        "FLIPPED": transposed.numel() > 0,
        "GROUPS": ceil_power_of_two(groups),
        "TILE": BLOCK,
        "INDEX": page.offset_type(BLOCK, BLOCK),
    }
    with on_device_of(x):
        if not in_blocks and tiles * bits.numel():
            _line_amax_kernel[(tiles,)](
                x, offsets, row_bits, column_bits, groups, *page.lying[:4], num_warps=2 * _WARPS, **common
            )
        if programs := tiles * 2 * (common["STRAIGHT"] + common["FLIPPED"]):
            _lines_kernel[(programs,)](
                x, row_major, transposed, offsets, row_bits, column_bits, of_rows, of_columns, groups,
                *page.lying[:4], page.flipped_width, *scale_strides(of_rows), *scale_strides(of_columns),
                FP8_MAX=torch.finfo(dtype).max, POWER_OF_TWO=power_of_two, PARTS=int(not in_blocks), num_warps=_WARPS,
                **common,
            )  # fmt: skip
    return row_major, of_rows, transposed, of_columns


def quantize_grouped_mx(
    x: Tensor, offsets: Tensor, dtype: torch.dtype, *, round_up: bool, rows: bool, columns: bool
) -> Copies:
    """See ``reference.grouped_casts.quantize_grouped_mx``. One launch for each copy, and torch's that copy the rows to
    where the casts read them."""
    require_groups(offsets, x.device)
    (tokens, features), groups = x.shape, len(offsets)
    ends = cut(offsets, tokens).long()
    expert = expert_of_rows(tokens, ends)
    nobodys = (expert == groups)[:, None]
    made: Copies = mx.quantize_mx(x, dtype, round_up=round_up, rows=False, columns=False)
    if rows:
        made = mx.quantize_mx(x.masked_fill(nobodys, 0), dtype, round_up=round_up, rows=True, columns=False)
    if columns:
        length = columns_bound(tokens, groups, MX_BLOCK)
        starts = torch.cat([ends.new_zeros(1), ends])
        whole = -(-starts.diff() // MX_BLOCK) * MX_BLOCK
        # By how much each expert's rows move down. Rows of no expert go to a row after the last.
        moved = torch.cat([whole.cumsum(0) - whole - starts[:-1], ends.new_zeros(1)])
        place = torch.where(nobodys[:, 0], length, torch.arange(tokens, device=x.device) + moved[expert])
        padded_rows = x.new_zeros(length + 1, features).index_copy_(0, place, x)[:length]
        turned = mx.quantize_mx(padded_rows, dtype, round_up=round_up, rows=False, columns=True)
        made = (*made[:2], *turned[2:])
    return made


def _page_of(x: Tensor, offsets: Tensor | None) -> Page:
    """Return the page of each expert's weight, which may be on its side, or of all rows, which never are: groups are
    found by their rows."""
    if offsets is None:
        return Page.of(x[0])
    tokens, features = x.shape
    down, across = x.stride()
    return Page(tokens, features, down, across, features, columns_bound(tokens, len(offsets)), False)


def _shapes(x: Tensor, offsets: Tensor | None, groups: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of the row-major and the transposed copy."""
    *_, tokens, features = x.shape
    if offsets is None:
        return tuple(x.shape), (groups, features, padded(tokens))
    return (tokens, features), (features, columns_bound(tokens, groups))


def _down(page: Page, offsets: Tensor | None, groups: int, tall: int) -> int:
    """Return how many tiles of ``tall`` rows may be needed for all groups and the tail, one below the other."""
    if offsets is None:
        return max(1, ceil_div(page.flipped_width, tall)) * groups
    return tiles_bound(page.flipped_width, groups, tall)

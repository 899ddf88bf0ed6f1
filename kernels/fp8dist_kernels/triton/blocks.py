"""FP8 casts with many scales: per row in two launches, per block in one.

``strips`` explains straight and flipped copies, strips and pages. A *line* is a row of either copy. INDEX is the
integer type of offsets within a tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8dist_kernels import BLOCK
from fp8dist_kernels.reference import blocks as plain
from fp8dist_kernels.reference.blocks import blocks_along, require_block
from fp8dist_kernels.reference.casts import padded
from fp8dist_kernels.triton.launching import ceil_div, ceil_power_of_two, on_device_of, scale_strides
from fp8dist_kernels.triton.magnitude import magnitude_bits, tile_bits
from fp8dist_kernels.triton.scaling import inverse, scale_from_amax
from fp8dist_kernels.triton.strips import Page, load_strips, scaled, store_flipped, store_straight

_WARPS = 16  # A tile is a block of 128 x 128: 32 elements per thread, as in ``triton.casts``.
_WARPS_OF_HALF = 8  # ``_lines_kernel``, whose programs cast half a tile.
_PARTS = 16
"""Parts into which the amax pass divides each row and each column, so that it has up to 16 x 16 programs: two for each
multiprocessor of a large GPU. With fewer, some would be idle. With more, a cast would read more amaxes than elements.
"""
_PART_ELEMENTS, _NARROWEST = 1 << 13, 128  # 16 elements per thread and 64 registers: two programs at a time.
_REGISTERS = 64
"""Per thread, so that a multiprocessor runs two tiles at a time. ptxas would take 102 on Blackwell, for one tile."""


Copies = tuple[Tensor, Tensor, Tensor, Tensor]


@triton.jit
def _amax_kernel(
    x,  # [height, width], strides as given
    row_bits,  # int32[parts of a row, height], written
    column_bits,  # int32[parts of a column, width], written
    height,
    width,
    row_stride,
    column_stride,
    region,  # Rows of a program, a multiple of TALL.
    STRAIGHT: tl.constexpr,
    FLIPPED: tl.constexpr,
    TALL: tl.constexpr,
    WIDE: tl.constexpr,
    INDEX: tl.constexpr,
):
    """Store the amax bits of parts of rows (STRAIGHT) and columns (FLIPPED). A program reads [region, WIDE]."""
    # Maxima of parts, because a maximum of the whole line would have to be cleared by a launch before this one.
    across = tl.cdiv(width, WIDE)
    down, right = tl.program_id(0) // across, tl.program_id(0) % across
    left, first = right.to(INDEX) * WIDE, down.to(INDEX) * region
    largest = tl.zeros((TALL, WIDE), tl.int32)
    for below in range(0, region, TALL):
        top = first + below
        bits = tile_bits(x, top, left, height, width, row_stride, column_stride, TALL, WIDE, INDEX)
        if STRAIGHT:
            row = top + tl.arange(0, TALL).to(INDEX)
            tl.store(row_bits + right.to(tl.int64) * height + row, tl.max(bits, 1), mask=row < height)
        if FLIPPED:
            largest = tl.maximum(largest, bits)
    if FLIPPED:
        column = left + tl.arange(0, WIDE).to(INDEX)
        tl.store(column_bits + down.to(tl.int64) * width + column, tl.max(largest, 0), mask=column < width)


@triton.jit
def _largest_part(bits, line, lines, count, PARTS: tl.constexpr):
    """Return the amax bits of the lines (rows or columns) with the numbers ``line``. ``bits``: int32[count, lines], of
    ``count`` <= PARTS parts."""
    if PARTS == 1:
        return tl.load(bits + line, mask=line < lines, other=0)
    part = tl.arange(0, PARTS)[:, None]
    inside = (part < count) & (line < lines)[None, :]
    return tl.max(tl.load(bits + (part.to(tl.int64) * lines + line[None, :]), mask=inside, other=0), 0)


@triton.jit
def _scale(bits, FP8_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    return scale_from_amax(bits.to(tl.float32, bitcast=True), 1.0, FP8_MAX, 0, POWER_OF_TWO)


@triton.jit
def _scaled_strip(
    x, row, row_bits, inv_scale, height, line_stride, part_count,
    FP8_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Return a strip times the scale of each row, float32. Store the inverse scales. Amaxes are read from ``row_bits``;
    if PARTS is 0, they are measured in the strip."""
    amax = _largest_part(row_bits, row, height, part_count, PARTS) if PARTS > 0 else tl.max(magnitude_bits(x), 1)
    scale = _scale(amax, FP8_MAX, POWER_OF_TWO)
    tl.store(inv_scale + row.to(tl.int64) * line_stride, inverse(scale), mask=row < height)
    return scaled(x, scale[:, None])


@triton.jit
def write_straight(
    out, inv_scale, bits, x, top, left, height, width, row_stride, column_stride, out_width, line_stride,
    part_count, FP8_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr, PARTS: tl.constexpr, TALL: tl.constexpr,
    WIDE: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    """Cast a tile into the straight copy, with a scale for each of its rows. ``bits`` as in ``_scaled_strip``."""
    a, b, c, d = load_strips(x, top, left, height, width, row_stride, column_stride, TALL, WIDE, INDEX)
    row = top + tl.arange(0, TALL // 4).to(INDEX) * 4
    a = _scaled_strip(a, row, bits, inv_scale, height, line_stride, part_count, FP8_MAX, POWER_OF_TWO, PARTS)
    b = _scaled_strip(b, row + 1, bits, inv_scale, height, line_stride, part_count, FP8_MAX, POWER_OF_TWO, PARTS)
    c = _scaled_strip(c, row + 2, bits, inv_scale, height, line_stride, part_count, FP8_MAX, POWER_OF_TWO, PARTS)
    d = _scaled_strip(d, row + 3, bits, inv_scale, height, line_stride, part_count, FP8_MAX, POWER_OF_TWO, PARTS)
    store_straight(out, a, b, c, d, top, left, height, out_width, TALL, WIDE, INDEX)


@triton.jit
def write_flipped(
    out, inv_scale, bits, x, top, left, height, width, row_stride, column_stride, length, out_width, line_stride,
    part_count, FP8_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr, PARTS: tl.constexpr, TALL: tl.constexpr,
    WIDE: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    """Cast a tile into the flipped copy [width, out_width], up to its column ``length``, with a scale for each column
    of the tile. ``bits``: amaxes of columns; if PARTS is 0, they are measured in the tile."""
    a, b, c, d = load_strips(x, top, left, height, width, row_stride, column_stride, TALL, WIDE, INDEX)
    column = left + tl.arange(0, WIDE).to(INDEX)
    if PARTS > 0:
        amax = _largest_part(bits, column, width, part_count, PARTS)
    else:
        upper = tl.maximum(magnitude_bits(a), magnitude_bits(b))
        lower = tl.maximum(magnitude_bits(c), magnitude_bits(d))
        amax = tl.max(tl.maximum(upper, lower), 0)
    scale = _scale(amax, FP8_MAX, POWER_OF_TWO)
    tl.store(inv_scale + column.to(tl.int64) * line_stride, inverse(scale), mask=column < width)
    scale = scale[None, :]
    a, b, c, d = scaled(a, scale), scaled(b, scale), scaled(c, scale), scaled(d, scale)
    store_flipped(out, a, b, c, d, top, left, width, length, out_width, TALL, WIDE, INDEX)


@triton.jit
def _parts(x, straight, flipped, group_stride, height, width, straight_width, flipped_width):
    """Return the pointers moved to this program's expert, ``program_id(1)``. A plain matrix is expert 0."""
    expert = tl.program_id(1).to(tl.int64)
    straight += expert * height * straight_width
    return x + expert * group_stride, straight, flipped + expert * width * flipped_width


@triton.jit
def _lines_kernel(
    x,  # [experts, height, width], strides as given
    straight,  # fp8 [experts, height, straight_width]
    flipped,  # fp8 [experts, width, flipped_width]
    row_bits,  # int32[row_parts, height], amaxes of parts of rows; read if PARTS
    column_bits,  # int32[column_parts, width], likewise
    straight_inverse,  # float32 [experts, height, 1 or blocks], written
    flipped_inverse,  # float32 [experts, width, 1 or blocks], written
    group_stride,
    height,
    width,
    row_stride,
    column_stride,
    straight_width,
    flipped_width,
    straight_line_stride,
    straight_block_stride,
    flipped_line_stride,
    flipped_block_stride,
    row_parts,
    column_parts,
    FP8_MAX: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    STRAIGHT: tl.constexpr,
    FLIPPED: tl.constexpr,
    PARTS: tl.constexpr,  # A power of two, at least row_parts and column_parts. 0: a scale for each block of a line.
    TILE: tl.constexpr,
    INDEX: tl.constexpr,
):
    """Cast with a scale per row of each copy, from amaxes of its parts, or (PARTS 0) a scale per 1 x TILE block."""
    # Each copy has its own programs, side by side, so that the second read of x comes from L2: one program for both
    # would need twice the registers. A program does half a tile: whole rows for the straight copy, whole columns for
    # the flipped copy.
    HALF: tl.constexpr = TILE // 2
    x, straight, flipped = _parts(x, straight, flipped, group_stride, height, width, straight_width, flipped_width)
    expert = tl.program_id(1).to(tl.int64)
    part = tl.program_id(0) % (2 * (STRAIGHT + FLIPPED))
    tile = tl.program_id(0) // (2 * (STRAIGHT + FLIPPED))
    across = tl.cdiv(straight_width, TILE)
    top = (tile // across).to(INDEX) * TILE
    left = (tile % across).to(INDEX) * TILE
    flips = part >= 2 if STRAIGHT and FLIPPED else FLIPPED
    if flips:
        left += part % 2 * HALF
        inv_scale = flipped_inverse
        if PARTS == 0:
            inv_scale += expert * width * tl.cdiv(flipped_width, TILE)
            inv_scale += (tile // across).to(tl.int64) * flipped_block_stride
        write_flipped(
            flipped, inv_scale, column_bits, x, top, left, height, width, row_stride, column_stride, flipped_width,
            flipped_width, flipped_line_stride, column_parts, FP8_MAX, POWER_OF_TWO, PARTS, TILE, HALF, INDEX,
        )  # fmt: skip
    else:
        top += part % 2 * HALF
        inv_scale = straight_inverse
        if PARTS == 0:
            inv_scale += expert * height * across
            inv_scale += (tile % across).to(tl.int64) * straight_block_stride
        write_straight(
            straight, inv_scale, row_bits, x, top, left, height, width, row_stride, column_stride, straight_width,
            straight_line_stride, row_parts, FP8_MAX, POWER_OF_TWO, PARTS, HALF, TILE, INDEX,
        )  # fmt: skip


@triton.jit
def _squares_kernel(
    x,  # [experts, height, width], strides as given
    straight,  # fp8 [experts, height, straight_width]
    flipped,  # fp8 [experts, width, flipped_width]
    straight_inverse,  # float32 [experts, down, across] of tiles, written
    flipped_inverse,  # float32 [experts, across, down], written
    group_stride,
    height,
    width,
    row_stride,
    column_stride,
    straight_width,
    flipped_width,
    FP8_MAX: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    STRAIGHT: tl.constexpr,
    FLIPPED: tl.constexpr,
    TILE: tl.constexpr,
    INDEX: tl.constexpr,
):
    """Cast with a scale per block of TILE x TILE. A program casts one block into both copies."""
    across, below = tl.cdiv(straight_width, TILE), tl.cdiv(flipped_width, TILE)
    expert = tl.program_id(1).to(tl.int64)
    x += expert * group_stride
    down = tl.program_id(0) // across
    right = tl.program_id(0) % across
    top, left = down.to(INDEX) * TILE, right.to(INDEX) * TILE
    a, b, c, d = load_strips(x, top, left, height, width, row_stride, column_stride, TILE, TILE, INDEX)
    upper = tl.maximum(magnitude_bits(a), magnitude_bits(b))
    lower = tl.maximum(magnitude_bits(c), magnitude_bits(d))
    scale = _scale(tl.max(tl.max(tl.maximum(upper, lower), 1), 0), FP8_MAX, POWER_OF_TWO)
    a, b, c, d = scaled(a, scale), scaled(b, scale), scaled(c, scale), scaled(d, scale)
    if STRAIGHT:
        straight += expert * height * straight_width
        tl.store(straight_inverse + expert * across * below + tl.program_id(0), inverse(scale))
        store_straight(straight, a, b, c, d, top, left, height, straight_width, TILE, TILE, INDEX)
    if FLIPPED:
        flipped += expert * width * flipped_width
        tl.store(flipped_inverse + (expert * across + right) * below + down, inverse(scale))
        store_flipped(flipped, a, b, c, d, top, left, width, flipped_width, flipped_width, TILE, TILE, INDEX)


def quantize_rowwise(x: Tensor, dtype: torch.dtype, *, power_of_two: bool, rows: bool, columns: bool) -> Copies:
    """See ``reference.blocks.quantize_rowwise``. The first launch computes the amaxes, the second one casts."""
    if x.numel() == 0:
        return plain.quantize_rowwise(x, dtype, power_of_two=power_of_two, rows=rows, columns=columns)
    tokens, features = x.shape
    copies = _room(x, dtype, (tokens, 1) if rows else (0,), (features, 1) if columns else (0,))
    page = Page.of(x)
    straight, flipped = (columns, rows) if page.on_its_side else (rows, columns)
    wide = min(max(_NARROWEST, ceil_power_of_two(ceil_div(page.width, _PARTS))), _PART_ELEMENTS)
    tall = _PART_ELEMENTS // wide
    region = ceil_div(ceil_div(page.height, _PARTS), tall) * tall
    row_parts, column_parts = ceil_div(page.width, wide), ceil_div(page.height, region)
    # One buffer for the amaxes of the parts of rows and of columns.
    bits = torch.empty(
        straight * row_parts * page.height + flipped * column_parts * page.width, dtype=torch.int32, device=x.device
    )
    parts = bits, bits[straight * row_parts * page.height :]
    with on_device_of(x):
        _amax_kernel[(row_parts * column_parts,)](
            x,
            *parts,
            *page.lying[:4],
            region,
            STRAIGHT=straight,
            FLIPPED=flipped,
            TALL=tall,
            WIDE=wide,
            INDEX=page.offset_type(tall, wide),
            num_warps=_WARPS,
        )
        _cast_lines(x, page, copies, parts, (row_parts, column_parts), power_of_two)
    return copies


def quantize_blocks(
    x: Tensor, dtype: torch.dtype, *, block: tuple[int, int], power_of_two: bool, rows: bool, columns: bool
) -> Copies:
    """See ``reference.blocks.quantize_blocks``. One launch, also for the weights of experts."""
    require_block(block)
    if x.numel() == 0:
        return plain.quantize_blocks(x, dtype, block=block, power_of_two=power_of_two, rows=rows, columns=columns)
    *_, tokens, features = x.shape
    down, across = blocks_along(tokens, BLOCK), blocks_along(features, BLOCK)
    page = Page.of(x if x.ndim == 2 else x[0])
    with on_device_of(x):
        if block == (BLOCK, BLOCK):
            copies = _room(x, dtype, (down, across) if rows else (0,), (across, down) if columns else (0,))
            _cast_squares(x, page, copies, power_of_two)
            return copies
        copies = _room(x, dtype, (across, tokens) if rows else (0,), (down, features) if columns else (0,))
        if rows:
            copies = (copies[0], copies[1].mT, *copies[2:])
        if columns:
            copies = (*copies[:3], copies[3].mT)
        _cast_lines(x, page, copies, None, (0, 0), power_of_two)
    return copies


def _room(x: Tensor, dtype: torch.dtype, row_scales: tuple[int, ...], column_scales: tuple[int, ...]) -> Copies:
    """Allocate the copies and their scales, of the given shapes. ``(0,)``: a copy that is not requested."""
    *experts, tokens, features = x.shape

    def room(shape: tuple[int, ...], wanted: bool, kind: torch.dtype) -> Tensor:
        return torch.empty((*experts, *shape) if wanted else (0,), dtype=kind, device=x.device)

    rows, columns = row_scales != (0,), column_scales != (0,)
    return (
        room((tokens, features), rows, dtype),
        room(row_scales, rows, torch.float32),
        room((features, padded(tokens)), columns, dtype),
        room(column_scales, columns, torch.float32),
    )


def _cast_lines(
    x: Tensor,
    page: Page,
    copies: Copies,
    bits: tuple[Tensor, Tensor] | None,
    parts: tuple[int, int],
    power_of_two: bool,
) -> None:
    """Launch ``_lines_kernel``. ``bits``: amaxes of the parts of the page's rows, and of its columns. None: a line has
    a scale per block, from the block itself. ``parts``: number of parts of a row, and of a column."""
    straight, flipped = page.sides(copies[0], copies[2])
    straight_inverse, flipped_inverse = page.sides(copies[1], copies[3])
    programs = page.tiles(BLOCK, BLOCK) * 2 * ((straight.numel() > 0) + (flipped.numel() > 0))
    if programs == 0:
        return
    _lines_kernel[(programs, _experts(x))](
        x,
        straight,
        flipped,
        *(bits or (straight_inverse, flipped_inverse)),
        straight_inverse,
        flipped_inverse,
        _apart(x),
        *page.lying,
        *scale_strides(straight_inverse),
        *scale_strides(flipped_inverse),
        *parts,
        FP8_MAX=torch.finfo(straight.dtype).max,
        POWER_OF_TWO=power_of_two,
        STRAIGHT=straight.numel() > 0,
        FLIPPED=flipped.numel() > 0,
        # At least _PARTS, so that most shapes share one compiled kernel.
        PARTS=0 if bits is None else max(_PARTS, ceil_power_of_two(max(parts))),
        TILE=BLOCK,
        INDEX=page.offset_type(BLOCK, BLOCK),
        num_warps=_WARPS_OF_HALF,
    )


def _experts(x: Tensor) -> int:
    return len(x) if x.ndim == 3 else 1


def _apart(x: Tensor) -> int:
    """Return the stride from expert to expert; 0 for a plain matrix."""
    return x.stride(0) if x.ndim == 3 else 0


def _cast_squares(x: Tensor, page: Page, copies: Copies, power_of_two: bool) -> None:
    """Launch ``_squares_kernel``."""
    straight, flipped = page.sides(copies[0], copies[2])
    _squares_kernel[(page.tiles(BLOCK, BLOCK), _experts(x))](
        x,
        straight,
        flipped,
        *page.sides(copies[1], copies[3]),
        _apart(x),
        *page.lying,
        FP8_MAX=torch.finfo(straight.dtype).max,
        POWER_OF_TWO=power_of_two,
        STRAIGHT=straight.numel() > 0,
        FLIPPED=flipped.numel() > 0,
        TILE=BLOCK,
        INDEX=page.offset_type(BLOCK, BLOCK),
        num_warps=_WARPS,
        maxnreg=_REGISTERS,
    )

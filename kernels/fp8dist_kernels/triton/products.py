"""Kernels for scaled FP8 products: persistent, fed through tensor descriptors (TMA).

Each program computes tiles of the result, one after another. The loop over tiles and the loop over the contracted dim
are flattened into one, so that the next tile's operands load while a tile is scaled and written.

ptxas compiles a step of the flattened loop for sm_90 to this (``tests/kernels/test_compiled.py`` checks it; UTMALDG and
UTMASTG are TMA's load and store, STSM writes a tile to shared memory)::

    wait for the barrier of this step's operands
    4 QGMMA (wgmma m64nNk32, e4m3/e5m2, both operands in shared memory), one commit group
    wait until at most 1 group is in flight: the previous step is done, and its operand buffers are free
    UTMALDG of ``a`` and of ``b`` for the step that is ``stages - 1`` ahead
    after a tile's last step: load scales and bias, wait for 0 groups, scale, STSM and UTMASTG piece by piece

This is the code if products go straight into the accumulator (fast accumulation). If each step's product has to be
added in float32 registers (slow accumulation, block scales), the wait is for 0 groups, and the two warp groups
alternate: one adds while the other multiplies. The product of a wide tile would not fit in registers beside the
accumulator, so a wide tile is computed in parts: two halves under slow accumulation, where the additions of one half
overlap the QGMMAs of the other, and four quarters under block scales. Quarters leave no registers for a flattened loop,
nor for the addresses of a fourth stage: in ``wide_block_scaled_kernel``, the loads of a tile begin after the previous
tile is written.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_at(index, tiles_m, tiles_n, GROUP: tl.constexpr):
    """Return the row and the column, counted in tiles, of tile number ``index``. GROUP rows of tiles are walked column
    by column, so tiles that run at the same time form nearly a square, and share most of their reads through L2."""
    width = GROUP * tiles_n
    first = index // width * GROUP
    rows = tl.minimum(tiles_m - first, GROUP)
    inside = index % width
    return first + inside % rows, inside // rows


@triton.jit
def _columns_of(b, column, start, SIDEWAYS: tl.constexpr):
    """Return [TILE_K, columns]: the tile of ``b`` at (column, start), transposed."""
    return _upright(_tile_of(b, column, start, SIDEWAYS), SIDEWAYS)


@triton.jit
def _tile_of(b, column, start, SIDEWAYS: tl.constexpr):
    """Return a tile of ``b`` in the order of memory: [columns, TILE_K], or SIDEWAYS [TILE_K, columns]."""
    return b.load([start, column]) if SIDEWAYS else b.load([column, start])


@triton.jit
def _upright(tile, SIDEWAYS: tl.constexpr):
    """Return a tile of ``_tile_of`` as [TILE_K, columns]."""
    return tile if SIDEWAYS else tile.T


@triton.jit
def _write_piece(
    out,
    product,  # float32[rows, PIECE]
    row_scale,  # "lines": float32[rows]; "one": float32
    column_scale,  # "lines": float32[n]; "one": float32[1]
    bias,  # [n]
    row,
    column,
    n,
    PIECE: tl.constexpr,
    SCALES: tl.constexpr,  # "lines", "one" or "none"
    ADDED: tl.constexpr,  # "nothing", "bias", or "total": the content of ``out``
):
    """Scale a piece of the result, add to it, and store it through TMA at (row, column)."""
    place = column + tl.arange(0, PIECE)
    # One scale after the other: the product of both may leave the range of float32. The second scale is loaded for each
    # piece: otherwise ptxas scales all pieces at once and holds them in extra registers.
    if SCALES == "lines":
        product = product * row_scale[:, None] * tl.load(column_scale + place, mask=place < n, other=0.0)[None, :]
    elif SCALES == "one":
        product = product * row_scale * tl.load(column_scale)
    if ADDED == "bias":
        product = product + tl.load(bias + place, mask=place < n, other=0.0).to(tl.float32)[None, :]
    elif ADDED == "total":
        product = product + out.load([row, column]).to(tl.float32)
    out.store([row, column], product.to(out.dtype))


@triton.jit
def _halves(product, COLUMNS: tl.constexpr):
    """Return the left and the right half of [rows, COLUMNS]."""
    return tl.split(tl.permute(tl.reshape(product, (product.shape[0], 2, COLUMNS // 2)), (0, 2, 1)))


@triton.jit
def _write(
    out, product, row_scale, column_scale, bias, row, column, n,
    COLUMNS: tl.constexpr, PIECE: tl.constexpr, SCALES: tl.constexpr, ADDED: tl.constexpr,
):  # fmt: skip
    """Write [rows, COLUMNS] in pieces of PIECE columns, which take turns in a small buffer of shared memory."""
    if COLUMNS == PIECE:
        _write_piece(out, product, row_scale, column_scale, bias, row, column, n, PIECE, SCALES, ADDED)
    else:
        HALF: tl.constexpr = COLUMNS // 2
        left, right = _halves(product, COLUMNS)
        _write(out, left, row_scale, column_scale, bias, row, column, n, HALF, PIECE, SCALES, ADDED)
        _write(out, right, row_scale, column_scale, bias, row, column + HALF, n, HALF, PIECE, SCALES, ADDED)


# The number of tokens, here m, varies between steps: compile no variants for 1 and for multiples of 16.
@triton.jit(do_not_specialize=["m"])
def scaled_kernel(
    a,  # descriptor of FP8 [m, k], blocks [TILE_M, TILE_K]
    b,  # descriptor of FP8 [n, k], blocks [TILE_N, TILE_K], or HALVED [TILE_N / 2, TILE_K]; SIDEWAYS both transposed
    out,  # descriptor of [m, n], blocks [TILE_M, PIECE]
    inv_scale_a,  # float32[1], or ROWWISE float32[m]
    inv_scale_b,  # float32[1], or ROWWISE float32[n]
    bias,  # [n]; unused unless ADDED is "bias"
    m,
    n,
    k,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    PIECE: tl.constexpr,
    GROUP: tl.constexpr,
    SIDEWAYS: tl.constexpr,
    ROWWISE: tl.constexpr,
    ADDED: tl.constexpr,
    FAST: tl.constexpr,
    HALVED: tl.constexpr,
):
    """Product with tensorwise or row-wise scales, applied once at the end."""
    tl.static_assert(not (FAST and HALVED))
    HALF: tl.constexpr = TILE_N // 2
    # Halves leave no registers for scales that are loaded per piece.
    SCALES: tl.constexpr = "lines" if ROWWISE else "none" if HALVED else "one"
    if SCALES == "none":
        scale_a, scale_b = tl.load(inv_scale_a), tl.load(inv_scale_b)
    tiles_m, tiles_n = tl.cdiv(m, TILE_M), tl.cdiv(n, TILE_N)
    for index in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=True):
        i, j = tile_at(index, tiles_m, tiles_n, GROUP)
        row, column = i * TILE_M, j * TILE_N
        product = tl.zeros((TILE_M, HALF if HALVED else TILE_N), tl.float32)
        if HALVED:
            right = tl.zeros((TILE_M, HALF), tl.float32)
        for start in range(0, k, TILE_K):
            x = a.load([row, start])
            y = _columns_of(b, column, start, SIDEWAYS)
            product = tl.dot(x, y, product, max_num_imprecise_acc=None if FAST else TILE_K)
            if HALVED:
                z = _columns_of(b, column + HALF, start, SIDEWAYS)
                right = tl.dot(x, z, right, max_num_imprecise_acc=TILE_K)
        # Loads that do not depend on the product come first, so that they overlap the last QGMMAs.
        if ROWWISE:
            place = row + tl.arange(0, TILE_M)
            row_scale = tl.load(inv_scale_a + place, mask=place < m, other=0.0)
        else:
            row_scale = tl.load(inv_scale_a)
        if SCALES == "none":
            product = product * scale_a * scale_b
            right = right * scale_a * scale_b
        if HALVED:
            _write(out, product, row_scale, inv_scale_b, bias, row, column, n, HALF, PIECE, SCALES, ADDED)
            _write(out, right, row_scale, inv_scale_b, bias, row, column + HALF, n, HALF, PIECE, SCALES, ADDED)
        else:
            _write(out, product, row_scale, inv_scale_b, bias, row, column, n, TILE_N, PIECE, SCALES, ADDED)


@triton.jit(do_not_specialize=["m"])
def block_scaled_kernel(
    a,  # descriptor of FP8 [m, k], blocks [TILE_M, TILE_K]
    b,  # descriptor of FP8 [n, k], blocks [TILE_N, TILE_K]; SIDEWAYS both transposed
    out,  # descriptor of [m, n], blocks [TILE_M, PIECE]
    inv_scale_a,  # float32[m, blocks], any strides; loads are wide if rows are adjacent
    inv_scale_b,  # float32[ceil(n / TILE_K), blocks], any strides; LINES float32[n, blocks], columns contiguous
    bias,  # [n]; unused unless ADDED is "bias"
    m,
    n,
    k,
    a_row_stride,
    a_block_stride,
    b_row_stride,
    b_block_stride,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,  # Divides TILE_K unless LINES: one scale of ``b`` per tile and step.
    TILE_K: tl.constexpr,  # The block of the scales.
    PIECE: tl.constexpr,
    GROUP: tl.constexpr,
    SIDEWAYS: tl.constexpr,
    ADDED: tl.constexpr,
    LINES: tl.constexpr,
):
    """Product with 1 x 128 by 128 x 128 scales, or LINES 1 x 128 by 1 x 128. The product of each step is scaled, then
    added in float32.

    LINES: each step is scaled by ``inv_scale_a``, then by ``inv_scale_b``, because the product of both may leave the
    range of float32. A step (128 products) times ``inv_scale_a`` stays in range for every amax of ``a`` below 2**105.
    """
    tl.static_assert(LINES or TILE_K % TILE_N == 0)
    tiles_m, tiles_n = tl.cdiv(m, TILE_M), tl.cdiv(n, TILE_N)
    for index in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=True):
        i, j = tile_at(index, tiles_m, tiles_n, GROUP)
        row, column = i * TILE_M, j * TILE_N
        place = row + tl.arange(0, TILE_M)
        scales_a = inv_scale_a + place.to(tl.int64) * a_row_stride
        scales_b = inv_scale_b + (column if LINES else (column // TILE_K).to(tl.int64) * b_row_stride)
        product = tl.zeros((TILE_M, TILE_N), tl.float32)
        for start in range(0, k, TILE_K):
            x = a.load([row, start])
            y = _columns_of(b, column, start, SIDEWAYS)
            scale_a = tl.load(scales_a, mask=place < m, other=0.0)
            if LINES:
                line = tl.arange(0, TILE_N)  # The pointer holds the tile's offset: one address for all.
                scale_b = tl.load(scales_b + line, mask=line < n - column, other=0.0)
                product += tl.dot(x, y) * scale_a[:, None] * scale_b[None, :]
            else:
                scale_b = tl.load(scales_b)
                product += tl.dot(x, y) * (scale_a * scale_b)[:, None]
            scales_a += a_block_stride
            scales_b += b_block_stride
        _write(out, product, 0.0, inv_scale_b, bias, row, column, n, TILE_N, PIECE, "none", ADDED)


@triton.jit(do_not_specialize=["m"])
def wide_block_scaled_kernel(
    a,  # descriptor of FP8 [m, k], blocks [TILE_M, TILE_K]
    b,  # descriptor of FP8 [n, k], blocks [PART, TILE_K]; SIDEWAYS both transposed
    out,  # descriptor of [m, n], blocks [TILE_M, PIECE]
    inv_scale_a,  # This and the following as in ``block_scaled_kernel``.
    inv_scale_b,
    bias,
    m,
    n,
    k,
    a_row_stride,
    a_block_stride,
    b_row_stride,
    b_block_stride,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,  # Twice TILE_K.
    TILE_K: tl.constexpr,
    PIECE: tl.constexpr,
    GROUP: tl.constexpr,
    SIDEWAYS: tl.constexpr,
    ADDED: tl.constexpr,
):
    """``block_scaled_kernel``, not LINES, for tiles that are two blocks wide, with two scales of ``b`` per step. A tile
    is computed in quarters of its columns."""
    tl.static_assert(TILE_N == 2 * TILE_K)
    PART: tl.constexpr = TILE_N // 4
    tiles_m, tiles_n = tl.cdiv(m, TILE_M), tl.cdiv(n, TILE_N)
    for index in range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        i, j = tile_at(index, tiles_m, tiles_n, GROUP)
        row, column = i * TILE_M, j * TILE_N
        place = row + tl.arange(0, TILE_M)
        scales_a = inv_scale_a + place.to(tl.int64) * a_row_stride
        scales_b = inv_scale_b + (column // TILE_K).to(tl.int64) * b_row_stride
        second = tl.where(column + TILE_K < n, b_row_stride, 0)
        first_quarter = tl.zeros((TILE_M, PART), tl.float32)
        second_quarter = tl.zeros((TILE_M, PART), tl.float32)
        third_quarter = tl.zeros((TILE_M, PART), tl.float32)
        fourth_quarter = tl.zeros((TILE_M, PART), tl.float32)
        for start in range(0, k, TILE_K):
            x = a.load([row, start])
            y0 = _tile_of(b, column, start, SIDEWAYS)
            y1 = _tile_of(b, column + PART, start, SIDEWAYS)
            y2 = _tile_of(b, column + 2 * PART, start, SIDEWAYS)
            y3 = _tile_of(b, column + 3 * PART, start, SIDEWAYS)
            # Loaded after the operands, which are transposed later still: ptxas then keeps one quarter's product in
            # registers at a time, not all four.
            scale = tl.load(scales_a, mask=place < m, other=0.0)
            left = (scale * tl.load(scales_b))[:, None]
            right = (scale * tl.load(scales_b + second))[:, None]
            first_quarter += tl.dot(x, _upright(y0, SIDEWAYS)) * left
            second_quarter += tl.dot(x, _upright(y1, SIDEWAYS)) * left
            third_quarter += tl.dot(x, _upright(y2, SIDEWAYS)) * right
            fourth_quarter += tl.dot(x, _upright(y3, SIDEWAYS)) * right
            scales_a += a_block_stride
            scales_b += b_block_stride
        _write(out, first_quarter, 0.0, inv_scale_b, bias, row, column, n, PART, PIECE, "none", ADDED)
        column += PART
        _write(out, second_quarter, 0.0, inv_scale_b, bias, row, column, n, PART, PIECE, "none", ADDED)
        column += PART
        _write(out, third_quarter, 0.0, inv_scale_b, bias, row, column, n, PART, PIECE, "none", ADDED)
        column += PART
        _write(out, fourth_quarter, 0.0, inv_scale_b, bias, row, column, n, PART, PIECE, "none", ADDED)

"""FP8 casts to MX, and their products with ``tl.dot_scaled``. See ``reference/mx.py`` for the format."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fp8dist_kernels import MX_BLOCK
from fp8dist_kernels.reference.matmuls import aligned
from fp8dist_kernels.reference.mx import Copies
from fp8dist_kernels.triton.launching import ceil_div, on_device_of
from fp8dist_kernels.triton.magnitude import magnitude_bits
from fp8dist_kernels.triton.products import tile_at

_LINES, _LENGTH, _WARPS = 64, 128, 16
"""A program casts 64 lines of 4 blocks: 16 elements per thread."""

_ROWS, _COLUMNS, _DEPTH, _GROUP = 128, 128, 128, 8
"""A tile of the product, and the elements that are contracted in one step."""

_LARGEST_OFFSET = 2**31 - 1
_MANTISSA, _MANTISSA_OF_MAX = tl.constexpr(0x7FFFFF), tl.constexpr(0x600000)
_QUIET_NAN = tl.constexpr(0x7FC00000)
FORMATS: Mapping[torch.dtype, str] = MappingProxyType({torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"})


@triton.jit
def _mx_kernel(
    x,  # [lines, width], strides as given
    out,  # fp8 [lines, blocks * BLOCK]
    inv_scale,  # uint8 [lines, blocks], E8M0
    lines,
    width,
    blocks,
    line_stride,
    element_stride,
    OF_MAX: tl.constexpr,  # Exponent of the format's largest number.
    UP: tl.constexpr,
    TALL: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    INDEX: tl.constexpr,
):
    """Cast [TALL, WIDE] elements with a scale for each BLOCK elements of a line."""
    COUNT: tl.constexpr = WIDE // BLOCK
    length = blocks * BLOCK
    across = tl.cdiv(length, WIDE)
    line = (tl.program_id(0) // across).to(INDEX) * TALL + tl.arange(0, TALL)
    first = (tl.program_id(0) % across).to(INDEX) * WIDE
    place = first + tl.arange(0, WIDE)
    inside = (line < lines)[:, None] & (place < width)[None, :]
    given = tl.load(x + (line[:, None] * line_stride + place[None, :] * element_stride), mask=inside, other=0.0)
    given = tl.reshape(given.to(tl.float32), (TALL, COUNT, BLOCK))
    amax = tl.max(magnitude_bits(given), 2)
    field = amax >> 23
    byte = field - OF_MAX
    if UP:
        byte += ((amax & _MANTISSA) > _MANTISSA_OF_MAX).to(tl.int32)
    byte = tl.where(byte < 0, 0, byte)
    byte = tl.where(field == 255, 255, byte)
    scale = tl.where(byte == 255, _QUIET_NAN, (254 - byte) << 23).to(tl.float32, bitcast=True)
    fp8 = tl.reshape((given * scale[:, :, None]).to(out.dtype.element_ty), (TALL, WIDE))
    tl.store(
        out + (line[:, None].to(tl.int64) * length + place[None, :]),
        fp8,
        mask=(line < lines)[:, None] & (place < length)[None, :],
    )
    block = first // BLOCK + tl.arange(0, COUNT)
    tl.store(
        inv_scale + (line[:, None].to(tl.int64) * blocks + block[None, :]),
        byte.to(tl.uint8),
        mask=(line < lines)[:, None] & (block < blocks)[None, :],
    )


@triton.jit
def _tile_of_scales(inv_scale, line, lines, start, blocks, end, DEPTH: tl.constexpr, BLOCK: tl.constexpr):
    """Return E8M0 bytes [lines of a tile, DEPTH / BLOCK] of an operand [lines, blocks]; 1 beyond it, and from block
    ``end`` on."""
    block = start // BLOCK + tl.arange(0, DEPTH // BLOCK)
    return tl.load(
        inv_scale + (line[:, None].to(tl.int64) * blocks + block[None, :]),
        mask=(line < lines)[:, None] & (block < end)[None, :],
        other=127,
    )


@triton.jit
def _dequantised(fp8, byte, BLOCK: tl.constexpr):
    """Return a tile [lines, DEPTH] times its scales, float32."""
    bits = byte.to(tl.int32) << 23
    bits = tl.where(byte == 0, 1 << 22, bits)  # 2**-127 is a subnormal number.
    scale = tl.where(byte == 255, _QUIET_NAN, bits).to(tl.float32, bitcast=True)
    wide = tl.reshape(fp8.to(tl.float32), (fp8.shape[0], fp8.shape[1] // BLOCK, BLOCK)) * scale[:, :, None]
    return tl.reshape(wide, (fp8.shape[0], fp8.shape[1]))


@triton.jit
def add_mx(
    product, x, y, inv_scale_a, row, m, inv_scale_b, column, n, start, blocks, end,
    FORMAT_A: tl.constexpr, FORMAT_B: tl.constexpr, BLOCK: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Return ``product`` plus that of two tiles, with the scales of rows ``row`` of m and ``column`` of n, from element
    ``start`` on. NATIVE: the tensor cores apply the scales; else they are applied before."""
    DEPTH: tl.constexpr = x.shape[1]
    of_x = _tile_of_scales(inv_scale_a, row, m, start, blocks, end, DEPTH, BLOCK)
    of_y = _tile_of_scales(inv_scale_b, column, n, start, blocks, end, DEPTH, BLOCK)
    if NATIVE:
        product = tl.dot_scaled(x, of_x, FORMAT_A, y.T, of_y, FORMAT_B, product)
    else:
        product = tl.dot(_dequantised(x, of_x, BLOCK), _dequantised(y, of_y, BLOCK).T, product, input_precision="ieee")
    return product


@triton.jit(do_not_specialize=["m"])
def _mx_scaled_kernel(
    a,  # descriptor of FP8 [m, k], blocks [TILE_M, TILE_K]
    b,  # descriptor of FP8 [n, k], blocks [TILE_N, TILE_K]
    inv_scale_a,  # uint8 [m, k / BLOCK], E8M0
    inv_scale_b,  # uint8 [n, k / BLOCK], E8M0
    bias,  # [n]; unused unless BIASED
    out,  # [m, n]
    m,
    n,
    k,
    FORMAT_A: tl.constexpr,
    FORMAT_B: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    BIASED: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """A tile of the product a @ b.T."""
    i, j = tile_at(tl.program_id(0), tl.cdiv(m, TILE_M), tl.cdiv(n, TILE_N), GROUP)
    row, column = i * TILE_M + tl.arange(0, TILE_M), j * TILE_N + tl.arange(0, TILE_N)
    blocks = k // BLOCK
    product = tl.zeros((TILE_M, TILE_N), tl.float32)
    for start in range(0, k, TILE_K):
        x = a.load([i * TILE_M, start])
        y = b.load([j * TILE_N, start])
        product = add_mx(
            product, x, y, inv_scale_a, row, m, inv_scale_b, column, n, start, blocks, blocks,
            FORMAT_A, FORMAT_B, BLOCK, NATIVE,
        )  # fmt: skip
    if BIASED:
        product += tl.load(bias + column, mask=column < n, other=0.0).to(tl.float32)[None, :]
    place = row[:, None].to(tl.int64) * n + column[None, :]
    tl.store(out + place, product.to(out.dtype.element_ty), mask=(row < m)[:, None] & (column < n)[None, :])


def is_native() -> bool:
    """True if there are products that apply scales: the interpreter has none."""
    return isinstance(_mx_scaled_kernel, triton.JITFunction)


def quantize_mx(x: Tensor, dtype: torch.dtype, *, round_up: bool, rows: bool, columns: bool) -> Copies:
    """See ``reference.mx.quantize_mx``. One launch for each copy."""
    nothing = x.new_empty(0, dtype=dtype), x.new_empty(0, dtype=torch.float8_e8m0fnu)
    with on_device_of(x):
        return (
            *(_cast(x, dtype, round_up) if rows else nothing),
            *(_cast(x.t(), dtype, round_up) if columns else nothing),
        )


def _cast(x: Tensor, dtype: torch.dtype, round_up: bool) -> tuple[Tensor, Tensor]:
    lines, width = x.shape
    blocks = ceil_div(width, MX_BLOCK)
    length = blocks * MX_BLOCK
    out = torch.empty(lines, length, dtype=dtype, device=x.device)
    inv_scale = torch.empty(lines, blocks, dtype=torch.uint8, device=x.device)
    programs = ceil_div(lines, _LINES) * ceil_div(length, _LENGTH)
    if programs:
        farthest = (lines + _LINES) * x.stride(0) + (length + _LENGTH) * x.stride(1)
        _mx_kernel[(programs,)](
            x,
            out,
            inv_scale,
            lines,
            width,
            blocks,
            *x.stride(),
            OF_MAX=8 if dtype == torch.float8_e4m3fn else 15,
            UP=round_up,
            TALL=_LINES,
            WIDE=_LENGTH,
            BLOCK=MX_BLOCK,
            INDEX=tl.int64 if farthest > _LARGEST_OFFSET else tl.int32,
            num_warps=_WARPS,
        )
    return out, inv_scale.view(torch.float8_e8m0fnu)


def multiply_mx(
    a: Tensor, b: Tensor, inv_scale_a: Tensor, inv_scale_b: Tensor, out_dtype: torch.dtype, bias: Tensor | None
) -> Tensor:
    """Return the product of MX operands that ``scaling_of`` has checked and that are not empty. The tile is always the
    same, so the result is, too."""
    (m, k), n = a.shape, b.shape[0]
    out = torch.empty(m, n, dtype=out_dtype, device=a.device)
    scales = [scale.contiguous().view(torch.uint8) for scale in (inv_scale_a, inv_scale_b)]
    with on_device_of(a):
        _mx_scaled_kernel[(ceil_div(m, _ROWS) * ceil_div(n, _COLUMNS),)](
            TensorDescriptor(aligned(a), [m, k], [k, 1], [_ROWS, _DEPTH]),
            TensorDescriptor(aligned(b), [n, k], [k, 1], [_COLUMNS, _DEPTH]),
            *scales,
            scales[0] if bias is None else bias.contiguous(),
            out,
            m,
            n,
            k,
            FORMAT_A=FORMATS[a.dtype],
            FORMAT_B=FORMATS[b.dtype],
            TILE_M=_ROWS,
            TILE_N=_COLUMNS,
            TILE_K=_DEPTH,
            BLOCK=MX_BLOCK,
            GROUP=_GROUP,
            BIASED=bias is not None,
            NATIVE=is_native(),
            num_warps=8,
            num_stages=3,
        )
    return out

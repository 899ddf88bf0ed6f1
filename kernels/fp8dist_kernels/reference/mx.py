"""FP8 casts to MX (OCP Microscaling Formats, version 1.0): blocks of 1 x 32 elements that share a power of two.

A block's shared scale X is stored as E8M0, the biased exponent of a power of two: byte b is 2**(b - 127), and 255 is
NaN. Scales here are *inverse* scales: an element stands for ``fp8 * X``.

Section 6.3 of the specification takes X = 2**(floor(log2(amax)) - emax), where emax is the exponent of the element
type's largest number (8 in E4M3, 15 in E5M2). Elements beyond the type, up to 2 / 1.75 of its maximum, saturate. cuBLAS
and TransformerEngine round ``amax / max`` up to a power of two instead (``round_up``): nothing saturates, and blocks
whose amax has a mantissa above 1.75 get twice the scale.

The specification leaves these cases to the implementation. An exponent below -127 becomes -127, also that of a block of
zeros. A block with an Inf or a NaN has the scale NaN, and its elements are NaN: a loss scaler sees it as without FP8.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8dist_kernels import MX_BLOCK
from fp8dist_kernels.reference.blocks import blocks_along

_MAGNITUDE, _MANTISSA, _MANTISSA_OF_MAX = 0x7FFFFFFF, 0x7FFFFF, 0x600000
"""Bits of float32. The largest numbers of E4M3 and E5M2 both have the mantissa 1.75."""

_NAN, _MOST = 255, 254

Copies = tuple[Tensor, Tensor, Tensor, Tensor]


def quantize_mx(x: Tensor, dtype: torch.dtype, *, round_up: bool, rows: bool, columns: bool) -> Copies:
    """Cast with one E8M0 scale for each block of 1 x 32 of each copy.

    Args:
        x: [tokens, features], any float dtype, any strides.
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        round_up: how the scale is rounded to a power of two: up, as cuBLAS does; else as the specification says.
        rows: write the row-major copy, with blocks along features.
        columns: write the transposed copy, with blocks along tokens.

    Returns:
        (row-major fp8 [tokens, features], its inv_scale E8M0 [tokens, ceil(features / 32)], transposed fp8
        [features, tokens], its inv_scale E8M0 [features, ceil(tokens / 32)]), all contiguous. Rows of both copies are
        padded to whole blocks, as cuBLASLt wants them, with zeros (a NaN block with NaN). Empty tensors for a copy that
        was not requested.
    """
    nothing = x.new_empty(0, dtype=dtype), x.new_empty(0, dtype=torch.float8_e8m0fnu)
    return (
        *(_cast(x, dtype, round_up) if rows else nothing),
        *(_cast(x.t(), dtype, round_up) if columns else nothing),
    )


def exponents(amax_bits: Tensor, dtype: torch.dtype, round_up: bool) -> Tensor:
    """Return the E8M0 bytes, int32, of blocks with these amaxes, given as the bits of float32. Elementwise."""
    of_max = 8 if dtype == torch.float8_e4m3fn else 15
    field = amax_bits >> 23
    byte = field - of_max
    if round_up:
        byte = byte + ((amax_bits & _MANTISSA) > _MANTISSA_OF_MAX)
    return torch.where(field == _NAN, _NAN, byte.clamp(0, _MOST))


def _cast(lines: Tensor, dtype: torch.dtype, round_up: bool) -> tuple[Tensor, Tensor]:
    """Return (FP8 [lines, 32 blocks], E8M0 [lines, blocks]) of [lines, width]."""
    count, width = lines.shape
    blocks = blocks_along(width, MX_BLOCK)
    x = torch.zeros(count, blocks * MX_BLOCK, device=lines.device)
    x[:, :width] = lines
    x = x.view(count, blocks, MX_BLOCK)
    byte = exponents((x.view(torch.int32) & _MAGNITUDE).amax(2), dtype, round_up)
    scale = torch.where(byte == _NAN, torch.nan, ((_MOST - byte) << 23).view(torch.float32))
    limit = torch.finfo(dtype).max
    fp8 = (x * scale[:, :, None]).clamp_(-limit, limit).view(count, blocks * MX_BLOCK).to(dtype)
    return fp8, byte.to(torch.uint8).view(torch.float8_e8m0fnu)

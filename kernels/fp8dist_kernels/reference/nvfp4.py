"""Emulated casts to NVFP4: E2M1 elements, an E4M3 scale for each block, one float32 scale for the tensor. No GPU path:
plain torch, with the same bits on every device.

The steps are those of "Pretraining Large Language Models with NVFP4" (arXiv 2509.25149). With ``encode = 6 * 448 /
amax`` of the tensor, a block's scale is ``E4M3(amax_of_block / 6 * encode)``, and an element stands for ``e2m1 *
(block_scale / encode)``. Blocks have 1 x 16 elements along the contracted dim, those of weights 16 x 16, so that the
transposed copy has the bytes of the row-major copy. A block with an Inf or a NaN becomes NaN.

Elements are stored in one byte each, as E4M3, which has all values of E2M1. Scales are returned multiplied.

Random numbers are the hash of a counter: nothing is stored, and whoever has the counter gets the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8dist_kernels import NVFP4_BLOCK
from fp8dist_kernels.reference.blocks import blocks_along
from fp8dist_kernels.reference.digest import GOLDEN, mix
from fp8dist_kernels.scaling import SMALLEST_NORMAL

COUNTERS = ("step", "backward", "first_token", "first_feature", "features")
"""Elements of ``draw``, int64[5]: the training step; the number of this backward of the module in the step; and where x
lies in the whole tensor: its first row, its first column, and the number of columns of the whole."""

_SIGNS, _ROWS, _COLUMNS = range(3)
"""What random numbers are for."""

_MOST, _MOST_SCALE = 6.0, 448.0
_GROWTH = 4.0  # A Hadamard transform of 16 elements enlarges the largest one at most so much.

Copies = tuple[Tensor, Tensor, Tensor, Tensor]


def quantize_nvfp4(
    x: Tensor,
    encode: Tensor,
    draw: Tensor,
    dtype: torch.dtype,
    *,
    key: int,
    square: bool,
    hadamard: bool,
    stochastic: bool,
    rows: bool,
    columns: bool,
) -> Copies:
    """Cast to NVFP4.

    Args:
        x: [tokens, features], any float dtype, any strides.
        encode: float32, 0-d: ``6 * 448 / amax`` of the whole tensor.
        draw: int64[5], see ``COUNTERS``.
        dtype: ``torch.float8_e4m3fn``, in which elements are stored.
        key: of the random numbers, int64. Tensors that are multiplied with each other need one key.
        square: blocks of 16 x 16, for weights. Else 1 x 16.
        hadamard: multiply each block of the transposed copy with random signs and a Hadamard matrix first. Both
            operands of a product get the same, which cancels. Scales are those of 4 times the amax.
        stochastic: round up or down at random, so that the mean is the element. Else to nearest, ties to even.
        rows: write the row-major copy.
        columns: write the transposed copy.

    Returns:
        (row-major [tokens, features], its inv_scale float32 [tokens, ceil(features / 16)], transposed [features,
        tokens], its inv_scale float32 [features, ceil(tokens / 16)]), all contiguous. Rows of both copies are padded to
        whole blocks, with zeros before the cast. Empty tensors for a copy that was not requested.
    """
    made = [x.new_empty(0, dtype=dtype), x.new_empty(0, dtype=torch.float32)] * 2
    for place, (wanted, lines) in enumerate(((rows, x), (columns, x.t()))):
        if not wanted:
            continue
        blocks, scale = _blocks(lines, square), encode
        if place and hadamard:
            blocks, scale = _transformed(blocks, hadamard_signs(key, draw)), encode / _GROWTH
        random = None
        if stochastic:
            step, backward, *_ = draw.unbind()
            stream = _stream(key, draw.new_full((), _COLUMNS if place else _ROWS), step, backward)
            random = uniform(stream, _elements(blocks, draw, bool(place)))
        made[2 * place : 2 * place + 2] = _cast(blocks, lines.shape[0], scale, random, square, dtype)
    return made[0], made[1], made[2], made[3]


def hadamard_signs(key: int, draw: Tensor) -> Tensor:
    """Return float32[16] of 1 and -1. ``draw``: see ``COUNTERS``; only the step counts, so both operands of a product,
    and a recomputation, get the same signs."""
    stream = _stream(key, draw.new_full((), _SIGNS), draw[0])
    places = torch.arange(NVFP4_BLOCK, device=draw.device)
    return 1.0 - 2.0 * ((stream >> places) & 1).float()


def uniform(stream: Tensor, elements: Tensor) -> Tensor:
    """Return float32 in [0, 1), multiples of 2**-24, one for each number of an element, int64."""
    return ((mix(stream + (elements + 1) * GOLDEN) >> 40) & 0xFFFFFF).float() * 2.0**-24


def _stream(key: int, *counters: Tensor) -> Tensor:
    """Return int64, 0-d: a hash of the key and the counters."""
    state = torch.full_like(counters[0], key)
    for counter in counters:
        state = mix(state + (counter + 1) * GOLDEN)
    return state


def _elements(blocks: Tensor, draw: Tensor, transposed: bool) -> Tensor:
    """Return the number of each element in the whole tensor, int64, in the shape of ``blocks``."""
    *_, first_token, first_feature, features = draw.unbind()
    lines = torch.arange(len(blocks), device=draw.device)[:, None]
    along = torch.arange(blocks.shape[1] * NVFP4_BLOCK, device=draw.device)
    tokens, columns = (along, lines) if transposed else (lines, along)
    return ((first_token + tokens) * features + first_feature + columns).view(blocks.shape)


def _blocks(lines: Tensor, square: bool) -> Tensor:
    """Return float32 [lines, blocks, 16], padded with zeros: rows to whole blocks, and lines if these are square."""
    count, width = lines.shape
    blocks = blocks_along(width, NVFP4_BLOCK)
    height = blocks_along(count, NVFP4_BLOCK) * NVFP4_BLOCK if square else count
    x = torch.zeros(height, blocks * NVFP4_BLOCK, device=lines.device)
    x[:count, :width] = lines
    return x.view(height, blocks, NVFP4_BLOCK)


def _transformed(blocks: Tensor, signs: Tensor) -> Tensor:
    """Return each block times signs times the Hadamard matrix / 4. Added in butterflies, the order of which decides the
    last bits."""
    x = blocks * signs
    for half in (1, 2, 4, 8):
        pairs = x.view(*blocks.shape[:2], NVFP4_BLOCK // (2 * half), 2, half)
        low, high = pairs.unbind(-2)
        x = torch.stack((low + high, low - high), -2).view(blocks.shape)
    return x / _GROWTH


def _cast(
    blocks: Tensor, count: int, encode: Tensor, random: Tensor | None, square: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return (elements [count, 16 blocks], inv_scale float32 [count, blocks])."""
    amax = blocks.abs().amax(2)
    if square:
        tiles = amax.view(-1, NVFP4_BLOCK, amax.shape[1]).amax(1)
        amax = tiles.repeat_interleave(NVFP4_BLOCK, 0)
    # A division by a Python number would be a multiplication on a GPU.
    scale = (amax / torch.full((), _MOST, device=amax.device) * encode).clamp(max=_MOST_SCALE)
    scale = torch.where(amax.isfinite(), scale, torch.nan).to(torch.float8_e4m3fn).float()
    inv_scale = scale * torch.reciprocal(encode)
    factor = torch.where(inv_scale >= SMALLEST_NORMAL, torch.reciprocal(inv_scale), 0.0)
    scaled = torch.where(amax.isfinite()[:, :, None], blocks * factor[:, :, None], 0.0)
    rounded = torch.copysign(_rounded(scaled.abs(), random), scaled)
    elements = rounded.flatten(1)[:count].to(dtype)
    return elements.contiguous(), inv_scale[:count].contiguous()


def _rounded(magnitude: Tensor, random: Tensor | None) -> Tensor:
    """Return values of E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6. ``random``: in [0, 1); None: to nearest, ties to even."""
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    steps = magnitude / step  # Exact, as what follows, because steps are powers of two.
    if random is None:
        steps = steps.round()
    else:
        low = steps.floor()
        steps = low + (random < steps - low)
    return (steps * step).clamp(max=_MOST)

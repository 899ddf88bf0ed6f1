"""Gradients as messages, cast in one launch, and summed in one."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8dist_kernels import BLOCK
from fp8dist_kernels.formats import E4M3
from fp8dist_kernels.reference.blocks import blocks_along
from fp8dist_kernels.reference.wire import message_bytes
from fp8dist_kernels.triton.launching import ceil_div, on_device_of
from fp8dist_kernels.triton.magnitude import magnitude_bits
from fp8dist_kernels.triton.scaling import inverse, scale_from_amax
from fp8dist_kernels.triton.strips import scaled

_BLOCKS = 16  # Blocks of a program: 2048 numbers, 16 for each of its threads.
_WARPS = 4


@triton.jit
def _places(length, numel, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    """Return this program's blocks of its message [BLOCKS]; the places of their numbers in the message, int64[BLOCKS,
    BLOCK]; the place of the message's first number; and how many numbers of the message exist."""
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    place = block.to(tl.int64)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    first = tl.program_id(1).to(tl.int64) * length
    return block, place, first, tl.minimum(length, numel - first)


@triton.jit
def _encode_kernel(
    x,  # [numel]
    fp8,  # [count, blocks * (BLOCK + 4)] bytes: the messages
    inv_scale,  # float32, the same memory
    numel,
    length,
    blocks,
    FP8_MAX: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """See ``reference.wire.encode``. A program casts some blocks of one message."""
    block, place, first, here = _places(length, numel, BLOCKS, BLOCK)
    if (tl.program_id(0) + 1) * BLOCKS * BLOCK <= here:  # Without masks, so that loads are wide.
        numbers = tl.load(x + (first + place))
    else:
        numbers = tl.load(x + (first + place), mask=place < here, other=0.0)
    amax = tl.max(magnitude_bits(numbers), 1).to(tl.float32, bitcast=True)
    scale = scale_from_amax(amax, 1.0, FP8_MAX, 0, False)
    start = tl.program_id(1).to(tl.int64) * blocks * (BLOCK + 4)
    cast = scaled(numbers, scale[:, None]).to(fp8.dtype.element_ty)
    if (tl.program_id(0) + 1) * BLOCKS <= blocks:
        tl.store(fp8 + (start + place), cast)
    else:
        tl.store(fp8 + (start + place), cast, mask=(block < blocks)[:, None])
    tl.store(inv_scale + (start + tl.cast(blocks, tl.int64) * BLOCK) // 4 + block, inverse(scale), mask=block < blocks)


@triton.jit
def _decode_kernel(
    fp8,  # [parts, summands, blocks * (BLOCK + 4)] bytes: the messages
    inv_scale,  # float32, the same memory
    out,  # [numel], written
    numel,
    length,
    blocks,
    summands,
    factor,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """See ``reference.wire.decode``. A program sums some blocks of one part."""
    block, place, first, here = _places(length, numel, BLOCKS, BLOCK)
    size = tl.cast(blocks, tl.int64) * (BLOCK + 4)
    start = tl.program_id(1).to(tl.int64) * summands * size
    total = tl.zeros((BLOCKS, BLOCK), tl.float32)
    for i in range(0, summands):
        scales = inv_scale + (start + tl.cast(blocks, tl.int64) * BLOCK) // 4 + block
        inverses = tl.load(scales, mask=block < blocks, other=0.0)[:, None]
        if (tl.program_id(0) + 1) * BLOCKS <= blocks:
            numbers = tl.load(fp8 + (start + place))
        else:
            numbers = tl.load(fp8 + (start + place), mask=(block < blocks)[:, None], other=0.0)
        term = numbers.to(tl.float32) * inverses * factor
        total = tl.where(i == 0, term, total + term)  # 0 + -0 would be 0.
        start += size
    total = total.to(out.dtype.element_ty)
    if (tl.program_id(0) + 1) * BLOCKS * BLOCK <= here:
        tl.store(out + (first + place), total)
    else:
        tl.store(out + (first + place), total, mask=place < here)


def encode(x: Tensor, count: int, length: int) -> Tensor:
    """See ``reference.wire.encode``."""
    messages = torch.empty(count, message_bytes(length), dtype=torch.uint8, device=x.device)
    blocks = blocks_along(length, BLOCK)
    if messages.numel():
        with on_device_of(x):
            _encode_kernel[(ceil_div(blocks, _BLOCKS), count)](
                x, messages.view(E4M3.dtype), messages.view(torch.float32), x.numel(), length, blocks,
                FP8_MAX=E4M3.max, BLOCKS=_BLOCKS, BLOCK=BLOCK, num_warps=_WARPS,
            )  # fmt: skip
    return messages


def decode(messages: Tensor, length: int, out: Tensor, factor: float = 1.0) -> None:
    """See ``reference.wire.decode``."""
    parts, summands, _ = messages.shape
    blocks = blocks_along(length, BLOCK)
    if messages.numel():
        with on_device_of(out):
            _decode_kernel[(ceil_div(blocks, _BLOCKS), parts)](
                messages.view(E4M3.dtype), messages.view(torch.float32), out, out.numel(), length, blocks, summands,
                factor, BLOCKS=_BLOCKS, BLOCK=BLOCK, num_warps=_WARPS, enable_fp_fusion=False,
            )  # fmt: skip

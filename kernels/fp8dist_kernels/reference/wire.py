"""Gradients as messages: E4M3 with a scale per block of 128, from the block's own amax, and float32 sums of messages.

A message holds ``length`` numbers, padded with zeros to whole blocks: 128 bytes of E4M3 per block, then a float32
inverse scale per block. So it takes 132 bytes for 128 numbers: 0.516 of bf16's bytes, 0.258 of float32's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8dist_kernels import BLOCK
from fp8dist_kernels.formats import E4M3
from fp8dist_kernels.reference.blocks import blocks_along, quantize_blocks
from fp8dist_kernels.reference.casts import dequantize

BYTES = BLOCK + 4
"""Bytes of a block and its inverse scale."""


def message_bytes(length: int) -> int:
    """Return the bytes of a message of ``length`` numbers."""
    return blocks_along(length, BLOCK) * BYTES


def encode(x: Tensor, count: int, length: int) -> Tensor:
    """Return messages uint8[count, message_bytes(length)]: number i holds x[i * length : (i + 1) * length].

    A block is cast as by ``quantize_blocks``: with the scale 1 if its amax is 0 or not finite. Inf and NaN become NaN.

    Args:
        x: float32, bf16 or fp16, [n], contiguous; n <= count * length. Numbers after the last one are zeros.
    """
    blocks = blocks_along(length, BLOCK)
    flat = torch.zeros(count * length, device=x.device)
    flat[: x.numel()] = x
    numbers = torch.nn.functional.pad(flat.view(count, length), (0, blocks * BLOCK - length)).view(-1, BLOCK)
    fp8, inv_scale, *_ = quantize_blocks(
        numbers, E4M3.dtype, block=(1, BLOCK), power_of_two=False, rows=True, columns=False
    )
    parts = [part.reshape(-1).view(torch.uint8).view(count, -1) for part in (fp8, inv_scale)]
    return torch.cat(parts, 1)


def decode(messages: Tensor, length: int, out: Tensor, factor: float = 1.0) -> None:
    """Write sums of messages to ``out``: numbers i * length to (i + 1) * length are the sum of messages[i], each times
    ``factor``.

    A term is the FP8 number times its inverse scale, times ``factor``, each product rounded to float32. So a mean stays
    finite where the sum would not. Sums are float32, of the messages in their order, without fused multiply-add, and
    rounded to the dtype of ``out`` once.

    Args:
        messages: uint8[parts, summands, message_bytes(length)].
        out: float32, bf16 or fp16, [n], contiguous; n <= parts * length.
        factor: rounded to float32.
    """
    parts, summands, _ = messages.shape
    blocks = blocks_along(length, BLOCK)
    fp8 = messages[..., : blocks * BLOCK].view(E4M3.dtype).unflatten(-1, (blocks, BLOCK))
    inv_scale = messages[..., blocks * BLOCK :].view(torch.float32).unsqueeze(-1)
    total = dequantize(fp8[:, 0], inv_scale[:, 0]) * factor
    for i in range(1, summands):
        total += dequantize(fp8[:, i], inv_scale[:, i]) * factor
    numbers = total.view(parts, blocks * BLOCK)[:, :length]
    out.copy_(numbers.reshape(-1)[: out.numel()])

"""FP8 matrix products with the reduced precision of Hopper's tensor cores, emulated in torch.

What is known: FP8 products are aligned to the largest exponent and truncated, and sums keep about 14 bits; adding the
sums of every 128 elements in float32 restores the precision (DeepSeek-V3, arXiv 2412.19437, sections 3.3.2 and 3.5.2).
The details are those of MMA-Sim (arXiv 2511.10909), whose authors compared their model with the GPU bit by bit:

- One step adds the products of 32 elements to the sum so far.
- A product's exponent is the sum of its factors' exponents. Products and sum are cut, towards zero, to 13 fraction bits
  below the largest exponent among them, then added exactly.
- The result is cut to 13 fraction bits, towards zero, and kept so until the next step.

Assumptions: the steps of a product follow each other, as in a kernel that does not split k, and slow accumulation adds
to a float32 sum, rounded to nearest, after every 128 elements. Nothing here was compared with a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8dist_kernels import direct
from fp8dist_kernels.reference.casts import dequantize
from fp8dist_kernels.reference.matmuls import scaling_of

FRACTION_BITS = 13
"""Bits behind the leading one of a sum: 14 bits with it."""

STEP = 32
"""Elements of the contracted dim that are added at once."""

PROMOTED_EVERY = 128
"""Elements of the contracted dim between two additions in float32, with slow accumulation."""

_LOWEST = {torch.float8_e4m3fn: -6, torch.float8_e5m2: -14}
"""Exponents of the smallest normal numbers. Subnormal numbers have the same."""

_ZERO = -48
"""Exponent of a zero: below each sum of two others, and an int8 even if it is added to itself."""

_TILE = 1 << 16
"""Number of results computed at once: their arrays stay in the cache."""


def emulated_product(
    a: Tensor,
    b: Tensor,
    inv_scale_a: Tensor,
    inv_scale_b: Tensor,
    promoted_every: int | None,
    fraction_bits: int = FRACTION_BITS,
) -> Tensor:
    """Return ``(a * inv_scale_a) @ (b * inv_scale_b).T``, float32 [m, n], with sums of limited precision.

    Args:
        a: FP8 [m, k].
        b: FP8 [n, k].
        inv_scale_a: float32: one element, or [m, 1]; ``inv_scale_b`` likewise, or [n, 1].
        promoted_every: sums are added in float32 after so many elements, a multiple of ``STEP``. None: never.
        fraction_bits: at most 23.
    """
    (m, k), n = a.shape, b.shape[0]
    if not (a.float().isfinite().all() and b.float().isfinite().all()):  # Below, sums are integers.
        return dequantize(a, inv_scale_a) @ dequantize(b, inv_scale_b).t()
    left, right = _parts(a), _parts(b)
    every = k if promoted_every is None else promoted_every
    sums = torch.empty(m, n)
    rows = max(1, _TILE // max(n, 1))
    for start in range(0, m, rows):
        tile = tuple(part[:, start : start + rows] for part in left)
        sums[start : start + rows] = _tile_of(tile, right, every, fraction_bits)
    scale_b = inv_scale_b.reshape(1, -1)
    return sums * inv_scale_a.reshape(-1, 1) * scale_b


def _parts(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return values (float32) and exponents (int8) of FP8 [rows, k], both [k, rows], k padded to a multiple of STEP."""
    values = F.pad(x.float(), (0, -x.shape[1] % STEP)).t().contiguous()
    exponents = _exponents(values).clamp_(min=_LOWEST[x.dtype]).masked_fill_(values == 0, _ZERO)
    return values, exponents.to(torch.int8)


def _exponents(x: Tensor) -> Tensor:
    """Return floor(log2(abs(x))) as int32 for float32 numbers that are not subnormal; -127 for zero."""
    return ((x.view(torch.int32) >> 23) & 255) - 127


def _power_of_two(exponents: Tensor) -> Tensor:
    """Return 2**exponents in float32, for int32 exponents from -126 to 127. Exact, unlike ``exp2``."""
    return ((exponents + 127) << 23).view(torch.float32)


def _tile_of(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor], every: int, bits: int) -> Tensor:
    """Return sums of products: float32 [rows, n]. ``left``, ``right``: see ``_parts``."""
    k, shape = left[0].shape[0], (left[0].shape[1], right[0].shape[1])
    total, partial = torch.zeros(shape), torch.zeros(shape)
    scratch = torch.empty(shape, dtype=torch.int8), torch.empty(shape), torch.empty(shape, dtype=torch.int32)
    for step in range(0, k, STEP):
        place = slice(step, step + STEP)
        chunk = [part[place] for part in (*left, *right)]
        partial = _added(partial, *chunk, bits, scratch)
        if (step + STEP) % every == 0:
            total += partial
            partial = torch.zeros(shape)
    return total + partial


def _added(
    partial: Tensor,
    values_a: Tensor,
    exponents_a: Tensor,
    values_b: Tensor,
    exponents_b: Tensor,
    bits: int,
    scratch: tuple[Tensor, Tensor, Tensor],
) -> Tensor:
    """Return ``partial`` [rows, n] plus the products of one step, a [STEP, rows] and b [STEP, n]."""
    exponent, product, integer = scratch
    largest = _exponents(partial).to(torch.int8)
    for a, b in zip(exponents_a, exponents_b):
        torch.add(a[:, None], b, out=exponent)
        torch.maximum(largest, exponent, out=largest)
    # Count in units of the last bit that is kept. All integers below are exact, and fit an int32.
    units = _power_of_two(bits - largest.to(torch.int32))
    counted = (partial * units).to(torch.int32)
    for a, b in zip(values_a, values_b):
        torch.mul(a[:, None], b, out=product)
        integer.copy_(product.mul_(units))  # Cuts towards zero. Twelve times faster than trunc().
        counted += integer
    dropped = 52 - bits  # Of the bits of a float64.
    kept = (counted.double().view(torch.int64) >> dropped << dropped).view(torch.float64)
    return (kept / units).float()


class Errors(NamedTuple):
    """Errors of one product, relative to the product (Frobenius norm). ``k``: length of the contracted dim."""

    k: int
    slow: float
    fast: float


def errors_of(a: Tensor, b: Tensor, inv_scale_a: Tensor, inv_scale_b: Tensor) -> Errors:
    """Return the errors of both accumulations, compared with the product in float64."""
    scale_a, scale_b = inv_scale_a.double().reshape(-1, 1), inv_scale_b.double().reshape(-1, 1)
    exact = (a.double() * scale_a) @ (b.double() * scale_b).t()
    found = (emulated_product(a, b, inv_scale_a, inv_scale_b, every) for every in (PROMOTED_EVERY, None))
    return Errors(a.shape[1], *(relative_error(product, exact) for product in found))


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return the length of the difference, relative to the length of ``expected`` (float64); 0 if both are zero."""
    length = float(expected.norm())
    return float((found.double() - expected).norm()) / length if length else float(found.double().norm())


@contextmanager
def emulated() -> Iterator[None]:
    """Let FP8Linear multiply with ``emulated_product`` inside the context: promoted, unless a call wants fast
    accumulation. Products by block are not emulated: their scales change every 128 elements, where they are added."""
    original = direct.matmul

    def matmul(*operands: Any, bias: Tensor | None = None, fast_accumulation: bool, **options: Any) -> Tensor:
        *factors, out_dtype = operands
        if scaling_of(*factors, bias).in_blocks:
            return original(*operands, bias=bias, fast_accumulation=fast_accumulation, **options)
        result = emulated_product(*factors, None if fast_accumulation else PROMOTED_EVERY)
        return (result if bias is None else result.add_(bias)).to(out_dtype)

    with mock.patch.object(direct, "matmul", matmul):
        yield


@contextmanager
def compared() -> Iterator[list[Errors]]:
    """Yield a list that gets the errors of each product inside the context that wants fast accumulation. The products
    themselves stay as they are, so that all of them see the same operands."""
    original, found = direct.matmul, []

    def matmul(*operands: Any, fast_accumulation: bool, **options: Any) -> Tensor:
        if fast_accumulation:
            found.append(errors_of(*operands[:4]))
        return original(*operands, fast_accumulation=fast_accumulation, **options)

    with mock.patch.object(direct, "matmul", matmul):
        yield found

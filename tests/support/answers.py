"""Known answers: their operands in Python's integers, and faults planted into the computations of a rank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fp8dist_kernels import direct

MASK, GOLDEN = (1 << 64) - 1, 0x9E3779B97F4A7C15
FIELDS: Mapping[torch.dtype, tuple[int, int, int]] = MappingProxyType(
    {
        torch.float32: (8, 23, 254),
        torch.bfloat16: (8, 7, 254),
        torch.float16: (5, 10, 30),
        torch.float8_e5m2: (5, 2, 30),
        torch.float8_e4m3fn: (4, 3, 15),
    }
)
"""Bits of exponent and mantissa, and the largest exponent field of a number."""


def word(place: int, seed: int) -> int:
    """Return SplitMix64's word for an element."""
    return mixed(((place + 1 + (seed << 40)) * GOLDEN) & MASK)


def mixed(z: int) -> int:
    """Return the output of SplitMix64 in this state. With seed 0, its states are the multiples of GOLDEN (Steele, Lea
    and Flood, "Fast splittable pseudorandom number generators", 2014)."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def known_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> list[int]:
    """Return the bit patterns of an operand, as the docstring of reference/operands.py defines them."""
    exponent_bits, mantissa_bits, largest = FIELDS[dtype]
    bias = 2 ** (exponent_bits - 1) - 1
    found = []
    for place in range(int(np.prod(shape))):
        w = word(place, seed)
        kind, drawn, mantissa = w % 64, w >> 8, (w >> 16) % 2**mantissa_bits
        exponent = bias - 3 + drawn % 4
        if kind == 0:
            exponent = mantissa = 0
        elif kind == 1:
            exponent = 0
        elif kind in (2, 3):
            exponent = max(1, bias - 24 + drawn % 16)
        elif kind == 4 and place // shape[-1] % 16 == 15:
            exponent = min(largest, bias + 4 + drawn % 8)
        if dtype == torch.float8_e4m3fn and exponent == 15:
            mantissa = min(mantissa, 6)
        sign = (w >> 6) % 2
        found.append((((sign << exponent_bits) | exponent) << mantissa_bits) | mantissa)
    return found


def known_values(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> npt.NDArray[np.float32]:
    """Return the values of an operand of 16 or 32 bits, as float32."""
    words = np.array(known_bits(shape, dtype, seed), dtype=np.uint32)
    if dtype == torch.bfloat16:
        words <<= np.uint32(16)
    values = words.astype(np.uint16).view(np.float16).astype(np.float32) if dtype == torch.float16 else None
    return (words.view(np.float32) if values is None else values).reshape(shape)


CALLS = ("quantize", "quantize_rowwise", "quantize_blocks", "quantize_grouped", "quantize_grouped_lines")
CALLS += ("quantize_mx", "quantize_nvfp4", "matmul", "matmul_into", "matmul_grouped", "matmul_grouped_columns")
OPTIONS = ("rows", "columns", "power_of_two", "block", "in_blocks", "fast_accumulation", "backend", "bias")


@contextlib.contextmanager
def recorded_calls() -> Iterator[set[Any]]:
    """Yield the distinct casts and products that ``direct`` computes: ops, what their tensors look like, options."""
    found: set[Any] = set()

    def look(value: Any) -> Any:
        return (tuple(value.shape), value.dtype, value.is_contiguous()) if isinstance(value, Tensor) else str(value)

    def recording(op: str) -> Any:
        original = getattr(direct, op)

        def call(*args: Any, **options: Any) -> Any:
            copies = options.get("rows", True) or options.get("columns", True)  # Else only an amax is recorded.
            kept = [(name, look(options[name])) for name in OPTIONS if options.get(name) is not None]
            if copies:
                found.add((op, *map(look, args), *kept))
            return original(*args, **options)

        return call

    with contextlib.ExitStack() as stack:
        for op in CALLS:
            stack.enter_context(mock.patch.object(direct, op, recording(op)))
        yield found


@contextlib.contextmanager
def flipping(op: str, shape: tuple[int, ...], byte: int, bit: int, result: int = 0, when: int = 0) -> Iterator[None]:
    """Flip one bit of a result of ``direct``'s function ``op``, if its first argument has this shape.

    ``byte``: place in the memory of the result. ``result``: which of several results. ``when``: which of these calls,
    counted from 1; 0: each of them. Calls of the reference backend do not count.
    """
    original, calls = getattr(direct, op), 0

    def faulty(x: Tensor, *rest: Any, **options: Any) -> Any:
        nonlocal calls
        found = original(x, *rest, **options)
        if tuple(x.shape) == shape and options["backend"] != "reference":
            calls += 1
            if when in (0, calls):
                wrong = found if isinstance(found, Tensor) else found[result]
                wrong.view(torch.uint8).view(-1)[byte] ^= 1 << bit
        return found

    with mock.patch.object(direct, op, faulty):
        yield

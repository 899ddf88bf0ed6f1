"""Differences: the first element that differs between two tensors, its values, and their distance. Local.

A tensor is compared in *blocks* of 256 KiB of its bytes. Its *leaves* are digests of the blocks, int64[blocks, 2]. A
*place* is an index into the flattened tensor. This file does not use torch.distributed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fp8dist_kernels.reference.content import BLOCK_BYTES, as_bytes


@dataclass(frozen=True)
class Difference:
    """The first differing element of a tensor, as plain values that can be sent to any rank.

    ``value``: the element as a Python number, NaN for packed formats. ``expected``: the same of the other tensor.
    """

    place: int
    value: Any
    expected: Any
    ulp: int | None  # Distance in units in the last place; None: undefined.
    bits: tuple[str, str]  # Hexadecimal, of value and expected.
    elements: int  # Differing elements in the first differing block.
    blocks: int  # Differing blocks.
    of_elements: int  # Elements in that block.
    of_blocks: int  # Blocks in the tensor.

    def extent(self) -> str:
        """Return a text that says how much differs, such as "3 of 64 elements"."""
        if self.of_blocks == 1:
            return f"{self.elements} of {self.of_elements} elements"
        return f"{self.elements} elements in the first of {self.blocks} differing blocks, of {self.of_blocks}"


def first_differing_block(mine: Tensor, theirs: Tensor) -> tuple[int, int] | None:
    """Return (index of the first differing block, number of differing blocks); None if all are equal.

    Args:
        mine, theirs: the leaves of two tensors.
    """
    places = (mine != theirs).any(1).nonzero().flatten()
    return (int(places[0]), len(places)) if len(places) else None


def first_difference(mine: Tensor, theirs: Tensor, my_leaves: Tensor, their_leaves: Tensor) -> Difference | None:
    """Return the first element that differs between two tensors of one dtype and shape; None if they are equal.

    Args:
        my_leaves, their_leaves: of the two tensors.
    """
    first = first_differing_block(my_leaves, their_leaves)
    if first is None:
        return None
    block, blocks = first
    a, b = (block_of(as_bytes(tensor), block).cpu() for tensor in (mine, theirs))
    return compare_block(a, b, mine.dtype, block, blocks, len(their_leaves))


def block_of(content: Tensor, block: int) -> Tensor:
    """Return one block of a tensor's bytes, uint8[nbytes]: uint8[262144], less for the last one."""
    return content[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]


def compare_block(
    mine: Tensor, theirs: Tensor, dtype: torch.dtype, block: int, blocks: int, of_blocks: int
) -> Difference | None:
    """Return the first element that differs between two blocks, uint8[n] each on the CPU; None if they are equal.

    Args:
        block: index of the block in the tensor.
        blocks: number of blocks of the tensor that differ.
        of_blocks: number of blocks of the tensor.
    """
    size = dtype.itemsize
    differs = (mine.view(-1, size) != theirs.view(-1, size)).any(1).nonzero().flatten()
    if not len(differs):
        return None
    first = int(differs[0])
    a, b = (part[first * size : (first + 1) * size].clone() for part in (mine, theirs))
    return Difference(
        place=block * (BLOCK_BYTES // size) + first,
        value=_value(a, dtype),
        expected=_value(b, dtype),
        ulp=ulp_distance(a, b, dtype),
        bits=(_hexadecimal(a), _hexadecimal(b)),
        elements=len(differs),
        blocks=blocks,
        of_elements=len(mine) // size,
        of_blocks=of_blocks,
    )


def ulp_distance(a: Tensor, b: Tensor, dtype: torch.dtype) -> int | None:
    """Return the distance of two elements in ULP, from their bytes (uint8[itemsize]). None for NaN, bool and complex.

    Floats are mapped to integers in order of value (Dawson, "Comparing Floating Point Numbers", 2012): the distance of
    +0 and -0 is 0. For integers it is the plain difference.
    """
    if dtype.is_complex or dtype == torch.bool:
        return None
    x, y = _value(a, dtype), _value(b, dtype)
    if not dtype.is_floating_point:
        return abs(x - y) if isinstance(x, int) else None
    if math.isnan(x) or math.isnan(y):
        return None
    signed = dtype != torch.float8_e8m0fnu
    return abs(_on_a_line(a, signed) - _on_a_line(b, signed))


def _on_a_line(element: Tensor, signed: bool) -> int:
    """Return an integer that grows with the value of the float. ``signed``: the format has a sign bit."""
    bits = int.from_bytes(bytes(element.tolist()), "little")
    sign = 1 << (8 * len(element) - 1)
    return sign - bits if signed and bits >= sign else bits


def _value(element: Tensor, dtype: torch.dtype) -> Any:
    """Return the element, uint8[itemsize], as a Python number."""
    typed = element.view(dtype)
    if dtype.is_floating_point:
        try:
            return typed.to(torch.float64).item()
        except (RuntimeError, NotImplementedError):  # A packed format: two numbers in a byte.
            return math.nan
    return typed.item()


def _hexadecimal(element: Tensor) -> str:
    return "0x" + bytes(element.tolist())[::-1].hex()


def unravel(place: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the index of an element of a tensor of ``shape`` from its place."""
    return tuple(map(int, np.unravel_index(place, shape)))


def ravel(index: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """Return the place of an element from its index; 0 for an empty index. The inverse of ``unravel``."""
    return int(np.ravel_multi_index(index, shape)) if index else 0

"""Parts of casts and products for audits: which lines are sent, and memory for messages and repetitions.

An audit sends a cast or a product of a training step to another rank, which repeats it. Large tensors are sent in part.
A *line* is a row or a column of a matrix, whichever way the matrix is cut.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from fp8dist_kernels import BLOCK

__all__ = [
    "ALIGNMENT",
    "INTEGERS",
    "aligned",
    "among_zeros",
    "hash_of",
    "lines_of",
    "part_of_lines",
    "part_of_product",
]

ALIGNMENT = 256
"""Bytes. torch chooses kernels by the alignment of operands, so a repetition gets operands with the same alignment:
the same address modulo this number."""

INTEGERS: Mapping[int, torch.dtype] = MappingProxyType({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64})
"""Integer dtypes by item size. Tensors are copied as integers, because some FP8 ops are missing in torch."""


def part_of_product(a: Tensor, b: Tensor, limit: int, at: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return (first, end) of the rows of a [m, k] and of b [n, k] that are sent: all, or what ``limit`` bytes hold.
    ``at``: see ``lines_of``."""
    return part_of_lines(a.shape[0], b.shape[0], limit // (a.shape[1] * a.element_size()), at)


def part_of_lines(m: int, n: int, allowed: int, at: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return (first, end) of the lines that are sent of ``m`` and of ``n``: all, or about ``allowed`` lines together.
    ``at``: see ``lines_of``."""
    if m + n <= allowed:
        return (0, m), (0, n)
    of_a = min(m, max(allowed // 2, allowed - n))
    return lines_of(m, of_a, at), lines_of(n, allowed - of_a, at + 1)


def lines_of(count: int, allowed: int, at: int) -> tuple[int, int]:
    """Return (first, end) of the lines that are sent of ``count``: all if ``allowed`` is as many, else whole blocks of
    ``BLOCK`` lines, at least one.

    ``at``: chooses which blocks, such as the number of the step. Audits with different numbers visit all.
    """
    if count <= allowed:
        return 0, count
    blocks = max(1, allowed // BLOCK)
    places = math.ceil(count / BLOCK) - blocks + 1
    first = hash_of(at) % places * BLOCK
    return first, min(count, first + blocks * BLOCK)


def hash_of(at: int, of: str = "lines") -> int:
    """Return a number below 2**32 that depends on ``at``, and on ``of``, what it is for.

    The steps at which one module is audited have a fixed distance. A multiplicative hash of such numbers would never
    choose some of the lines, so all bits of this hash depend on all bits of ``at``.
    """
    return int.from_bytes(hashlib.blake2b(f"{at} {of}".encode(), digest_size=4).digest(), "little")


def among_zeros(part: Tensor, size: int, start: int) -> Tensor:
    """Return [size, k]: zeros, with ``part`` [lines, k] from row ``start`` on. Its alignment is such that ``part``
    could be a view of it. If ``part`` has all rows, it is returned itself."""
    if part.shape[0] == size:
        return part
    line = part.shape[1] * part.element_size()
    whole = aligned(size * line, part.data_ptr() - start * line, part.device)
    whole = whole.zero_().view(part.dtype).view(size, part.shape[1])
    whole.view(INTEGERS[part.itemsize])[start : start + part.shape[0]] = part.view(INTEGERS[part.itemsize])
    return whole


def aligned(nbytes: int, like: int, device: torch.device) -> Tensor:
    """Return uint8[nbytes], not initialised, at an address that equals ``like`` modulo ``ALIGNMENT``."""
    memory = torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8, device=device)
    start = (like - memory.data_ptr()) % ALIGNMENT
    return memory[start : start + nbytes]

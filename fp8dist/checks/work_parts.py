"""Parts: which lines of a cast or a product are taken down, and the memory in which they are sent and repeated."""

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
    "message_of",
    "part_of_lines",
    "part_of_product",
    "text_of",
]

ALIGNMENT = 256
"""Bytes. Kernels are chosen by the alignment of operands, so a repeated call gets operands that are aligned alike."""

INTEGERS: Mapping[int, torch.dtype] = MappingProxyType({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64})


def part_of_product(a: Tensor, b: Tensor, limit: int, at: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return which rows of ``a`` and of ``b`` are taken: all, or as many of each as the limit allows."""
    return part_of_lines(a.shape[0], b.shape[0], limit // (a.shape[1] * a.element_size()), at)


def part_of_lines(m: int, n: int, allowed: int, at: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return which of ``m`` and of ``n`` lines are taken: all, or about ``allowed`` together."""
    if m + n <= allowed:
        return (0, m), (0, n)
    of_a = min(m, max(allowed // 2, allowed - n))
    return lines_of(m, of_a, at), lines_of(n, allowed - of_a, at + 1)


def lines_of(count: int, allowed: int, at: int) -> tuple[int, int]:
    """Return (first, end) of the lines that are taken of ``count``: all, or whole blocks, at least one."""
    if count <= allowed:
        return 0, count
    blocks = max(1, allowed // BLOCK)
    places = math.ceil(count / BLOCK) - blocks + 1
    first = hash_of(at) % places * BLOCK
    return first, min(count, first + blocks * BLOCK)


def hash_of(at: int, of: str = "lines") -> int:
    """Return a number below 2**32. Audits visit a site every so many steps, so all bits must depend on all of ``at``:
    with a multiplicative hash, some of the lines would never come up."""
    return int.from_bytes(hashlib.blake2b(f"{at} {of}".encode(), digest_size=4).digest(), "little")


def among_zeros(part: Tensor, size: int, start: int) -> Tensor:
    """Return [size, …]: zeros, with ``part`` from line ``start`` on, aligned as if ``part`` had been cut out of it."""
    if part.shape[0] == size:
        return part
    line = part.shape[1] * part.element_size()
    whole = aligned(size * line, part.data_ptr() - start * line, part.device)
    whole = whole.zero_().view(part.dtype).view(size, part.shape[1])
    whole.view(INTEGERS[part.itemsize])[start : start + part.shape[0]] = part.view(INTEGERS[part.itemsize])
    return whole


def message_of(nbytes: int, device: torch.device) -> Tensor:
    """Return memory for a message: uint8[nbytes], not initialised."""
    return aligned(nbytes, 0, device)


def aligned(nbytes: int, like: int, device: torch.device) -> Tensor:
    """Return uint8[nbytes], not initialised, at an address that is aligned as ``like``."""
    memory = torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8, device=device)
    start = (like - memory.data_ptr()) % ALIGNMENT
    return memory[start : start + nbytes]


def text_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype, as messages have it."""
    return str(dtype).removeprefix("torch.")

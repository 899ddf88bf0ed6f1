"""The operands that each recipe must multiply, bit for bit. Shares no code with the library or torch's FP8 casts.

FP8 follows the fields of its codes (OCP 8-bit Floating Point Specification, revision 1.0, section 5.1: tables 1 and 2),
casts follow the docstrings of the recipes. Uses numpy only: its float32 arithmetic is IEEE's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]
By = Literal["tensor", "row", "block", "mx down", "mx up"]

FLOAT32_MAX = np.float32((2.0 - 2.0**-23) * 2.0**127)
SMALLEST_NORMAL = np.float32(2.0**-126)


@dataclass(frozen=True)
class FP8:
    """One encoding: sign, exponent and mantissa fields. ``largest``: the code of the largest finite number; all codes
    above it are Inf or NaN."""

    exponent_bits: int
    mantissa_bits: int
    bias: int
    largest: int

    def decode(self, code: int) -> float:
        """Return the number of a finite code from 0 to 255."""
        assert code & 0x7F <= self.largest
        exponent = (code & 0x7F) >> self.mantissa_bits
        mantissa = (code & ((1 << self.mantissa_bits) - 1)) / (1 << self.mantissa_bits)
        magnitude = 2.0 ** (exponent - self.bias) * (1 + mantissa) if exponent else 2.0 ** (1 - self.bias) * mantissa
        return -magnitude if code & 0x80 else magnitude

    @property
    def max(self) -> float:
        """The largest finite number."""
        return self.decode(self.largest)

    @property
    def smallest(self) -> float:
        """The smallest number above 0, which is the spacing of subnormal numbers."""
        return self.decode(1)

    def encode(self, x: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
        """Return the codes of float numbers: to nearest, ties to even, saturating. Keeps the sign of 0. NaN becomes
        0x7F."""
        numbers = _numbers(self)
        middles = (numbers[:-1] + numbers[1:]) / 2  # Exact in float64.
        magnitude = np.abs(x.astype(np.float64))
        above = np.searchsorted(middles, magnitude, side="left")
        tie = middles[np.minimum(above, len(middles) - 1)] == magnitude
        code = np.where(tie & (above % 2 == 1), above + 1, above).astype(np.uint8)
        return np.where(np.isnan(x), np.uint8(0x7F), code | np.where(np.signbit(x), 0x80, 0).astype(np.uint8))

    def decoded(self, codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.float64]:
        """Return the numbers of finite codes."""
        magnitude = _numbers(self)[codes & 0x7F]
        return np.where(codes & 0x80, -magnitude, magnitude)


E4M3 = FP8(exponent_bits=4, mantissa_bits=3, bias=7, largest=0x7E)  # S.1111.111 is NaN; there is no Inf.
E5M2 = FP8(exponent_bits=5, mantissa_bits=2, bias=15, largest=0x7B)  # S.11111.00 is Inf, others above it NaN.


@cache
def _numbers(format: FP8) -> npt.NDArray[np.float64]:
    """Return all finite numbers >= 0, by code."""
    return np.array([format.decode(code) for code in range(format.largest + 1)])


def formats(name: str) -> Mapping[str, FP8]:
    """Return the format of each role."""
    return {"input": E4M3, "weight": E4M3, "grad_output": {"hybrid": E5M2, "e4m3": E4M3}[name]}


def current_scale(amax: Array, format: FP8, power_of_two: bool, margin: int = 0) -> Array:
    """Return ``(max / amax) / 2**margin`` in float32, elementwise; 1 where ``amax`` is 0, Inf or NaN."""
    with np.errstate(all="ignore"):
        scale = np.float32(format.max) / amax / np.float32(2.0**margin)
    scale = np.clip(scale, SMALLEST_NORMAL, FLOAT32_MAX)
    if power_of_two:
        _, exponent = np.frexp(scale)
        scale = np.ldexp(np.float32(0.5), exponent)
    return np.where((amax > 0) & np.isfinite(amax), scale, np.float32(1)).astype(np.float32)


def mx_scale(amax: Array, format: FP8, up: bool) -> Array:
    """Return 1 / X of MX blocks, float32, elementwise. X is 2**(floor(log2(amax)) - emax), with the exponent of the
    format's largest number for emax, at least 2**-127 (OCP Microscaling Formats 1.0, sections 5.4.1 and 6.3). ``up``: X
    is the smallest power of two of which ``max`` reaches ``amax``. NaN where ``amax`` is Inf or NaN."""
    finite = np.isfinite(amax)
    wide = np.where(finite, amax, 1).astype(np.float64)
    exponent = np.frexp(wide)[1] - 1 - (np.frexp(format.max)[1] - 1)
    exponent += up & (wide > np.ldexp(format.max, exponent))
    exponent = np.where(wide > 0, np.maximum(exponent, -127), -127)
    return np.where(finite, np.ldexp(1.0, -exponent), np.nan).astype(np.float32)


@dataclass(frozen=True)
class Operand:
    """A matrix [lines, contracted] in FP8, with one inverse scale per block of ``block`` elements."""

    codes: npt.NDArray[np.uint8]
    inv_scale: Array  # [lines of blocks, blocks of a line]
    block: tuple[int, int]
    format: FP8

    def dequantised(self) -> npt.NDArray[np.float64]:
        """Return its exact numbers."""
        return self.format.decoded(self.codes) * self.spread(self.inv_scale)

    def spread(self, of_blocks: Array) -> npt.NDArray[np.float64]:
        """Expand values of blocks to elements."""
        return _spread(of_blocks, self.block, self.codes.shape).astype(np.float64)


def _spread(of_blocks: Array, block: tuple[int, int], shape: tuple[int, ...]) -> Array:
    down, across = np.arange(shape[0]) // block[0], np.arange(shape[1]) // block[1]
    return of_blocks[down][:, across]


def cast(
    x: Array, format: FP8, block: tuple[int, int], power_of_two: bool, scale: Array | None = None, by: By = "block"
) -> Operand:
    """Cast a matrix to FP8. ``scale``: float32, one per block; None: computed from the blocks' own amaxes."""
    lines, width = x.shape
    grid = (-(-lines // block[0]), -(-width // block[1]))
    if scale is None:
        amax = np.zeros(grid, np.float32)
        for i, j in np.ndindex(grid):
            part = x[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
            amax[i, j] = np.abs(part).max()  # NaN propagates.
        mx = by.startswith("mx")
        scale = mx_scale(amax, format, by == "mx up") if mx else current_scale(amax, format, power_of_two)
    each = _spread(np.broadcast_to(scale, grid), block, x.shape)
    with np.errstate(all="ignore"):
        scaled = x * each
        inv_scale = np.float32(1) / np.broadcast_to(scale, grid)
    scaled = np.where(np.isinf(x), np.float32(np.nan), scaled)  # Inf becomes NaN; only finite values saturate.
    return Operand(format.encode(scaled), inv_scale, block, format)


def block_shape(by: By, weight: bool, shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the shape of the blocks of a matrix [lines, contracted] that have their own scale."""
    if by == "tensor":
        return shape[0], shape[1]
    if by.startswith("mx"):
        return 1, 32
    if by == "row":
        return 1, shape[1]
    return (128 if weight else 1), 128


def operands(
    x: Array,
    weight: Array,
    grad_output: Array,
    by: By,
    format: str,
    power_of_two: bool,
    scales: Mapping[str, Array] | None = None,
) -> dict[str, tuple[Operand, Operand]]:
    """Return both operands of each GEMM of a Linear, ``a @ b.T``.

    Args:
        x: [tokens, in_features]; ``weight`` [out_features, in_features]; ``grad_output`` [tokens, out_features].
        scales: the scale of each role; None: computed from the tensors' own amaxes.
    """
    by_role = formats(format)

    def operand(role: str, matrix: Array) -> Operand:
        block = block_shape(by, role == "weight", matrix.shape)
        return cast(matrix, by_role[role], block, power_of_two, None if scales is None else scales[role], by)

    return {
        "fprop": (operand("input", x), operand("weight", weight)),
        "dgrad": (operand("grad_output", grad_output), operand("weight", weight.T)),
        "wgrad": (operand("grad_output", grad_output.T), operand("input", x.T)),
    }

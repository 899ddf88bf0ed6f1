"""Compare two FP8 weights by value: an element's number in FP8 times its scale. Local, on the CPU.

The same values may have other bytes: if a scale is halved, its elements double. A weight that was dequantised and
quantised again with another scale is off by at most half an ULP of either grid.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fp8dist_kernels import BLOCK, MX_BLOCK
from fp8dist_kernels.reference.blocks import blocks_along


class ValueDifference(NamedTuple):
    """How the values of two weights of one shape differ.

    Attributes:
        differing: number of elements with different values.
        beyond: how many of them a cast with another scale does not explain: values that differ by more than the sum of
            both ULPs, or have equal scales.
        place: index in the flattened weight of the first element that ``beyond`` counts, else that ``differing``
            counts. None: all are equal.
        value, expected: the two values there.
    """

    differing: int = 0
    beyond: int = 0
    place: int | None = None
    value: float = 0.0
    expected: float = 0.0


def have_values(weight: Tensor, scale: Tensor) -> bool:
    """Return True if ``scale`` are the scales of an FP8 weight, in a layout of an export: float32, or E8M0 as uint8."""
    if weight.dtype != torch.float8_e4m3fn or scale.dtype not in (torch.float32, torch.uint8) or weight.ndim != 2:
        return False
    rows, columns = weight.shape
    if scale.dtype == torch.uint8:
        return scale.shape == (rows, blocks_along(columns, MX_BLOCK))
    return scale.numel() == 1 or scale.shape in ((rows, 1), (blocks_along(rows, BLOCK), blocks_along(columns, BLOCK)))


def compare_values(weight: Tensor, scale: Tensor, expected: Tensor, expected_scale: Tensor) -> ValueDifference:
    """Compare two weights of float8_e4m3fn [rows, columns] in pieces of 128 rows.

    Args:
        scale, expected_scale: of one shape, and as ``have_values`` requires.
    """
    if scale.dtype == torch.uint8:
        scale, expected_scale = (each.view(torch.float8_e8m0fnu).float() for each in (scale, expected_scale))
    found = ValueDifference()
    for begin in range(0, len(weight), BLOCK):
        part = slice(begin, begin + BLOCK)
        mine, theirs = _Grid.of(weight, scale, part), _Grid.of(expected, expected_scale, part)
        differs = ~((mine.values == theirs.values) | (mine.values.isnan() & theirs.values.isnan()))
        near = (mine.values - theirs.values).abs() <= mine.ulps + theirs.ulps
        beyond = differs & ~(near & (mine.scales != theirs.scales))
        sought = beyond if not found.beyond and bool(beyond.any()) else differs
        if bool(sought.any()) and (found.place is None or sought is beyond):
            first = int(sought.flatten().nonzero()[0])
            value, wanted = (float(each.values.flatten()[first]) for each in (mine, theirs))
            found = ValueDifference(found.differing, found.beyond, begin * weight.shape[1] + first, value, wanted)
        found = found._replace(differing=found.differing + int(differs.sum()), beyond=found.beyond + int(beyond.sum()))
    return found


class _Grid(NamedTuple):
    """Some rows of a weight as float64, exactly: values, the distance of each to the next FP8 value (ULP), and scales,
    which broadcast over the rows."""

    values: Tensor
    ulps: Tensor
    scales: Tensor

    @classmethod
    def of(cls, weight: Tensor, scale: Tensor, part: slice) -> _Grid:
        """Return these rows of a weight. ``part``: at most 128 rows, from a multiple of 128 on."""
        rows, columns = weight.shape
        if scale.numel() == 1:
            scales = scale.reshape(1, 1).double()
        elif scale.shape == (rows, 1):
            scales = scale[part].double()
        elif scale.shape == (rows, blocks_along(columns, MX_BLOCK)):
            scales = scale[part].double().repeat_interleave(MX_BLOCK, 1)[:, :columns]
        else:
            scales = scale[part.start // BLOCK].double().repeat_interleave(BLOCK)[:columns]
        numbers = weight[part]
        # E4M3 has 3 bits of mantissa and an exponent bias of 7, so a ULP is 2**(exponent - 7 - 3).
        exponents = ((numbers.view(torch.uint8) >> 3) & 15).clamp(min=1).double()  # Subnormal numbers have 0.
        return cls(numbers.double() * scales, torch.exp2(exponents - 10) * scales.abs(), scales)


def is_power_of_two(scale: Tensor) -> bool:
    """Return True if all elements are powers of two that UE8M0 holds; uint8 are their bytes."""
    return scale.dtype == torch.uint8 or torch.equal(scale.to(torch.float8_e8m0fnu).to(scale.dtype), scale)


def is_rounded_up(scale: Tensor, expected: Tensor) -> bool:
    """Return True if ``scale`` is ``expected`` with each element rounded up to a power of two, and differs from it."""
    if scale.dtype == torch.uint8:
        return False
    mantissa, exponent = torch.frexp(expected)  # mantissa * 2**exponent, with a mantissa in [0.5, 1).
    rounded = torch.ldexp(torch.ones_like(expected), exponent - (mantissa == 0.5).int())
    return torch.equal(scale, rounded) and not torch.equal(scale, expected)

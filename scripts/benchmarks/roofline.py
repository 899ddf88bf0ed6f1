"""Estimates of what FP8 can gain on a GPU, from bytes and operations: no kernel runs.

Forward and backward of a Linear take at least the time of three products, and in FP8 that of the casts, which move
memory. ``tests/scripts/test_roofline.py`` compares the bytes with those of the launches of an FP8Linear.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from scripts.benchmarks.llama_shapes import LINEARS, Layer
from scripts.benchmarks.markdown import table


class Bytes(NamedTuple):
    """Bytes that the casts of a forward and backward move per element. ``bias``: in addition, per element of the
    gradient, for the gradient of a bias."""

    input: float
    weight: float
    gradient: float
    bias: float


BYTES: Mapping[str, Bytes] = MappingProxyType(
    {
        "delayed": Bytes(4, 6, 4, 2 * 4 / 128),
        "current": Bytes(6, 6, 6, 2 * 4 / 128),
        "rowwise": Bytes(6, 6, 6, 2 + 2 * 4 / 128),
        "block": Bytes(4, 4, 4, 2 + 2 * 4 / 128),
    }
)
"""Of bf16 tensors, with both copies. A weight with a delayed scale is read twice, to see if it has outgrown it."""

LAUNCHES: Mapping[str, tuple[int, int]] = MappingProxyType(
    {"delayed": (7, 8), "current": (9, 10), "rowwise": (9, 11), "block": (6, 8)}
)
"""Of a forward and backward in FP8, without and with a bias."""

_BEFORE: Mapping[str, tuple[int, int]] = MappingProxyType(
    {"delayed": (7, 8), "current": (9, 10), "rowwise": (12, 13), "block": (6, 7)}
)
"""Before row-wise casts were two launches, and when torch added up the gradient of a bias in one, reading 2 bytes."""


class Speeds(NamedTuple):
    """Assumed speeds of a GPU, per second: an H100's memory at 85 % of a copy's 3.0 TB/s, and products."""

    moved: float = 0.85 * 3.0e12
    bf16: float = 798e12
    fast: float = 1250e12
    slow: float = 950e12


def gain(tokens: int, layer: Layer, recipe: str = "delayed", fast: bool = False, reused: bool = False) -> float:
    """Return the estimated time of bf16 over that of FP8, forward and backward.

    Args:
        fast: all products accumulate fast, not fprop alone.
        reused: the weight's cast is that of an earlier microbatch.
    """
    speeds, each = Speeds(), BYTES[recipe]
    operations = 2 * tokens * layer.in_features * layer.out_features
    moved = each.input * tokens * layer.in_features + each.gradient * tokens * layer.out_features
    moved += 0 if reused else each.weight * layer.in_features * layer.out_features
    products = operations * (3 / speeds.fast if fast else 1 / speeds.fast + 2 / speeds.slow)
    return 3 * operations / speeds.bf16 / (products + moved / speeds.moved)


def roofline() -> str:
    """Return the table of estimates. Each says that it is one."""
    layers = [("4096 x 4096", Layer("", 4096, 4096)), *((layer.name, layer) for layer in LINEARS)]
    sides = [(fast, reused) for fast in (False, True) for reused in (False, True)]
    rows = []
    for name, layer in layers:
        gains = (gain(8192, layer, fast=fast, reused=reused) for fast, reused in sides)
        rows.append([name, *(f"{one:.2f} (estimate, not measured)" for one in gains)])
    head = ["layer, 8,192 tokens", "by default", "weight's cast reused", "fast everywhere", "fast, reused"]
    return table(head, rows)


def launches() -> str:
    """Return the table of launches and bytes of each recipe."""
    rows = []
    for recipe, each in BYTES.items():
        counts = (f"{was} → {now}" for was, now in zip(_BEFORE[recipe], LAUNCHES[recipe]))
        rows.append([recipe, *counts, " + ".join(f"{one:g}" for one in each[:3]), f"2 → {each.bias:.2g}"])
    head = ["recipe", "launches", "with a bias", "bytes of x + weight + gradient", "a bias adds, of the gradient"]
    return table(head, rows)

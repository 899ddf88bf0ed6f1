"""The matrix products of Llama 3's layers, per GPU, without tensor parallelism.

Queries, keys and values come from one Linear (qkv), and the two up projections of the MLP are one Linear, as in
training frameworks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["LINEARS", "PASSES", "TOKENS", "Shape", "shapes_of"]

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

TOKENS = (4096, 8192, 16384, 32768)
PASSES = ("fprop", "dgrad", "wgrad")

# (model, layer, in_features, out_features)
LINEARS = (
    ("8B", "qkv", 4096, 6144),
    ("8B", "attention out", 4096, 4096),
    ("8B", "mlp up", 4096, 28672),
    ("8B", "mlp down", 14336, 4096),
    ("70B", "qkv", 8192, 10240),
    ("70B", "attention out", 8192, 8192),
    ("70B", "mlp up", 8192, 57344),
    ("70B", "mlp down", 28672, 8192),
)


class Shape(NamedTuple):
    """a [m, k] by b [n, k]."""

    name: str
    m: int
    n: int
    k: int
    a_dtype: torch.dtype
    b_dtype: torch.dtype


def shapes_of(tokens: int) -> list[Shape]:
    """Return all products of one step with ``tokens`` tokens, forward and backward."""
    shapes = []
    for model, layer, features, outputs in LINEARS:
        name = f"{model} {layer} {tokens}"
        shapes.append(Shape(f"{name} fprop", tokens, outputs, features, E4M3, E4M3))
        shapes.append(Shape(f"{name} dgrad", tokens, features, outputs, E5M2, E4M3))
        shapes.append(Shape(f"{name} wgrad", outputs, features, tokens, E5M2, E4M3))
    return shapes

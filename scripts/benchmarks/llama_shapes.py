"""What FP8Linear multiplies when it trains Llama 3: shapes, dtypes, scaling and accumulation of each recipe's GEMMs.

Queries, keys and values come from one Linear (qkv), and the two up projections of the MLP are one Linear, as in
training frameworks. Shapes are of one GPU, without tensor parallelism.
``tests/scripts/test_gpu_benchmark.py`` compares with the calls of a real FP8Linear.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch

from fp8dist import BlockScaling, CurrentScaling, DelayedScaling, MXFP8Scaling, RowwiseScaling
from fp8dist.state.recipe import Recipe
from fp8dist_kernels import GEMMS, MX_BLOCK, Gemm
from fp8dist_kernels.formats import Role
from fp8dist_kernels.reference.casts import TOKEN_ALIGNMENT
from fp8dist_kernels.reference.matmuls import Scaling

RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        "delayed": DelayedScaling(),
        "current": CurrentScaling(),
        "rowwise": RowwiseScaling(),
        "block": BlockScaling(),
        "mxfp8": MXFP8Scaling(),
    }
)
KINDS: Mapping[str, Recipe] = MappingProxyType(
    {
        "tensorwise": RECIPES["delayed"],
        "rowwise": RECIPES["rowwise"],
        "blockwise": RECIPES["block"],
        "mx": RECIPES["mxfp8"],
    }
)
"""A recipe for each kind of products. CurrentScaling runs the same ones as DelayedScaling."""

_SCALINGS: Mapping[str, tuple[Scaling, Scaling]] = MappingProxyType(
    {
        "tensor": (Scaling.TENSORWISE, Scaling.TENSORWISE),
        "row": (Scaling.ROWWISE, Scaling.ROWWISE),
        "block": (Scaling.BLOCKWISE, Scaling.BLOCKWISE_1D),
        "mx": (Scaling.MX, Scaling.MX),
    }
)
"""Scaling of fprop and dgrad, and of wgrad, whose operands are both activations."""


class Layer(NamedTuple):
    """A Linear."""

    name: str
    in_features: int
    out_features: int


LINEARS = (
    Layer("8B qkv", 4096, 6144),
    Layer("8B attention out", 4096, 4096),
    Layer("8B mlp up", 4096, 28672),
    Layer("8B mlp down", 14336, 4096),
    Layer("70B qkv", 8192, 10240),
    Layer("70B attention out", 8192, 8192),
    Layer("70B mlp up", 8192, 57344),
    Layer("70B mlp down", 28672, 8192),
)


class Product(NamedTuple):
    """a [m, k] by b [n, k], as FP8Linear passes them to ``matmul``."""

    name: str
    gemm: Gemm
    m: int
    n: int
    k: int
    scaling: Scaling
    fast: bool
    a_dtype: torch.dtype
    b_dtype: torch.dtype


def fast_everywhere(recipe: Recipe) -> Recipe | None:
    """Return the recipe with fast accumulation in all GEMMs. None if the recipe has no such choice: products of blocks
    are always added in float32."""
    if recipe.by in ("block", "mx"):
        return None
    return dataclasses.replace(recipe, fast_accumulation=GEMMS)  # type: ignore[type-var]


def products_of(recipe: Recipe, layer: Layer, tokens: int, fast: Sequence[Gemm] | None = None) -> list[Product]:
    """Return fprop, dgrad and wgrad of a layer in training.

    Args:
        fast: the GEMMs with fast accumulation. None: as the recipe says.
    """
    fast = recipe.fast_accumulation if fast is None else fast
    x, weight, gradient = (recipe.format_of(role).dtype for role in (Role.INPUT, Role.WEIGHT, Role.GRAD_OUTPUT))
    multiple = MX_BLOCK if recipe.by == "mx" else 1  # MX casts pad what is contracted to whole blocks.
    features, outputs = layer.in_features, layer.out_features
    from_features, from_outputs = (-(-size // multiple) * multiple for size in (features, outputs))
    padded = -(-tokens // max(multiple, TOKEN_ALIGNMENT)) * max(multiple, TOKEN_ALIGNMENT)
    forward, of_wgrad = _SCALINGS[recipe.by]
    shapes: tuple[tuple[Gemm, int, int, int, Scaling, torch.dtype, torch.dtype], ...] = (
        ("fprop", tokens, outputs, from_features, forward, x, weight),
        ("dgrad", tokens, features, from_outputs, forward, gradient, weight),
        ("wgrad", outputs, features, padded, of_wgrad, gradient, x),
    )
    products = []
    for gemm, m, n, k, scaling, a_dtype, b_dtype in shapes:
        name = f"{layer.name}, {tokens} tokens, {gemm} {'fast' if gemm in fast else 'slow'}"
        products.append(Product(name, gemm, m, n, k, scaling, gemm in fast, a_dtype, b_dtype))
    return products

"""Known answers of experts: the grouped casts and products of a mixture's own shapes. See ``computations``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8dist.checks.computations import (
    LARGEST,
    SCALE,
    SEEDS,
    TOKENS,
    CastOf,
    Computation,
    described,
    for_casts,
    short,
)
from fp8dist.modules.fp8_experts import FP8Experts
from fp8dist.modules.grouped_slots import GroupedSlots
from fp8dist.modules.outgrown import OUTGROWN, meant_to_saturate
from fp8dist.modules.weight_notes import stored_parameters
from fp8dist.state.recipe import Gemm, Recipe
from fp8dist_kernels import BLOCK, direct, grouped_ops, ops
from fp8dist_kernels.formats import FORMATS, Role
from fp8dist_kernels.reference.blocks import blocks_along
from fp8dist_kernels.reference.groups import blocks_bound, columns_bound, rows_of
from fp8dist_kernels.reference.matmuls import Scaling
from fp8dist_kernels.reference.operands import inverse_scales, operand

__all__ = ["GroupedCastOf", "GroupedProductOf", "ends_of", "grouped_computations_of", "product_computations"]

_BEYOND = 8
"""Rows that belong to no expert."""


class GroupedCastOf(NamedTuple):
    """A cast of rows [tokens, features] of E experts, or of their weights [E, n, k]. ``recipe`` has only the fields
    that matter for a cast."""

    role: Role
    experts: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    recipe: Recipe
    rows: bool
    columns: bool
    backend: str

    def name(self, device: torch.device) -> str:
        """Return a name for reports, which differs between different casts."""
        copies = "" if self.rows and self.columns else ", rows only" if self.rows else ", columns only"
        by, shape = ops.implementer(self.backend, device), "x".join(map(str, self.shape))
        of = f"{self.role} {shape} of {self.experts} experts {short(self.dtype)}"
        return f"grouped cast of {of}, {described(self.recipe)}{copies}, {by}"

    def prepared(self, device: torch.device) -> Callable[[], dict[str, Tensor]]:
        """Return a function that computes, and returns the results by name."""
        x = operand(self.shape, self.dtype, SEEDS[self.role.value], device)
        dtype = self.recipe.format_of(self.role).dtype
        offsets = None if len(self.shape) == 3 else ends_of(self.experts, device)
        how: dict[str, Any] = {"power_of_two": self.recipe.power_of_two, "backend": self.backend}
        how |= {"rows": self.rows, "columns": self.columns}
        if self.recipe.by != "tensor":
            how["in_blocks"] = self.recipe.by == "block"
            names = ("rows", "rows_inv_scale", "columns", "columns_inv_scale")
            return lambda: _named(names, direct.quantize_grouped_lines(x, offsets, dtype, **how))
        scale = torch.full((self.experts,), SCALE, device=device)
        cold = torch.full_like(scale, not self.recipe.delayed, dtype=torch.bool)
        if offsets is None and self.recipe.delayed:
            how["outgrown"] = OUTGROWN * meant_to_saturate(self.recipe)
        how |= {"margin": self.recipe.margin, "record": True, "just_in_time": not self.recipe.delayed}

        def compute() -> dict[str, Tensor]:
            amax = torch.zeros_like(scale)
            results = direct.quantize_grouped(x, offsets, scale, cold, amax, dtype, **how)
            return _named(("rows", "columns", "inv_scale", "amax"), (*results, amax))

        return compute


class GroupedProductOf(NamedTuple):
    """A grouped product of E experts: of rows a [tokens, k] and b [E, n, k], or for wgrad of the transposed copies
    a [n, tokens] and b [k, tokens]. ``by``: the part of a tensor that has a scale."""

    gemm: Gemm
    experts: int
    n: int
    k: int
    formats: tuple[str, str]
    dtype: torch.dtype
    by: str
    bias: bool
    fast_accumulation: bool
    backend: str

    def name(self, device: torch.device) -> str:
        """Return a name for reports, which differs between different products."""
        extras = " with bias" * self.bias + ", fast accumulation" * self.fast_accumulation
        how = f"{' '.join(self.formats)} {short(self.dtype)}{extras}, a scale per {self.by}"
        by = ops.implementer(self.backend, device)
        if self.gemm != "wgrad":
            a, b = (FORMATS[name].dtype for name in self.formats)
            scaling = {"tensor": Scaling.TENSORWISE, "row": Scaling.ROWWISE, "block": Scaling.BLOCKWISE}[self.by]
            shape = self.experts, self.n, self.k
            by = grouped_ops.multiplier_name((a, b, self.dtype), scaling, shape, self.bias, self.backend, device)
        return f"grouped {self.gemm} {TOKENS}x{self.n}x{self.k} of {self.experts} experts {how}, {by}"

    def prepared(self, device: torch.device) -> Callable[[], dict[str, Tensor]]:
        """Return a function that computes, and returns the result. The operands are made directly in FP8."""
        offsets, wgrad = ends_of(self.experts, device), self.gemm == "wgrad"
        width = columns_bound(TOKENS, self.experts)
        of_a, of_b = ((self.n, width), (self.k, width)) if wgrad else ((TOKENS, self.k), (self.experts, self.n, self.k))
        a, b = (
            operand(shape, FORMATS[name].dtype, SEEDS[seed], device)
            for shape, name, seed in zip((of_a, of_b), self.formats, "ab")
        )
        if wgrad:  # As casts make them: zeros between the experts.
            filled = torch.zeros(width, dtype=torch.bool, device=device)
            for _, columns, _ in rows_of(offsets):
                filled[columns] = True
            a, b = (torch.where(filled, x.view(torch.uint8), 0).view(x.dtype) for x in (a, b))
        scales = [
            inverse_scales(shape, SEEDS[f"inv_scale_{name}"], device) for name, shape in zip("ab", self._scale_shapes())
        ]
        how: dict[str, Any] = {"fast_accumulation": self.fast_accumulation, "backend": self.backend}
        if wgrad:
            return lambda: {"": direct.matmul_grouped_columns(a, b, *scales, offsets, self.dtype, **how)}
        how["bias"] = operand((self.experts, self.n), self.dtype, SEEDS["bias"], device) if self.bias else None
        return lambda: {"": direct.matmul_grouped(a, b, *scales, offsets, self.dtype, **how)}

    def _scale_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        experts, n, k, wgrad = self.experts, self.n, self.k, self.gemm == "wgrad"
        if self.by == "tensor":
            return (experts,), (experts,)
        if self.by == "row":
            return ((experts, n, 1), (experts, k, 1)) if wgrad else ((TOKENS, 1), (experts, n, 1))
        if wgrad:
            blocks = blocks_bound(TOKENS, experts)
            return (n, blocks), (k, blocks)
        along = blocks_along(k, BLOCK)
        return (TOKENS, along), (experts, blocks_along(n, BLOCK), along)


def ends_of(experts: int, device: torch.device) -> Tensor:
    """Return the ends of the experts' rows: int32[E]. Each second expert has none, the others more and more."""
    filled, rows = -(-experts // 2), TOKENS - _BEYOND
    ends = [rows * (expert // 2 + 1) ** 2 // filled**2 for expert in range(experts)]
    return torch.tensor(ends, dtype=torch.int32, device=device)


def grouped_computations_of(mixtures: Iterable[FP8Experts]) -> dict[torch.device, tuple[Computation, ...]]:
    """Return what the forwards and backwards of these experts compute in FP8, each once, by device. Local. See
    ``computations_of``."""
    found: dict[torch.device, dict[Computation, None]] = {}
    for module in mixtures:
        for slots in module.fp8_products.values():
            device, stored = slots.weight_sync.arena.device, stored_parameters(module, slots.name)
            if not stored or not slots.job.enabled:
                continue
            autocast = torch.is_autocast_enabled(device.type)
            dtype = torch.get_autocast_dtype(device.type) if autocast else stored[0].dtype
            more = _of_product(module, slots, stored[0], dtype)
            found.setdefault(device, {}).update(dict.fromkeys(more))
    return {device: tuple(computations) for device, computations in found.items()}


def _of_product(module: Any, slots: GroupedSlots, weight: Tensor, dtype: torch.dtype) -> list[Computation]:
    experts, *shape = weight.shape
    transposed = bool(module.is_transposed)
    out, into = reversed(shape) if transposed else shape
    how = slots.recipe, dtype, weight.dtype, bool(module.has_bias), transposed, slots.job.backend
    return product_computations((experts, out, into), *how)


def product_computations(
    shape: Sequence[int],
    recipe: Recipe,
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    bias: bool = False,
    transposed: bool = False,
    backend: str = "auto",
) -> list[Computation]:
    """Return the casts and products of one grouped product: those of the GEMMs that ``recipe`` has in FP8.

    Args:
        shape: [E, out_features, in_features]. What is larger than ``LARGEST`` is cut, and experts, so that all weights
            together are not larger than the largest one of a Linear.
        dtype, transposed: as in ``linear_computations``.
    """
    out, into = (min(size, LARGEST) for size in shape[1:])
    experts = max(1, min(shape[0], LARGEST**2 // (out * into)))
    fprop, dgrad, wgrad = (gemm not in recipe.high_precision for gemm in ("fprop", "dgrad", "wgrad"))
    of_casts = for_casts(recipe)
    found: list[Computation] = [
        GroupedCastOf(role, experts, (TOKENS, features), dtype, of_casts, rows, wgrad, backend)
        for role, features, rows in ((Role.INPUT, into, fprop), (Role.GRAD_OUTPUT, out, dgrad))
        if rows or wgrad
    ]
    (n, k), copies = ((into, out), (dgrad, fprop)) if transposed else ((out, into), (fprop, dgrad))
    found += _weight_casts(experts, n, k, weight_dtype, of_casts, copies, backend)
    x, w, grad = (recipe.format_of(role).name for role in (Role.INPUT, Role.WEIGHT, Role.GRAD_OUTPUT))
    products: tuple[tuple[Gemm, int, int, tuple[str, str], torch.dtype, bool], ...] = (
        ("fprop", out, into, (x, w), dtype, bias),
        ("dgrad", into, out, (grad, w), dtype, False),
        ("wgrad", out, into, (grad, x), weight_dtype, False),
    )
    return found + [
        GroupedProductOf(gemm, experts, n, k, formats, of, recipe.by, biased, gemm in recipe.fast_accumulation, backend)
        for gemm, n, k, formats, of, biased in products
        if gemm not in recipe.high_precision
    ]


def _weight_casts(
    experts: int, n: int, k: int, dtype: torch.dtype, recipe: Recipe, copies: tuple[bool, bool], backend: str
) -> list[Computation]:
    """Return the casts of experts' weights, stored as [E, n, k], as ``GroupedSlots`` makes them."""
    if not any(copies):
        return []
    if recipe.by == "tensor":
        return [GroupedCastOf(Role.WEIGHT, experts, (experts, n, k), dtype, recipe, *copies, backend)]
    if recipe.by == "block":
        return [CastOf(Role.WEIGHT, (n, k), dtype, recipe, *copies, backend)]
    flat = ((experts * n, k), copies[0]), ((experts * k, n), copies[1])  # The experts' rows, one below the other.
    return [CastOf(Role.WEIGHT, size, dtype, recipe, True, False, backend) for size, wanted in flat if wanted]


def _named(names: Sequence[str], results: Sequence[Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in zip(names, results) if tensor.numel()}

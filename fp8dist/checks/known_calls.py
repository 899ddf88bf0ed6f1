"""Known answers: casts and products on operands that are the same on every device, each of which can be repeated.

A cast is made by the caster that modules use. A product calls the op itself, because a module would give it what its
own casts have made, and one wrong cast would look like many wrong results.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fp8dist.modules.casters import Cast, Request, caster_for
from fp8dist.modules.grouped_slots import slot_names
from fp8dist.modules.job_state import JobState
from fp8dist.modules.outgrown import OUTGROWN, Outgrown, meant_to_saturate
from fp8dist.state import overwrites
from fp8dist.state.arena import Arena
from fp8dist.state.arena_sync import ArenaSync
from fp8dist.state.precision import Precision
from fp8dist.state.recipe import Gemm, Recipe
from fp8dist.state.slots import SlotSpec
from fp8dist_kernels import BLOCK, direct, grouped_ops, ops
from fp8dist_kernels.formats import FORMATS, Role
from fp8dist_kernels.multipliers import Product
from fp8dist_kernels.reference.blocks import blocks_along
from fp8dist_kernels.reference.groups import blocks_bound, columns_bound, rows_of
from fp8dist_kernels.reference.matmuls import Scaling
from fp8dist_kernels.reference.operands import integers, inverse_scales, operand

__all__ = ["TOKENS", "CastOf", "Computation", "GroupedProductOf", "ProductOf", "ends_of", "for_casts"]

TOKENS = 256
"""Rows of the inputs and gradients. Few are enough: more rows only repeat the same tiles, and users choose their own
number."""

_SCALE = 60.0
"""Scale of slots with delayed scaling: large operands saturate, small ones become subnormal or zero."""

_OPERANDS = ("input", "weight", "grad_output", "a", "b", "inv_scale_a", "inv_scale_b", "bias")
_SEEDS: Mapping[str, int] = MappingProxyType({name: i for i, name in enumerate(_OPERANDS)})

_BEYOND = 8
"""Rows that belong to no expert."""


class Computation(Protocol):
    """A cast or a product with known operands. Equal ones hash and compare as equal."""

    def name(self, device: torch.device) -> str:
        """Return a name for reports."""

    def prepared(self, device: torch.device) -> Callable[[], dict[str, Tensor]]:
        """Return a function that computes, and returns the results by name."""


class CastOf(NamedTuple):
    """A cast. ``recipe`` has only the fields that matter for a cast.

    ``experts``: their number, if it is a grouped cast, of rows [tokens, features] or of weights [E, m, n].
    """

    role: Role
    shape: tuple[int, ...]
    dtype: torch.dtype
    recipe: Recipe
    rows: bool
    columns: bool
    backend: str
    experts: int = 0

    def name(self, device: torch.device) -> str:
        """Return a name for reports, which differs between different casts."""
        copies = "" if self.rows and self.columns else ", rows only" if self.rows else ", columns only"
        by, shape = ops.implementer(self.backend, device), "x".join(map(str, self.shape))
        grouped, of = ("grouped ", f" of {self.experts} experts") if self.experts else ("", "")
        what = f"{grouped}cast of {self.role} {shape}{of} {_short(self.dtype)}"
        return f"{what}, {_described(self.recipe)}{copies}, {by}"

    def prepared(self, device: torch.device) -> Callable[[], dict[str, Tensor]]:
        """Return a function that computes, and returns the results by name. It uses slots of its own, so no other
        state changes."""
        slots = [each[self.role] for each in slot_names("known answers", max(1, self.experts))]
        arena = Arena([SlotSpec(slot, self.recipe.format_of(self.role)) for slot in slots], self.recipe, self.backend)
        arena.place(device)
        for place in range(len(slots)):
            overwrites.set_scale(arena, place, _SCALE)
        arena.known_hot = True  # Most steps of a training know it, and need no look at the amax before the cast.
        precision = None if self.experts else Precision({self.role: slots[0]}, ())
        caster = caster_for(self.recipe, JobState(True, self.backend, "fp8"), ArenaSync(arena), precision)
        state = arena.state_of_run(slots) if self.experts else arena.state_of(slots[0])
        of_weight = self.role is Role.WEIGHT
        limits = Outgrown(OUTGROWN * meant_to_saturate(self.recipe) if of_weight and self.recipe.delayed else None)
        offsets = ends_of(self.experts, device) if self.experts and not of_weight else None
        x = operand(self.shape, self.dtype, _SEEDS[self.role.value], device)

        def compute() -> dict[str, Tensor]:
            arena.pending.zero_()
            cast = caster.cast(x, Request(state, self.role, self.rows, self.columns, True, limits, offsets))
            found: dict[str, Tensor] = {name: getattr(cast, name) for name in Cast._fields[:4]}
            found["amax"] = state.pending.clone() if cast.amaxes is None else cast.amaxes
            if cast.rows_inv_scale is cast.columns_inv_scale:
                found["inv_scale"] = found.pop("rows_inv_scale")
                del found["columns_inv_scale"]
            return {name: tensor for name, tensor in found.items() if tensor.numel()}

        return compute


class ProductOf(NamedTuple):
    """A product of a [m, k] and b [n, k], with the scales of ``scaling``.

    ``exact``: the operands are such that all sums are exact, in any order: all kernels give the same bits.
    ``sideways``: b lies in memory as [k, n], as a weight does that was gathered in FP8. ``into``: the product is added
    to what a buffer holds, here zeros.
    """

    gemm: Gemm
    m: int
    n: int
    k: int
    formats: tuple[str, str]
    dtype: torch.dtype
    scaling: Scaling
    fast_accumulation: bool
    backend: str
    bias: bool = False
    exact: bool = False
    sideways: bool = False
    into: bool = False

    def name(self, device: torch.device) -> str:
        """Return a name for reports, which differs between different products."""
        by = ops.multiplier_name(self.product, self.fast_accumulation, self.backend, device)
        shape, formats = f"{self.m}x{self.n}x{self.k}", " ".join(self.formats)
        extras = " with bias" * self.bias + ", fast accumulation" * self.fast_accumulation + ", exact" * self.exact
        extras += ", sideways" * self.sideways + ", into a buffer" * self.into
        return f"{self.gemm} {shape} {formats} {_short(self.dtype)}{extras}, {self.scaling.value}, {by}"

    def prepared(self, device: torch.device) -> Callable[[], dict[str, Tensor]]:
        """Return a function that computes, and returns the result. The operands are made directly in FP8: a wrong cast
        does not matter here."""
        make = integers if self.exact else operand
        a, b = (
            make((lines, self.k), dtype, _SEEDS[name], device)
            for name, lines, dtype in zip("ab", (self.m, self.n), self.dtypes)
        )
        if self.sideways:
            b = direct.transpose(b, backend=self.backend).t()
        inv_a, inv_b = self._inverse_scales(device)
        bias = operand((self.n,), self.dtype, _SEEDS["bias"], device) if self.bias else None
        options = {"fast_accumulation": self.fast_accumulation, "backend": self.backend}
        if not self.into:
            return lambda: {"": direct.matmul(a, b, inv_a, inv_b, self.dtype, bias=bias, **options)}

        def add() -> dict[str, Tensor]:
            total = torch.zeros(self.m, self.n, dtype=self.dtype, device=device)
            direct.matmul_into(a, b, inv_a, inv_b, total, **options)
            return {"": total}

        return add

    @property
    def dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        """The operands' dtypes."""
        a, b = self.formats
        return FORMATS[a].dtype, FORMATS[b].dtype

    @property
    def product(self) -> Product:
        """Return what decides who computes it."""
        bias = self.dtype if self.bias else None
        return Product(self.scaling, self.m, self.n, self.k, *self.dtypes, self.dtype, bias, self.into)

    def _inverse_scales(self, device: torch.device) -> list[Tensor]:
        """Return the inverse scales of ``a`` and ``b``, laid out as casts make them."""
        found = []
        for name, lines in (("inv_scale_a", self.m), ("inv_scale_b", self.n)):
            shape: tuple[int, ...] = ()
            along = blocks_along(self.k, BLOCK)
            square = self.scaling is Scaling.BLOCKWISE and name == "inv_scale_b"
            if self.scaling is Scaling.ROWWISE:
                shape = (lines, 1)
            elif self.scaling.in_blocks:
                shape = (blocks_along(lines, BLOCK), along) if square else (along, lines)
            if self.exact:
                scales = torch.ones(shape, dtype=torch.float32, device=device)
            else:
                scales = inverse_scales(shape, _SEEDS[name], device)
            found.append(scales.t() if self.scaling.in_blocks and not square else scales)
        return found


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
        how = f"{' '.join(self.formats)} {_short(self.dtype)}{extras}, a scale per {self.by}"
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
            operand(shape, FORMATS[name].dtype, _SEEDS[seed], device)
            for shape, name, seed in zip((of_a, of_b), self.formats, "ab")
        )
        if wgrad:  # As casts make them: zeros between the experts.
            filled = torch.zeros(width, dtype=torch.bool, device=device)
            for _, columns, _ in rows_of(offsets):
                filled[columns] = True
            a, b = (torch.where(filled, x.view(torch.uint8), 0).view(x.dtype) for x in (a, b))
        scales = [
            inverse_scales(shape, _SEEDS[f"inv_scale_{name}"], device)
            for name, shape in zip("ab", self._scale_shapes())
        ]
        how: dict[str, Any] = {"fast_accumulation": self.fast_accumulation, "backend": self.backend}
        if wgrad and self.by == "block":
            scales = [scale.t() for scale in scales]
        if wgrad:
            return lambda: {"": direct.matmul_grouped_columns(a, b, *scales, offsets, self.dtype, **how)}
        how["bias"] = operand((self.experts, self.n), self.dtype, _SEEDS["bias"], device) if self.bias else None
        return lambda: {"": direct.matmul_grouped(a, b, *scales, offsets, self.dtype, **how)}

    def _scale_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        experts, n, k, wgrad = self.experts, self.n, self.k, self.gemm == "wgrad"
        if self.by == "tensor":
            return (experts,), (experts,)
        if self.by == "row":
            return ((experts, n, 1), (experts, k, 1)) if wgrad else ((TOKENS, 1), (experts, n, 1))
        if wgrad:
            blocks = blocks_bound(TOKENS, experts)
            return (blocks, n), (blocks, k)  # Transposed afterwards, as casts lay them out.
        along = blocks_along(k, BLOCK)
        return (TOKENS, along), (experts, blocks_along(n, BLOCK), along)


def ends_of(experts: int, device: torch.device) -> Tensor:
    """Return the ends of the experts' rows: int32[E]. Each second expert has none, the others more and more."""
    filled, rows = -(-experts // 2), TOKENS - _BEYOND
    ends = [rows * (expert // 2 + 1) ** 2 // filled**2 for expert in range(experts)]
    return torch.tensor(ends, dtype=torch.int32, device=device)


def for_casts(recipe: Recipe) -> Recipe:
    """Return the recipe with only those fields that matter for a cast, so that equal casts are equal."""
    matter = {"format", "margin", "power_of_two"} & {field.name for field in dataclasses.fields(recipe)}  # type: ignore[arg-type]
    return type(recipe)(**{name: getattr(recipe, name) for name in matter})


def _described(recipe: Recipe) -> str:
    """Return what a cast needs of a recipe, in words."""
    extras = [" power_of_two"] if recipe.power_of_two else []
    extras += [f" margin={recipe.margin}"] if recipe.margin else []
    return f"{type(recipe).__name__} {recipe.format}{''.join(extras)}"


def _short(dtype: torch.dtype) -> str:
    """Return the name of a dtype."""
    return str(dtype).removeprefix("torch.")

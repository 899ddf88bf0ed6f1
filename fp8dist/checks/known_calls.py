"""Known calls: casts and products whose operands are the same on every device, so ranks can compare the results.

A cast goes through the caster that modules use. A product calls the op itself, with operands that are made directly in
FP8: if it used the results of casts, one wrong cast would look like many wrong products.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8dist.common.text import dtype_name
from fp8dist.modules.casters import Cast, Request, caster_for
from fp8dist.modules.grouped_slots import slot_names
from fp8dist.modules.job_state import JobState
from fp8dist.modules.outgrown import OUTGROWN, Outgrown, meant_to_saturate
from fp8dist.state import overwrites
from fp8dist.state.arena import Arena
from fp8dist.state.arena_sync import ArenaSync
from fp8dist.state.precision import Precision
from fp8dist.state.recipe import MXFP8Scaling, Recipe
from fp8dist.state.slots import SlotSpec
from fp8dist_kernels import BLOCK, MX_BLOCK, NVFP4_BLOCK, Gemm, direct, grouped_ops, ops
from fp8dist_kernels.formats import FORMATS, Role
from fp8dist_kernels.multipliers import Product
from fp8dist_kernels.reference.blocks import blocks_along
from fp8dist_kernels.reference.casts import TOKEN_ALIGNMENT
from fp8dist_kernels.reference.groups import blocks_bound, columns_bound, rows_of
from fp8dist_kernels.reference.matmuls import Scaling
from fp8dist_kernels.reference.operands import integers, inverse_scales, operand

TOKENS = 256
"""Rows of inputs and gradients, whatever their number is in training: a kernel computes more rows in more tiles of the
same size."""

_SCALE = 60.0
"""Scale of casts with delayed scaling. With it, the largest elements saturate, and the smallest become subnormal or
zero."""

_OPERANDS = ("input", "weight", "grad_output", "a", "b", "inv_scale_a", "inv_scale_b", "bias")
_SEEDS: Mapping[str, int] = MappingProxyType({name: i for i, name in enumerate(_OPERANDS)})
"""The seed from which an operand is made."""

_OF_BLOCKS = (Scaling.BLOCKWISE_1D, Scaling.BLOCKWISE)
SCALINGS: Mapping[str, tuple[Scaling, Scaling]] = MappingProxyType(
    {
        "tensor": (Scaling.TENSORWISE,) * 2,
        "row": (Scaling.ROWWISE,) * 2,
        "block": _OF_BLOCKS,
        "mx": (Scaling.MX,) * 2,
        "nvfp4": (Scaling.NVFP4,) * 2,
    }
)
"""(scaling of wgrad, scaling of fprop and dgrad) by the part of a tensor that has a scale of its own. They differ for
blocks, because a weight has square blocks, and only fprop and dgrad have a weight as operand."""

_BEYOND = 8
"""Rows at the end that belong to no expert, as with expert parallelism."""


class CastOf(NamedTuple):
    """A cast to FP8.

    ``shape``: [tokens, features] of an input or gradient, [m, n] of a weight, [E, m, n] of experts' weights. ``dtype``:
    before the cast. ``recipe``: with only the fields that matter for a cast (``for_casts``). ``rows``, ``columns``:
    True if the cast makes a copy as it is, and a transposed copy. ``experts``: their number; 0: not a grouped cast.
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
        """Return a name for reports. Different computations have different names."""
        copies = "" if self.rows and self.columns else ", rows only" if self.rows else ", columns only"
        by, shape = ops.implementer(self.backend, device), "x".join(map(str, self.shape))
        grouped, of = ("grouped ", f" of {self.experts} experts") if self.experts else ("", "")
        what = f"{grouped}cast of {self.role} {shape}{of} {dtype_name(self.dtype)}"
        return f"{what}, {_described(self.recipe)}{copies}, {by}"

    def prepared(self, device: torch.device) -> Callable[[], dict[str, Tensor]]:
        """Make the operand on ``device``, and return a function that casts it, and can be called again. It returns the
        results by name. Casts with slots of its own, so a model's FP8 state does not change."""
        named = slot_names("known answers", max(1, self.experts))
        slots = [each[self.role] for each in named]
        arena = Arena([SlotSpec(slot, self.recipe.format_of(self.role)) for slot in slots], self.recipe, self.backend)
        arena.place(device)
        overwrites.set_scale(arena, slice(None), _SCALE)
        arena.known_hot = True  # As in most steps of a training: the cast uses the slot's scale, not the amax of x.
        precision = None if self.experts else Precision(named[0], ())
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
            if cast.rows_inv_scale is cast.columns_inv_scale:  # One scale for the tensor: compare it once.
                found["inv_scale"] = found.pop("rows_inv_scale")
                del found["columns_inv_scale"]
            return {name: tensor for name, tensor in found.items() if tensor.numel()}

        return compute


class ProductOf(NamedTuple):
    """A product a @ b.T of FP8 operands a [m, k] and b [n, k].

    ``formats``: of a and b, keys of ``FORMATS``. ``dtype``: of the result. ``exact``: True for operands with which all
    sums are exact in any order, so all kernels give the same bits. ``sideways``: True if b lies in memory as [k, n], as
    a weight that FSDP2 gathers in FP8 does in dgrad. ``into``: True if the product is added to a buffer, here zeros.
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
        """See ``CastOf``."""
        by = ops.multiplier_name(self.product, self.fast_accumulation, self.backend, device)
        shape, formats = f"{self.m}x{self.n}x{self.k}", " ".join(self.formats)
        extras = " with bias" * self.bias + ", fast accumulation" * self.fast_accumulation + ", exact" * self.exact
        extras += ", sideways" * self.sideways + ", into a buffer" * self.into
        return f"{self.gemm} {shape} {formats} {dtype_name(self.dtype)}{extras}, {self.scaling.value}, {by}"

    def prepared(self, device: torch.device) -> Callable[[], dict[str, Tensor]]:
        """Make the operands on ``device``, and return a function as that of ``CastOf``. The result has the name ""."""
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
        """FP8 dtypes of a and b."""
        a, b = self.formats
        return FORMATS[a].dtype, FORMATS[b].dtype

    @property
    def product(self) -> Product:
        """The description by which a kernel or a library is chosen for it."""
        bias = self.dtype if self.bias else None
        return Product(self.scaling, self.m, self.n, self.k, *self.dtypes, self.dtype, bias, self.into)

    def _inverse_scales(self, device: torch.device) -> list[Tensor]:
        """Return the inverse scales of a and b, with the dtype, shapes and strides that casts give them."""
        found = []
        for name, lines in (("inv_scale_a", self.m), ("inv_scale_b", self.n)):
            shape: tuple[int, ...] = ()
            along = blocks_along(self.k, BLOCK)
            square = self.scaling is Scaling.BLOCKWISE and name == "inv_scale_b"
            if self.scaling is Scaling.ROWWISE:
                shape = (lines, 1)
            elif self.scaling in (Scaling.MX, Scaling.NVFP4):
                shape = (lines, blocks_along(self.k, MX_BLOCK if self.scaling is Scaling.MX else NVFP4_BLOCK))
            elif self.scaling.in_blocks:
                shape = (blocks_along(lines, BLOCK), along) if square else (along, lines)
            if self.exact:
                scales = torch.ones(shape, dtype=torch.float32, device=device)
            else:
                scales = inverse_scales(shape, _SEEDS[name], device)
            if self.scaling is Scaling.MX:
                scales = _powers_of(scales)
            found.append(scales.t() if self.scaling.in_blocks and not square else scales)
        return found


class GroupedProductOf(NamedTuple):
    """A grouped product of E experts, whose operands are FP8.

    fprop and dgrad multiply each expert's rows of a [tokens, k] by its matrix in b [E, n, k]. wgrad multiplies each
    expert's columns of the transposed copies a [n, tokens] and b [k, tokens]. ``by``: the part of a tensor that has a
    scale, a key of ``SCALINGS``.
    """

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
        """See ``CastOf``."""
        extras = " with bias" * self.bias + ", fast accumulation" * self.fast_accumulation
        how = f"{' '.join(self.formats)} {dtype_name(self.dtype)}{extras}, a scale per {self.by}"
        by = ops.implementer(self.backend, device)
        if self.gemm != "wgrad":
            a, b = (FORMATS[name].dtype for name in self.formats)
            scaling = SCALINGS[self.by][1]
            shape = self.experts, self.n, self.k
            by = grouped_ops.multiplier_name((a, b, self.dtype), scaling, shape, self.bias, self.backend, device)
        return f"grouped {self.gemm} {TOKENS}x{self.n}x{self.k} of {self.experts} experts {how}, {by}"

    def prepared(self, device: torch.device) -> Callable[[], dict[str, Tensor]]:
        """Make the operands on ``device``, and return a function as that of ``CastOf``. The result has the name ""."""
        offsets, wgrad = ends_of(self.experts, device), self.gemm == "wgrad"
        multiple = MX_BLOCK if self.by == "mx" else TOKEN_ALIGNMENT
        width = columns_bound(TOKENS, self.experts, multiple)
        of_a, of_b = ((self.n, width), (self.k, width)) if wgrad else ((TOKENS, self.k), (self.experts, self.n, self.k))
        a, b = (
            operand(shape, FORMATS[name].dtype, _SEEDS[seed], device)
            for shape, name, seed in zip((of_a, of_b), self.formats, "ab")
        )
        if wgrad:  # As casts make them: zeros between the experts.
            filled = torch.zeros(width, dtype=torch.bool, device=device)
            for _, columns, _ in rows_of(offsets, None, multiple):
                filled[columns] = True
            a, b = (torch.where(filled, x.view(torch.uint8), 0).view(x.dtype) for x in (a, b))
        scales = [
            inverse_scales(shape, _SEEDS[f"inv_scale_{name}"], device)
            for name, shape in zip("ab", self._scale_shapes(width))
        ]
        if self.by == "mx":
            scales = [_powers_of(scale) for scale in scales]
        how: dict[str, Any] = {"fast_accumulation": self.fast_accumulation, "backend": self.backend}
        if wgrad and self.by == "block":
            scales = [scale.t() for scale in scales]
        if wgrad:
            return lambda: {"": direct.matmul_grouped_columns(a, b, *scales, offsets, self.dtype, **how)}
        how["bias"] = operand((self.experts, self.n), self.dtype, _SEEDS["bias"], device) if self.bias else None
        return lambda: {"": direct.matmul_grouped(a, b, *scales, offsets, self.dtype, **how)}

    def _scale_shapes(self, width: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of the inverse scales of a and b. ``width``: of the operands of wgrad."""
        experts, n, k, wgrad = self.experts, self.n, self.k, self.gemm == "wgrad"
        if self.by == "tensor":
            return (experts,), (experts,)
        if self.by == "row":
            return ((experts, n, 1), (experts, k, 1)) if wgrad else ((TOKENS, 1), (experts, n, 1))
        if self.by == "mx":
            along = (width if wgrad else k) // MX_BLOCK
            return ((n, along), (k, along)) if wgrad else ((TOKENS, along), (experts, n, along))
        if wgrad:
            blocks = blocks_bound(TOKENS, experts)
            return (blocks, n), (blocks, k)  # Transposed afterwards, as casts lay them out.
        along = blocks_along(k, BLOCK)
        return (TOKENS, along), (experts, blocks_along(n, BLOCK), along)


Computation = CastOf | ProductOf | GroupedProductOf
"""A cast or a product with known operands. Hashable; equal ones compute the same."""


def _powers_of(scales: Tensor) -> Tensor:
    """Return positive float32 as E8M0, rounded down to powers of two."""
    return (scales.view(torch.int32) >> 23).to(torch.uint8).view(torch.float8_e8m0fnu)


def ends_of(experts: int, device: torch.device) -> Tensor:
    """Return where the rows of each expert end, int32[E]. Every second expert has no rows; each of the others has more
    than the one before."""
    filled, rows = -(-experts // 2), TOKENS - _BEYOND
    ends = [rows * (expert // 2 + 1) ** 2 // filled**2 for expert in range(experts)]
    return torch.tensor(ends, dtype=torch.int32, device=device)


def for_casts(recipe: Recipe) -> Recipe:
    """Return the recipe with all fields that do not matter for a cast at their defaults, so that casts which compute
    the same compare as equal."""
    fields = {field.name for field in dataclasses.fields(recipe)}  # type: ignore[arg-type]
    matter = {"format", "margin", "power_of_two", "scale_rounding", "hadamard", "stochastic_rounding", "seed"} & fields
    return type(recipe)(**{name: getattr(recipe, name) for name in matter})


def _described(recipe: Recipe) -> str:
    """Return what matters of a recipe for a cast, as text."""
    if isinstance(recipe, MXFP8Scaling):
        extras = [f" scale_rounding={recipe.scale_rounding}"]
    else:
        extras = [" power_of_two"] if recipe.power_of_two else []
    extras += [f" margin={recipe.margin}"] if recipe.margin else []
    of_nvfp4 = {name: getattr(recipe, name, None) for name in ("hadamard", "stochastic_rounding", "seed")}
    extras += [f" {name}={value}" for name, value in of_nvfp4.items() if value is not None]
    return f"{type(recipe).__name__} {recipe.format}{''.join(extras)}"

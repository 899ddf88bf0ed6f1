"""Known answers: the casts and products of a model's own shapes, on operands that are the same on every device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fp8dist.checks.contents import Content, Digester, Field, Key, on_device
from fp8dist.checks.differences import unravel
from fp8dist.modules.casters import Cast, Request
from fp8dist.modules.fp8_linear import FP8Linear
from fp8dist.modules.job_state import JobState
from fp8dist.modules.linear_slots import LinearSlots
from fp8dist.modules.main_grad import fuses
from fp8dist.modules.outgrown import OUTGROWN, Outgrown, meant_to_saturate
from fp8dist.modules.weight_notes import stored_parameters
from fp8dist.parallel.wrappers import multiplied_shape
from fp8dist.state import overwrites
from fp8dist.state.arena import Arena
from fp8dist.state.arena_sync import ArenaSync
from fp8dist.state.recipe import GEMMS, Gemm, Recipe
from fp8dist.state.slots import Slot, SlotSpec
from fp8dist_kernels import BLOCK, direct, ops
from fp8dist_kernels.formats import FORMATS, Role
from fp8dist_kernels.multipliers import Product
from fp8dist_kernels.reference.blocks import blocks_along
from fp8dist_kernels.reference.matmuls import ALIGNMENT, Scaling
from fp8dist_kernels.reference.operands import integers, inverse_scales, operand

__all__ = [
    "KIND",
    "LARGEST",
    "SCALE",
    "SEEDS",
    "TOKENS",
    "CastOf",
    "Computation",
    "ComputedContent",
    "ProductOf",
    "computations_of",
    "described",
    "for_casts",
    "linear_computations",
    "short",
]

KIND = "computation"
"""Kind of the things that are computed, and of findings about them."""

TOKENS = 256
"""Rows of the inputs and gradients. Few are enough: more rows only repeat the same tiles of a product."""

LARGEST = 8192
"""Largest number of features: bounds the memory that a check needs."""

SCALE = 60.0
"""Scale of slots with delayed scaling: large operands saturate, small ones become subnormal or zero."""

_OPERANDS = ("input", "weight", "grad_output", "a", "b", "inv_scale_a", "inv_scale_b", "bias")
SEEDS: Mapping[str, int] = MappingProxyType({name: i for i, name in enumerate(_OPERANDS)})

_OF_BLOCKS = (Scaling.BLOCKWISE_1D, Scaling.BLOCKWISE)
_SCALINGS: Mapping[str, tuple[Scaling, Scaling]] = MappingProxyType(
    {"tensor": (Scaling.TENSORWISE,) * 2, "row": (Scaling.ROWWISE,) * 2, "block": _OF_BLOCKS}
)
"""By the part of a tensor that has a scale: the scaling of a product without a weight, and with one."""


class CastOf(NamedTuple):
    """A cast. ``recipe`` has only the fields that matter for a cast."""

    role: Role
    shape: tuple[int, int]
    dtype: torch.dtype
    recipe: Recipe
    rows: bool
    columns: bool
    backend: str

    def name(self, device: torch.device) -> str:
        """Return a name for reports, which differs between different casts."""
        copies = "" if self.rows and self.columns else ", rows only" if self.rows else ", columns only"
        by = ops.implementer(self.backend, device)
        shape = "x".join(map(str, self.shape))
        return f"cast of {self.role} {shape} {short(self.dtype)}, {described(self.recipe)}{copies}, {by}"

    def prepared(self, device: torch.device) -> Callable[[], dict[str, Tensor]]:
        """Return a function that computes, and returns the results by name. It uses a slot of its own, so no other
        state changes."""
        slot = Slot("known answers", self.role.value)
        spec = SlotSpec(slot, self.recipe.format_of(self.role))
        arena = Arena([spec], self.recipe, self.backend)
        arena.place(device)
        overwrites.set_scale(arena, 0, SCALE)
        arena.known_hot = True  # Most steps of a training know it, and need no look at the amax before the cast.
        sync = ArenaSync(arena)
        slots = LinearSlots(sync, sync, JobState(True, self.backend, "fp8"), self.recipe, dict.fromkeys(Role, slot))
        of_weight = self.role is Role.WEIGHT
        limits = Outgrown(OUTGROWN * meant_to_saturate(self.recipe) if of_weight and self.recipe.delayed else None)
        request = Request(slots.states(device)[0], self.role, self.rows, self.columns, True, limits, tapped=False)
        x = operand(self.shape, self.dtype, SEEDS[self.role.value], device)

        def compute() -> dict[str, Tensor]:
            arena.pending.zero_()
            cast = slots.caster.cast(x, request)
            found: dict[str, Tensor] = {name: getattr(cast, name) for name in Cast._fields[:4]}
            found["amax"] = arena.pending[0].clone()
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
    bias: bool
    fast_accumulation: bool
    backend: str
    exact: bool = False
    sideways: bool = False
    into: bool = False

    def name(self, device: torch.device) -> str:
        """Return a name for reports, which differs between different products."""
        by = ops.multiplier_name(self.product, self.fast_accumulation, self.backend, device)
        shape, formats = f"{self.m}x{self.n}x{self.k}", " ".join(self.formats)
        extras = " with bias" * self.bias + ", fast accumulation" * self.fast_accumulation + ", exact" * self.exact
        extras += ", sideways" * self.sideways + ", into a buffer" * self.into
        return f"{self.gemm} {shape} {formats} {short(self.dtype)}{extras}, {self.scaling.value}, {by}"

    def prepared(self, device: torch.device) -> Callable[[], dict[str, Tensor]]:
        """Return a function that computes, and returns the result. The operands are made directly in FP8: a wrong cast
        does not matter here."""
        make = integers if self.exact else operand
        a, b = (
            make((lines, self.k), dtype, SEEDS[name], device)
            for name, lines, dtype in zip("ab", (self.m, self.n), self.dtypes)
        )
        if self.sideways:
            b = direct.transpose(b, backend=self.backend).t()
        inv_a, inv_b = self._inverse_scales(device)
        bias = operand((self.n,), self.dtype, SEEDS["bias"], device) if self.bias else None
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
            scales = _ones(shape, device) if self.exact else inverse_scales(shape, SEEDS[name], device)
            found.append(scales.t() if self.scaling.in_blocks and not square else scales)
        return found


class Computation(Protocol):
    """A cast or a product with known operands. Equal ones hash and compare as equal."""

    def name(self, device: torch.device) -> str:
        """Return a name for reports."""

    def prepared(self, device: torch.device) -> Callable[[], dict[str, Tensor]]:
        """Return a function that computes, and returns the results by name."""


def computations_of(linears: Iterable[FP8Linear]) -> dict[torch.device, tuple[Computation, ...]]:
    """Return what the forwards and backwards of these modules compute in FP8, each once, by device. Local.

    Inputs have autocast's dtype inside ``torch.autocast``, else the weight's. Modules with FP8 switched off are left
    out.
    """
    found: dict[torch.device, dict[Computation, None]] = {}
    for linear in linears:
        slots = linear.fp8_slots
        device, stored = slots.weight_sync.arena.device, stored_parameters(linear)
        if not stored or not slots.job.enabled:
            continue
        weight = stored[0].dtype
        autocast = torch.is_autocast_enabled(device.type)
        dtype = torch.get_autocast_dtype(device.type) if autocast else weight
        shape = multiplied_shape(linear, slots.note.resharded)
        # A row-wise parallel Linear adds its bias after the product.
        bias = linear.bias is not None and shape[1] == linear.in_features
        how = slots.recipe, dtype, weight, bias, linear.transposed, slots.job.backend
        more = linear_computations(shape, *how, sideways=slots.job.gathers, into=fuses(linear))
        found.setdefault(device, {}).update(dict.fromkeys(more))
    return {device: tuple(computations) for device, computations in found.items()}


def linear_computations(
    shape: Sequence[int],
    recipe: Recipe,
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    bias: bool = False,
    transposed: bool = False,
    backend: str = "auto",
    tokens: int = TOKENS,
    sideways: bool = False,
    into: bool = False,
) -> list[CastOf | ProductOf]:
    """Return the casts and products of one Linear: those of the GEMMs that ``recipe`` has in FP8.

    Args:
        shape: [out_features, in_features]; what is larger than ``LARGEST`` is cut.
        dtype: of inputs and their gradients.
        transposed: the weight is stored, and cast, as [in_features, out_features].
        tokens: of inputs and gradients.
        sideways: the weight is gathered in FP8.
        into: the weight's gradient is added to a buffer.
    """
    rows, features = (min(size, LARGEST) for size in shape)
    fprop, dgrad, wgrad = (gemm not in recipe.high_precision for gemm in ("fprop", "dgrad", "wgrad"))
    stored, copies = ((features, rows), (dgrad, fprop)) if transposed else ((rows, features), (fprop, dgrad))
    casts = (
        (Role.INPUT, (tokens, features), dtype, fprop, wgrad),
        (Role.WEIGHT, stored, weight_dtype, *copies),
        (Role.GRAD_OUTPUT, (tokens, rows), dtype, dgrad, wgrad),
    )
    of_casts = for_casts(recipe)
    found: list[CastOf | ProductOf] = [
        CastOf(role, size, of, of_casts, row_major, columns, backend)
        for role, size, of, row_major, columns in casts
        if row_major or columns
    ]
    x, w, grad = (recipe.format_of(role).name for role in (Role.INPUT, Role.WEIGHT, Role.GRAD_OUTPUT))
    lines, squares = _SCALINGS[recipe.by]
    along = blocks_along(tokens, ALIGNMENT) * ALIGNMENT  # Casts pad the rows of transposed copies.
    fast = {gemm: gemm in recipe.fast_accumulation for gemm in GEMMS}
    products = (
        ProductOf("fprop", tokens, rows, features, (x, w), dtype, squares, bias, fast["fprop"], backend),
        ProductOf(
            "dgrad",
            tokens,
            features,
            rows,
            (grad, w),
            dtype,
            squares,
            False,
            fast["dgrad"],
            backend,
            sideways=sideways,
        ),
        ProductOf("wgrad", rows, features, along, (grad, x), weight_dtype, lines, False, fast["wgrad"], backend),
    )
    if into:
        products = (*products[:2], products[2]._replace(dtype=torch.float32, into=True))
    return found + [product for product in products if product.gemm not in recipe.high_precision]


class ComputedContent(Content):
    """Results of computations, which ``digests`` computes. They are kept, in host memory, as long as this object."""

    def __init__(self, computations: Sequence[Computation], device: torch.device, suffix: str = "") -> None:
        """``suffix``: of the names."""
        self._computations = tuple(computations)
        self._results: list[dict[str, Tensor]] = []
        super().__init__([Key(c.name(device) + suffix, KIND, (), "") for c in computations], device)

    @property
    def sizes(self) -> dict[str, int]:
        """See ``Content``."""
        return {}

    @torch.no_grad()
    def digests(self, digester: Digester) -> Tensor:
        """See ``Content``."""
        digest, found = digester.on(self.device), []
        self._results = []
        for computation, seed in zip(self._computations, self.seeds):
            with on_device(self.device):
                results = computation.prepared(self.device)()
            leaves, _ = digester.many_leaves(list(results.values()))
            found.append(digest.digests(leaves, [len(leaves)], seed[None]))
            self._results.append({name: tensor.cpu() for name, tensor in results.items()})
        return torch.cat(found).cpu()

    def fields(self, index: int) -> list[Field]:
        """See ``Content``."""

        def field(name: str, tensor: Tensor) -> Field:
            return Field(name, KIND, tensor, lambda place: unravel(place, tuple(tensor.shape)))

        return [field(name, tensor) for name, tensor in self._results[index].items()]


def _ones(shape: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.ones(shape, dtype=torch.float32, device=device)


def for_casts(recipe: Recipe) -> Recipe:
    """Return the recipe with only those fields that matter for a cast, so that equal casts are equal."""
    matter = {"format", "margin", "power_of_two"} & {field.name for field in dataclasses.fields(recipe)}  # type: ignore[arg-type]
    return type(recipe)(**{name: getattr(recipe, name) for name in matter})


def described(recipe: Recipe) -> str:
    """Return what a cast needs of a recipe, in words."""
    extras = [" power_of_two"] if recipe.power_of_two else []
    extras += [f" margin={recipe.margin}"] if recipe.margin else []
    return f"{type(recipe).__name__} {recipe.format}{''.join(extras)}"


def short(dtype: torch.dtype) -> str:
    """Return the name of a dtype."""
    return str(dtype).removeprefix("torch.")

"""What a model's FP8 modules compute, as casts and products with known answers, and the results to compare."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from fp8dist.checks.contents import Content, Digester, Field, Key, on_device
from fp8dist.checks.known_calls import TOKENS, CastOf, Computation, GroupedProductOf, ProductOf, for_casts
from fp8dist.modules.fp8_linear import FP8Linear
from fp8dist.modules.main_grad import fuses
from fp8dist.modules.parts import Part
from fp8dist.parallel.wrappers import multiplied_shape
from fp8dist.state.recipe import GEMMS, Recipe
from fp8dist_kernels.formats import Role
from fp8dist_kernels.reference.blocks import blocks_along
from fp8dist_kernels.reference.matmuls import ALIGNMENT, Scaling

__all__ = ["KIND", "ComputedContent", "computations_of", "linear_computations", "product_computations"]

KIND = "computation"
"""Kind of the things that are computed, and of findings about them."""

LARGEST = 8192
"""Largest number of features: bounds the memory that a check needs."""

_OF_BLOCKS = (Scaling.BLOCKWISE_1D, Scaling.BLOCKWISE)
_SCALINGS: Mapping[str, tuple[Scaling, Scaling]] = MappingProxyType(
    {"tensor": (Scaling.TENSORWISE,) * 2, "row": (Scaling.ROWWISE,) * 2, "block": _OF_BLOCKS}
)
"""By the part of a tensor that has a scale: the scaling of a product without a weight, and with one."""


def computations_of(parts: Iterable[Part]) -> dict[torch.device, tuple[Computation, ...]]:
    """Return what the forwards and backwards of these parts of a model compute in FP8, each once, by device. Local.

    Inputs have autocast's dtype inside ``torch.autocast``, else the weight's. Modules with FP8 switched off are left
    out.
    """
    found: dict[torch.device, dict[Computation, None]] = {}
    for part in parts:
        module, slots = part
        device, stored = slots.weight_sync.arena.device, part.stored
        if not stored or not slots.job.enabled:
            continue
        dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else stored[0].dtype
        how = slots.recipe, dtype, stored[0].dtype
        more: Sequence[Computation]
        if isinstance(module, FP8Linear):
            shape = multiplied_shape(module, slots.note.resharded)
            # A row-wise parallel Linear adds its bias after the product.
            bias = module.bias is not None and shape[1] == module.in_features
            of_linear = bias, module.transposed, slots.job.backend
            more = linear_computations(shape, *how, *of_linear, sideways=slots.job.gathers, into=fuses(module))
        else:
            experts, *sizes = stored[0].shape
            transposed, biased = bool(module.is_transposed), bool(module.has_bias)
            sizes = sizes[::-1] if transposed else sizes
            more = product_computations((experts, *sizes), *how, biased, transposed, slots.job.backend)
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
    out, features = (min(size, LARGEST) for size in shape)
    x, w, grad = (recipe.format_of(role).name for role in Role)
    lines, squares = _SCALINGS[recipe.by]
    along = blocks_along(tokens, ALIGNMENT) * ALIGNMENT  # Casts pad the rows of transposed copies.
    how: list[dict[str, Any]] = [
        {"gemm": gemm, "fast_accumulation": gemm in recipe.fast_accumulation, "backend": backend} for gemm in GEMMS
    ]
    fprop, dgrad, wgrad = how
    of_wgrad = torch.float32 if into else weight_dtype
    products = (
        ProductOf(m=tokens, n=out, k=features, formats=(x, w), dtype=dtype, scaling=squares, bias=bias, **fprop),
        ProductOf(
            m=tokens, n=features, k=out, formats=(grad, w), dtype=dtype, scaling=squares, sideways=sideways, **dgrad
        ),
        ProductOf(m=out, n=features, k=along, formats=(grad, x), dtype=of_wgrad, scaling=lines, into=into, **wgrad),
    )
    casts = _casts((out, features), recipe, dtype, weight_dtype, transposed, backend, tokens)
    return [*casts, *(product for product in products if product.gemm not in recipe.high_precision)]


def product_computations(
    shape: Sequence[int],
    recipe: Recipe,
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    bias: bool = False,
    transposed: bool = False,
    backend: str = "auto",
) -> list[CastOf | GroupedProductOf]:
    """Return the casts and products of one grouped product: those of the GEMMs that ``recipe`` has in FP8.

    Args:
        shape: [E, out_features, in_features]. What is larger than ``LARGEST`` is cut, and experts, so that all weights
            together are not larger than the largest one of a Linear.
        dtype, transposed: as in ``linear_computations``.
    """
    out, into = (min(size, LARGEST) for size in shape[1:])
    experts = max(1, min(shape[0], LARGEST**2 // (out * into)))
    x, w, grad = (recipe.format_of(role).name for role in Role)
    of_gemms = (
        (out, into, (x, w), dtype, bias),
        (into, out, (grad, w), dtype, False),
        (out, into, (grad, x), weight_dtype, False),
    )
    products = [
        GroupedProductOf(gemm, experts, n, k, formats, of, recipe.by, biased, gemm in recipe.fast_accumulation, backend)
        for gemm, (n, k, formats, of, biased) in zip(GEMMS, of_gemms)
        if gemm not in recipe.high_precision
    ]
    return [*_casts((out, into), recipe, dtype, weight_dtype, transposed, backend, TOKENS, experts), *products]


def _casts(
    shape: tuple[int, int],
    recipe: Recipe,
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    transposed: bool,
    backend: str,
    tokens: int,
    experts: int = 0,
) -> list[CastOf]:
    """Return the casts of a Linear or a grouped product, with the copies that its GEMMs in FP8 need."""
    out, into = shape
    fprop, dgrad, wgrad = (gemm not in recipe.high_precision for gemm in GEMMS)
    stored, copies = ((into, out), (dgrad, fprop)) if transposed else ((out, into), (fprop, dgrad))
    casts: tuple[tuple[Role, tuple[int, ...], torch.dtype, bool, bool], ...] = (
        (Role.INPUT, (tokens, into), dtype, fprop, wgrad),
        (Role.WEIGHT, (experts, *stored) if experts else stored, weight_dtype, *copies),
        (Role.GRAD_OUTPUT, (tokens, out), dtype, dgrad, wgrad),
    )
    of_casts = for_casts(recipe)
    return [
        CastOf(role, size, of, of_casts, rows, columns, backend, experts)
        for role, size, of, rows, columns in casts
        if rows or columns
    ]


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
        return [Field(name, KIND, tensor) for name, tensor in self._results[index].items()]

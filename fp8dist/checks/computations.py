"""Computations: the casts and products that a model's FP8 modules do, with known operands, and their results.

``check(compute=True)`` lets each rank run them. Ranks with equal hardware and versions must get the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fp8dist.checks.contents import Content, Digester, Field, Key, on_device
from fp8dist.checks.known_calls import SCALINGS, TOKENS, CastOf, Computation, GroupedProductOf, ProductOf, for_casts
from fp8dist.modules.fp8_linear import FP8Linear
from fp8dist.modules.main_grad import fuses
from fp8dist.modules.parts import Part, fp8_parts
from fp8dist.parallel.wrappers import fsdp2_axes, multiplied_shape
from fp8dist.state.recipe import Recipe
from fp8dist_kernels import GEMMS, MX_BLOCK
from fp8dist_kernels.formats import Role
from fp8dist_kernels.reference.blocks import blocks_along
from fp8dist_kernels.reference.matmuls import ALIGNMENT

KIND = "computation"
"""Kind of the results that are compared, and of findings about them."""

LARGEST = 8192
"""The most features of an operand. Larger ones are cut, to bound the memory of a check."""


def computations_of(model: nn.Module) -> dict[torch.device, tuple[Computation, ...]]:
    """Return the casts and products that forwards and backwards of a model do in FP8, by device. Local.

    Equal ones (same shapes, dtypes, recipe, backend) are listed once. Inputs have autocast's dtype inside
    ``torch.autocast``, else the weight's. Modules with FP8 switched off are left out.
    """
    axes = fsdp2_axes(model)
    found: dict[torch.device, dict[Computation, None]] = {}
    for part in fp8_parts(model):
        module, slots = part
        device, stored = slots.weight_sync.arena.device, part.stored
        if not stored or not slots.job.enabled:
            continue
        dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else stored[0].dtype
        shape, bias, transposed = factors_of(part, axes)
        how = slots.recipe, dtype, stored[0].dtype, bias, transposed, slots.job.backend
        into = isinstance(module, FP8Linear) and fuses(module)
        more = casts_and_products(shape, *how, sideways=slots.job.gathers, into=into)
        found.setdefault(device, {}).update(dict.fromkeys(more))
    return {device: tuple(computations) for device, computations in found.items()}


class Factors(NamedTuple):
    """The weight that this rank multiplies with in a part.

    ``shape``: [out_features, in_features], of experts [E, out_features, in_features]; local under tensor parallelism.
    ``bias``: True if the product adds a bias. ``transposed``: True if the weight is stored, and cast, as [in_features,
    out_features].
    """

    shape: tuple[int, ...]
    bias: bool
    transposed: bool


def factors_of(part: Part, axes: Mapping[int, int]) -> Factors:
    """Return what this rank multiplies in a part. Local.

    Args:
        part: with at least one stored weight.
        axes: ``fsdp2_axes`` of the model.
    """
    module = part.module
    if isinstance(module, FP8Linear):
        shape = tuple(multiplied_shape(module, axes))
        # A row-wise parallel Linear adds its bias after the product.
        return Factors(shape, module.bias is not None and shape[1] == module.in_features, module.transposed)
    experts, *sizes = part.stored[0].shape
    transposed = bool(module.is_transposed)
    return Factors((experts, *(reversed(sizes) if transposed else sizes)), bool(module.has_bias), transposed)


def casts_and_products(
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
) -> list[Computation]:
    """Return the casts and products of one Linear, or of one grouped product, for the GEMMs that ``recipe`` does in
    FP8. A cast makes only the copies that these need: its rows as they are, its columns (a transposed copy), or both.

    Args:
        shape: [out_features, in_features], each cut to ``LARGEST``; of a grouped product [E, out_features,
            in_features], with experts cut so that all weights together have at most ``LARGEST`` ** 2 elements.
        dtype: of inputs and of gradients of outputs.
        weight_dtype: of the weight and its gradient.
        transposed: True if the weight is stored, and cast, as [in_features, out_features].
        tokens: rows of inputs and of gradients of outputs. Of a grouped product it must be ``TOKENS``.
        sideways: True if FSDP2 gathers the weight in FP8: then dgrad multiplies a transposed view of it. Not for
            grouped products.
        into: True if the weight's gradient is added to a float32 buffer (``main_grad``). Not for grouped products.
    """
    *several, out, features = shape
    out, features = min(out, LARGEST), min(features, LARGEST)
    experts = max(1, min(several[0], LARGEST**2 // (out * features))) if several else 0
    fprop, dgrad, wgrad = (gemm not in recipe.high_precision for gemm in GEMMS)
    stored, copies = ((features, out), (dgrad, fprop)) if transposed else ((out, features), (fprop, dgrad))
    casts: tuple[tuple[Role, tuple[int, ...], torch.dtype, bool, bool], ...] = (
        (Role.INPUT, (tokens, features), dtype, fprop, wgrad),
        (Role.WEIGHT, (experts, *stored) if experts else stored, weight_dtype, *copies),
        (Role.GRAD_OUTPUT, (tokens, out), dtype, dgrad, wgrad),
    )
    x, w, grad = (recipe.format_of(role).name for role in Role)
    lines, squares = SCALINGS[recipe.by]
    alignment = MX_BLOCK if recipe.by == "mx" else ALIGNMENT  # Casts pad the contracted dim.
    along, of_k, of_n = (blocks_along(size, alignment) * alignment for size in (tokens, features, out))
    of_wgrad = torch.float32 if into else weight_dtype
    found: list[Computation] = [
        CastOf(role, size, of, for_casts(recipe), rows, columns, backend, experts)
        for role, size, of, rows, columns in casts
        if rows or columns
    ]
    for gemm, (m, n, k), formats, of, scaling, extras in (
        (GEMMS[0], (tokens, out, of_k), (x, w), dtype, squares, {"bias": bias}),
        (GEMMS[1], (tokens, features, of_n), (grad, w), dtype, squares, {"sideways": sideways and recipe.by != "mx"}),
        (GEMMS[2], (out, features, along), (grad, x), of_wgrad, lines, {"into": into}),
    ):
        fast = gemm in recipe.fast_accumulation
        if gemm in recipe.high_precision:
            continue
        if experts:
            n, k = (features, out) if gemm == "dgrad" else (out, features)
            if recipe.by == "mx" and gemm != "wgrad":  # Other casts of experts do not pad.
                k = of_n if gemm == "dgrad" else of_k
            biased = bias and gemm == "fprop"
            found.append(GroupedProductOf(gemm, experts, n, k, formats, of, recipe.by, biased, fast, backend))
        else:
            found.append(ProductOf(gemm, m, n, k, formats, of, scaling, fast, backend, **extras))
    return found


class ComputedContent(Content):
    """The results of computations on one device. ``digests`` runs the computations, and keeps the results in host
    memory, for ``fields``."""

    def __init__(self, computations: Sequence[Computation], device: torch.device, suffix: str = "") -> None:
        """``suffix``: appended to each name, to distinguish the devices of one rank."""
        self._computations = tuple(computations)
        self._results: list[dict[str, Tensor]] = []
        super().__init__([Key(c.name(device) + suffix, KIND, (), "") for c in computations], device)

    @property
    def sizes(self) -> dict[tuple[str, str], int]:
        """See ``Content``. Empty: results have no size before they are computed."""
        return {}

    @torch.no_grad()
    def digests(self, digester: Digester) -> Tensor:
        """See ``Content``. Runs all computations."""
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
        """See ``Content``. After ``digests``; the tensors are on the CPU."""
        return [Field(name, KIND, tensor) for name, tensor in self._results[index].items()]

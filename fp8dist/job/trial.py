"""Tries a model's products at ``attach``, so that one that torch cannot compute raises an error here, not in a later
step.

Kernels of Triton are not tried. Compiling them takes seconds, and each shape may take another one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from fp8dist.checks.computations import linear_computations, product_computations
from fp8dist.checks.known_calls import GroupedProductOf, ProductOf
from fp8dist.errors import ConfigurationError
from fp8dist.modules.fp8_experts import fp8_experts
from fp8dist.modules.fp8_linear import FP8Linear, fp8_linears
from fp8dist.modules.linear_slots import refusal
from fp8dist.modules.main_grad import fuses
from fp8dist.modules.weight_notes import stored_parameters
from fp8dist.parallel.wrappers import multiplied_shape
from fp8dist_kernels import BLOCK, ops
from fp8dist_kernels.multipliers import ProductError, machine_of, refused, row_of

__all__ = ["TOKENS", "try_products"]

TOKENS = (BLOCK + 16, BLOCK + 13, 13)
"""Numbers of tokens that are tried, because those of a batch are not known: a multiple of 16, as most are; an odd one;
both beyond a block of scales; and fewer than a block."""

_MOST_EXPERTS = 2
_TOLERANCE = 0.01
"""Largest error of a product, relative to its norm. Rounding to bfloat16 gives 0.002, a wrong product about 1."""


def try_products(model: nn.Module, resharded: set[nn.Module]) -> None:
    """Raise ConfigurationError if torch is to compute a product of these modules, but does not, or gets it wrong.

    On a GPU each distinct product is computed once, with features cut to at most three blocks. A model in float32 may
    be run under autocast, so its products are tried with both dtypes. Local; waits for the GPU.

    Args:
        resharded: modules whose weights FSDP frees.
    """
    tried: set[tuple[ProductOf | GroupedProductOf, torch.device]] = set()
    seen: set[tuple[Any, ...]] = set()  # Kinds of Linears: few, where Linears are many.
    for linear in fp8_linears(model):
        slots = linear.fp8_slots
        device, stored = slots.weight_sync.arena.device, stored_parameters(linear)
        if not stored:
            continue
        _require_fp8(slots.fqn, slots.job.backend, device)
        shape, dtype = multiplied_shape(linear, linear in resharded), stored[0].dtype
        of = linear.bias is None, linear.in_features, linear.transposed, fuses(linear)
        kind = (*shape, slots.recipe, dtype, *of, device)
        if kind in seen:
            continue
        seen.add(kind)
        for product in _products_of(linear, shape, dtype, device):
            if (product, device) not in tried:
                _try(slots.fqn, product, device)
                tried.add((product, device))
    for module in fp8_experts(model):
        for grouped in module.fp8_products.values():
            device, stored = grouped.weight_sync.arena.device, stored_parameters(module, grouped.name)
            if not stored:
                continue
            _require_fp8(grouped.fqn, grouped.job.backend, device)
            experts, *sizes = stored[0].shape
            transposed = bool(module.is_transposed)
            out, into = map(_cut, reversed(sizes) if transposed else sizes)
            shape = min(experts, _MOST_EXPERTS), out, into
            how = bool(module.has_bias), transposed, grouped.job.backend
            for dtype in _dtypes(stored[0].dtype, device):
                for each in product_computations(shape, grouped.recipe, dtype, stored[0].dtype, *how):
                    if isinstance(each, GroupedProductOf) and (each, device) not in tried:
                        _try_grouped(grouped.fqn, each, device)
                        tried.add((each, device))


def _require_fp8(fqn: str, backend: str, device: torch.device) -> None:
    row = machine_of(device).capability
    if row is not None and row < (8, 9) and backend != "reference":
        raise ConfigurationError(
            f"{fqn}: {device} has compute capability {row[0]}.{row[1]}, and FP8 needs 8.9: use a newer GPU, "
            'prepare(enabled=False), or backend="reference", which emulates FP8'
        )


def _products_of(
    linear: FP8Linear, whole: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Iterator[ProductOf]:
    """Iterate over the products of a Linear whose weight is multiplied in this shape."""
    slots = linear.fp8_slots
    # A row-wise parallel Linear adds its bias after the product.
    bias = linear.bias is not None and whole[1] == linear.in_features
    shape = [_cut(size) for size in whole]
    for of in _dtypes(dtype, device):
        how = slots.recipe, of, dtype, bias, linear.transposed, slots.job.backend
        for tokens in TOKENS:
            for each in linear_computations(shape, *how, tokens, slots.job.gathers, fuses(linear)):
                if isinstance(each, ProductOf):
                    yield each._replace(exact=True)


def _dtypes(weight: torch.dtype, device: torch.device) -> tuple[torch.dtype, ...]:
    """Return the dtypes that inputs may have."""
    if torch.is_autocast_enabled(device.type):
        return (torch.get_autocast_dtype(device.type),)
    return (weight, torch.bfloat16) if weight == torch.float32 and _is_gpu(device) else (weight,)


def _cut(size: int) -> int:
    """Return a smaller size that leaves the same rest of a block."""
    return min(size, 2 * BLOCK + size % BLOCK)


def _try(fqn: str, product: ProductOf, device: torch.device) -> None:
    if ops.multiplier_name(product.product, product.fast_accumulation, product.backend, device) != "torch._scaled_mm":
        return
    if not _is_gpu(device):
        row = row_of(product.product, machine_of(device))
        if row is not None and row.detour is None:
            raise refusal(fqn, product.gemm, refused(product.product, device, row.name))
        return
    try:
        found, expected = (
            each.prepared(device)()[""].float() for each in (product, product._replace(backend="reference"))
        )
        if not (found - expected).norm() <= _TOLERANCE * expected.norm():
            raise refused(product.product, device, "its result is wrong")
    except ProductError as error:
        raise refusal(fqn, product.gemm, error) from error


def _try_grouped(fqn: str, product: GroupedProductOf, device: torch.device) -> None:
    if not _is_gpu(device) or "scaled_grouped_mm" not in product.name(device):
        return
    try:
        float(product.prepared(device)()[""].float().sum())  # Waits for the GPU.
    except ProductError as error:
        raise refusal(fqn, product.gemm, error) from error


def _is_gpu(device: torch.device) -> bool:
    return device.type == "cuda"

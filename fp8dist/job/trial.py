"""Tries a model's products at ``attach``, so that one that torch cannot compute raises an error here, not in a later
step.

Kernels of Triton are not tried. Compiling them takes seconds, and each shape may take another one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from fp8dist.checks.computations import Factors, casts_and_products, factors_of
from fp8dist.checks.known_calls import GroupedProductOf, ProductOf
from fp8dist.errors import ConfigurationError
from fp8dist.modules.fp8_linear import FP8Linear
from fp8dist.modules.linear_slots import refusal
from fp8dist.modules.main_grad import fuses
from fp8dist.modules.parts import Part, fp8_parts
from fp8dist_kernels import BLOCK, ops
from fp8dist_kernels.multipliers import ProductError, machine_of, refused, row_of

TOKENS = (BLOCK + 16, BLOCK + 13, 13)
"""Numbers of tokens that are tried, because those of a batch are not known: a multiple of 16, as most are; an odd one;
both beyond a block of scales; and fewer than a block."""

_MOST_EXPERTS = 2
_TOLERANCE = 0.01
"""Largest error of a product, relative to its norm. Rounding to bfloat16 gives 0.002, a wrong product about 1."""


def try_products(model: nn.Module, axes: Mapping[int, int]) -> None:
    """Raise ConfigurationError if torch is to compute a product of these modules, but does not, or gets it wrong.

    On a GPU each distinct product is computed once, with features cut to at most three blocks. A model in float32 may
    be run under autocast, so its products are tried with both dtypes. Local; waits for the GPU.

    Args:
        axes: ``fsdp2_axes`` of the model.
    """
    tried: set[tuple[ProductOf | GroupedProductOf, torch.device]] = set()
    seen: set[tuple[Any, ...]] = set()  # Kinds of modules: few, where modules are many.
    for part in fp8_parts(model):
        slots, stored = part.slots, part.stored
        device = slots.weight_sync.arena.device
        if not stored:
            continue
        _require_fp8(slots.fqn, slots.job.backend, device)
        factors, dtype = factors_of(part, axes), stored[0].dtype
        kind = (factors, slots.recipe, dtype, isinstance(part.module, FP8Linear) and fuses(part.module), device)
        if kind in seen:
            continue
        seen.add(kind)
        for product in _products_of(part, factors, dtype, device):
            if (product, device) not in tried:
                _try(slots.fqn, product, device)
                tried.add((product, device))


def _require_fp8(fqn: str, backend: str, device: torch.device) -> None:
    row = machine_of(device).capability
    if row is not None and row < (8, 9) and backend != "reference":
        raise ConfigurationError(
            f"{fqn}: {device} has compute capability {row[0]}.{row[1]}, and FP8 needs 8.9: use a newer GPU, "
            'prepare(enabled=False), or backend="reference", which emulates FP8'
        )


def _products_of(
    part: Part, factors: Factors, dtype: torch.dtype, device: torch.device
) -> Iterator[ProductOf | GroupedProductOf]:
    """Iterate over the products of a Linear, or of a grouped product, of at most two experts."""
    slots, module = part.slots, part.module
    for of in _dtypes(dtype, device):
        how = slots.recipe, of, dtype, factors.bias, factors.transposed, slots.job.backend
        if isinstance(module, FP8Linear):
            shape = [_cut(size) for size in factors.shape]
            for tokens in TOKENS:
                for each in casts_and_products(shape, *how, tokens, slots.job.gathers, fuses(module)):
                    if isinstance(each, ProductOf):
                        yield each._replace(exact=True)
        else:
            experts, *sizes = factors.shape
            found = casts_and_products((min(experts, _MOST_EXPERTS), *map(_cut, sizes)), *how)
            yield from (each for each in found if isinstance(each, GroupedProductOf))


def _dtypes(weight: torch.dtype, device: torch.device) -> tuple[torch.dtype, ...]:
    """Return the dtypes that inputs may have."""
    if torch.is_autocast_enabled(device.type):
        return (torch.get_autocast_dtype(device.type),)
    return (weight, torch.bfloat16) if weight == torch.float32 and _is_gpu(device) else (weight,)


def _cut(size: int) -> int:
    """Return a smaller size that leaves the same rest of a block."""
    return min(size, 2 * BLOCK + size % BLOCK)


def _try(fqn: str, product: ProductOf | GroupedProductOf, device: torch.device) -> None:
    try:
        if isinstance(product, GroupedProductOf):
            if _is_gpu(device) and "scaled_grouped_mm" in product.name(device):
                float(product.prepared(device)()[""].float().sum())  # Waits for the GPU.
            return
        of = product.product
        if ops.multiplier_name(of, product.fast_accumulation, product.backend, device) != "torch._scaled_mm":
            return
        if not _is_gpu(device):
            row = row_of(of, machine_of(device))
            if row is not None and row.detour is None:
                raise refused(of, device, row.name)
            return
        found, expected = (
            each.prepared(device)()[""].float() for each in (product, product._replace(backend="reference"))
        )
        if not (found - expected).norm() <= _TOLERANCE * expected.norm():
            raise refused(of, device, "its result is wrong")
    except ProductError as error:
        raise refusal(fqn, product.gemm, error) from error


def _is_gpu(device: torch.device) -> bool:
    return device.type == "cuda"

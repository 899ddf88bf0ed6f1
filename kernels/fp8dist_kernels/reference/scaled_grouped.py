"""Grouped products of rows by ``torch.nn.functional.scaled_grouped_mm`` (CUTLASS), where torch has a kernel.

Never for wgrad: with 2-D operands on both sides, torch asserts on the device if a group is empty, or if its size is no
multiple of 16, and a device assertion ends the CUDA context.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from fp8dist_kernels.reference.grouped_shares import expert_of_rows
from fp8dist_kernels.reference.groups import cut
from fp8dist_kernels.reference.matmuls import Scaling, aligned


def multiply_grouped_torch(
    scaling: Scaling,
    a: Tensor,
    b: Tensor,
    inv_scale_a: Tensor,
    inv_scale_b: Tensor,
    offsets: Tensor,
    fast_accumulation: bool,
    clear: Callable[[Tensor, Tensor], None],
) -> Tensor:
    """Do ``grouped_matmuls.matmul_grouped`` for arguments that ``grouped_scaling_of`` has checked and that
    ``torch_can_group``. Offsets are cut, as by the kernels. Does not read the device.

    ``clear``: the ``clear_tail`` of a backend.
    """
    tokens, (groups, n, _) = len(a), b.shape
    if tokens == 0:
        return torch.empty(0, n, dtype=torch.bfloat16, device=a.device)
    offsets = cut(offsets, tokens)
    if scaling is Scaling.TENSORWISE:  # torch takes a scale per row only.
        inv_scale_a = inv_scale_a[expert_of_rows(tokens, offsets).clamp_(max=groups - 1)]
        inv_scale_b = inv_scale_b[:, None].expand(groups, n)
    rows = functional.ScalingType.RowWise
    product: Tensor = functional.scaled_grouped_mm(  # type: ignore[attr-defined, unused-ignore]
        aligned(a),
        aligned(b).mT,
        inv_scale_a.reshape(tokens).contiguous(),
        rows,
        inv_scale_b.reshape(groups, n).contiguous(),
        rows,
        offs=offsets,
        output_dtype=torch.bfloat16,
        use_fast_accum=fast_accumulation,
    )
    clear(product, offsets)  # torch leaves rows of no expert uninitialised.
    return product


def clear_tail(product: Tensor, ends: Tensor) -> None:
    """Set the rows of no expert to 0, in place.

    Args:
        product: [tokens, n], contiguous.
        ends: int32[E], offsets that never decrease.
    """
    row = torch.arange(len(product), device=ends.device)
    product.masked_fill_((row >= ends[-1])[:, None], 0)

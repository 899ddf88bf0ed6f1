"""Clears the rows of no expert in the result of torch's grouped product, without a pass over the other rows."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fp8dist_kernels.triton.launching import ceil_div, on_device_of

_ROWS, _COLUMNS, _WARPS = 8, 512, 4


@triton.jit(do_not_specialize=["tokens"])
def _clear_kernel(
    product,  # [tokens, n]
    ends,  # int32[groups]: the row after each group's last
    groups,
    tokens,
    n,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Set the rows of ``product`` from the last of ``ends`` on to 0."""
    end = tl.load(ends + groups - 1)
    top = tl.program_id(0) * ROWS
    if top + ROWS > end:
        row = top + tl.arange(0, ROWS)
        lines = product + row.to(tl.int64)[:, None] * n
        ours = (row >= end) & (row < tokens)
        for left in range(0, n, COLUMNS):
            place = left + tl.arange(0, COLUMNS)
            zeros = tl.zeros((ROWS, COLUMNS), product.dtype.element_ty)
            tl.store(lines + place[None, :], zeros, mask=ours[:, None] & (place < n)[None, :])


def clear_tail(product: Tensor, ends: Tensor) -> None:
    """See ``reference.scaled_grouped.clear_tail``."""
    tokens, n = product.shape
    with on_device_of(product):
        _clear_kernel[(ceil_div(tokens, _ROWS),)](
            product, ends, len(ends), tokens, n, ROWS=_ROWS, COLUMNS=_COLUMNS, num_warps=_WARPS
        )

"""Which program of a kernel comes last."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["came_last"]


@triton.jit
def came_last(ticket):
    """Whether all other programs have been here, and what they added before is visible. ``ticket``: 0 before and
    after the kernel."""
    last = tl.atomic_add(ticket, 1, sem="acq_rel") == tl.num_programs(0) - 1
    if last:
        tl.atomic_xchg(ticket, 0, sem="relaxed")
    return last

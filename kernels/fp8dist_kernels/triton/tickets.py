"""Detects the last program of a kernel."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def came_last(ticket):
    """True in the last program of the grid to call this. It sees the atomics that other programs did before their call.

    Each program of a 1-d grid must call this once. ``ticket``: an integer in memory, 0 before and after the kernel.
    """
    last = tl.atomic_add(ticket, 1, sem="acq_rel") == tl.num_programs(0) - 1
    if last:
        tl.atomic_xchg(ticket, 0, sem="relaxed")
    return last

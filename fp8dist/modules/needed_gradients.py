"""needed_gradients: which gradients a backward must compute."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["needed_gradients"]


def needed_gradients(ctx: Any) -> tuple[bool, bool, bool]:
    """Return, for the first three inputs of an autograd function, True if the backward that runs now uses the gradient.

    ``ctx.needs_input_grad`` shows what the forward knew. That is not enough for pipelines with split backward (zero
    bubble): they run each backward twice, first for the gradients of inputs, later for those of weights, and each run
    should compute its own part only. Every backward calls this, so the code makes few Python calls.

    Args:
        ctx: the autograd context, inside ``backward``.
    """
    needs: tuple[bool, bool, bool] = ctx.needs_input_grad[:3]
    if torch.compiler.is_compiling():
        return needs
    nodes = [node for node, _ in ctx.next_functions if node is not None]  # Of the inputs that need gradients, in order.
    used, first = [False, False, False], 0
    for place in range(3):
        if needs[place]:
            try:
                used[place] = torch._C._will_engine_execute_node(nodes[first])
            except (AttributeError, RuntimeError):  # A leaf whose gradient autograd.grad() returns; or another torch.
                used[place] = True
            first += 1
    return used[0], used[1], used[2]

"""Communication hook for FullyShardedDataParallel (FSDP1) that launches the FP8 sync as the backward ends.

FSDP2 needs no hook: ``DelayedScaling(update="next_step")`` hides the sync.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

from fp8dist.job.early_launch import early_launcher
from fp8dist.job.manager import StateManager

__all__ = ["comm_hook"]


def comm_hook(manager: StateManager, inner: Callable[..., None] | None = None) -> Callable[..., None]:
    """Return an FSDP1 communication hook that runs ``inner`` and launches the FP8 sync as the backward ends. Local; the
    hook is COLLECTIVE.

    The sync then overlaps with gradient clipping and everything else before the optimizer's step. Register the hook
    yourself, on the root, before the first forward, with the state that ``inner`` takes (FSDP1 takes one hook, and none
    with HYBRID_SHARD; ``attach`` never registers one)::

        state = DefaultState(process_group)  # of torch.distributed.algorithms._comm_hooks.default_hooks
        fsdp.register_comm_hook(state, fp8dist.fsdp.comm_hook(manager))

    Each backward that reduces gradients has one collective. With reentrant checkpointing, whose backwards are nested,
    each checkpointed unit has one. Several before an optimizer step merge their results at the boundary.

    Args:
        manager: the manager of the model inside the FSDP module.
        inner: ``(state, gradient)``, or ``(state, gradient, output)`` if gradients are sharded. None: FSDP's averaging
            all-reduce and reduce-scatter.
    """
    from torch.distributed.algorithms._comm_hooks.default_hooks import allreduce_hook, reduce_scatter_hook

    launch = early_launcher(manager, frozen_weights=True)
    last_backward = -1

    def launching_hook(state: Any, gradient: Tensor, *output: Tensor) -> None:
        nonlocal last_backward
        backward = torch._C._current_graph_task_id()
        if backward != last_backward:
            last_backward = backward
            Variable._execution_engine.queue_callback(launch)
        if inner is not None:
            inner(state, gradient, *output)
        elif output:
            reduce_scatter_hook(state, gradient, *output)
        else:
            allreduce_hook(state, gradient)

    return launching_hook

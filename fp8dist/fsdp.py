"""The hook for FullyShardedDataParallel (FSDP1): the early launch. FSDP2 needs none: ``attach`` sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

from fp8dist.manager import StateManager

__all__ = ["comm_hook"]


def comm_hook(manager: StateManager, inner: Callable[..., None] | None = None) -> Callable[..., None]:
    """An FSDP1 communication hook that runs ``inner`` and launches the FP8 sync as the backward ends.

    The sync then runs under gradient clipping and whatever else comes before the optimizer's step. Register it
    yourself, on the root, before the first forward, with the state that ``inner`` wants (FSDP1 takes one hook, and
    none with HYBRID_SHARD; ``attach`` never registers it)::

        state = DefaultState(process_group)  # of torch.distributed.algorithms._comm_hooks.default_hooks
        fsdp.register_comm_hook(state, fp8dist.fsdp.comm_hook(manager))

    One collective per backward that reduces gradients (per checkpointed unit under reentrant checkpointing, whose
    backwards are nested); several before an optimizer step merge, and wait for the boundary.

    Args:
        manager: of the model inside the FSDP module.
        inner: ``(state, gradient)``, or ``(state, gradient, output)`` where gradients are sharded; None: FSDP's
            averaging all-reduce and reduce-scatter.
    """
    from torch.distributed.algorithms._comm_hooks.default_hooks import allreduce_hook, reduce_scatter_hook

    launcher = manager._early_launcher(frozen_weights=True)
    last_backward = -1

    def launching_hook(state: Any, gradient: Tensor, *output: Tensor) -> None:
        nonlocal last_backward
        backward = torch._C._current_graph_task_id()
        if backward != last_backward:
            last_backward = backward
            Variable._execution_engine.queue_callback(launcher.launch_from_hook)
        if inner is not None:
            inner(state, gradient, *output)
        elif output:
            reduce_scatter_hook(state, gradient, *output)
        else:
            allreduce_hook(state, gradient)

    return launching_hook

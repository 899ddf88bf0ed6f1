"""The hook for DistributedDataParallel: the early launch from its last gradient bucket."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from fp8dist.manager import StateManager

__all__ = ["comm_hook"]

CommHook = Callable[[Any, Any], torch.futures.Future[Any]]


def comm_hook(manager: StateManager, inner: CommHook | None = None) -> CommHook:
    """A DDP comm hook that runs ``inner`` and launches the FP8 sync from the last gradient bucket.

    The sync then overlaps with the rest of backward. There is one collective per synced backward;
    several before an optimizer step merge, and wait for the boundary. Register it yourself, with the
    state that ``inner`` wants (DDP takes only one hook, so ``attach`` never does)::

        ddp.register_comm_hook(powersgd_state, fp8dist.ddp.comm_hook(manager, powersgd_hook))

    Args:
        manager: of the model inside the DDP module.
        inner: ``(state, bucket) -> Future``; None: DDP's plain all-reduce, with ``state`` None or a
            process group. One that starts further collectives from callbacks of its futures, as
            PowerSGD does, may start them in another order than this hook starts its own: give the
            manager a group of its own then (``group=dist.new_group()``).

    Raises:
        ConfigurationError: a converted module's weight is frozen: its gradient comes after the last
            bucket, and its grad_output amax would be a step late.
    """
    launcher = manager._early_launcher()
    reduce = allreduce_hook if inner is None else inner

    def launching_hook(state, bucket):  # type: ignore[no-untyped-def]
        future = reduce(state, bucket)
        if bucket.is_last():
            launcher.launch_from_hook()
        return future

    return launching_hook

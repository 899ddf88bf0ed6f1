"""Communication hook for DistributedDataParallel that launches the FP8 sync from the last gradient bucket."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from fp8dist.job.early_launch import early_launcher
from fp8dist.job.manager import StateManager

__all__ = ["comm_hook"]

CommHook = Callable[[Any, Any], torch.futures.Future[Any]]


def comm_hook(manager: StateManager, inner: CommHook | None = None) -> CommHook:
    """Return a DDP communication hook that runs ``inner`` and launches the FP8 sync from the last gradient bucket.
    Local; the hook is COLLECTIVE.

    The sync then overlaps with the rest of backward. Each synced backward has one collective. Several backwards before
    an optimizer step merge their results at the boundary. Register the hook yourself, with the state that ``inner``
    takes (DDP takes only one hook, so ``attach`` never registers one)::

        ddp.register_comm_hook(powersgd_state, fp8dist.ddp.comm_hook(manager, powersgd_hook))

    Args:
        manager: the manager of the model inside the DDP module.
        inner: ``(state, bucket) -> Future``. None: DDP's plain all-reduce, with ``state`` None or a process group. If
            ``inner`` starts further collectives from callbacks of its futures, as PowerSGD does, their order relative
            to the FP8 sync is not fixed: do not combine it with ``prepare(share_group=True)``.

    Raises:
        ConfigurationError: the weight of an FP8Linear is frozen. Its grad_output comes after the last bucket, so its
            amax would be one step late.
    """
    launch = early_launcher(manager)
    reduce = allreduce_hook if inner is None else inner

    def launching_hook(state, bucket):  # type: ignore[no-untyped-def]
        future = reduce(state, bucket)
        if bucket.is_last():
            launch()
        return future

    return launching_hook

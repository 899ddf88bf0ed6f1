"""Communication hook for DistributedDataParallel that launches the FP8 sync from the last gradient bucket."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from fp8dist.errors import ConfigurationError
from fp8dist.job.cycle import StepCycle
from fp8dist.job.manager import StateManager, internals
from fp8dist.modules.parts import fp8_parts
from fp8dist_kernels.formats import Role

__all__ = ["comm_hook", "early_launcher"]

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
            to the FP8 sync is not fixed. Give the manager its own group then (``group=dist.new_group()``).

    Raises:
        ConfigurationError: the weight of an FP8Linear is frozen. Its grad_output comes after the last bucket, so its
            amax would be one step late.
    """
    launcher = early_launcher(manager)
    reduce = allreduce_hook if inner is None else inner

    def launching_hook(state, bucket):  # type: ignore[no-untyped-def]
        future = reduce(state, bucket)
        if bucket.is_last():
            launcher.launch_from_hook()
        return future

    return launching_hook


def early_launcher(manager: StateManager, frozen_weights: bool = False) -> StepCycle:
    """Return what launches syncs before the boundary, for the hooks of DDP and FSDP1. Local.

    Args:
        frozen_weights: True if the hook launches after the gradient amaxes of frozen layers are recorded.

    Raises:
        ConfigurationError: a converted weight is frozen, and ``frozen_weights`` is False.
    """
    inside = internals(manager)
    inside.cycle.require("comm_hook(manager)")
    for part in fp8_parts(inside.model):
        if not part.weight.requires_grad and not frozen_weights:
            raise ConfigurationError(
                f"{part.slots.slots[Role.WEIGHT].fqn}.weight is frozen: its gradient amax comes after DDP's "
                "last bucket. Leave fp8dist.ddp.comm_hook out; the sync then runs at the optimizer's step"
            )
    inside.cycle.job.launches_early = True
    return inside.cycle

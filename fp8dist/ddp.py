"""Communication hook for DistributedDataParallel that launches the FP8 sync from the last gradient bucket, and sends
gradients in FP8."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from fp8dist.checks.report import DivergenceReport
from fp8dist.checks.values import check_received
from fp8dist.errors import ConfigurationError
from fp8dist.job.early_launch import early_launcher
from fp8dist.job.gradient_hook import GradientHook
from fp8dist.job.manager import Internals, StateManager
from fp8dist.state.groups import SyncGroup

__all__ = ["check_gradients", "comm_hook"]

CommHook = Callable[[Any, Any], torch.futures.Future[Any]]


def comm_hook(
    manager: StateManager | nn.Module,
    inner: CommHook | None = None,
    *,
    gradients: Literal["fp8"] | None = None,
    exclude: str | Iterable[str] = (),
) -> CommHook:
    """Return a DDP communication hook that runs ``inner`` and launches the FP8 sync from the last gradient bucket.
    Local; the hook is COLLECTIVE.

    The sync then overlaps with the rest of backward. Each synced backward has one collective. Several backwards before
    an optimizer step merge their results at the boundary. If DDP ignores an FP8 weight, whose gradient may come later,
    the sync runs at the boundary alone. Register the hook yourself, with the state that ``inner`` takes (DDP takes only
    one hook, so ``attach`` never registers one)::

        ddp.register_comm_hook(powersgd_state, fp8dist.ddp.comm_hook(manager, powersgd_hook))

    With ``gradients="fp8"``, buckets of at least 32,768 numbers per rank travel in FP8, but for vectors and routers,
    and all ranks end with the same bits::

        ddp.register_comm_hook(None, fp8dist.ddp.comm_hook(manager, gradients="fp8"))

    A bucket then has an all-to-all and an all-gather instead of DDP's all-reduce. Numbers are cast to E4M3 in blocks of
    128, each with a scale from its own amax. A block with Inf or NaN gives NaN on all ranks. If the state that is
    registered is a DeviceMesh of DDP's ranks, with an axis of nodes and one of the ranks of a node, gradients travel in
    bf16 within a node, and in FP8 between nodes.

    Args:
        manager: the manager of the model inside the DDP module. With ``gradients="fp8"`` also a model that was not
            prepared; the hook then launches nothing.
        inner: ``(state, bucket) -> Future``. None: DDP's plain all-reduce, with ``state`` None or a process group. If
            ``inner`` starts further collectives from callbacks of its futures, as PowerSGD does, their order relative
            to the FP8 sync is not fixed: do not combine it with ``prepare(share_group=True)``.
        gradients: None: they travel as ``inner`` sends them.
        exclude: with ``gradients="fp8"``: patterns of names of parameters that travel in their own dtype, in the same
            messages; "!" before a pattern takes its matches out again. Parameters of one dimension do, such as biases
            and norms, and those with "router" in their names, unless ``exclude="!*"``. If DDP holds more than the
            manager's model, call ``attach`` with the DDP module first: names are then those of all of it.

    Raises:
        ConfigurationError: the weight of an FP8Linear is frozen. Its grad_output comes after the last bucket, so its
            amax would be one step late. Or the arguments do not fit together. The hook: DDP has more ranks than gain
            from FP8.
    """
    if gradients == "fp8" and inner is None:
        if not isinstance(manager, StateManager):
            return GradientHook(manager, exclude).run
        inside = Internals(manager)
        known, launch = inside.cycle.job.received, early_launcher(manager)
        return GradientHook(inside.called_module, exclude, inside.cycle.syncs, known, launch).run
    if gradients is not None or exclude != () or not isinstance(manager, StateManager):
        raise ConfigurationError(
            'comm_hook() expects a manager, and an inner hook or none; or a manager or a model, gradients="fp8", '
            f"exclude=(…), and no inner hook. It got {type(manager).__name__}, gradients={gradients!r}, inner={inner!r}"
        )
    launch = early_launcher(manager)
    reduce = allreduce_hook if inner is None else inner

    def launching_hook(state, bucket):  # type: ignore[no-untyped-def]
        future = reduce(state, bucket)
        if bucket.is_last():
            launch()
        return future

    return launching_hook


def check_gradients(hook: CommHook, policy: Literal["raise", "warn"] = "raise") -> DivergenceReport:
    """Check that all ranks have received the same gradients in FP8 since the hook was made, or since the last
    difference. COLLECTIVE: all ranks of DDP, between two steps.

    With a manager that shares FP8 state over DDP's ranks, and a recipe that syncs, the next step's sync compares the
    same without a collective of its own. With any manager ``manager.check()`` does, also that of ``check_every``, on
    the ranks that share its state.

    Args:
        hook: what ``comm_hook(…, gradients="fp8")`` returned.
        policy: "raise", or "warn": one rank logs the differences, and the report has them.

    Returns:
        A report whose findings name the ranks, and the parameters of the bucket.

    Raises:
        DivergenceError: on all ranks, if the policy is "raise" and ranks have received other bytes.
        ConfigurationError: ``hook`` is another hook.
        SyncError: a rank did not take part. The message names it.
    """
    owner = getattr(hook, "__self__", None)
    if not isinstance(owner, GradientHook):
        raise ConfigurationError(f'check_gradients() expects what comm_hook(…, gradients="fp8") returns, got {hook!r}')
    group = owner.group or SyncGroup(dist.group.WORLD)  # type: ignore[arg-type]
    return check_received(owner.received, group, policy)

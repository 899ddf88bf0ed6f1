"""Communication hook for FullyShardedDataParallel (FSDP1) that launches the FP8 sync as the backward ends. Gradients
of FSDP2 in FP8.

For the sync FSDP2 needs no hook: ``DelayedScaling(update="next_step")`` hides it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from fp8dist.checks.report import DivergenceReport
from fp8dist.checks.values import check_received
from fp8dist.common.patterns import matching
from fp8dist.errors import ConfigurationError
from fp8dist.job.early_launch import early_launcher
from fp8dist.job.manager import Internals, StateManager, managers_in
from fp8dist.parallel import wire
from fp8dist.parallel.torch_internals import fsdp2_mesh, fsdp2_modules, fsdp2_reductions, set_reduce_scatter
from fp8dist.state.arena_sync import carry
from fp8dist.state.groups import SyncGroup
from fp8dist.state.received import Received
from fp8dist.state.slots import clean_fqn

__all__ = ["check_gradients", "comm_hook", "reduce_in_fp8"]

_RECEIVED = "_fp8dist_received"
"""Attribute of a model whose gradients FSDP2 reduces in FP8: what was received, and the mesh."""


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


def reduce_in_fp8(model: nn.Module, exclude: str | Iterable[str] = ()) -> tuple[str, ...]:
    """Let FSDP2 reduce gradients in FP8. Local; afterwards the reduction of a module is COLLECTIVE as before: an
    all-to-all instead of a reduce-scatter.

    Call it after ``fully_shard``, before the first backward. Each rank casts the gradients of a module to E4M3 in
    blocks of 128, each with a scale from its own amax, and adds up its own shard in float32. A module of less than
    32,768 numbers for each rank of its shard group, or whose shard group is one rank, reduces as before. So does HSDP's
    all-reduce across replicas, for which FSDP2 has no seam: it stays in ``reduce_dtype``.

    Each message has a checksum, and ranks note from whom a message came damaged. ``check_gradients`` reports it. If the
    model was prepared, so do ``manager.check()``, and the next step's sync if it has the ranks of FSDP2's mesh.

    Args:
        model: the model that ``fully_shard`` was called on.
        exclude: patterns of names of FSDP2 modules that reduce as before; "" is the model itself.

    Returns:
        The names of the modules that reduce in FP8 from now on. All others are left alone.

    Raises:
        ConfigurationError: the model has no FSDP2 module; a pattern matches none; torch has no call for it, or the
            module has several parameter groups. In backward: the shard group has more ranks than gain from FP8.
    """
    modules = {id(module) for module in fsdp2_modules(model)}
    named = {clean_fqn(name): module for name, module in model.named_modules() if id(module) in modules}
    if not named:
        raise ConfigurationError("gradients in FP8: the model has no FSDP2 module. Call fully_shard() first")
    excluded = matching("exclude", exclude, named)
    large = (
        name
        for name, module in named.items()
        if any(numbers >= wire.LEAST * ranks and ranks > 1 for numbers, ranks in fsdp2_reductions(module))
    )
    if reduced := tuple(name for name in large if name not in excluded):
        received = Received()
        # Experts may be sharded over fewer ranks than the rest: the checks are over the mesh that has all of these.
        mesh = max((fsdp2_mesh(named[name]) for name in reduced), key=lambda mesh: mesh.size())
        ranks, cycles = SyncGroup(mesh).ranks, [Internals(manager).cycle for manager in managers_in(model)]
        for cycle in cycles:
            received = cycle.job.received.setdefault(tuple(ranks), received)
        syncs = [sync for cycle in cycles for sync in cycle.syncs]
        for name in reduced:
            comm = wire.FP8ReduceScatter(name, received, lambda: carry(syncs, received, ranks))
            set_reduce_scatter(named[name], comm)
        model.__dict__[_RECEIVED] = received, mesh
    return reduced


def check_gradients(model: nn.Module, policy: Literal["raise", "warn"] = "raise") -> DivergenceReport:
    """Check that no rank has received other gradients in FP8 than were sent to it, since ``reduce_in_fp8`` or the last
    report. COLLECTIVE: one gather, by all ranks of FSDP2's mesh, between two steps.

    Args:
        model: what ``reduce_in_fp8`` was called with.
        policy: "raise", or "warn": one rank logs the differences, and the report has them.

    Returns:
        A report whose findings name the receivers and the FSDP2 module, and in ``detail`` the senders.

    Raises:
        DivergenceError: on all ranks, if the policy is "raise" and a message was damaged.
        ConfigurationError: ``reduce_in_fp8`` was not called with this model, or has found no module.
        SyncError: a rank did not take part. The message names it.
    """
    if _RECEIVED not in model.__dict__:
        raise ConfigurationError("check_gradients() expects a model whose gradients reduce_in_fp8() has put in FP8")
    received, mesh = model.__dict__[_RECEIVED]
    return check_received(received, SyncGroup(mesh), policy)

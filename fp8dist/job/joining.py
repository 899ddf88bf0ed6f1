"""Syncs that are launched before the boundary: by communication hooks of DDP and FSDP1, and inside torch's ``Join``
contexts. The results of several launches merge.

In a Join context, a rank without data makes no steps, but DDP notifies it of each forward of the others. So it can
*shadow* their syncs: take part with a message that changes nothing.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _find_tensors

from fp8dist.errors import ConfigurationError
from fp8dist.job.cycle import StepCycle
from fp8dist.modules.precision_control import PrecisionControl
from fp8dist.parallel.ddp import in_join
from fp8dist.state.arena import Arena
from fp8dist.state.arena_sync import ArenaSync, Phase
from fp8dist.state.groups import SyncGroup
from fp8dist.state.precision import Precisions


def launch_early(cycle: StepCycle) -> None:
    """Launch the sync of each arena. COLLECTIVE: one all-reduce per arena.

    Launches nothing while calibrating, which commits on a clean exit only, or after ``detach``.
    """
    if cycle.settings.enabled and not cycle.job.recording and not cycle.job.untied:
        for sync in cycle.syncs:
            if sync.every_step:
                sync.launch()


def launch_from_hook(cycle: StepCycle) -> None:
    """Call ``launch_early`` for a communication hook, which may have outlived a ``detach``. COLLECTIVE.

    Raises:
        ConfigurationError: the call comes out of order.
    """
    job = cycle.job
    if not job.untied:
        job.launches_early = True
        if job.joined or (cycle.settings.enabled and not job.recording):
            cycle.require("comm_hook")
            launch_early(cycle)


def launch_idle(cycle: StepCycle) -> None:
    """Shadow a launch of the other ranks, on a rank without data. COLLECTIVE: one all-reduce per arena."""
    for sync in cycle.syncs:
        if sync.communicates and sync.every_step:
            sync.launch_idle()
    cycle.measurement.waits.drop()


def resync_after_join(cycle: StepCycle) -> None:
    """Take over the state of the rank that has done the most steps, and end the Join context. COLLECTIVE: a
    max-reduction, and broadcasts of the whole state, per arena."""
    cycle.state.settle()
    # Ranks without data have no verdicts. Act on those of the other ranks before taking over their state.
    cycle.verdicts.act(True, raises=False)
    for sync in cycle.syncs:
        _take_furthest(sync, cycle.precisions, cycle.control)
        if sync.phase is not Phase.IDLE:
            sync.abandon()
    cycle.job.invalidate_casts()
    # A rank without data has counted fewer steps. These counts decide when ranks check, so make them equal.
    cycle.checks.restart()
    cycle.count_from_state()
    cycle.measurement.waits.drop()
    cycle.job.leave_join()


class JoinLink:
    """Launches syncs at the end of each backward that DDP synchronises, while a Join context is open. Outside a Join
    context it does nothing.

    A rank without data only knows of DDP's synchronised forwards. So all ranks launch once for each of these, and not
    once for each optimizer step, which may have several.
    """

    def __init__(self, ddp: DistributedDataParallel, cycle: StepCycle) -> None:
        self._ddp = weakref.ref(ddp)  # Weak: DDP holds the model, which holds the manager, which holds this.
        self._cycle = cycle
        self._ended: object = None  # The configuration of a Join context that needs no further look.
        self._handle = ddp.register_forward_hook(self._after_forward)

    def __getstate__(self) -> dict[str, Any]:
        # Copies and pickles of the DDP module contain this hook. It does nothing in them: ``attach`` makes a new one.
        return {"_ddp": _none}

    def remove(self) -> None:
        """Remove the hook."""
        self._handle.remove()

    @property
    def ddp(self) -> DistributedDataParallel:
        """The DDP module, which must still exist."""
        ddp = self._ddp()
        assert ddp is not None
        return ddp

    def _after_forward(self, module: DistributedDataParallel, args: Any, output: Any) -> None:
        if module is not self._ddp():
            return
        if not (torch.is_grad_enabled() and module.require_backward_grad_sync):
            return
        if self._cycle.job.joined:
            self._ended = module._join_config  # The manager is in this context: nothing to refuse, now or later.
        elif _communicates(self._cycle) and self._joins_alone(module):
            raise ConfigurationError(
                "a Join context without the manager: a rank without data would take no part in the syncs of FP8 "
                "state, and the others would wait for it: use Join([ddp, manager]) instead of ddp.join()"
            )
        else:
            return
        queued = False

        def at_start_of_backward(_: Tensor) -> None:
            nonlocal queued
            if not queued:
                queued = True
                Variable._execution_engine.queue_callback(functools.partial(launch_early, self._cycle))

        for tensor in _find_tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(at_start_of_backward)

    def _joins_alone(self, ddp: DistributedDataParallel) -> bool:
        """True in a Join context that the manager is not in. ``in_join`` is slow, so it is asked only once for a
        context that has ended, which torch's flag does not show."""
        config = ddp._join_config
        alone = config.enable and config is not self._ended and in_join(ddp)
        if not alone:
            self._ended = config
        return alone


def _communicates(cycle: StepCycle) -> bool:
    """True if steps end with a collective."""
    return any(sync.communicates and sync.every_step for sync in cycle.syncs)


def _none() -> None:
    """Replaces the weak reference in a copied or unpickled hook: called, it returns no DDP module."""


def _take_furthest(sync: ArenaSync, precisions: Precisions, control: PrecisionControl) -> None:
    """Copy the state of the rank with the highest step counter to all ranks: the arena, and which GEMMs of its modules
    run in high precision and for how long. COLLECTIVE if the sync communicates."""
    if not sync.communicates:
        return
    assert sync.group is not None
    source = _broadcast_furthest(sync.arena, sync.group)
    fqns = {slot.fqn for slot in sync.arena.index}
    described = precisions.describe()
    theirs = [{fqn: of for fqn, of in described.items() if fqn in fqns}]
    dist.broadcast_object_list(theirs, src=source, group=sync.group.process_group, device=sync.arena.device)
    precisions.restore({**{fqn: of for fqn, of in described.items() if fqn not in fqns}, **theirs[0]})
    control.announce()


def _broadcast_furthest(arena: Arena, group: SyncGroup) -> int:
    """Broadcast the arena of the rank with the highest step counter, and return that rank. COLLECTIVE."""
    me = group.ranks.index(group.rank)
    furthest = (arena.step.to(torch.int64) * group.size + me).view(1)
    dist.all_reduce(furthest, dist.ReduceOp.MAX, group=group.process_group)
    source = group.ranks[int(furthest) % group.size]
    for tensor in arena.shared_state():
        dist.broadcast(tensor, src=source, group=group.process_group)
    return source

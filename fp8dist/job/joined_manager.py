"""What torch's context manager for uneven data, ``Join([ddp, manager])``, calls on a manager."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.distributed.algorithms.join import Joinable, JoinHook, _JoinConfig
from torch.nn.parallel import DistributedDataParallel

from fp8dist.errors import ConfigurationError
from fp8dist.job.attachment import Attachment
from fp8dist.job.cycle import StepCycle
from fp8dist.job.joining import launch_idle, resync_after_join


class ManagerJoinHook(JoinHook):
    """Makes a rank without data take part in the syncs of the other ranks. ``Join`` calls its methods."""

    def __init__(self, cycle: StepCycle, ddp: DistributedDataParallel) -> None:
        self._cycle = cycle
        self._ddp = ddp

    def main_hook(self) -> None:
        """Shadow one launch, if DDP's own hook has just shadowed a synchronised forward. COLLECTIVE."""
        if self._ddp.require_forward_param_sync:
            launch_idle(self._cycle)

    def post_hook(self, is_last_joiner: bool) -> None:
        """Copy the state of the rank that has made the most steps, because ranks that ran out of data have old state.
        COLLECTIVE."""
        resync_after_join(self._cycle)


class JoinedManager(Joinable):
    """Base of StateManager with the names that torch's ``Join`` calls; see ``torch.distributed.algorithms.join``."""

    _cycle: StepCycle
    _attachment: Attachment

    @property
    def _join_config(self) -> _JoinConfig:
        return self._cycle.job.join_config

    @_join_config.setter
    def _join_config(self, config: _JoinConfig) -> None:
        self._cycle.job.join_config = config

    def join_hook(self, **kwargs: Any) -> ManagerJoinHook:
        """Return the hook that takes part in the other ranks' syncs once this rank has no data left. Local.

        Raises:
            ConfigurationError: the manager is not attached to a DDP module, or syncs are launched by ``comm_hook``.
        """
        ddp = self._attachment.ddp
        if ddp is None:
            raise ConfigurationError("Join([ddp, manager]) needs attach(ddp, …) first, with the DDP module")
        if self._cycle.job.launches_early:
            raise ConfigurationError(
                "Join does not work with comm_hook, which ranks without data never reach: leave the hook out"
            )
        hook = ManagerJoinHook(self._cycle, ddp)
        self._cycle.job.join_hook = weakref.ref(hook)
        return hook

    @property
    def join_device(self) -> torch.device:
        """Device of the collectives."""
        return self._cycle.syncs[0].arena.device

    @property
    def join_process_group(self) -> Any:
        """The given group of the first arena that has one: ``Join`` wants the same group from DDP."""
        return next((group.given for group in self._cycle.groups if group is not None), None)

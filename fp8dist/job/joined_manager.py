"""What torch's context manager for uneven data, ``Join([ddp, manager])``, calls on a manager."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.distributed.algorithms.join import Joinable, _JoinConfig

from fp8dist.errors import ConfigurationError
from fp8dist.job.attachment import Attachment
from fp8dist.job.cycle import StepCycle
from fp8dist.job.joining import EarlyLauncher
from fp8dist.parallel.ddp import ManagerJoinHook

__all__ = ["JoinedManager"]


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
        hook = ManagerJoinHook(EarlyLauncher(self._cycle), ddp)
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

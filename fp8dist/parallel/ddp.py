"""Support for DistributedDataParallel and ``Join``. The communication hook is in ``fp8dist.ddp``."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.algorithms.join import JoinHook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _find_tensors

from fp8dist.errors import ConfigurationError
from fp8dist.modules.job_state import JobState

__all__ = ["JoinLink", "ManagerJoinHook", "find_ddp", "in_join"]


class Launcher(Protocol):
    """The part of a manager's step cycle that this module needs."""

    def launch_early(self) -> None:
        """Launch syncs before the boundary. COLLECTIVE."""

    def launch_idle(self) -> None:
        """Shadow the other ranks' launch, on a rank without data. COLLECTIVE."""

    def resync_after_join(self) -> None:
        """Take over the state of the rank that is furthest ahead. COLLECTIVE."""

    @property
    def job(self) -> JobState:
        """The manager's current state."""

    @property
    def communicates(self) -> bool:
        """True if steps end with a collective."""


def find_ddp(module: nn.Module) -> DistributedDataParallel | None:
    """Return the DDP module that ``module`` is or holds; None: there is none."""
    found: Iterator[DistributedDataParallel] = (m for m in module.modules() if isinstance(m, DistributedDataParallel))
    return next(found, None)


class JoinLink:
    """Launches syncs at the end of each backward that DDP synchronises, while a Join context is open.

    Ranks that ran out of data only notice DDP's synchronised forwards, so all ranks count these: one launch for each,
    whatever the gradient accumulation. Outside a Join context, this does nothing.
    """

    def __init__(self, ddp: DistributedDataParallel, launcher: Launcher) -> None:
        self._ddp = weakref.ref(ddp)  # Weak: DDP holds the model, which holds the manager, which holds this.
        self._launcher = launcher
        self._ended: object = None
        self._handle = ddp.register_forward_hook(self._after_forward)

    def __getstate__(self) -> dict[str, Any]:
        return {"_ddp": _none}  # DDP holds the hook: its copies and pickles have one that does nothing until attach().

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
        if self._launcher.job.joined:
            self._ended = module._join_config  # Not alone in this context, nor after it.
        elif self._launcher.communicates and self._joins_alone(module):
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
                Variable._execution_engine.queue_callback(self._launcher.launch_early)

        for tensor in _find_tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(at_start_of_backward)

    def _joins_alone(self, ddp: DistributedDataParallel) -> bool:
        """True in a Join context without the manager. Looks once per context that has ended."""
        config = ddp._join_config
        alone = config.enable and config is not self._ended and in_join(ddp)
        if not alone:
            self._ended = config
        return alone


def in_join(module: nn.Module) -> bool:
    """True inside a Join context of a DDP module that ``module`` is or holds. torch leaves the flag of a context that
    has ended, but its hook is gone."""
    flagged = [m for m in module.modules() if isinstance(m, DistributedDataParallel) and m._join_config.enable]
    hooks = [thing for thing in gc.get_objects() if issubclass(type(thing), JoinHook)] if flagged else []
    return any(hook.ddp is ddp for hook in hooks for ddp in flagged if hasattr(hook, "ddp"))


def _none() -> None:
    """Replaces the weak reference of a copied or unpickled hook."""


class ManagerJoinHook(JoinHook):
    """Takes part in the other ranks' syncs, on a rank without data."""

    def __init__(self, launcher: Launcher, ddp: DistributedDataParallel) -> None:
        self._launcher = launcher
        self._ddp = ddp

    def main_hook(self) -> None:
        """Shadow one launch, if DDP has just shadowed a forward that it synchronises."""
        if self._ddp.require_forward_param_sync:
            self._launcher.launch_idle()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Take over the state of the rank that is furthest ahead: ranks that joined early have stale state."""
        self._launcher.resync_after_join()

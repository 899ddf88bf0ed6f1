"""DistributedDataParallel and ``Join``. The hook for its gradient buckets is ``fp8dist.ddp``."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.algorithms.join import JoinHook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _find_tensors

from fp8dist.modules.job_state import JobState

__all__ = ["JoinLink", "ManagerJoinHook", "find_ddp"]


class Launcher(Protocol):
    """What this module needs of a manager's cycle of steps."""

    def launch_early(self) -> None:
        """Launch before the boundary. COLLECTIVE."""

    def launch_idle(self) -> None:
        """Shadow the others' launch. COLLECTIVE."""

    def resync_after_join(self) -> None:
        """Take the state of the rank that came furthest. COLLECTIVE."""

    @property
    def job(self) -> JobState:
        """What the manager is doing."""


def find_ddp(module: nn.Module) -> DistributedDataParallel | None:
    """The DDP module that ``module`` is or holds."""
    found: Iterator[DistributedDataParallel] = (m for m in module.modules() if isinstance(m, DistributedDataParallel))
    return next(found, None)


class JoinLink:
    """While a Join context is open, launches at the end of each backward that DDP synchronises.

    Ranks that ran out of data see DDP's synced forwards and nothing else, so these are what they can
    count: one launch for each, whatever the accumulation. Outside a Join context this does nothing.
    """

    def __init__(self, ddp: DistributedDataParallel, launcher: Launcher) -> None:
        self._ddp = weakref.ref(ddp)  # It holds the model, which holds the manager, which holds this.
        self._launcher = launcher
        self._handle = ddp.register_forward_hook(self._after_forward)

    def remove(self) -> None:
        """Take the hook off."""
        self._handle.remove()

    @property
    def ddp(self) -> DistributedDataParallel:
        """The module, which is alive as long as anybody trains with it."""
        ddp = self._ddp()
        assert ddp is not None
        return ddp

    def _after_forward(self, module: DistributedDataParallel, args: Any, output: Any) -> None:
        if module is not self._ddp():  # A deep copy has this hook too, and after attach() one of its own.
            return
        if not (self._launcher.job.joined and torch.is_grad_enabled() and module.require_backward_grad_sync):
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


class ManagerJoinHook(JoinHook):
    """What a rank without data does for the others' syncs."""

    def __init__(self, launcher: Launcher, ddp: DistributedDataParallel) -> None:
        self._launcher = launcher
        self._ddp = ddp

    def main_hook(self) -> None:
        """Shadow one launch, where the forward that DDP has just shadowed is one that it syncs."""
        if self._ddp.require_forward_param_sync:
            self._launcher.launch_idle()

    def post_hook(self, is_last_joiner: bool) -> None:
        """An early rank's state is stale: take the furthest one's."""
        self._launcher.resync_after_join()

"""DistributedDataParallel: the early launch from its last gradient bucket, and ``Join``.

No ``from __future__ import annotations`` here: DDP inspects a comm hook's annotations as objects.
"""

import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import JoinHook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _find_tensors

from fp8dist.modules.job_state import JobState

__all__ = ["JoinLink", "ManagerJoinHook", "comm_hook", "find_ddp"]

CommHook = Callable[[Any, Any], torch.futures.Future[Any]]


class Launcher(Protocol):
    """What this module needs of a manager's cycle of steps."""

    def launch_early(self) -> None:
        """Launch before the boundary. COLLECTIVE."""

    def launch_from_hook(self) -> None:
        """The same, called by a communication hook. COLLECTIVE."""

    def launch_idle(self) -> None:
        """Shadow the others' launch. COLLECTIVE."""

    def resync_after_join(self) -> None:
        """Take the state of the rank that came furthest. COLLECTIVE."""

    @property
    def job(self) -> JobState:
        """Whether a Join context is open."""


class EarlyLauncher(Protocol):
    """What ``comm_hook`` needs of a StateManager."""

    def _early_launcher(self, frozen_weights: bool = False) -> Launcher:
        """What launches. Raises ConfigurationError where an early launch would be wrong."""


def comm_hook(manager: EarlyLauncher, inner: CommHook | None = None) -> CommHook:
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

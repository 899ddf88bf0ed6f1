"""DDP and torch's ``Join`` context: syncs of FP8 state while some ranks have run out of data.

A *sync* is the all-reduce that ends each step. In a Join context, a rank without data makes no steps, but DDP notifies
it of each forward of the others. So it can *shadow* their syncs: take part with a message that changes nothing. The
communication hook for DDP is in ``fp8dist.ddp``.
"""

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
    """The part of a manager's step cycle that this file needs. A Protocol, because this room may not import it."""

    def launch_early(self) -> None:
        """Launch the syncs of this step before its end. COLLECTIVE."""

    def launch_idle(self) -> None:
        """Shadow the syncs that the other ranks launch, on a rank without data. COLLECTIVE."""

    def resync_after_join(self) -> None:
        """Copy the state of the rank that has made the most steps. COLLECTIVE."""

    @property
    def job(self) -> JobState:
        """How the manager is tied to its job now."""

    @property
    def communicates(self) -> bool:
        """True if steps end with a collective."""


def find_ddp(module: nn.Module) -> DistributedDataParallel | None:
    """Return the first DDP module that ``module`` is or holds; None: there is none."""
    found: Iterator[DistributedDataParallel] = (m for m in module.modules() if isinstance(m, DistributedDataParallel))
    return next(found, None)


class JoinLink:
    """Launches syncs at the end of each backward that DDP synchronises, while a Join context is open. Outside a Join
    context it does nothing.

    A rank without data only knows of DDP's synchronised forwards. So all ranks launch once for each of these, and not
    once for each optimizer step, which may have several.
    """

    def __init__(self, ddp: DistributedDataParallel, launcher: Launcher) -> None:
        self._ddp = weakref.ref(ddp)  # Weak: DDP holds the model, which holds the manager, which holds this.
        self._launcher = launcher
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
        if self._launcher.job.joined:
            self._ended = module._join_config  # The manager is in this context: nothing to refuse, now or later.
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
        """True in a Join context that the manager is not in. ``in_join`` is slow, so it is asked only once for a
        context that has ended, which torch's flag does not show."""
        config = ddp._join_config
        alone = config.enable and config is not self._ended and in_join(ddp)
        if not alone:
            self._ended = config
        return alone


def in_join(module: nn.Module) -> bool:
    """True inside a Join context of a DDP module that ``module`` is or holds. Slow: walks over all objects in memory.

    torch does not clear a DDP module's flag when the context ends. But the context's hook exists only inside it.
    """
    flagged = [m for m in module.modules() if isinstance(m, DistributedDataParallel) and m._join_config.enable]
    hooks = [thing for thing in gc.get_objects() if issubclass(type(thing), JoinHook)] if flagged else []
    return any(hook.ddp is ddp for hook in hooks for ddp in flagged if hasattr(hook, "ddp"))


def _none() -> None:
    """Replaces the weak reference in a copied or unpickled hook: called, it returns no DDP module."""


class ManagerJoinHook(JoinHook):
    """Makes a rank without data take part in the syncs of the other ranks. ``Join`` calls its methods."""

    def __init__(self, launcher: Launcher, ddp: DistributedDataParallel) -> None:
        self._launcher = launcher
        self._ddp = ddp

    def main_hook(self) -> None:
        """Shadow one launch, if DDP's own hook has just shadowed a synchronised forward. COLLECTIVE."""
        if self._ddp.require_forward_param_sync:
            self._launcher.launch_idle()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Copy the state of the rank that has made the most steps, because ranks that ran out of data have old state.
        COLLECTIVE."""
        self._launcher.resync_after_join()

"""Where a step ends: hooks on optimizers and on the loss scaler.

The optimizer's step is a place that every rank reaches whatever its modules did. An FP8 module's own
backward is not: a rank that ran none would not launch, and the others would hang.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from fp8dist.errors import ConfigurationError

__all__ = ["BoundaryHooks", "BoundaryOwner", "CompilationWatch", "unwrap_optimizers", "watch_every_step"]


class BoundaryOwner(Protocol):
    """What the hooks tell of."""

    def boundary(self, hold: Tensor | None = None) -> None:
        """A step ends here. ``hold`` non-zero: the loss scaler skips it."""

    def weights_changed(self) -> None:
        """An attached optimizer has stepped."""

    def before_step(self, optimizer: Optimizer) -> None:
        """Some optimizer of the process is about to step."""

    def after_step(self, optimizer: Optimizer) -> None:
        """It has stepped."""

    def reuse_casts(self, allowed: bool) -> None:
        """Whether weights stand still between now and the next call."""

    def step_skipped(self) -> None:
        """The loss scaler did not run the optimizer."""

    def compilation_begins(self) -> None:
        """torch.compile is about to trace something."""


def watch_every_step(owner: BoundaryOwner) -> list[RemovableHandle]:
    """Tell the owner whenever any torch optimizer of this process steps, attached or not.

    A re-created optimizer has none of our hooks, and a fused one leaves no trace in ``_version``. The
    hooks go with the owner.
    """
    alive = weakref.ref(owner)

    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        living = alive()
        if living is not None:
            living.before_step(optimizer)

    def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        living = alive()
        if living is not None:
            living.after_step(optimizer)

    handles = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
    for handle in handles:
        weakref.finalize(owner, handle.remove)
    return handles


class CompilationWatch:
    """Tells the owner when torch.compile begins: a compiled forward has no place for a commit, nor has its first run.

    The watch goes with the owner.
    """

    def __init__(self, owner: BoundaryOwner) -> None:
        # Here, because it takes a second: torch.optim has imported it, but not everybody has an optimizer.
        from torch._dynamo.callback import callback_handler

        self._handler = callback_handler
        alive = weakref.ref(owner)

        def begins(compilation: Any) -> None:
            living = alive()
            if living is not None:
                living.compilation_begins()

        self._callback = callback_handler.register_start_callback(begins)
        weakref.finalize(owner, self.remove)

    def remove(self) -> None:
        """End it."""
        if self._callback in self._handler.start_callbacks:
            self._handler.remove_start_callback(self._callback)


def unwrap_optimizers(optimizer: Any) -> list[Optimizer]:
    """One optimizer or several, out of wrappers that keep theirs in ``.optimizer`` (Accelerate).

    Raises:
        ConfigurationError: something without step hooks.
    """
    given = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
    unwrapped = []
    for candidate in given:
        inner = candidate
        while hasattr(inner, "optimizer"):  # AcceleratedOptimizer inherits the hook methods, but not their hooks.
            inner = inner.optimizer
        if not hasattr(inner, "register_step_post_hook"):
            raise ConfigurationError(
                f"{type(candidate).__name__} has no step hooks: leave optimizer= out and call manager.step() "
                "once per optimizer step"
            )
        unwrapped.append(inner)
    if not unwrapped:
        raise ConfigurationError("optimizer=[] has no optimizer in it")
    return unwrapped


class BoundaryHooks:
    """Hooks on the optimizers of one manager; the last one's step is the boundary.

    Order of events in ``optimizer.step()``: pre-hook, closure, post-hook. With a closure the
    backward runs inside, so the boundary is in the post-hook; without one it is in the pre-hook, and
    the collective may run under the update.
    """

    def __init__(self, owner: BoundaryOwner, optimizers: Sequence[Optimizer], scaler: Any, is_boundary: bool) -> None:
        self._owner = owner
        self._last = weakref.ref(optimizers[-1])  # It holds these hooks.
        self._is_boundary = is_boundary
        self._handles: list[RemovableHandle] = []
        for optimizer in optimizers:
            self._handles.append(optimizer.register_step_pre_hook(self._before))
            self._handles.append(optimizer.register_step_post_hook(self._after))
        self._restore_scaler = self._watch(scaler) if scaler is not None else None
        self._stepped = False

    def remove(self) -> None:
        """Take all hooks off."""
        for handle in self._handles:
            handle.remove()
        if self._restore_scaler is not None:
            self._restore_scaler()

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if _has_closure(args, kwargs):
            # The optimizer may move the weights between two calls of the closure.
            self._owner.reuse_casts(False)
        elif optimizer is self._last() and self._is_boundary:
            self._owner.boundary(_found_inf(optimizer))
        self._stepped |= optimizer is self._last()

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if _has_closure(args, kwargs):
            self._owner.reuse_casts(True)
            if optimizer is self._last() and self._is_boundary:
                self._owner.boundary()
        self._owner.weights_changed()

    def _watch(self, scaler: Any) -> Callable[[], None]:
        """GradScaler has no hooks, and a skipped unfused step calls none of the optimizer's."""
        original = scaler.step

        def step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            self._stepped = False
            result = original(optimizer, *args, **kwargs)
            if not self._stepped and unwrap_optimizers(optimizer)[0] is self._last():
                self._owner.step_skipped()
            return result

        scaler.step = step

        def restore() -> None:
            if scaler.__dict__.get("step") is step:
                del scaler.step

        return restore


def _has_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    # Hooks get the arguments of the unbound step: args[0] is the optimizer itself.
    given = args[1] if len(args) > 1 else kwargs.get("closure")
    return given is not None


def _found_inf(optimizer: Optimizer) -> Tensor | None:
    """What GradScaler tells a fused optimizer, which is called also when the step is to be skipped."""
    found = getattr(optimizer, "found_inf", None)
    return found if isinstance(found, torch.Tensor) else None

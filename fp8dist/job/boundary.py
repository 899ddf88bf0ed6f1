"""Hooks on optimizers and on the loss scaler, which end a step.

Every rank reaches the optimizer's step, whichever of its modules ran. Not every rank reaches the backward of an FP8
module: if the sync were launched there, a rank that ran none would not launch, and the others would hang.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from fp8dist.common.optimizer_hooks import (
    found_inf,
    has_closure,
    has_stepped,
    is_real_step,
    step_frames,
    untraced,
    unwrap_optimizers,
    weakly,
)
from fp8dist.errors import ConfigurationError
from fp8dist.job.cycle import StepCycle

_SCALER_STEP = GradScaler.step.__code__
_SCALER_FRAMES = 8
"""Maximum number of frames between a scaler and the optimizer: its helper, and schedulers' wrappers of ``step``."""


class CompilationWatch:
    """Calls ``owner.compilation_begins`` when torch.compile begins to trace: neither a compiled forward nor its first
    run can commit a sync. Ends with ``remove``, or with its owner."""

    def __init__(self, owner: StepCycle) -> None:
        # Imported here because it takes a second. torch's optimizers import it, too, but not every job has one.
        from torch._dynamo.callback import callback_handler

        self._handler = callback_handler
        self._callback = callback_handler.register_start_callback(untraced(weakly(owner.compilation_begins)))
        weakref.finalize(owner, self.remove)

    def remove(self) -> None:
        """Stop watching."""
        if self._callback in self._handler.start_callbacks:
            self._handler.remove_start_callback(self._callback)


class BoundaryHooks:
    """Hooks on the optimizers of one manager. The step of the last optimizer is the boundary.

    Order of events in ``optimizer.step()``: pre-hook, closure, post-hook. With a closure, the backward runs inside, so
    the boundary is in the post-hook. Without a closure, it is in the pre-hook, so that the collective can overlap the
    update.
    """

    def __init__(self, owner: StepCycle, optimizers: Sequence[Optimizer], scaler: Any, is_boundary: bool) -> None:
        self._owner = owner
        self._last = weakref.ref(optimizers[-1])  # Weak: the optimizer holds these hooks.
        self._is_boundary = is_boundary
        self._handles: list[RemovableHandle] = []
        before, after = untraced(weakly(self._before)), untraced(weakly(self._after))
        for optimizer in optimizers:
            self._handles.append(optimizer.register_load_state_dict_post_hook(weakly(self._loaded)))
            self._handles.append(optimizer.register_step_pre_hook(before))
            self._handles.append(optimizer.register_step_post_hook(after))
        self._restore_scaler = self._watch(scaler) if scaler is not None else None
        self._looked = scaler is not None
        self._stepped = False
        # Another optimizer than the last has stepped since the last boundary. Then the last one's step is a boundary
        # even if the scaler skips it, unless ``_others_skipped`` is non-zero: the scaler skipped all of these steps.
        self._others_stepped = False
        self._others_skipped: Tensor | None = None

    def remove(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        if self._restore_scaler is not None:
            self._restore_scaler()

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if _inside_own_step(optimizer):
            return
        self._stepped |= optimizer is self._last()
        if is_real_step(optimizer):
            self._look_for_scaler()
        if has_closure(args, kwargs):
            # The optimizer may move the weights between two calls of the closure.
            self._owner.reuse_casts(False)
        elif self._ends_step(optimizer):
            if torch._C._current_graph_task_id() != -1:
                raise ConfigurationError(
                    f"{type(optimizer).__name__} steps inside backward(), where gradients of other layers are still to "
                    'come: use attach(…, boundary="manual") and call manager.step() after each backward'
                )
            self._owner.boundary(self._take_hold(found_inf(optimizer)))

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if _inside_own_step(optimizer):
            return
        if has_closure(args, kwargs):
            self._owner.reuse_casts(True)
            if self._ends_step(optimizer):
                self._others_stepped = False
                self._owner.boundary()
        if is_real_step(optimizer):
            if optimizer is not self._last():
                skipped = found_inf(optimizer)
                self._others_skipped = _both(skipped, self._others_skipped) if self._others_stepped else skipped
                self._others_stepped = True
            self._owner.weights_changed()
        else:
            self._owner.commit_unseen()

    def _loaded(self, optimizer: Optimizer) -> None:
        self._owner.optimizer_loaded(has_stepped(optimizer))

    def _ends_step(self, optimizer: Optimizer) -> bool:
        """True if this step is the boundary: the last optimizer's, if it or another one may change parameters."""
        is_last = optimizer is self._last() and self._is_boundary
        return is_last and (self._others_stepped or is_real_step(optimizer))

    def _take_hold(self, skipped: Tensor | None) -> Tensor | None:
        """Return a flag that is non-zero if the scaler skips the steps of all optimizers; None if it skips none. Forget
        the other optimizers' steps. ``skipped``: the flag of the last one's step."""
        if self._others_stepped:
            skipped = _both(skipped, self._others_skipped)
        self._others_stepped = False
        return skipped

    def _look_for_scaler(self) -> None:
        """Find, in the first step, a GradScaler that ``attach`` was not given.

        Searches the call stack for the scaler's ``step``: GradScaler has no hooks, and an optimizer step that it skips
        runs no hooks.
        """
        if self._looked:
            return
        self._looked = True
        step = next(iter(step_frames()), None)
        frame = None if step is None else step.f_back
        for _ in range(_SCALER_FRAMES):
            if frame is None:
                return
            scaler = frame.f_locals.get("self") if frame.f_code is _SCALER_STEP else None
            if isinstance(scaler, GradScaler) and scaler.is_enabled():
                self._restore_scaler = self._watch(scaler)
                self._owner.scaler_found()
                return
            frame = frame.f_back

    def _watch(self, scaler: Any) -> Callable[[], None]:
        """Replace the scaler's ``step``, and return a function that restores it. GradScaler has no hooks, and a step
        that it skips runs none of the optimizer's hooks, unless the optimizer is fused."""
        watched = _WatchedStep(scaler, self)
        scaler.step = watched
        alive = weakref.ref(scaler)

        def restore() -> None:
            living = alive()
            if living is not None and living.__dict__.get("step") is watched:
                del living.step

        return restore

    def scaler_steps(self, step: Callable[[], Any], optimizer: Any) -> Any:
        """Run the scaler's ``step`` of an optimizer, and handle a step that the scaler skips."""
        self._stepped = False
        result = step()
        if not self._stepped and unwrap_optimizers(optimizer)[0] is self._last():
            self._owner.step_skipped()
            if self._is_boundary and self._others_stepped:
                self._owner.boundary(self._take_hold(self._others_skipped))
                self._owner.commit_unseen()
        return result


class _WatchedStep:
    """Replaces a scaler's ``step``. Keeps neither scaler nor hooks alive. Copies and pickles as the original method."""

    def __init__(self, scaler: Any, hooks: BoundaryHooks) -> None:
        self._scaler, self._hooks = weakref.ref(scaler), weakref.ref(hooks)
        self._own = scaler.__dict__.get("step")  # A ``step`` that other code has set on this instance.

    def __call__(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        scaler, hooks = self._scaler(), self._hooks()

        def step() -> Any:
            if self._own is not None:
                return self._own(optimizer, *args, **kwargs)
            return type(scaler).step(scaler, optimizer, *args, **kwargs)  # type: ignore[union-attr]

        return step() if hooks is None else hooks.scaler_steps(step, optimizer)

    def __reduce__(self) -> Any:
        return getattr, (self._scaler(), "step")


def _both(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Return a flag that is non-zero if both flags are; None, a step that no scaler skips, counts as 0."""
    return None if one is None or other is None else torch.minimum(one, other.to(one.device))


def _inside_own_step(optimizer: Optimizer) -> bool:
    """True inside the ``super().step()`` of a step that has already called the hooks."""
    return any(frame.f_locals["self"] is optimizer for frame in step_frames()[1:])

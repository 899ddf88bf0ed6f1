"""Hooks on the steps of torch's optimizers: which optimizers call them, how to remove them, and what a step is.

Uses three private parts of torch: the wrapper around ``Optimizer.step``, the dict of hooks behind a hook's handle, and
``_disable_dynamo``. All functions are local.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from fp8dist.errors import ConfigurationError

_WRAPPER: CodeType = Optimizer.profile_hook_step(lambda optimizer: None).__code__
"""The code object of the wrapper that torch puts around the ``step`` of each optimizer class."""


def unwrap_optimizers(optimizer: Any) -> list[Optimizer]:
    """Return the torch optimizers in ``optimizer``, without wrappers that keep theirs in ``.optimizer`` (Accelerate).

    Args:
        optimizer: an optimizer, or a sequence of them.

    Raises:
        ConfigurationError: the sequence is empty, or an object has no step hooks.
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


def hooked_optimizers(optimizer: Any) -> list[Optimizer]:
    """Return what ``unwrap_optimizers`` returns, after a check that each ``step`` calls torch's step hooks.

    Raises:
        ConfigurationError: a ``step`` does not call them; or as ``unwrap_optimizers``.
    """
    unwrapped = unwrap_optimizers(optimizer)
    for inner in unwrapped:
        # torch's Optimizer.__init__ sets both. A class that does not call it inherits only the methods.
        step = getattr(type(inner), "step", None)
        if not getattr(step, "hooked", False) or "_optimizer_step_pre_hooks" not in vars(inner):
            raise ConfigurationError(
                f"{type(inner).__name__}.step() does not call torch's step hooks (its __init__ does not call "
                "Optimizer.__init__): leave optimizer= out and call manager.step() once per optimizer step"
            )
    return unwrapped


def has_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if ``optimizer.step`` was called with a closure. Takes the arguments that a step hook gets."""
    # Hooks get the arguments of the unbound step: args[0] is the optimizer itself.
    given = args[1] if len(args) > 1 else kwargs.get("closure")
    return given is not None


def is_real_step(optimizer: Optimizer) -> bool:
    """True if a step may change parameters: not all learning rates are 0. A rate on a GPU counts as not 0, because
    reading it would wait.

    ``torch.distributed.checkpoint.state_dict`` makes a step with learning rates of 0, to create optimizer state.
    """
    for group in optimizer.param_groups:
        rate = group.get("lr")
        on_gpu = isinstance(rate, Tensor) and rate.device.type != "cpu"
        if rate is None or on_gpu or bool(rate != 0):
            return True
    return False


def has_stepped(optimizer: Optimizer) -> bool:
    """True if the optimizer has made a step that may have changed parameters.

    State alone does not show it. Some optimizers have state with a step count of 0 from the start, and
    ``torch.distributed.checkpoint.state_dict`` makes one step that changes nothing.
    """
    counts = (state.get("step") if isinstance(state, Mapping) else None for state in optimizer.state.values())
    return any(count is None or bool(count > 1) for count in counts)


def found_inf(optimizer: Optimizer) -> Tensor | None:
    """Return the flag, float32 0-d, by which GradScaler makes a fused optimizer skip the step; None: there is none.

    GradScaler calls ``step`` of a fused optimizer in any case, so its hooks run in a skipped step, too.
    """
    found = getattr(optimizer, "found_inf", None)
    return found if isinstance(found, torch.Tensor) else None


def step_frames() -> list[FrameType]:
    """Return the frames of torch's wrappers around the steps that run in this thread now, innermost first. The local
    variable "self" of a frame is the optimizer.

    A counter in hooks would not do: a step that raises calls no post-hook. A compiled step has no frame.
    """
    found: list[FrameType] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _WRAPPER:
            found.append(frame)
        frame = frame.f_back
    return found


def untraced(hook: Callable[..., None]) -> Callable[..., None]:
    """Return the hook so that torch.compile, when it traces an optimizer's step, calls it and does not trace it."""
    disabled: Callable[..., None] = _disable_dynamo(hook)  # Imports Dynamo only when first called.
    return disabled


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Return a hook that calls a bound method while its object lives, and holds the object only weakly: torch keeps
    hooks of ``untraced`` in a reference cycle, which would keep the object alive."""
    alive = weakref.WeakMethod(method)

    def hook(*args: Any) -> None:
        living = alive()
        if living is not None:
            living(*args)

    return hook


def retire_with(owner: object, handle: RemovableHandle) -> None:
    """Remove a step hook when its owner is garbage-collected.

    That may happen inside a step, while torch iterates over the hooks and none may be removed. Then the hook is
    replaced by one that does nothing, which the next call of this function for the same optimizer removes.

    Args:
        handle: what ``register_step_pre_hook`` or ``register_step_post_hook`` returned.
    """
    hooks = handle.hooks_dict_ref()
    if hooks is not None:
        for key in [key for key, hook in hooks.items() if hook is _retired]:
            del hooks[key]
    weakref.finalize(owner, _retire, weakref.ref(hooks) if hooks is not None else None, handle.id)


def _retire(hooks: weakref.ref[Any] | None, key: int) -> None:
    """Remove the hook ``key``, or replace it while a step runs."""
    living = None if hooks is None else hooks()
    if living is None or key not in living:
        return
    if step_frames():
        living[key] = _retired
    else:
        del living[key]


def _retired(*_: Any) -> None:
    """Replaces a hook whose owner is gone."""

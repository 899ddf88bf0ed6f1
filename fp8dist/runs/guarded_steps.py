"""GuardedSteps: optimizer hooks of a loss guard. They skip updates, and detect a loss observed after its update."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fp8dist.common.optimizer_hooks import has_closure, retire_with, untraced, unwrap_optimizers, weakly
from fp8dist.errors import ConfigurationError
from fp8dist.state.groups import is_dtensor


class GuardedSteps:
    """Hooks on the optimizers of one guard. They live as long as this object, which keeps no optimizer alive.

    Gradients are dropped inside ``optimizer.step()``, not before: until then, GradScaler looks for infinities in them
    and clipping measures them, as in any other step. The step restores them, because a CUDA graph of forward and
    backward may write to the same memory again.

    Args:
        optimizer: one or several, possibly wrapped, as for ``attach``.
        drops: True if ``drop`` will be called. A step with a closure is then an error.

    Raises:
        ConfigurationError: ``optimizer`` has no step hooks.
    """

    def __init__(self, optimizer: Any, drops: bool) -> None:
        try:
            optimizers = unwrap_optimizers(optimizer)
        except ConfigurationError:
            message = f"optimizer= must be one torch optimizer or several, got {type(optimizer).__name__}"
            raise ConfigurationError(message) from None
        self._drops = drops
        self._optimizers = [weakref.ref(each) for each in optimizers]
        self._to_drop: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        # (parameter, gradient) of each optimizer inside its step: one optimizer may step inside the step of another.
        self._dropped: weakref.WeakKeyDictionary[Optimizer, list[tuple[Tensor, Tensor]]] = weakref.WeakKeyDictionary()
        self._stepped = False  # Since the last call of ``late``.
        # True: the first loss came before any backward, so this loop calls observe() between forward and backward.
        # There, gradients look the same as after a step: only the first call shows the difference.
        self._before_backward: bool | None = None
        self._note()
        before, after = untraced(weakly(self._before)), untraced(weakly(self._after))
        for each in optimizers:
            for handle in (each.register_step_pre_hook(before), each.register_step_post_hook(after)):
                retire_with(self, handle)  # Never removes a hook inside a step: torch iterates over the hooks then.

    @property
    def gone(self) -> bool:
        """True if an optimizer no longer exists."""
        return any(optimizer() is None for optimizer in self._optimizers)

    def drop(self, wanted: bool) -> None:
        """Make the next step of each optimizer find no gradients, or cancel that. Local: call it on all ranks alike."""
        self._to_drop.clear()
        if wanted:
            self._to_drop.update(self._living())

    def late(self, loss: object) -> bool:
        """True if an optimizer has stepped since the last call, and the loss is of that step. Local.

        This is the case if no backward has written a gradient since, unless the loss is newer than the step. The age of
        a loss without an autograd graph is unknown; then the order of the first call decides.
        """
        stepped, self._stepped = self._stepped, False
        written = self._written()
        if self._before_backward is None:
            self._before_backward = not stepped and not written
        if not stepped or written:
            return False
        node = loss.grad_fn if isinstance(loss, Tensor) else None
        return not self._before_backward if node is None else node._sequence_nr() < self._sequence_nr

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._drops and has_closure(args, kwargs):
            raise ConfigurationError(
                'LossGuard with action="skip" does not support optimizer.step(closure): the closure computes loss and '
                "gradients inside the step. Call backward and observe() before optimizer.step()"
            )
        self._dropped.pop(optimizer, None)  # Of a step that raised.
        if optimizer in self._to_drop:
            self._to_drop.discard(optimizer)
            dropped = self._dropped[optimizer] = []
            for parameter in _parameters(optimizer):
                if parameter.grad is not None:
                    dropped.append((parameter, parameter.grad))
                    parameter.grad = None

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for parameter, gradient in self._dropped.pop(optimizer, ()):
            # FSDP1 may have put a gradient of another dtype there, which the setter refuses.
            with contextlib.suppress(RuntimeError):
                parameter.grad = gradient
        self._stepped = True
        self._note()

    def _note(self) -> None:
        self._sequence_nr: int = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]  # Of the next node.
        # Versions rise with each in-place write; reading them needs no device access.
        self._noted = {
            id(parameter): (weakref.ref(parameter.grad), _versions(parameter.grad))
            for optimizer in self._living()
            for parameter in _parameters(optimizer)
            if parameter.grad is not None
        }

    def _written(self) -> bool:
        """True if a gradient was replaced or written to since the last step."""
        for optimizer in self._living():
            for parameter in _parameters(optimizer):
                gradient, noted = parameter.grad, self._noted.get(id(parameter))
                if gradient is None:
                    continue
                if noted is None or noted[0]() is not gradient or noted[1] != _versions(gradient):
                    return True
        return False

    def _living(self) -> Iterator[Optimizer]:
        for reference in self._optimizers:
            optimizer = reference()
            if optimizer is not None:
                yield optimizer


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _versions(gradient: Tensor) -> tuple[int, int]:
    """Return the versions of the tensor and of a DTensor's local part: a write to a DTensor raises the latter only."""
    local: Any = gradient._local_tensor if is_dtensor(gradient) else gradient
    return gradient._version, local._version

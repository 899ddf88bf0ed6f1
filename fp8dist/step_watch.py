"""The steps of all torch optimizers of the process, as far as they concern one model's FP8 weights.

Scales follow weights at boundaries. An optimizer that steps weights for which no boundary comes would train on with
scales that stand still, while the loss falls: so its second step is refused.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Collection, Iterator, Sequence
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fp8dist.errors import ConfigurationError
from fp8dist.formats import Role
from fp8dist.graphs import compiled_any
from fp8dist.linear_slots import LinearSlots, Mode
from fp8dist.nn import FP8Linear, fp8_linears
from fp8dist.state.slots import Slot, first_few

__all__ = ["StepListener", "StepWatch", "enclosing_steps", "found_inf", "is_real_step"]


class StepListener(Protocol):
    """What hears of steps."""

    mode: Mode

    @property
    def captures(self) -> bool:
        """Whether a CUDA graph is being captured."""

    def before_step(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step."""

    def after_step(self, optimizer: Optimizer, real: bool) -> None:
        """It has stepped."""

    def tell_others(self, text: str) -> None:
        """This rank raises: whoever waits for it should know why."""


class StepWatch:
    """Watches optimizers for the FP8Linears of one model, from ``prepare`` to ``detach``. Goes with its manager.

    A step nested in another optimizer's (Lookahead, SAM, ZeroRedundancyOptimizer) belongs to the outer one.
    """

    def __init__(self, listener: StepListener, model: weakref.ref[nn.Module]) -> None:
        self._listener = weakref.ref(listener)  # It holds this: GPU memory must not wait for a cycle to be found.
        self._model = model
        self._linears: tuple[weakref.ref[FP8Linear], ...] | None = None
        self._began = 0
        self.brings_boundary: weakref.ref[Optimizer] | None = None
        """The attached optimizer whose step is the boundary."""
        alive = weakref.ref(self)

        def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            living = alive()
            if living is not None:
                living._before(optimizer, _is_nested(sys._getframe(1)))

        def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            living = alive()
            if living is not None:
                living._after(optimizer, _is_nested(sys._getframe(1)))

        self._handles = (register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after))
        for handle in self._handles:
            weakref.finalize(self, handle.remove)

    def remove(self) -> None:
        """End it."""
        for handle in self._handles:
            handle.remove()

    @property
    def linears(self) -> list[FP8Linear]:
        """The FP8Linears of the model, as they were at ``attach``."""
        if self._linears is None:
            model = self._model()
            self._linears = () if model is None else tuple(map(weakref.ref, fp8_linears(model)))
        living = (reference() for reference in self._linears)
        return [linear for linear in living if linear is not None]

    def attached(self, boundary: Optimizer | None) -> None:
        """``attach`` has placed the state: scales are right for the weights as they are now. Local.

        Args:
            boundary: the optimizer whose step is the boundary, if one's is.
        """
        self._linears = None
        self.brings_boundary = None if boundary is None else weakref.ref(boundary)
        for linear in self.linears:
            note = linear.fp8_slots.note
            note.take(linear, linear.fp8_slots.resharded, attached=True)
            note.stepped_at, note.skipped, note.unfollowed = -1, None, False

    def take_notes(self) -> None:
        """A boundary that the loop called for: what changed the weights before it was a step. Local."""
        for linear in self.linears:
            linear.fp8_slots.note.take(linear, linear.fp8_slots.resharded)

    @contextlib.contextmanager
    def kept_notes(self) -> Iterator[None]:
        """What is written to weights inside is undone there: notes stay. Local."""
        before = [(linear, linear.fp8_slots.note) for linear in self.linears]
        kept = [(note.awaited, note.written(linear)) for linear, note in before]
        try:
            yield
        finally:
            for (linear, note), (awaited, written) in zip(before, kept):
                note.take(linear, linear.fp8_slots.resharded)
                note.awaited = awaited
                if written:
                    note.mark_written()

    def state_loaded(self, slots: Collection[Slot]) -> None:
        """The state of these slots is right for the weights that the next forward finds. Local."""
        for linear in self.linears:
            if linear.fp8_slots.slots[Role.WEIGHT] in slots:
                linear.fp8_slots.note.awaited = True

    def held_by(self, optimizer: Optimizer) -> list[FP8Linear]:
        """The FP8Linears whose weights an optimizer holds."""
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        found = []
        for linear in self.linears:
            weight = linear._parameters.get("weight")
            if id(weight) not in held:  # The usual case needs no more than this.
                slots = linear.fp8_slots
                if not any(id(p) in held for p in slots.note.holders(linear, slots.resharded)):
                    continue
            found.append(linear)
        return found

    def _before(self, optimizer: Optimizer, nested: bool) -> None:
        listener = self._listener()
        if listener is None:
            return
        listener.before_step(optimizer)
        if nested or listener.captures:
            return
        self._began, listener.mode.stepping = listener.mode.boundaries, True
        exempt = self.brings_boundary is not None and self.brings_boundary() is optimizer
        if listener.mode.allowed and not exempt and is_real_step(optimizer):
            again = [each for each in self.held_by(optimizer) if each.fp8_slots.note.stepped_at == self._began]
            late = [linear for linear in again if _is_late(linear.fp8_slots, self._began)]
            if late:
                listener.mode.stepping = False
                text = _second_step(optimizer, late)
                listener.tell_others(text)
                raise ConfigurationError(text)

    def _after(self, optimizer: Optimizer, nested: bool) -> None:
        listener, real = self._listener(), is_real_step(optimizer)
        if listener is None:
            return
        counts = real and not nested and not listener.captures
        if not nested:
            listener.mode.stepping = False
        unseen = compiled_any()  # Forwards that leave no notes.
        skipped = found_inf(optimizer)
        for linear in self.held_by(optimizer):
            note = linear.fp8_slots.note
            if not note.awaited:
                note.take(linear, linear.fp8_slots.resharded)
            if counts:
                note.stepped_at, note.skipped = self._began, skipped
                note.unfollowed = not (note.recorded or unseen)
                note.recorded = False
        listener.after_step(optimizer, real)


def _is_late(slots: LinearSlots, boundaries: int) -> bool:
    """Whether a weight that was stepped since the last boundary must not be stepped again: it is cast to FP8. Reads the
    device if a loss scaler may have skipped that step. ``boundaries``: passed so far."""
    skipped, used = slots.note.skipped, slots.note.used_at == boundaries or compiled_any()
    return used and slots.weight_sync.every_step and (skipped is None or not bool(skipped))


def _second_step(optimizer: Optimizer, late: Sequence[FP8Linear]) -> str:
    names = first_few(sorted({linear.fp8_slots.slots[Role.WEIGHT].fqn for linear in late}))
    return (
        f"{type(optimizer).__name__} is about to step {len(late)} FP8 weights ({names}) a second time, but no step of "
        "FP8 state has ended since the first: their scales would stand still. If the optimizer was made after attach() "
        "or was not given to it, call attach(optimizer=…) again; or call manager.step() once per optimizer step"
    )


def is_real_step(optimizer: Optimizer) -> bool:
    """Whether a step may change parameters: some learning rate is not 0, as far as the host can tell.

    ``torch.distributed.checkpoint.state_dict`` makes an optimizer's state by a step with a learning rate of 0.
    """
    rates = (group.get("lr") for group in optimizer.param_groups)
    return any(rate is None or _on_gpu(rate) or bool(rate != 0) for rate in rates)


def _on_gpu(rate: Any) -> bool:
    return isinstance(rate, Tensor) and rate.device.type != "cpu"


def found_inf(optimizer: Optimizer) -> Tensor | None:
    """What GradScaler tells a fused optimizer, which is called also when the step is to be skipped."""
    found = getattr(optimizer, "found_inf", None)
    return found if isinstance(found, torch.Tensor) else None


def _is_nested(caller: FrameType) -> bool:
    return bool(enclosing_steps(caller, most=1))


def enclosing_steps(caller: FrameType, most: int | None = None) -> list[Optimizer]:
    """The optimizers inside whose ``step`` another one steps, innermost first.

    Args:
        caller: of a step hook: torch's wrapper around ``step``, whose code all optimizers share. Frames tell where a
            count could not: a step that raises calls no hook.
        most: how many to look for.
    """
    found: list[Optimizer] = []
    code, frame = caller.f_code, caller.f_back
    while frame is not None and len(found) != most:
        if frame.f_code is code:
            found.append(frame.f_locals["self"])
        frame = frame.f_back
    return found

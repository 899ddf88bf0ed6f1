"""StepWatch: watches the steps of all torch optimizers of the process that change one model's FP8 weights.

Scales follow weights at boundaries. If no boundary follows an optimizer's step, training would continue with outdated
scales, while the loss falls. So the second such step raises an error.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fp8dist.checks.at_rest import AtRest
from fp8dist.checks.checker import Checker
from fp8dist.checks.coherence import stale_weights
from fp8dist.common.optimizer_hooks import (
    found_inf,
    has_closure,
    is_real_step,
    retire_with,
    step_frames,
    untraced,
    weakly,
)
from fp8dist.common.text import first_few
from fp8dist.errors import ConfigurationError
from fp8dist.job.changes import Gradients, Masters, WeightLoads
from fp8dist.job.weight_scales import WeightScales
from fp8dist.modules.linear_slots import LinearSlots
from fp8dist.modules.model_state import ModelState
from fp8dist.modules.parts import Part, fp8_parts
from fp8dist.modules.weight_notes import (
    SAMPLED_WEIGHTS,
    Held,
    NoteList,
    WeightNote,
    sample_of,
    stored_parameters,
)
from fp8dist.state.roll_call import leave_word
from fp8dist.state.slots import Slot
from fp8dist_kernels.formats import Role
from fp8dist_kernels.graphs import compiled_any

logger = logging.getLogger("fp8dist")


class StepWatch:
    """Watches optimizers for one model's FP8 weights, from ``prepare`` to ``restore``. Lives as long as its manager.

    A step inside another optimizer's step (Lookahead, SAM, ZeroRedundancyOptimizer) belongs to the outer step.

    ``renews``: True if an attached optimizer has stepped, so weights that FSDP2 gathers in FP8 need new scales. The
    optimizer's own hooks set it, which run before those of this class.
    """

    def __init__(
        self, state: ModelState, checker: Checker, scales: WeightScales, at_rest: AtRest, model: weakref.ref[nn.Module]
    ) -> None:
        # Not their StepCycle, which holds this: a reference cycle would delay the release of GPU memory.
        self._state, self._checker, self._scales, self._at_rest = state, checker, scales, at_rest
        self._model = model
        self.renews = False
        self._notes: NoteList | None = None
        self._slots: list[LinearSlots] = []
        self._began = 0
        self._lists: list[tuple[int, int]] = []  # Of the optimizer that steps; and the weights that it holds.
        self._held: Held | None = None
        self._unrecorded: list[WeightNote] = []
        self._last: weakref.ref[Optimizer] | None = None  # Last attached optimizer; its step may be the boundary.
        self._masters: Masters | None = None
        self._gradients = Gradients()
        self._loads = WeightLoads()
        self._warned_of_eval = False
        self._attached: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._handles = (
            register_optimizer_step_pre_hook(untraced(weakly(self._before))),
            register_optimizer_step_post_hook(untraced(weakly(self._after))),
        )
        for handle in self._handles:
            retire_with(self, handle)  # Never removes a hook inside a step: torch iterates over the hooks then.

    def remove(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()

    @property
    def notes(self) -> NoteList:
        """The notes of the model's FP8 weights, as they were at ``attach``."""
        if self._notes is not None:
            return self._notes
        return NoteList([part.slots.note.bind(part.module) for part in self._parts()], lasts=False)

    @property
    def slots(self) -> list[LinearSlots]:
        """The slots of these weights."""
        return self._slots if self._notes is not None else [part.slots for part in self._parts()]

    def _parts(self) -> list[Part]:
        """Return the FP8 weights of the model as it is now. Until ``attach``, modules may still be converted."""
        model = self._model()
        return [] if model is None else list(fp8_parts(model))

    def _slots_of(self, notes: Iterable[WeightNote]) -> list[LinearSlots]:
        wanted = {id(note) for note in notes}
        return [slots for slots in self.slots if id(slots.note) in wanted]

    def expect_masters(self, parts: Sequence[Part], optimizer: Optimizer) -> None:
        """Check weights that no attached optimizer holds, although ``optimizer`` holds parameters that may be their
        master copies: its steps must then change the weights. Local."""
        self._masters = Masters(parts, optimizer)

    def attached(self, optimizers: Sequence[Optimizer]) -> None:
        """Take notes, after ``attach`` has placed the state and derived the scales of cold weights. Local.

        A weight that has changed since the last boundary stays marked as written: after an earlier ``attach``, its slot
        is hot and has the scale of the old weight.
        """
        self._notes = self._masters = None
        self._slots, notes = self.slots, self.notes.notes
        self._attached = weakref.WeakSet(optimizers)
        self._last = weakref.ref(optimizers[-1]) if optimizers else None
        for note in notes:
            linear = note.linear
            assert linear is not None
            changed = note.written(linear)
            note.take(linear, attached=True)
            note.stepped_at, note.skipped = -1, None
            if changed:
                note.mark_written()
        self._notes = NoteList(notes)

    def detached(self) -> None:
        """Forget the attached optimizers. Local."""
        self._masters = self._last = None
        self._attached, self.renews = weakref.WeakSet(), False

    def take_notes(self, after_step: bool = False) -> None:
        """Note that scales are right for the weights as they are now. Local.

        Args:
            after_step: True at a boundary that the loop requested. Earlier writes then count as an optimizer step,
                except for writes after an optimizer step that was seen.
        """
        boundaries = self._state.job.boundaries - 1
        for note in self.notes.take(stepped_at=boundaries if after_step else None):
            if after_step:
                note.mark_written()

    @contextlib.contextmanager
    def kept_notes(self) -> Iterator[None]:
        """Restore the notes at exit. The caller undoes, inside the context, all its writes to weights; if it does not,
        one rank warns. Local."""
        notes, boundaries = self.notes, self._state.job.boundaries
        awaited, written = [note for note in notes.notes if note.awaited], notes.find()[1]
        gathered, on = self._scales.sharded is not None, self._state.job.enabled
        scaled = [each.note for each in self.slots if on and (gathered or each.weight_sync.arena.recipe.delayed)]
        before = _samples(scaled)
        try:
            yield
            if boundaries == self._state.job.boundaries and self._state.logs:
                _warn_of_other_weights(before, _samples(scaled))
        finally:
            notes.take()
            for note in awaited:
                note.trust_next()
            for note in written:
                note.mark_written()

    def state_loaded(self, slots: Collection[Slot]) -> None:
        """Note that state was loaded: these slots are right for the weights that the next forward finds. Local."""
        for each in self.slots:
            if any(slot in slots for slot in each.weight_slots):
                each.note.trust_next()

    def optimizer_loaded(self) -> None:
        """Note that the state of an attached optimizer was loaded, and thus its copies of weights. Local."""
        self._loads.forget()
        self._state.job.loads.clear()

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        job = self._state.job
        if self._scales.sharded is not None:
            self._scales.sharded.before_step(optimizer)
        if _is_nested() or self._state.captures:
            return
        if job.enabled and optimizer in self._attached and is_real_step(optimizer):
            is_last = optimizer is self._last_one
            self._gradients.before(optimizer, is_last, has_closure(args, kwargs))
            if is_last:
                self._loads.before(optimizer, job.loads, self._state.logs, self._stale_weights)
        self._began, job.stepping = job.boundaries, True
        if self._at_rest.every and optimizer in self._attached and (whole := job.whole) is not None:
            step = job.step if job.enabled else job.boundaries
            self._at_rest.before(optimizer, whole, self._others(optimizer), step)
        if self._masters is not None and self._masters.check(optimizer):
            self._masters = None
        self._lists = _lists_of(optimizer)
        if not job.enabled:
            return
        self._held, written = self.notes.find(optimizer)
        self._unrecorded = [note for note in written if note.unrecorded]
        brings_boundary = job.by_optimizer and self._last_one is optimizer
        if is_real_step(optimizer) and not brings_boundary:
            self._require_boundary(optimizer, [*self._held.listed, *self._held.others])

    def _stale_weights(self) -> list[str]:
        """Return the names of weights that are not what the optimizers' master weights say. Local."""
        whole = self._state.job.whole
        try:
            return [] if whole is None else stale_weights(whole, self._checker.asked.optimizers)
        except Exception as error:  # Such as a lack of memory: it must not keep this rank from its step.
            logger.warning("fp8dist: cannot compare the loaded weights with the optimizer's: %s", error)
            return []

    @property
    def _last_one(self) -> Optimizer | None:
        return None if self._last is None else self._last()

    def _others(self, optimizer: Optimizer) -> list[Optimizer] | None:
        """Return the other attached optimizers, if this is the last one, which stands for the rest of the model."""
        return [one for one in self._attached if one is not optimizer] if optimizer is self._last_one else None

    def _require_boundary(self, optimizer: Optimizer, held: Sequence[WeightNote]) -> None:
        """Raise ConfigurationError if weights are about to be stepped a second time since the last boundary."""
        again = [note for note in held if note.stepped_at == self._began]
        late = [slots for slots in self._slots_of(again) if _is_late(slots, self._began)] if again else []
        if late:
            self._state.job.stepping = False
            text = _second_step(optimizer, late, optimizer in self._attached, self._state.job.by_optimizer)
            if self._state.job.attached and self._state.job.shared:
                leave_word(text)  # Ranks that miss this rank in a collective quote it.
            raise ConfigurationError(text)

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        job, nested, real = self._state.job, _is_nested(), is_real_step(optimizer)
        counts = real and not nested and not self._state.captures
        if not nested:
            job.stepping = False
        skipped = found_inf(optimizer)
        since = self._began - 1  # ``manager.step()`` may come before the optimizer's.
        held = self._held
        if nested or self._lists != _lists_of(optimizer):  # A closure may change them.
            held, _ = self.notes.find(optimizer)
        if held is not None:
            self.notes.take(held)
        if held is not None and counts:
            notes = [*held.listed, *held.others]
            for note in notes:
                note.stepped_at, note.skipped = self._began, skipped
            if job.unrecorded_at >= since and self._state.logs:
                self._warn_of_eval(optimizer, notes, since)
        if not nested:
            for note in self._unrecorded:  # Written to between the last forward and this step.
                note.mark_written()
            self._lists, self._held, self._unrecorded = [], None, []
            self._gradients.after(optimizer, self._state.logs, self._model())
        job.invalidate_casts()
        if self._scales.sharded is not None:
            self._scales.sharded.after_step(optimizer, real)
            if self.renews:
                self.renews = False
                self._scales.sharded.renew()
        counts &= bool(self._at_rest.every) and optimizer in self._attached
        if counts and (whole := job.whole) is not None:
            self._at_rest.after(optimizer, whole, self._others(optimizer))

    def _warn_of_eval(self, optimizer: Optimizer, notes: Sequence[WeightNote], since: int) -> None:
        """Warn once about trained weights whose backwards recorded no amax. A part of a model may be in ``eval()``
        while its slots are cold, and thus cast with their tensors' own amaxes.

        Args:
            notes: of the weights that ``optimizer`` holds.
            since: number of boundaries passed before the backwards that count.
        """
        if self._warned_of_eval:
            return
        trained = [note for note in notes if note.recorded_at < since <= note.unrecorded_at]
        still = self._slots_of([note for note in trained if any(p.requires_grad for p in note.stored)])
        hot = any(slots.sync.arena.known_hot for slots in still)
        alone = all(note.recorded_at < since for note in self.notes.notes)
        if still and (hot or alone):
            self._warned_of_eval = True
            logger.warning(
                "fp8dist: %s trains the FP8 weights of %s, but their backwards record no amaxes, because they are in "
                "eval(): their scales stand still. Call train(); or, if they train in eval() on purpose, run the "
                "forwards inside `with manager.recording():`",
                type(optimizer).__name__,
                first_few(sorted({slots.fqn for slots in still})),
            )


def _samples(notes: Sequence[WeightNote]) -> list[Tensor]:
    """Return samples of the first weights."""
    linears = ((note, note.linear) for note in notes[:SAMPLED_WEIGHTS])
    stored = (stored_parameters(linear, note.name) for note, linear in linears if linear is not None)
    return [sample_of(parameters[0]) for parameters in stored if parameters and not parameters[0].is_meta]


def _warn_of_other_weights(before: Sequence[Tensor], after: Sequence[Tensor]) -> None:
    """Warn if weights were swapped and not put back: their scales are those of the former ones. Waits for the
    device."""
    if not all(map(_is_like, before, after)):
        logger.warning(
            "fp8dist: swapped_weights(): the weights are not those from before the block, whose scales stay: put them "
            "back inside it. To go on with other weights, load them outside of the block"
        )


def _is_like(a: Tensor, b: Tensor) -> bool:
    """True if two samples are equal but for rounding, as after a LoRA is merged and taken out again."""
    # By bytes, because NaN is not equal to itself.
    if a.shape != b.shape or torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
        return a.shape == b.shape
    a, b = a.float(), b.float()
    return bool((a - b).abs().max() <= 2**-6 * a.abs().max())


def _is_late(slots: LinearSlots, boundaries: int) -> bool:
    """True if a weight that was stepped since the last boundary must not be stepped again, because it is cast to FP8.
    Reads the device if a loss scaler may have skipped that step. ``boundaries``: number passed so far."""
    note, skipped = slots.note, slots.note.skipped
    used = note.used_at == boundaries or (compiled_any() and note.idle_at != boundaries)
    return used and slots.weight_sync.every_step and (skipped is None or not bool(skipped))


def _second_step(optimizer: Optimizer, late: Sequence[LinearSlots], attached: bool, by_optimizer: bool) -> str:
    names = first_few(sorted({slots.slots[Role.WEIGHT].fqn for slots in late}))
    what = (
        f"{type(optimizer).__name__} is about to step {len(late)} FP8 weights ({names}) a second time, but no step of "
        "FP8 state has ended since the first: their scales would stand still. "
    )
    if attached and not by_optimizer:
        return what + 'With boundary="manual", call manager.step() once per optimizer step'
    if attached:
        return what + (
            "It is attached, but the step ends with another optimizer, the last one that attach was given: use "
            'attach(optimizer=[…], boundary="manual") and call manager.step() once per optimizer step'
        )
    return what + (
        "If the optimizer was made after attach() or was not given to it, call attach(optimizer=…) again; or call "
        "manager.step() once per optimizer step"
    )


def _lists_of(optimizer: Optimizer) -> list[tuple[int, int]]:
    """Return the ids and lengths of an optimizer's lists of parameters, which show within a step that all are as they
    were."""
    return [(id(group["params"]), len(group["params"])) for group in optimizer.param_groups]


def _is_nested() -> bool:
    return len(step_frames()) > 1

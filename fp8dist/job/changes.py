"""Checks of what an optimizer's steps have changed. Each compares the first elements of a few weights, logs one warning
at most, and waits for the device only in the step in which it compares."""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fp8dist.common.optimizer_hooks import is_real_step
from fp8dist.common.text import first_few
from fp8dist.modules.parts import Part
from fp8dist.modules.weight_notes import SAMPLED_WEIGHTS, WeightNote, sample_of
from fp8dist.state.groups import local_part

logger = logging.getLogger("fp8dist")

_UNCHANGED_STEPS = 3
"""Number of steps before and after which master copies and weights are compared."""

_BACK, _APART = 0.1, 0.25
"""A load is undone if the weight is this much nearer to what it was before. The two must be this far apart, relative to
the larger norm: after a rollback by one step, the next step leads back as well."""


class Masters:
    """Checks that the steps of an optimizer change FP8 weights that it does not hold itself, because it may hold master
    copies of them in float32. Warns at its fourth step if the weights are as they were. ``parts``: these weights."""

    def __init__(self, parts: Sequence[Part], optimizer: Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._steps = 0
        self._names = first_few(sorted({part.fqn for part in parts}))
        chosen = [part.slots for part in parts[:SAMPLED_WEIGHTS]]
        self._seen = [(weakref.ref(slots), sample_of(slots.note.stored[0])) for slots in chosen]

    def check(self, optimizer: Optimizer) -> bool:
        """Check, before a step of ``optimizer``. Return True once the check is done."""
        if optimizer is not self._optimizer() or not is_real_step(optimizer):
            return False
        self._steps += 1
        if self._steps <= _UNCHANGED_STEPS:
            return False
        living = [(slots, before) for reference, before in self._seen if (slots := reference()) is not None]
        if living and all(torch.equal(sample_of(slots.note.stored[0]), before) for slots, before in living):
            logger.warning(
                "fp8dist: %s has stepped %d times, and the FP8 weights of %s have not changed: the optimizer that "
                "attach was given holds other parameters, maybe those of a copy of the model",
                type(optimizer).__name__,
                _UNCHANGED_STEPS,
                self._names,
            )
        return True


class Gradients:
    """Finds the first step for which no attached optimizer has a gradient, and which changes no parameter."""

    def __init__(self) -> None:
        self._found = False  # An attached optimizer had a gradient since the last one's step.
        self._over = False
        self._before: list[tuple[Tensor, Tensor]] = []  # Parameters, and what they were.

    def before(self, optimizer: Optimizer, last: bool, closure: bool) -> None:
        """Look for a gradient, until there is one, before a step. Local.

        Args:
            last: True if ``optimizer`` is the last of those attached, with whose step the gradients must be there.
            closure: True if the step computes its gradients itself.
        """
        self._before = []
        if self._over:
            return
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        if self._found or closure or any(p.grad is not None for p in parameters):
            self._found = not last
        elif last:
            trained = (p for group in optimizer.param_groups for p in group["params"] if p.requires_grad)
            held = (p for p in trained if local_part(p).numel())  # FSDP1 and ZeRO leave some ranks nothing.
            self._before = [(p, sample_of(p)) for p in itertools.islice(held, SAMPLED_WEIGHTS)]

    def after(self, optimizer: Optimizer, logs: bool, model: nn.Module | None) -> None:
        """Warn if the step had no gradients, and changed nothing. Local. ``model``: what is trained."""
        before, self._before = self._before, []
        if not before:
            return
        # An optimizer that changes parameters without gradients has its own way to get them.
        self._over = True
        if not logs or not all(torch.equal(sample_of(p), values) for p, values in before):
            return
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if model is not None and any(p.grad is not None and id(p) not in held for p in model.parameters()):
            logger.warning(
                "fp8dist: %s has stepped, but trained nothing: the gradients are in parameters of the model that it "
                "does not hold. If they replaced its own after it was made, as load_state_dict(…, assign=True) does, "
                "make the optimizer anew and call attach(optimizer=…) again",
                type(optimizer).__name__,
            )
        else:
            logger.warning(
                "fp8dist: %s has stepped, but no parameter has a gradient, so nothing was trained. manager.calibrate() "
                "restores the gradients that it finds: to train while amaxes are recorded, use `with manager.no_fp8(), "
                "manager.recording():` instead. Otherwise look for a backward() that is missing, or for a zero_grad() "
                "that comes before the step",
                type(optimizer).__name__,
            )


class WeightLoads:
    """Finds the first load of weights that the next step undoes, because the optimizer has copies from before: before
    the step if these can be read, else after it."""

    def __init__(self) -> None:
        self._over = False
        self._seen: list[tuple[WeightNote, Tensor, Tensor]] = []  # (note, before the load, loaded).

    def forget(self) -> None:
        """Forget the last load: the optimizer's state was loaded, too."""
        self._seen = []

    def before(
        self, optimizer: Optimizer, loads: dict[WeightNote, Tensor], logs: bool, stale: Callable[[], list[str]]
    ) -> None:
        """Warn, before the first step after a load, if the weights do not fit the optimizer's master weights; before
        the second one, if the weights are as before the load. Local.

        Args:
            loads: samples of weights that were loaded since the last step, from before. Emptied.
            stale: returns the names of weights that do not fit.
        """
        if loads and not self._over and (names := stale()):
            self._over = True
            self._warn(optimizer, logs, f"the step of %s that begins now undoes the load of {first_few(names)}")
        seen, self._seen = self._seen, []
        if seen or loads:
            undone = [_undone(*each) for each in seen if each[0] not in loads and not self._over]
            known = [each for each in undone if each is not None]
            if known and all(known):
                self._over = True
                self._warn(optimizer, logs, "the step of %s after load_state_dict() of the model has undone the load")
            self._seen = [(note, old, sample_of(note.stored[0])) for note, old in loads.items() if note.stored]
            loads.clear()

    def _warn(self, optimizer: Optimizer, logs: bool, what: str) -> None:
        if logs:
            logger.warning(
                f"fp8dist: {what}: it keeps copies of the weights (master weights), which still have the values from "
                "before. Load these, too, with the optimizer's state, or make the optimizer after the load",
                type(optimizer).__name__,
            )


def _undone(note: WeightNote, old: Tensor, new: Tensor) -> bool | None:
    """Return True if a weight is again what it was before a load, False if it is not. None: unknown, because the values
    before and after the load are too similar, or were sharded in other ways, as by FSDP1, which loads whole weights."""
    now = sample_of(note.stored[0])
    if len({(x.shape, x.device) for x in (now, old, new)}) > 1:
        return None
    to_old, to_new, apart = (float((a.float() - b.float()).norm()) for a, b in ((now, old), (now, new), (new, old)))
    if apart <= _APART * max(float(old.float().norm()), float(new.float().norm())):
        return None
    return to_old < _BACK * to_new

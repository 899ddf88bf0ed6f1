"""The saved checkpoints of a run, and which of them are good."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fp8dist.checks.checked import Checked
from fp8dist.common.text import shortened
from fp8dist.runs.report.events import RunEvent, checks_in
from fp8dist.runs.report.facts import checks
from fp8dist.runs.report.numbers import Metrics, RunNumbers

GOOD, DIVERGED, NOT_FINITE, UNCHECKED = "good", "after a divergence", "not finite", "unchecked"
NOT_VERIFIABLE, NOT_RECORDED = "saved, not verifiable", "checked, not recorded what"
LOADED = "loaded before a check"


class SavedCheckpoint(NamedTuple):
    """A checkpoint that no resume has undone. ``state``: GOOD, or why it is not known to be good."""

    event: RunEvent
    state: str


def saved_checkpoints(run: RunNumbers) -> list[SavedCheckpoint]:
    """Return the checkpoints of a run, in the order in which they were saved."""
    found = checks(run)
    suspect, compared = _suspect(run), _compared(run)
    saved = [event for event in run.events if event.kind == "saved" and not event.undone]
    return [
        SavedCheckpoint(e, DIVERGED if id(e) in suspect else _state(e.step, run, found, id(e) in compared))
        for e in saved
    ]


def why_none(run: RunNumbers, saved: Sequence[SavedCheckpoint]) -> str:
    """Return why no checkpoint of a run is good."""
    if not saved:
        return 'no checkpoint is recorded. Note each: recorder.event("saved", step, path=…)'
    newest = next(reversed(checks(run)), None)
    about = "" if newest is None else f"after step {newest.step:,} a check found {shortened(newest.text, 200)}"
    if saved[-1].state == NOT_VERIFIABLE:
        return f"they are saved, not verifiable, because {about}"
    if saved[-1].state == LOADED:
        return "no check came between one and the next load, which makes ranks equal"
    return about or "no check came after one and found parameters equal and finite"


def _state(step: int, run: RunNumbers, found: Sequence[Checked], compared: bool) -> str:
    """Return the state of a checkpoint without a divergence. ``found``: the run's checks, by step. ``compared``: see
    ``_compared``.

    A check after the checkpoint vouches for it, because ranks that differ stay so until a load, and weights that are
    not finite stay so. A loss or gradient norm that is not finite counts until a check finds the weights finite: a loss
    scaler may have skipped that step. If the losses before and after a checkpoint are not finite, no later check
    vouches for it: the job may have loaded other weights since.
    """
    later = [one for one in found if one.step >= step]
    known = next((one for one in later if one.compared is not None), None)
    if known is not None and known.nonfinite:
        return NOT_FINITE
    spanned = _spanned(step, run.metrics)
    if spanned and not (known is not None and known.step == step):
        return f"after NaN or infinity in step {spanned:,}"
    if not compared and any(one.verified or one.part for one in later):
        return LOADED
    if any(one.verified for one in later):
        return GOOD
    if part := next((one.part for one in later if one.part), ""):
        return f"good as far as compared: {part}"
    if known is not None:
        return NOT_VERIFIABLE
    if (bad := _first_bad(step, run.metrics, found)) is not None:
        return f"after NaN or infinity in step {bad:,}"
    return NOT_RECORDED if later else UNCHECKED


def _first_bad(step: int, metrics: Metrics, found: Sequence[Checked]) -> int | None:
    """Return the first step up to ``step`` with NaN or infinity, after the last check that found all finite."""
    finite = max((one.step for one in found if one.finite), default=-1)
    bad = (*metrics.bad_losses, *metrics.bad_norms, *(one.step for one in found if one.nonfinite))
    return min((one for one in bad if finite < one <= step), default=None)


def _spanned(step: int, metrics: Metrics) -> int:
    """Return the last step up to ``step`` if its loss, and that of the next step, is not finite; else 0."""
    place = int(np.searchsorted(metrics.step, step, side="right"))
    around = [int(one) for one in metrics.step[max(0, place - 1) : place + 1]]
    return around[0] if len(around) == 2 and set(around) <= set(metrics.bad_losses) else 0


def _compared(run: RunNumbers) -> set[int]:
    """Return the ids of the saved events whose parameters were compared, at that step or later, before the job loaded
    again. A load makes ranks equal, whatever they held when they saved."""
    loads: list[list[RunEvent]] = [[]]
    for event in run.events:
        if event.kind == "start":
            loads.append([])
        loads[-1].append(event)
    newest = [max(map(_equal_up_to, load), default=-1) for load in loads]
    return {id(e) for load, step in zip(loads, newest) for e in load if e.kind == "saved" and e.step <= step}


def _equal_up_to(event: RunEvent) -> int:
    """Return the step up to which an event says that parameters were equal, finite or not; -1: it says nothing."""
    if event.kind == "diverged" and not event.audited:
        return min(_good_steps(event, ()))
    check = Checked.read({**event.data, "step": event.step}) if event.kind == "checked" else None
    known = check is not None and (check.covers or check._replace(nonfinite=()).verified or check.part)
    return event.step if known else -1


def _suspect(run: RunNumbers) -> set[int]:
    """Return the ids of the saved events that may hold a divergence: those after its last good step, up to the repair
    or the resume that has ended it."""
    saved = [(place, event) for place, event in enumerate(run.events) if event.kind == "saved"]
    suspect, equal = set(), list[int]()  # Steps of the checks so far that found all parameters equal.
    for place, event in enumerate(run.events):
        if event.kind == "checked" and not event.undone:
            equal += [one.step for one in checks_in([event], None) if one.verified]
        if event.kind == "diverged":
            least, over = min(_good_steps(event, equal)), event.undone or event.repaired
            suspect |= {id(one) for at, one in saved if one.step > least and (at < place or not over)}
    return suspect


def _good_steps(event: RunEvent, equal: Sequence[int]) -> list[int]:
    """Return the last good steps of a divergence. If they are not known, it may be as old as the last check before it
    that found all parameters equal. An audit is about its own step. ``equal``: the steps of the checks before it."""
    known = [one.get("last_good_step") for one in event.findings]
    unknown = event.step - 1 if event.audited else max((step for step in equal if step <= event.step), default=-1)
    return [step for step in known if type(step) is int] or [unknown]

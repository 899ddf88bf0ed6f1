"""What a run's numbers say, as sentences and plain values."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from fp8dist.checks.checked import Checked
from fp8dist.common.text import shortened
from fp8dist.runs.report.events import RunEvent, checks_in
from fp8dist.runs.report.numbers import RunNumbers

TROUBLE = ("nonfinite", "saturated", "fallback", "jump", "spike", "nonfinite_loss", "diverged")
"""Kinds of events that a sound run may not have, in the order in which they usually follow each other."""

ODD = 2.0
"""A rank is odd if it holds this many times its even share of the maxima."""

BEHIND = 0.5
"""The others wait for a rank that waits less than this share of the median wait."""

COMPARE = "compare with check_every= of prepare, or with fp8dist.check and recorder.log_check"
"""How a run gets checks."""


class Soundness(NamedTuple):
    """``state``: "sound", "unsound" or "unknown"."""

    state: str
    text: str
    more: tuple[str, ...] = ()


class OddRank(NamedTuple):
    """``shares``: float64[slots, ranks], how often each rank held the maximum of each of ``slots``."""

    slots: tuple[str, ...]
    shares: Any
    text: str


def goals(run: RunNumbers) -> dict[str, int | None]:
    """Return the newest steps that are proven, checked and done. None: there is none. A step is checked if parameters
    were compared, and are finite; of older runs what was compared is not known."""
    last = [int(run.metrics.step[-1])] if len(run.metrics.step) else []
    last += [] if run.slots.newest is None else [run.slots.newest]
    proven = run.metrics.newest("proven")
    return {
        "proven": None if proven is None else _step(proven),
        "checked": max((one.step for one in checks(run) if one.covers), default=None),
        "last": max(last, default=None),
    }


def checks(run: RunNumbers) -> list[Checked]:
    """Return the checks that found no difference, by step."""
    newest = run.metrics.newest("checked")
    return checks_in(run.events, None if newest is None else _step(newest))


def verdict(run: RunNumbers) -> Soundness:
    """Return one sentence about the soundness of the run, and further ones."""
    remarks, proof, at = tuple(_remarks(run)), _proof(run), goals(run)
    last = next(reversed(checks(run)), None)
    if trouble := next(_trouble(run, last), ""):
        return Soundness("unsound", f"Not sound: {trouble}", (f"Proven: {proof}", *remarks))
    if at["last"] is None or at["proven"] is None is at["checked"]:
        return Soundness("unknown", f"Not known: {proof}", remarks)
    if at["checked"] is None:
        hint = f"No check has compared parameters and optimizer: {COMPARE}."
        if last is not None and last.part:
            hint = f"No check has compared all parameters: the last one compared {last.part}."
        elif last is not None:
            hint = f"No check has compared parameters: {last.unverified.get('parameter', 'the run does not say why')}."
        remarks = (hint, *remarks)
    return Soundness("sound", f"Sound as far as it is proven: {proof}", remarks)


def _trouble(run: RunNumbers, last: Checked | None) -> Iterator[str]:
    """Yield what makes the run unsound. ``last``: the newest check."""
    yield from (event.sentence for event in _divergences(run) if not event.undone and not event.repaired)
    if run.metrics.bad_losses:
        yield f"the loss is not finite in step {run.metrics.bad_losses[0]}."
    if last is not None and last.nonfinite:
        yield f"a check after step {last.step} found {last.text}."


def _proof(run: RunNumbers) -> str:
    """Return what is proven up to which step."""
    at = goals(run)
    last, proven, checked = at["last"], at["proven"], at["checked"]
    if last is None:
        return "the run has no step yet."
    found = checks(run)
    if proven is None and not found:
        text = f"nothing in this folder proves that ranks agreed in any of its steps up to {last}"
        return f"{text}. Record with fp8dist.Recorder, and {COMPARE}."
    parts = []
    if proven is not None:
        parts.append(f"the sync has proven the FP8 state equal on all ranks up to step {proven}")
    if found:
        parts.append(f"after step {found[-1].step} a check found {found[-1].text}")
    newest = max((step for step in (proven, checked) if step is not None), default=None)
    if newest is None:
        return f"{', '.join(parts)}; no step is proven."
    rest = f"steps {newest + 1} to {last} are unproven" if newest + 1 < last else f"step {last} is unproven"
    rest = rest if newest < last else f"no step up to {last} is unproven"
    which = "the other parameters" if found and found[-1].part else "parameters"
    rest = rest if checked is not None else f"for the FP8 state, {rest}; {which} are unproven"
    return f"{', '.join(parts)}; {rest}."


def _remarks(run: RunNumbers) -> Iterator[str]:
    found = _divergences(run)
    if undone := [event for event in found if event.undone]:
        yield f"Before the run resumed from an earlier step: {undone[0].sentence}"
    if over := [event for event in found if not event.undone and event.repaired]:
        yield f"Repaired {len(over)} time(s), first: {over[0].sentence}"
    newest = next((event for event in reversed(run.events) if event.kind in ("start", "end")), None)
    if run.metrics.step.size and run.events and (newest is None or newest.kind == "start"):
        yield "The run has not ended: it goes on, or was killed."
    if newest is not None and newest.kind == "end" and newest.data.get("error") is not None:
        yield f"An error ended the run: {shortened(str(newest.data['error']))}."
    for name, count in run.left_out.items():
        yield f"{count} damaged line(s) of {name} are left out."


def _divergences(run: RunNumbers) -> list[RunEvent]:
    return [event for event in run.events if event.kind == "diverged"]


def story(run: RunNumbers) -> list[RunEvent]:
    """Return what happened, in the order of steps. Of a run without a loss guard, losses that are not finite, too."""
    events = list(run.events)
    if all(event.kind != "nonfinite_loss" for event in events):
        events += [RunEvent(step, "nonfinite_loss") for step in run.metrics.bad_losses[:1000]]
    return sorted(events, key=lambda event: event.step)


def validation_losses(run: RunNumbers) -> dict[int, float]:
    """Return the validation losses by step, which grows. A run logs them as a number, or as an event "evaluated"."""
    steps, numbers = run.metrics.step, run.metrics.columns["validation_loss"]
    found = {step: number for step, number in zip(steps.tolist(), numbers.tolist()) if not math.isnan(number)}
    for event in run.events:
        if not event.undone and (number := event.validation_loss) is not None:
            found[event.step] = number
    return dict(sorted(found.items()))


def replayed_text(run: RunNumbers, step: int) -> str:
    """Return what a replay of the trouble of a step found; "" if there was none."""
    about = [event for event in run.events if event.kind == "replayed" and not event.undone and event.step == step]
    return about[0].text if about else ""


def odd_rank(run: RunNumbers) -> OddRank | None:
    """Return how often each rank held the maxima; None if that was not recorded.

    Weights are left out: ranks hold equal ones, and of equal maxima the lowest rank is named.
    """
    rows = [(name, place) for name, place in run.slots.names.items() if not name.endswith(":weight")]
    held = run.slots.held[[place for _, place in rows]].astype(np.float64)
    seen = held.sum(1)
    if not held.size or not seen.any():
        return None
    shares = held[seen > 0] / seen[seen > 0][:, None]
    names = tuple(name for (name, _), many in zip(rows, seen) if many)
    mean = shares.mean(0)
    top, even = int(mean.argmax()), 1 / len(mean)
    text = (
        f"Rank {top} held the maximum most often: in {mean[top]:.0%} of the observations. An even share is {even:.0%}."
    )
    if len(mean) > 1 and mean[top] >= min(ODD * even, (1 + even) / 2):
        text += " Look at its data, its host and its seeds."
    return OddRank(names, shares, text)


def straggler(run: RunNumbers) -> str:
    """Return a sentence about the rank that the others wait for."""
    waits = run.waits
    if waits is None or len(waits.ranks) < 2 or np.isnan(waits.sync_wait_ms).all():
        return ""
    median, least = float(np.nanmedian(waits.sync_wait_ms)), int(np.nanargmin(waits.sync_wait_ms))
    own = float(waits.sync_wait_ms[least])
    hosts = run.folder.header.get("hosts")
    rank = waits.ranks[least]
    host = f" (host {shortened(str(hosts[rank]))})" if isinstance(hosts, list) and 0 <= rank < len(hosts) else ""
    if own < BEHIND * median and median - own > 1.0:
        return (
            f"The others wait for rank {rank}{host}: it waits {own:.2f} ms per step, the median rank {median:.2f} ms."
        )
    return f"No rank stands out: the waits are {own:.2f} to {float(np.nanmax(waits.sync_wait_ms)):.2f} ms per step."


def _step(value: float | None) -> int:
    return int(value) if value is not None and math.isfinite(value) else 0


def worst_slots(run: RunNumbers, most: int = 10) -> Sequence[tuple[str, float, float]]:
    """Return (slot, mean share underflow, mean share saturated) of the slots that lose most, the worst first."""
    with np.errstate(invalid="ignore", divide="ignore"):
        saturated, underflow = (run.slots.sums[:, :2] / run.slots.sums[:, 2:]).T
    loss = np.nan_to_num(saturated) + np.nan_to_num(underflow)
    names = list(run.slots.names)
    order = [int(i) for i in np.argsort(-loss, kind="stable")[:most] if loss[i] > 0]
    return [(names[i], float(underflow[i]), float(saturated[i])) for i in order]

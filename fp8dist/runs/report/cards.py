"""Tables of a report: checkpoints, and the card of a divergence."""

from __future__ import annotations

import struct
from collections.abc import Container, Iterator, Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from fp8dist.checks.checked import Checked
from fp8dist.common.numbers import from_json
from fp8dist.common.text import first_few, shortened
from fp8dist.runs.report.events import RunEvent
from fp8dist.runs.report.facts import checks
from fp8dist.runs.report.numbers import Metrics, RunNumbers

__all__ = ["bits_of", "checkpoint_table", "divergence_cards", "table"]

MOST_CARDS, MOST_SAVED = 4, 20

_FORMATS = (
    ("float32", ">f", ">I", 0),
    ("bfloat16", ">f", ">I", 16),
    ("float16", ">e", ">H", 0),
    ("float64", ">d", ">Q", 0),
)
"""(dtype, format of the number, format of its bits, bits that are left out at the end), as ``struct`` has them."""


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], numbers: Container[int] = ()) -> str:
    """Return a table. All texts are escaped, and shortened to 400 characters."""

    def cell(place: int, text: str) -> str:
        kind = ' class="number"' if place in numbers else ""
        return f"<td{kind}>{escape(shortened(text, 400))}</td>"

    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in heads)
    body = "".join(f"<tr>{''.join(cell(place, text) for place, text in enumerate(row))}</tr>" for row in rows)
    label = escape("table of " + ", ".join(heads))  # A region that scrolls can have the focus, so that keys scroll it.
    whole = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{label}">{whole}</div>'


def checkpoint_table(run: RunNumbers) -> Iterator[str]:
    """Yield a sentence about the newest good checkpoint, and the saved ones with their states."""
    saved = [event for event in run.events if event.kind == "saved" and not event.undone]
    if not saved:
        yield '<p class="empty">No checkpoint is recorded: Recorder notes each one that a job saves (--save-every).</p>'
        return
    suspect, found = _suspect(run), checks(run)
    states = [DIVERGED if id(event) in suspect else _state(event.step, run, found) for event in saved]
    good = [event for event, state in zip(saved, states) if state == GOOD]
    if good:
        path = escape(shortened(str(good[-1].data.get("path") or ""), 200))
        step = f"<strong>step {good[-1].step:,}</strong>"
        yield f"<p>The newest checkpoint that is known to be good is of {step} {path}. {_since(good[-1], found)}</p>"
    else:
        yield f"<p>No checkpoint is known to be good: {escape(_why_none(states[-1], found))}.</p>"
    rows = [
        (f"{event.step:,}", state, *(str(event.data.get(name) or "") for name in ("path", "digest")))
        for event, state in [*zip(saved, states)][: -MOST_SAVED - 1 : -1]
    ]
    yield table(("step", "state", "path", "digest"), rows, numbers=(0,))


GOOD, DIVERGED, NOT_FINITE, UNCHECKED = "good", "after a divergence", "not finite", "unchecked"
NOT_VERIFIABLE, NOT_RECORDED = "saved, not verifiable", "checked, not recorded what"


def _state(step: int, run: RunNumbers, found: Sequence[Checked]) -> str:
    """Return the state of a checkpoint without a divergence. ``found``: the run's checks, by step.

    A check after the checkpoint vouches for it, because ranks that differ stay so, and so do weights that are not
    finite. A loss or gradient norm that is not finite counts until a check finds the weights finite: a loss scaler may
    have skipped that step. If the losses before and after a checkpoint are not finite, no later check vouches for it:
    the job may have loaded other weights since.
    """
    later = [one for one in found if one.step >= step]
    known = next((one for one in later if one.compared is not None), None)
    if known is not None and known.nonfinite:
        return NOT_FINITE
    spanned = _spanned(step, run.metrics)
    if spanned and not (known is not None and known.step == step):
        return f"after NaN or infinity in step {spanned:,}"
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


def _since(event: RunEvent, found: Sequence[Checked]) -> str:
    check = next(one for one in found if one.verified and one.step >= event.step)
    return escape(f"After step {check.step:,} a check found {shortened(check.text, 200)}.")


def _why_none(newest: str, found: Sequence[Checked]) -> str:
    """Return why no checkpoint is good. ``newest``: the state of the newest."""
    about = f"after step {found[-1].step:,} a check found {shortened(found[-1].text, 200)}" if found else ""
    if newest == NOT_VERIFIABLE:
        return f"they are saved, not verifiable, because {about}"
    return about or "no check came after one and found parameters equal and finite"


def _suspect(run: RunNumbers) -> set[int]:
    """Return the ids of the saved events that may hold a divergence: those after its last good step, up to the repair
    or the resume that has ended it."""
    saved = [(place, event) for place, event in enumerate(run.events) if event.kind == "saved"]
    found = set()
    for place, event in enumerate(run.events):
        if event.kind == "diverged":
            least, over = min(_good_steps(event)), event.undone or event.repaired
            found |= {id(one) for at, one in saved if one.step > least and (at < place or not over)}
    return found


def _good_steps(event: RunEvent) -> list[int]:
    """Return the last good steps of a divergence; the step before it if they are not known."""
    known = [one.get("last_good_step") for one in event.findings]
    return [step for step in known if type(step) is int] or [event.step - 1]


def divergence_cards(run: RunNumbers) -> Iterator[str]:
    """Yield a card for each of the first divergences."""
    found = [event for event in run.events if event.kind == "diverged"]
    for event in found[:MOST_CARDS]:
        undone = " (undone by a resume)" if event.undone else ""
        yield f"<h3>Divergence{undone}: {escape(event.sentence)}</h3>"
        rows = [_row(one) for one in event.findings]
        if rows:
            yield table([*rows[0]], [[*row.values()] for row in rows], numbers=(7, 8, 10))
    if len(found) > MOST_CARDS:
        yield f'<p class="note">and {len(found) - MOST_CARDS} more divergences.</p>'


def _row(one: Mapping[str, Any]) -> dict[str, str]:
    """Return a row of the table, by column."""
    value, expected, ulp = (one.get(name) for name in ("value", "expected", "ulp"))
    reference = one.get("reference_rank")
    return {
        "kind": _text(one.get("kind")),
        "name": _text(one.get("name")),
        "ranks": _few(one.get("ranks")),
        "hosts": _few(one.get("hosts")),
        "reference": "no majority" if reference is None else _text(reference),
        "field": _text(one.get("field")),
        "index": _few(one.get("index")),
        "value": _text(value),
        "expected": _text(expected),
        "bits of both": bits_of(value, expected, ulp if type(ulp) is int else None) or _text(one.get("detail")),
        "ULP": _text(ulp),
    }


def bits_of(value: Any, expected: Any, ulp: int | None) -> str:
    """Return the bit patterns of two floats in hex, as "float32 41a00000 against 41a00001"; "" if they are no floats.

    The report has numbers without their dtype. It is the one in which they are ``ulp`` apart.
    """
    if not any(isinstance(one, float) for one in (value, expected)) or isinstance(value, bool):
        return ""
    pair = [from_json(one) for one in (value, expected)]
    if any(one != one for one in pair):
        return ""
    for dtype, number, word, dropped in _FORMATS:
        patterns = _patterns(pair, number, word)
        if not patterns or any(pattern & ((1 << dropped) - 1) for pattern in patterns):
            continue
        size = struct.calcsize(number) * 8 - dropped
        short = [pattern >> dropped for pattern in patterns]
        ordered = [one if not one >> (size - 1) else (1 << (size - 1)) - one for one in short]
        if ulp is None or abs(ordered[0] - ordered[1]) == abs(ulp):
            return f"{dtype} {short[0]:0{size // 4}x} against {short[1]:0{size // 4}x}"
    return ""


def _patterns(values: Sequence[float], number: str, word: str) -> list[int]:
    """Return the bits of the values in a format of ``struct``; nothing if it does not hold them exactly."""
    try:
        packed = [struct.pack(number, one) for one in values]
    except OverflowError:
        return []
    exact = [struct.unpack(number, one)[0] for one in packed] == [*values]
    return [struct.unpack(word, one)[0] for one in packed] if exact else []


def _text(value: Any) -> str:
    return "" if value is None else shortened(str(value), 200)


def _few(value: Any) -> str:
    return first_few([shortened(str(one)) for one in value], 8, none="") if isinstance(value, list) else _text(value)

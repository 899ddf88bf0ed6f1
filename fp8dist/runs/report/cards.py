"""Tables of a report: checkpoints, and the card of a divergence."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from fp8dist.checks.checked import Checked
from fp8dist.common.numbers import from_json
from fp8dist.common.text import first_few, shortened
from fp8dist.runs.report.checkpoints import GOOD, saved_checkpoints, why_none
from fp8dist.runs.report.events import RunEvent
from fp8dist.runs.report.facts import checks
from fp8dist.runs.report.numbers import RunNumbers

MOST_CARDS, MOST_SAVED, SHOWN_DIGEST = 4, 20, 12

LONG_WORD = 20
"""A cell with a longer word, such as a path, may break within words; others do not."""

_FORMATS = (("float32", np.float32, 0), ("bfloat16", np.float32, 16), ("float16", np.float16, 0), ("float64", float, 0))
"""(dtype, numpy's type that holds it, bits that are left out at the end)."""


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], numbers: Container[int] = ()) -> str:
    """Return a table. All texts are escaped, and shortened to 400 characters."""

    def cell(place: int, text: str) -> str:
        long = max(map(len, text.split()), default=0) > LONG_WORD
        kind = ' class="number"' if place in numbers else ' class="long"' if long else ""
        return f"<td{kind}>{escape(shortened(text, 400))}</td>"

    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in heads)
    body = "".join(f"<tr>{''.join(cell(place, text) for place, text in enumerate(row))}</tr>" for row in rows)
    label = escape("table of " + ", ".join(heads))  # A region that scrolls can have the focus, so that keys scroll it.
    whole = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{label}">{whole}</div>'


def checkpoint_table(run: RunNumbers) -> Iterator[str]:
    """Yield a sentence about the newest good checkpoint, and the saved ones with their states."""
    saved = saved_checkpoints(run)
    if not saved:
        yield f'<p class="empty">{escape(why_none(run, saved))}.</p>'
        return
    good = [one.event for one in saved if one.state == GOOD]
    if good:
        path = escape(shortened(str(good[-1].data.get("path") or ""), 200))
        step = f"<strong>step {good[-1].step:,}</strong>"
        since = _since(good[-1], checks(run))
        yield f"<p>The newest checkpoint that is known to be good is of {step} {path}. {since}</p>"
    else:
        yield f"<p>No checkpoint is known to be good: {escape(why_none(run, saved))}.</p>"
    rows = [
        (
            f"{event.step:,}",
            state,
            str(event.data.get("path") or ""),
            str(event.data.get("digest") or "")[:SHOWN_DIGEST],
        )
        for event, state in saved[: -MOST_SAVED - 1 : -1]
    ]
    yield table(("step", "state", "path", "digest"), rows, numbers=(0,))


def _since(event: RunEvent, found: Sequence[Checked]) -> str:
    check = next(one for one in found if one.verified and one.step >= event.step)
    return escape(f"After step {check.step:,} a check found {shortened(check.text, 200)}.")


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
    for dtype, number, dropped in _FORMATS:
        with np.errstate(over="ignore"):
            held = np.array(pair).astype(number)
        patterns = held.view(f"u{held.itemsize}").tolist()
        if held.tolist() != pair or any(pattern & ((1 << dropped) - 1) for pattern in patterns):
            continue
        size = held.itemsize * 8 - dropped
        short = [pattern >> dropped for pattern in patterns]
        ordered = [one if not one >> (size - 1) else (1 << (size - 1)) - one for one in short]
        if ulp is None or abs(ordered[0] - ordered[1]) == abs(ulp):
            return f"{dtype} {short[0]:0{size // 4}x} against {short[1]:0{size // 4}x}"
    return ""


def _text(value: Any) -> str:
    return "" if value is None else shortened(str(value), 200)


def _few(value: Any) -> str:
    return first_few([shortened(str(one)) for one in value], 8, none="") if isinstance(value, list) else _text(value)

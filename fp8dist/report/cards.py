"""Tables of a report: checkpoints, and the card of a divergence."""

from __future__ import annotations

import struct
from collections.abc import Container, Iterator, Mapping, Sequence
from html import escape
from typing import Any

from fp8dist.monitoring.run_format import from_json
from fp8dist.report.facts import diverged_text, findings, goals, repaired, shortened
from fp8dist.report.numbers import Run
from fp8dist.text import first_few

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


def checkpoint_table(run: Run) -> Iterator[str]:
    """Yield a sentence about the newest good checkpoint, and the saved ones."""
    saved = [event for event in run.events if event.kind == "saved" and not event.undone]
    if not saved:
        yield '<p class="empty">No checkpoint is recorded: Recorder notes each one that a job saves (--save-every).</p>'
        return
    checked = goals(run)["checked"]
    suspect = _suspect(run)
    good = [event for event in saved if checked is not None and event.step <= checked and id(event) not in suspect]
    if good:
        path = escape(shortened(str(good[-1].data.get("path") or ""), 200))
        step = f"<strong>step {good[-1].step:,}</strong>"
        yield f"<p>The newest checkpoint that is known to be good is of {step} {path}.</p>"
    else:
        yield "<p>No checkpoint is known to be good: no check came after one and found everything equal.</p>"
    known = {id(event) for event in good}
    rows = [
        (
            f"{event.step:,}",
            "good" if id(event) in known else "after a divergence" if id(event) in suspect else "unchecked",
            str(event.data.get("path") or ""),
            str(event.data.get("digest") or ""),
        )
        for event in saved[: -MOST_SAVED - 1 : -1]
    ]
    yield table(("step", "state", "path", "digest"), rows, numbers=(0,))


def _suspect(run: Run) -> set[int]:
    """Return the ids of the saved events that may hold a divergence: those after its last good step, up to the repair
    or the resume that has ended it."""
    saved = [(place, event) for place, event in enumerate(run.events) if event.kind == "saved"]
    found = set()
    for place, event in enumerate(run.events):
        if event.kind == "diverged":
            least, over = min(_good_steps(event)), event.undone or repaired(event)
            found |= {id(one) for at, one in saved if one.step > least and (at < place or not over)}
    return found


def _good_steps(event: Any) -> list[int]:
    """Return the last good steps of a divergence; the step before it if they are not known."""
    known = [one.get("last_good_step") for one in findings(event)]
    return [step for step in known if type(step) is int] or [event.step - 1]


def divergence_cards(run: Run) -> Iterator[str]:
    """Yield a card for each of the first divergences."""
    found = [event for event in run.events if event.kind == "diverged"]
    for event in found[:MOST_CARDS]:
        undone = " (undone by a resume)" if event.undone else ""
        yield f"<h3>Divergence{undone}: {escape(diverged_text(event))}</h3>"
        rows = [_row(one) for one in findings(event)]
        heads = (
            "kind",
            "name",
            "ranks",
            "hosts",
            "reference",
            "field",
            "index",
            "value",
            "expected",
            "bits of both",
            "ULP",
        )
        if rows:
            yield table(heads, rows, numbers=(7, 8, 10))
    if len(found) > MOST_CARDS:
        yield f'<p class="note">and {len(found) - MOST_CARDS} more divergences.</p>'


def _row(one: Mapping[str, Any]) -> tuple[str, ...]:
    value, expected, ulp = (one.get(name) for name in ("value", "expected", "ulp"))
    reference = one.get("reference_rank")
    bits = bits_of(value, expected, ulp if type(ulp) is int else None)
    return (
        _text(one.get("kind")),
        _text(one.get("name")),
        _few(one.get("ranks")),
        _few(one.get("hosts")),
        "no majority" if reference is None else _text(reference),
        _text(one.get("field")),
        _few(one.get("index")),
        _text(value),
        _text(expected),
        bits or _text(one.get("detail")),
        _text(ulp),
    )


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
        try:
            patterns = [struct.unpack(word, struct.pack(number, one))[0] for one in pair]
            exact = all(struct.unpack(number, struct.pack(number, one))[0] == one for one in pair)
        except OverflowError:
            continue
        if not exact or any(pattern & ((1 << dropped) - 1) for pattern in patterns):
            continue
        size = struct.calcsize(number) * 8 - dropped
        short = [pattern >> dropped for pattern in patterns]
        ordered = [one if not one >> (size - 1) else (1 << (size - 1)) - one for one in short]
        if ulp is None or abs(ordered[0] - ordered[1]) == abs(ulp):
            return f"{dtype} {short[0]:0{size // 4}x} against {short[1]:0{size // 4}x}"
    return ""


def _text(value: Any) -> str:
    return "" if value is None else shortened(str(value), 200)


def _few(value: Any) -> str:
    return first_few([shortened(str(one)) for one in value], 8, none="") if isinstance(value, list) else _text(value)

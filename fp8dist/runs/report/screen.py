"""The screen of ``fp8dist watch``: a LiveRun as lines of text, with rich. And as one line, without it."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from statistics import median
from typing import TYPE_CHECKING

from fp8dist.common.text import placed, shortened
from fp8dist.runs.report.events import RunEvent
from fp8dist.runs.report.live import MAX_TEXT, LiveRun, NewestOfSlot, RankWait, clean

if TYPE_CHECKING:
    from rich.text import Text

MOST_SLOTS, LEAST_SLOTS, MOST_RANKS = 10, 3, 8
"""Slots that are shown if the terminal has the lines, and if it has few; ranks."""

STUCK_AFTER = 10.0
"""Seconds without a step, and as many times the last step's duration, after which the screen says so."""

_BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int) -> str:
    """Return the last ``width`` values as bars between their least and largest one; "!" if not finite."""
    shown = list(values)[-width:] if width > 0 else []
    finite = [value for value in shown if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    span = high - low if math.isfinite(high - low) and high > low else math.inf
    return "".join(_BARS[round((v - low) / span * 7)] if math.isfinite(v - low) else "!" for v in shown)


def stuck(run: LiveRun) -> str:
    """Return "no step for N s" if the job seems to be stuck, or is over; else ""."""
    if run.step is None:
        return "no step yet"
    idle = run.idle()
    step = run.step_ms if run.step_ms is not None and math.isfinite(run.step_ms) else 0.0
    if run.ended:
        return "the run has ended"
    return f"no step for {idle:.0f} s" if idle > max(STUCK_AFTER, STUCK_AFTER * step / 1e3) else ""


def one_line(run: LiveRun, since: int = 0) -> str:
    """Return the present state as one line. ``since``: events before, which are not shown again."""
    _, sound = run.sound
    parts = [f"step {_count(run.step)}", f"loss {_number(run.loss)}", _validation(run)]
    parts += [f"{_number(run.step_ms)} ms", sound]
    parts.append(run.idle_experts)
    parts += [f"worst slot {slot.name}: {slot.what}{_at(slot)}" for slot in run.troubled(1)]
    new = list(run.events)[-(run.event_count - since) :] if run.event_count > since else []
    parts += [
        f"{clean(event.kind)} in step {_count(event.step)}: {clean(event.beside_kind, MAX_TEXT)}" for event in new[-3:]
    ]
    return "  ".join(part for part in (*parts, stuck(run)) if part)


def screen(run: LiveRun, width: int, height: int) -> list[Text]:
    """Return the lines of the screen, at most ``height``, none wider than ``width``."""
    from rich.text import Text

    known, sound = run.sound
    style = {True: "green", False: "bold red", None: "yellow"}[known]
    held_up, waits = stuck(run), list(_waits(run.waits))
    slots = run.troubled(min(MOST_SLOTS, max(LEAST_SLOTS, height - 12)))
    inside = _common_module([slot.name.rpartition(":")[0] for slot in slots])
    losses = "  ".join(part for part in (f"loss {_number(run.loss)}", _validation(run)) if part)
    lines = [
        Text("  ".join(run.title), "bold"),
        Text.assemble(
            (f"step {_count(run.step)}   ", "bold"),
            (f"{held_up}   " if held_up else "", "bold yellow"),
            f"{_number(run.step_ms)} ms per step   gradient norm {_number(run.grad_norm)}",
        ),
        Text.assemble((losses, "bold"), "  ", (sparkline(run.losses, max(10, width - len(losses) - 2)), "cyan")),
        Text.assemble((sound, style), "   ", (run.idle_experts, "yellow")),
    ]
    if slots:
        lines += [_rule(f"slots in trouble{' in ' * bool(inside)}{shortened(inside, max(8, width - 30))}", width)]
        lines += _slot_lines(slots, len(inside) + bool(inside), width)
    elif observed := len(run.observed()):
        lines.append(Text(f"no slot is in trouble, of {observed:,} observed", "dim"))
    else:
        lines.append(Text("no slots yet: fp8dist.Recorder(folder, manager, every=…) writes scales.jsonl", "dim"))
    if waits:
        lines += [_rule("waits in the sync, ms per step: who waits least is waited for", width)]
        lines += [Text(text) for text in _in_columns(waits, width)]
    room = height - len(lines) - 2
    if room > 0 and run.events:
        lines.append(_rule("events", width))
        lines += [_event_line(event, width) for event in run.events[-room:]]
    lines = [*lines[: max(1, height - 1)], Text("Ctrl-C ends the view, not the run", "dim")]
    for line in lines:
        line.rstrip()
        line.truncate(width, overflow="ellipsis")
        line.no_wrap = True
    return lines[:height]


def _rule(title: str, width: int) -> Text:
    from rich.text import Text

    return Text(f"── {title} ".ljust(width, "─"), "dim")


def _common_module(modules: Sequence[str]) -> str:
    """Return the module that all these modules are inside of, or ""."""
    parents = [module.split(".")[:-1] for module in modules]
    if len(set(modules)) < 2:
        return ""
    return ".".join(os.path.commonprefix(parents))  # noqa: RUF071  (lists: part by part)


def _slot_lines(slots: Sequence[NewestOfSlot], skip: int, width: int) -> list[Text]:
    """Return a line per slot: name, role, trouble, and where if there is room. Long names lose their middle.

    ``skip``: characters at the start of all names that are left out.
    """
    from rich.cells import set_cell_size
    from rich.text import Text

    cells = []
    for slot in slots:
        module, _, role = slot.name.rpartition(":")
        cells.append((module[skip:], shortened(role, 12), shortened(slot.what, 20), _at(slot).removeprefix(", ")))
    widths = [max((len(cell[i]) for cell in cells), default=0) for i in range(4)]
    place = widths[3] if width - sum(widths[1:]) - 6 >= 20 else 0
    room = max(8, min(widths[0], width - widths[1] - widths[2] - place - 6))
    styles = ("bold red", "red", "yellow", "yellow")
    return [
        Text.assemble(
            set_cell_size(shortened(module, room), room) + "  ",
            (f"{role:<{widths[1]}}  ", "dim"),
            (f"{what:<{widths[2]}}  ", styles[slot.trouble.rank_of_kind]),
            (where if place else "", "dim"),
        )
        for slot, (module, role, what, where) in zip(slots, cells)
    ]


def _event_line(event: RunEvent, width: int) -> Text:
    """Return a line whose text loses its middle, because a rank or a step stands at the end."""
    from rich.text import Text

    bad = event.kind in ("diverged", "nonfinite", "nonfinite_loss")
    step, kind = f"step {_count(event.step)}  ", clean(event.kind)
    text = shortened(clean(event.beside_kind, MAX_TEXT), max(20, width - len(step) - len(kind) - 2))
    return Text.assemble(step, (kind, "bold red" if bad else "bold"), f"  {text}")


def _waits(waits: Sequence[RankWait]) -> Iterator[str]:
    """Yield a text per rank. Of many ranks only those that wait least and most, and the median."""
    known = sorted((one for one in waits if math.isfinite(one.wait)), key=lambda one: one.wait)
    shown = known
    if len(waits) > MOST_RANKS:
        half = MOST_RANKS // 2
        shown = [*known[:half], *known[max(half, len(known) - half) :]]
    yield from (f"rank {_count(one.rank)}: {_number(one.wait, 3)}" for one in shown)
    if len(waits) > len(shown):
        middle = f", median {_number(median(one.wait for one in known), 3)}" if known else ""
        yield f"and {len(waits) - len(shown)} more{middle}"


def _in_columns(texts: Sequence[str], width: int) -> list[str]:
    """Return the texts side by side, as many to a line as fit."""
    wide = max(map(len, texts)) + 3
    each = max(1, width // wide)
    return ["".join(f"{text:<{wide}}" for text in texts[i : i + each]).rstrip() for i in range(0, len(texts), each)]


def _at(slot: NewestOfSlot) -> str:
    return placed(*(None if number is None else _count(number) for number in slot.place))


def _validation(run: LiveRun) -> str:
    found = run.validation
    return "" if found is None else f"validation loss {_number(found[1])} (step {_count(found[0])})"


def _number(value: float | None, digits: int = 4) -> str:
    return "-" if value is None else f"{value:.{digits}g}"


def _count(number: int | None) -> str:
    return "-" if number is None else shortened(str(number), 20)

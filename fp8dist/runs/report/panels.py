"""The panels of a report. Each answers a question, or says what to switch on."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

import numpy as np

from fp8dist.checks.checked import Checked
from fp8dist.common.text import shortened
from fp8dist.runs.report import facts, plots
from fp8dist.runs.report.cards import checkpoint_table, divergence_cards, table
from fp8dist.runs.report.events import RunEvent
from fp8dist.runs.report.experts import idle_experts, relative_loads
from fp8dist.runs.report.heat import heat_of, picture
from fp8dist.runs.report.numbers import RunNumbers
from fp8dist.runs.report.parting import Parting
from fp8dist.runs.report.precision import FORMULA, GEMMS, modules_of, use_of
from fp8dist.runs.report.rows import QUANTITIES, Rows, rows_of

MOST_ROWS, MOST_MODULES, MOST_RANKS = 24, 512, 256
"""Rows of the table of events; modules and columns of ranks that are drawn."""


class Plot(NamedTuple):
    """A Bokeh figure with its accessible name."""

    name: str
    label: str
    model: Any


class Panel(NamedTuple):
    """``parts``: HTML and plots, in their order. ``arguments``: models that page.js gets."""

    anchor: str
    question: str
    parts: Sequence[str | Plot]
    arguments: Mapping[str, Any] = {}


def panels_of(run: RunNumbers, other: RunNumbers | None, parting: Parting | None) -> list[Panel]:
    """Return all panels. The last one compares with ``other``."""
    found = [
        Panel("sound", "Is this run sound?", list(_sound(run))),
        _losing(run),
        Panel("first", "What came first?", list(_first(run))),
        Panel("odd", "Is one rank odd?", list(_odd(run))),
        Panel("back", "What can I go back to?", list(_back(run))),
        Panel("fp8", "Am I getting my FP8?", list(_fp8(run))),
    ]
    if run.mixtures:
        found.append(Panel("experts", "Do all experts get tokens?", list(_experts(run))))
    if other is not None and parting is not None:
        found.append(Panel("part", "Where did these two runs part?", list(_parted(run, other, parting))))
    return found


def _empty(text: str) -> str:
    return f'<p class="empty">{escape(text)}</p>'


def _note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>'


def _sound(run: RunNumbers) -> Iterator[str | Plot]:
    found = facts.verdict(run)
    yield f'<p class="verdict {found.state}" role="status">{escape(found.text)}</p>'
    yield "".join(f"<p>{escape(text)}</p>" for text in found.more)


# Which layer is losing numbers? -----------------------------------------------------------------------


def _losing(run: RunNumbers) -> Panel:
    anchor, question = "losing", "Which layer is losing numbers?"
    rows = rows_of(run)
    if rows is None:
        hint = "scales.jsonl has no observation. Record with fp8dist.Recorder(folder, manager, every=10)."
        return Panel(anchor, question, [_empty(hint)])
    heat = heat_of(rows)
    parts: list[str | Plot] = [_about_rows(run, rows), _controls(), '<div class="maps">']
    for role, made in heat.maps.items():
        parts += [f'<div class="plot"><h3>{escape(role)}</h3>']
        parts += [Plot(f"map-{role}", f"heat map of {role}: slots by steps. Choose a slot in the list below.", made)]
        parts += ["</div>"]
    parts += [
        "</div>",
        *_pictures(rows),
        _chooser(rows),
        '<h3 id="slot-name"></h3><p id="slot-facts" role="status"></p>',
    ]
    labels = ("amax of the slot against the window of its format", "scale of the slot", "rank that held the maximum")
    parts += [Plot(f"slot-{i}", label, made) for i, (label, made) in enumerate(zip(labels, heat.slot))]
    parts.append(_note(_HOW_TO_READ))
    worst = facts.worst_slots(run)
    if worst:
        lines = [(name, f"{under:.4%}", f"{over:.4%}") for name, under, over in worst]
        parts += ["<h3>Slots that lose most, means over the run</h3>"]
        parts.append(table(("slot", "underflow", "saturation"), lines, numbers=(1, 2)))
    return Panel(anchor, question, parts, heat.arguments)


_HOW_TO_READ = (
    "The blue band holds the values that the format represents with full precision at this scale, the orange band "
    "below it the subnormal ones. Elements beyond the largest value saturate; those below the smallest become zero. "
    "Triangles mark jumps of the scale by a factor of 2 or more."
)


def _about_rows(run: RunNumbers, rows: Rows) -> str:
    text = f"{run.slots.observations:,} observations of {len(run.slots.names):,} slots. "
    if rows.width > 1:
        text += f"A column has {rows.width:,} steps, and shows the worst of them; below, that with the largest amax. "
    if rows.left_out:
        text += f"The {rows.left_out:,} slots that lose least are left out. "
    if not any(row.format for row in rows.rows):
        text += "Headroom is empty: run.json does not say which format each slot has. "
    return _note(text + "Blank: no observation. Bright: trouble. Click a slot, or choose it in the list.")


def _controls() -> str:
    radios = "".join(
        f'<label><input type="radio" name="quantity" value="{one.name}"{" checked" if not i else ""}> '
        f"{escape(one.title)}</label>"
        for i, one in enumerate(QUANTITIES)
    )
    return f'<fieldset class="controls"><legend>Shown in the heat maps</legend>{radios}</fieldset>'


def _chooser(rows: Rows) -> str:
    groups = []
    for role in rows.roles():
        part = rows.of_role(role)
        options = "".join(
            f'<option value="{place}">{escape(shortened(rows.rows[place].name, 200))}</option>'
            for place in range(part.start, part.stop)
        )
        groups.append(f'<optgroup label="{escape(role)}">{options}</optgroup>')
    return (
        f'<p class="controls chooser"><label for="slot">Slot</label> <select id="slot">{"".join(groups)}</select></p>'
    )


def _pictures(rows: Rows) -> Iterator[str]:
    """Yield the heat maps as pictures, which are there in print only."""
    for quantity in QUANTITIES:
        for role in rows.roles():
            if np.isnan(rows.arrays[quantity.name][rows.of_role(role)]).all():
                continue
            data = base64.b64encode(picture(rows, quantity, role)).decode()
            last = rows.start + rows.width * rows.arrays["amax"].shape[1] - 1
            text = escape(f"{role}, {quantity.title}. Steps {rows.start} to {last} from left to right, slots by name.")
            shown = f'<img alt="{text}" src="data:image/png;base64,{data}">'
            yield f'<figure class="print">{shown}<figcaption>{text}</figcaption></figure>'


# What came first? -------------------------------------------------------------------------------------


def _first(run: RunNumbers) -> Iterator[str | Plot]:
    points, metrics = facts.story(run), run.metrics
    trouble = [point for point in points if point.kind in facts.TROUBLE and not point.undone]
    if trouble:
        yield f"<p>First: step {trouble[0].step}, {escape(trouble[0].text)}.</p>"
        replayed = facts.replayed_text(run, trouble[0].step)
        yield f"<p><strong>{escape(replayed[0].upper() + replayed[1:])}.</strong></p>" if replayed else ""
    else:
        yield "<p>No trouble is recorded: all losses are finite; no fallback, jump, spike or divergence.</p>"
    if norms := metrics.bad_norms:
        steps = f"{len(norms):,} step{'s' * (len(norms) > 1)}, first in step {norms[0]:,}"
        yield _note(f"The gradient norm is not finite in {steps}. A loss scaler skips such steps.")
    share: dict[str, Any] = {}
    for field, title, bad in (("loss", "loss", metrics.bad_losses), ("grad_norm", "gradient norm", metrics.bad_norms)):
        if np.isnan(metrics.columns[field]).all():
            why = "finite." if bad else f"recorded. Log it: recorder.log(step, {field}=…)."
            yield _empty(f"No {title} is {why}")
            continue
        named = {title: (metrics.step, metrics.columns[field])}
        if field == "loss" and (validation := facts.validation_losses(run)):
            named["validation loss"] = (np.array([*validation]), np.array([*validation.values()]))
        made = plots.curves(named, 240, title, **share)
        share = {"x_range": made.x_range}
        yield Plot(field, f"{title} by step", made)
    if points:
        kinds = {plots.plain(kind): kind for kind in sorted({point.kind for point in points}, key=_lane)[:16]}
        made = plots.lanes(points, list(kinds.values()), **share)
        yield Plot("events", "events by step, a lane for each kind", made)
        rows = [
            (f"{one.step:,}", one.kind, one.text + (" (undone by a resume)" if one.undone else "")) for one in points
        ]
        drawn = ("checked", "saved", *(("evaluated",) if len(points) > MOST_ROWS else ()))
        interesting = [row for row, one in zip(rows, points) if one.kind not in drawn]
        yield table(("step", "kind", "what"), interesting[:MOST_ROWS], numbers=(0,))
        if len(interesting) > MOST_ROWS:
            yield _note(f"and {len(interesting) - MOST_ROWS:,} more.")
    if not run.events:
        yield _empty("events.jsonl is missing or empty. fp8dist.Recorder writes it, with a LossGuard also spikes.")


def _lane(kind: str) -> tuple[int, str]:
    order = ("start", *facts.TROUBLE, "replayed", "checked", "saved", "end")
    return (order.index(kind) if kind in order else len(order), kind)


# Is one rank odd? -------------------------------------------------------------------------------------


def _odd(run: RunNumbers) -> Iterator[str | Plot]:
    held = facts.odd_rank(run)
    if held is None:
        yield _empty("Who held the maxima is not recorded: record with fp8dist.Recorder(…, every=10, ranks=True).")
    else:
        yield f"<p>{escape(held.text)}</p>"
        slots, shares, columns = held.slots, held.shares, [str(rank) for rank in range(held.shares.shape[1])]
        if shares.shape[1] > MOST_RANKS:
            each = -(-shares.shape[1] // MOST_RANKS)
            shares = np.add.reduceat(shares, range(0, shares.shape[1], each), axis=1)
            columns = [f"{rank} to {rank + each - 1}" for rank in range(0, held.shares.shape[1], each)]
        most = np.argsort(-shares.max(1), kind="stable")[:MOST_MODULES]
        keep = np.sort(most)
        made = plots.matrix(
            shares[keep], [slots[i] for i in keep], columns, plots.mapper_of(0, 1), "share of observations", "rank"
        )
        yield Plot("held", "share of the observations in which each rank held the maximum, slots by ranks", made)
        yield _note("Weights are left out: ranks hold equal ones, and of equal maxima the lowest rank is named.")
    waits = run.waits
    if waits is None:
        yield _empty("Waits of the ranks are not recorded: fp8dist.Recorder writes ranks.jsonl (ranks=True).")
        return
    if np.isnan(waits.rows).all():
        yield _empty("No sync was timed, so no rank is known to wait: this recipe has none, or the run was too short.")
        return
    yield f"<p>{escape(facts.straggler(run))}</p>"
    rows = [f"rank {rank}" for rank in waits.ranks]
    top = float(np.nanmax(waits.rows))
    made = plots.matrix(
        waits.rows.T, rows, [str(step) for step in waits.steps], plots.mapper_of(0, top), "ms in the sync", "step"
    )
    yield Plot("waits", "milliseconds that each rank waited in the sync, ranks by steps", made)
    order = np.argsort(np.nan_to_num(waits.sync_wait_ms, nan=np.inf))[:MOST_ROWS]
    lines = [(str(waits.ranks[i]), f"{waits.sync_wait_ms[i]:.3f}", f"{waits.step_ms[i]:.1f}") for i in order]
    yield table(("rank", "waits, ms per step", "step, ms"), lines, numbers=(0, 1, 2))


# What can I go back to? -------------------------------------------------------------------------------


def _back(run: RunNumbers) -> Iterator[str | Plot]:
    at = facts.goals(run)
    points = [
        one for one in run.events if one.kind in _STATES and (one.kind != "checked" or Checked.read(one.data).covers)
    ]
    spans = [(kind, 0, last) for kind in _STATES if (last := at.get(kind)) is not None]
    there = {(one.step, one.kind) for one in points if not one.undone}
    points += [RunEvent(last, kind) for kind, _, last in spans if (last, kind) not in there]
    yield from checkpoint_table(run)
    if points:
        kinds = [kind for kind in _STATES if any(point.kind == kind for point in points)]
        yield Plot("back", "proven, checked and saved steps", plots.lanes(points, kinds, spans))
    else:
        yield _empty(
            f"No step is proven, checked or saved. Record with fp8dist.Recorder, {facts.COMPARE}, and note what you "
            'save: recorder.event("saved", step, path=…).'
        )
    yield from divergence_cards(run)


_STATES = ("proven", "checked", "saved", "diverged")


# Am I getting my FP8? ---------------------------------------------------------------------------------


def _fp8(run: RunNumbers) -> Iterator[str | Plot]:
    modules, use = modules_of(run.folder.header), use_of(run)
    share = "not known" if use.share is None else f"{use.share:.1%}"
    mfu = f"N/A: {use.why}" if use.mfu is None else f"{use.mfu:.1%}"
    yield f"<p>FLOPs of Linears in FP8: <strong>{share}</strong>. MFU: <strong>{escape(mfu)}</strong>.</p>"
    yield _note(FORMULA)
    if not modules:
        yield _empty("run.json lists no modules. fp8dist.Recorder(folder, manager) writes it.")
        return
    kinds = {"fp8": 1.0, "high": 0.0, "": np.nan}
    values = np.array([[kinds[gemm] for gemm in module.gemms] for module in modules[:MOST_MODULES]])
    names = [module.name for module in modules[:MOST_MODULES]]
    made = plots.matrix(values, names, GEMMS, plots.two_colours(), "1: FP8, 0: high precision", "GEMM", bar=False)
    yield '<p class="note">Blue: FP8. Orange: high precision. Blank: unknown.</p>'
    yield Plot("precision", "precision of each GEMM, modules by GEMMs", made)
    if len(modules) > MOST_MODULES:
        yield _note(f"The first {MOST_MODULES} of {len(modules):,} modules.")
    high = [one for one in modules if "high" in one.gemms]
    if high:
        lines = [
            (one.name, ", ".join(gemm for gemm, kind in zip(GEMMS, one.gemms) if kind == "high"), one.reason)
            for one in high[:MOST_ROWS]
        ]
        yield "<h3>In high precision</h3>"
        yield table(("module", "GEMMs", "reason"), lines)
        yield _note(f"and {len(high) - MOST_ROWS:,} more.") if len(high) > MOST_ROWS else ""


# Do all experts get tokens? ---------------------------------------------------------------------------


def _experts(run: RunNumbers) -> Iterator[str | Plot]:
    mixtures, idle = run.mixtures, idle_experts(run.mixtures)
    count = sum(len(one.shares) for one in mixtures)
    if idle:
        longest = escape(shortened(str(idle[0]), 300))
        yield f"<p>{len(idle):,} of {count:,} experts had no token when last observed: <strong>{longest}</strong>.</p>"
        rows = [
            (
                one.module,
                str(one.expert),
                f"{one.steps:,}",
                "" if one.age is None else f"{one.age:,}",
                f"{one.share:.3%}",
            )
            for one in idle[:MOST_ROWS]
        ]
        heads = ("mixture", "expert", "steps without a token", "age of its scale, steps", "share of tokens in the run")
        yield table(heads, rows, numbers=(1, 2, 3, 4))
        yield _note(f"and {len(idle) - MOST_ROWS:,} more.") if len(idle) > MOST_ROWS else ""
        yield _note("Steps and ages are lower bounds: what happened between two observations is not known.")
    else:
        yield f"<p>All {count:,} experts had tokens when last observed.</p>"
    loads, columns = relative_loads(mixtures[:MOST_MODULES], MOST_RANKS)
    names = [one.module for one in mixtures[:MOST_MODULES]]
    made = plots.matrix(loads, names, columns, plots.mapper_of(0, 2), "tokens over an even spread", "expert")
    yield Plot("loads", "tokens of each expert over those of an even spread, mixtures by experts", made)
    yield _note("1: as many tokens as with an even spread, mean over the run. Dark: an expert that learns little.")


# Where did these two runs part? -----------------------------------------------------------------------


def _parted(run: RunNumbers, other: RunNumbers, found: Parting) -> Iterator[str | Plot]:
    names = ["first run: " + shortened(run.name, 30), "second run: " + shortened(other.name, 30)]
    if not found.compared:
        yield _empty("The runs have no observed step in common: watch both with the same every=.")
    elif found.step is None:
        yield f"<p>Amax and scale of all slots are equal, bit for bit, in {found.compared:,} observed steps.</p>"
    else:
        first = found.first
        where = "" if first is None else f" The first is <code>{escape(shortened(first.slot, 200))}</code>."
        before = "no earlier observed step is equal" if found.before is None else f"equal up to step {found.before:,}"
        yield f"<p><strong>Step {found.step:,}</strong>: {found.slots:,} slot(s) differ; {before}.{where}</p>"
        if first is not None:
            bits = [np.float32(value).tobytes()[::-1].hex() for value in first.values]
            lines = [(name, first.field, repr(value), bit) for name, value, bit in zip(names, first.values, bits)]
            yield table(("run", "field", "value", "float32 in hex"), lines, numbers=(2, 3))
    if found.loss_step is not None and found.losses is not None:
        ours, theirs = found.losses
        yield f"<p>The loss differs first in step {found.loss_step:,}: {ours!r} and {theirs!r}.</p>"
    elif found.losses_compared:
        yield f"<p>The losses are equal in {found.losses_compared:,} steps.</p>"
    both = {name: (one.metrics.step, one.metrics.columns["loss"]) for name, one in zip(names, (run, other))}
    if any(np.isfinite(values).any() for _, values in both.values()):
        yield Plot("both", "loss of both runs by step", plots.curves(both, 280, "loss"))

"""The heat maps of the slots, and the plots of one slot that a click shows."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from bokeh.models import BasicTicker, BoxAnnotation, ColorBar, ColumnDataSource, CustomJS, HoverTool, Range1d

from fp8dist.runs.report.plots import COLOURS, figure_of, hover, image, mapper_of
from fp8dist.runs.report.raster import heat_map_png
from fp8dist.runs.report.rows import QUANTITIES, Quantity, Rows

TAP = """
const chosen = document.getElementById("slot")
chosen.value = String(first + Math.max(0, Math.min(count - 1, Math.floor(cb_obj.y))))
chosen.dispatchEvent(new Event("change"))
"""

COLUMNS = ("step", "amax", "top", "normal", "subnormal", "bad", "scale", "jump", "rank", "microbatch")
LONGEST_NAME = 1_000


class Heat(NamedTuple):
    """``maps``: a figure by role. ``slot``: the figures of the chosen slot. ``arguments``: models for page.js."""

    maps: dict[str, Any]
    slot: tuple[Any, ...]
    arguments: dict[str, Any]


def heat_of(rows: Rows) -> Heat:
    """Return the plots."""
    end = rows.start + rows.width * rows.arrays["amax"].shape[1]
    x_range = Range1d(rows.start, end)
    maps, sources, boxes = {}, {}, {}
    renderers: dict[str, list[Any]] = {one.name: [] for one in QUANTITIES}
    mappers = {one.name: mapper_of(one.low, one.high, one.log, one.reverse) for one in QUANTITIES}
    for role in rows.roles():
        part = rows.of_role(role)
        source = _source(rows, part, end)
        names = [row.name.rpartition(":")[0] or row.name for row in rows.rows[part]]
        made = image(names, x_range, "step")
        for one in QUANTITIES:
            drawn = made.image(one.name, "x", "y", "dw", "dh", source=source, color_mapper=mappers[one.name])
            bar = ColorBar(color_mapper=mappers[one.name], width=10, padding=4, background_fill_color=None)
            made.add_layout(bar, "right")
            drawn.visible = bar.visible = one is QUANTITIES[0]
            renderers[one.name] += [drawn, bar]
        made.add_tools(hover([made.renderers[0], made.renderers[1], made.renderers[2]], names, _TOOLTIPS))
        tap = {"first": part.start, "count": len(names)}
        made.js_on_event("tap", CustomJS(args=tap, code=TAP))
        box = BoxAnnotation(
            top=0, bottom=0, fill_alpha=0, line_color=COLOURS[1], line_alpha=1, line_width=3, visible=False
        )
        made.add_layout(box)
        maps[role], sources[role], boxes[role] = made, source, box
    slot = ColumnDataSource({name: np.ones(1) for name in COLUMNS})  # Something for the first ranges of the axes.
    arguments = {
        "sources": sources,
        "boxes": boxes,
        "renderers": renderers,
        "slot": slot,
        "about": _about(rows),
        "start": rows.start,
        "width": rows.width,
    }
    return Heat(maps, _slot_plots(slot, x_range), arguments)


_TOOLTIPS = (
    ("step", "$x{custom}"),
    ("underflow", "@underflow{0.0000%}"),
    ("saturation", "@saturated{0.0000%}"),
    ("headroom", "@headroom{0.0} powers of two"),
)


def _about(rows: Rows) -> Any:
    """Return what page.js says about each slot."""
    data = {
        "names": [row.name[:LONGEST_NAME] for row in rows.rows],
        "roles": [row.role for row in rows.rows],
        "formats": [row.format for row in rows.rows],
        **{name: np.array([getattr(row, name) for row in rows.rows]) for name in ("largest", "normal", "subnormal")},
        "places": np.array([place - rows.of_role(row.role).start for place, row in enumerate(rows.rows)]),
    }
    return ColumnDataSource(data)


def _source(rows: Rows, part: slice, end: int) -> Any:
    floats = ("underflow", "saturated", "headroom", "amax", "scale", "jump")
    data: dict[str, Any] = {name: [rows.arrays[name][part]] for name in floats}
    for name in ("rank", "microbatch"):
        whole = np.clip(np.nan_to_num(rows.arrays[name][part], nan=-1), -1, (1 << 15) - 1)
        data[name] = [whole.astype(np.int16)]
    return ColumnDataSource(
        {**data, "x": [rows.start], "y": [0], "dw": [end - rows.start], "dh": [part.stop - part.start]}
    )


def _slot_plots(source: Any, x_range: Any) -> tuple[Any, ...]:
    window = figure_of(280, x_range=x_range, y_axis_type="log", x_axis_label="step", y_axis_label="amax and window")
    window.varea_step("step", "normal", "top", step_mode="after", source=source, fill_color=COLOURS[5], fill_alpha=0.25)
    window.varea_step(
        "step", "subnormal", "normal", step_mode="after", source=source, fill_color=COLOURS[4], fill_alpha=0.2
    )
    shapes = {"top": ("largest value", "solid"), "normal": ("smallest normal", "dashed")}
    for name, (title, dash) in {**shapes, "subnormal": ("smallest subnormal", "dotted")}.items():
        window.step("step", name, mode="after", source=source, color=COLOURS[0], line_dash=dash, legend_label=title)
    window.line("step", "amax", source=source, color=COLOURS[1], line_width=2, legend_label="amax")
    dots = window.scatter("step", "amax", source=source, color=COLOURS[1], size=4)
    bad = {"marker": "x", "size": 13, "line_width": 3, "color": COLOURS[3], "legend_label": "not finite"}
    odd = window.scatter("step", "bad", source=source, **bad)
    window.add_tools(HoverTool(renderers=[dots, odd], tooltips=list(_SLOT_TOOLTIPS)))
    window.add_layout(window.legend[0], "below")
    window.legend[0].orientation = "horizontal"
    window.legend[0].ncols = 3
    scale = figure_of(180, x_range=x_range, y_axis_type="log", x_axis_label="step", y_axis_label="scale")
    line = scale.step("step", "scale", source=source, color=COLOURS[0], line_width=2, mode="after")
    jumps = scale.scatter("step", "jump", source=source, color=COLOURS[1], marker="triangle", size=10)
    scale.add_tools(HoverTool(renderers=[line, jumps], tooltips=[("step", "@step{0,0}"), ("scale", "@scale")]))
    who = figure_of(160, x_range=x_range, x_axis_label="step", y_axis_label="rank of the amax")
    who.yaxis.ticker = BasicTicker(min_interval=1, num_minor_ticks=0, desired_num_ticks=4)
    held = who.scatter("step", "rank", source=source, color=COLOURS[2], marker="square", size=6)
    who.add_tools(HoverTool(renderers=[held], tooltips=list(_SLOT_TOOLTIPS)))
    return window, scale, who


_SLOT_TOOLTIPS = (
    ("step", "@step{0,0}"),
    ("amax", "@amax"),
    ("scale", "@scale"),
    ("rank", "@rank"),
    ("microbatch", "@microbatch"),
)


def picture(rows: Rows, quantity: Quantity, role: str) -> bytes:
    """Return the heat map of a role as PNG, for print."""
    values = rows.arrays[quantity.name][rows.of_role(role)]
    across, down = (max(1, round(want / have)) for want, have in zip((960, 240), values.shape[::-1]))
    return heat_map_png(
        values,
        quantity.low,
        quantity.high,
        log=quantity.log,
        reverse=quantity.reverse,
        cell=(across, min(down, 16)),
    )

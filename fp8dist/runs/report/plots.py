"""Plots by Bokeh. Colours are those of Okabe and Ito, and viridis; no meaning hangs on colour alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from bokeh.models import (
    BasicTicker,
    ColorBar,
    ColumnDataSource,
    CustomJSHover,
    FactorRange,
    FixedTicker,
    HoverTool,
    LinearColorMapper,
    LogColorMapper,
    NumeralTickFormatter,
    Range1d,
)
from bokeh.plotting import figure

from fp8dist.common.text import shortened
from fp8dist.runs.report.events import RunEvent
from fp8dist.runs.report.raster import PALETTE

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Blue, vermilion, green, pink, orange, sky blue (Okabe and Ito 2008)."""

MARKERS = ("circle", "square", "triangle", "diamond", "inverted_triangle", "star", "hex", "plus", "x", "asterisk")
DASHES = ("solid", "dashed", "dotted", "dashdot")

MOST_POINTS = 2_000
"""Points of a curve. Of more, each bin has its mean, and a band from its least to its largest."""

MOST_LABELS, MOST_COLUMNS, LONGEST_LABEL = 40, 8, 22
LEFT = 96
"""Pixels left of a plot, so that plots below each other have the same axis of steps."""

ROW = "const names = rows.data.row; return names[Math.max(0, Math.min(names.length - 1, Math.floor(special_vars.y)))]"
COLUMN = ROW.replace("row", "column").replace("columns", "rows").replace("special_vars.y", "special_vars.x")
FLOOR = "return '' + Math.floor(special_vars.x)"


def plain(text: str, most: int = LONGEST_LABEL) -> str:
    """Return a text for a plot: shortened, and without what Bokeh would read as a formula."""
    text = "".join(letter if letter.isprintable() else "\ufffd" for letter in shortened(text, most))
    for mark in ("$$", "\\(", "\\["):
        text = text.replace(mark, mark[0] + "\u200b" + mark[1])
    return text


def figure_of(height: int, **more: Any) -> Any:
    """Return an empty figure as wide as the page. A finger and a wheel scroll the page, not the plot."""
    made = figure(
        height=height,
        sizing_mode="stretch_width",
        tools="box_zoom,pan,reset,save",
        active_drag=None,
        background_fill_color=None,
        border_fill_color=None,
        outline_line_color=None,
        min_border_left=LEFT,
        min_border_right=16,
        **more,
    )
    made.toolbar.logo = None
    made.toolbar.autohide = True
    made.xaxis.formatter = NumeralTickFormatter(format="0,0")
    made.xaxis.ticker = BasicTicker(desired_num_ticks=5, num_minor_ticks=0, min_interval=1)
    return made


def mapper_of(low: float, high: float, log: bool = False, reverse: bool = False) -> Any:
    """Return the colours from ``low`` to ``high``. NaN is transparent."""
    palette = ["#{:02x}{:02x}{:02x}".format(*colour) for colour in PALETTE][:: -1 if reverse else 1]
    ends = {"low": low, "high": high, "low_color": palette[0], "high_color": palette[-1], "nan_color": "#00000000"}
    return LogColorMapper(palette=palette, **ends) if log else LinearColorMapper(palette=palette, **ends)


def image(rows: Sequence[str], x_range: Any, x_title: str) -> Any:
    """Return a figure for images of ``rows``, the first on top."""
    count = len(rows)
    made = figure_of(
        min(560, max(150, 100 + 14 * count)), x_range=x_range, y_range=Range1d(count, 0), x_axis_label=x_title
    )
    label(made.yaxis[0], without_common_start(rows), MOST_LABELS)
    made.grid.visible = False
    return made


def without_common_start(names: Sequence[str]) -> list[str]:
    """Return the names without the components, such as "model.layers.", that all of them start with."""
    least, most = min(names), max(names)  # In the order of texts, those between them start alike.
    alike = next((i for i, pair in enumerate(zip(least, most)) if pair[0] != pair[1]), 0)
    return [name[least.rfind(".", 0, alike) + 1 :] for name in names]


def label(axis: Any, names: Sequence[str], most: int) -> None:
    """Label the places of an image, at most ``most`` of them."""
    places = range(0, len(names), max(1, -(-len(names) // most)))
    axis.ticker = FixedTicker(ticks=[place + 0.5 for place in places])
    axis.major_label_overrides = {place + 0.5: plain(names[place]) for place in places}


def hover(drawn: Any, rows: Sequence[str], more: Sequence[tuple[str, str]], columns: Sequence[str] = ()) -> Any:
    """Return the tool that tells the row, the column and the numbers under the pointer."""
    names = ColumnDataSource({"row": [plain(name, 120) for name in rows]})
    across = CustomJSHover(code=FLOOR)
    if columns:
        across = CustomJSHover(
            args={"rows": ColumnDataSource({"column": [plain(n, 120) for n in columns]})}, code=COLUMN
        )
    return HoverTool(
        renderers=drawn,
        tooltips=[("row", "$y{custom}"), *more],
        formatters={"$y": CustomJSHover(args={"rows": names}, code=ROW), "$x": across},
        attachment="vertical",
    )


def matrix(
    values: npt.NDArray[Any],
    rows: Sequence[str],
    columns: Sequence[str],
    mapper: Any,
    shown: str,
    x_title: str,
    bar: bool = True,
) -> Any:
    """Return a heat map of [rows, columns], the first row on top. ``bar``: with a bar of the colours."""
    across = values.shape[1]
    made = image(rows, Range1d(0, across), x_title)
    data = {"image": [values.astype(np.float32)], "x": [0], "y": [0], "dw": [across], "dh": [len(rows)]}
    drawn = made.image("image", "x", "y", "dw", "dh", source=ColumnDataSource(data), color_mapper=mapper)
    label(made.xaxis[0], columns, MOST_COLUMNS)
    if bar:
        made.add_layout(ColorBar(color_mapper=mapper, width=10, padding=4, background_fill_color=None), "right")
    made.add_tools(hover([drawn], rows, [(x_title, "$x{custom}"), (shown, "@image{0.000}")], columns))
    return made


def curves(named: Mapping[str, tuple[Any, Any]], height: int, title: str, **more: Any) -> Any:
    """Return curves of (steps, values) by name."""
    made = figure_of(height, x_axis_label="step", y_axis_label=title, **more)
    drawn = []
    for place, (name, (steps, values)) in enumerate(named.items()):
        data = _thinned(np.asarray(steps), np.asarray(values, dtype=np.float64))
        colour, source = COLOURS[place % len(COLOURS)], ColumnDataSource(data)
        made.varea("step", "least", "most", source=source, fill_color=colour, fill_alpha=0.25)
        shown = {"legend_label": plain(name, 40)} if len(named) > 1 else {}
        dash = DASHES[place % len(DASHES)]
        drawn.append(made.line("step", "mean", source=source, color=colour, line_width=2, line_dash=dash, **shown))
        if len(data["step"]) < 3:
            made.scatter("step", "mean", source=source, color=colour, size=7)
    made.add_tools(
        HoverTool(renderers=drawn, tooltips=[("step", "@step{0,0}"), (title, "@mean{0.0000}")], mode="vline")
    )
    return made


def _thinned(steps: Any, values: Any) -> dict[str, Any]:
    """Return the curve with at most MOST_POINTS points. What is not finite is a gap."""
    values = np.where(np.isfinite(values), values, np.nan)
    each = max(1, -(-len(steps) // MOST_POINTS))
    padding = -len(steps) % each
    grid = np.pad(values, (0, padding), constant_values=np.nan).reshape(-1, each)
    known = (~np.isnan(grid)).sum(1)
    gap = known == 0
    filled = np.where(gap[:, None], 0.0, grid)
    found = {
        "mean": np.nansum(filled, 1) / np.maximum(known, 1),
        "least": np.nanmin(filled, 1, initial=np.inf),
        "most": np.nanmax(filled, 1, initial=-np.inf),
    }
    return {"step": steps[::each].astype(float), **{name: np.where(gap, np.nan, one) for name, one in found.items()}}


def lanes(
    points: Sequence[RunEvent], kinds: Sequence[str], spans: Sequence[tuple[str, int, int]] = (), **more: Any
) -> Any:
    """Return points and spans of steps in lanes, one for each kind, from top to bottom."""
    made = figure_of(
        80 + 26 * len(kinds),
        y_range=FactorRange(*reversed([plain(kind) for kind in kinds])),
        x_axis_label="step",
        **more,
    )
    for kind, first, last in spans:
        made.hbar(
            [kind], height=0.4, left=[first], right=[last], fill_color=COLOURS[5], fill_alpha=0.4, line_color=None
        )
    drawn = []
    for place, kind in enumerate(kinds):
        here = [point for point in points if point.kind == kind]
        data = {
            "step": [float(point.step) for point in here],
            "kind": [plain(kind)] * len(here),
            "text": [plain(point.text, 200) + (" (undone by a resume)" if point.undone else "") for point in here],
            "fill": [0.0 if point.undone else 0.9 for point in here],
        }
        drawn.append(
            made.scatter(
                "step",
                "kind",
                source=ColumnDataSource(data),
                size=11,
                marker=MARKERS[place % len(MARKERS)],
                color=COLOURS[place % len(COLOURS)],
                fill_alpha="fill",
            )
        )
    made.add_tools(HoverTool(renderers=drawn, tooltips=[("step", "@step{0,0}"), ("", "@text")]))
    return made


def two_colours() -> Any:
    """Return the colours of 0, orange, and 1, blue."""
    return LinearColorMapper(palette=[COLOURS[4], COLOURS[0]], low=0, high=1, nan_color="#00000000")

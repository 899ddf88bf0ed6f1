"""The report of a run: one HTML file that loads nothing."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from bokeh.document import Document
from bokeh.embed import components
from bokeh.models import CustomJS
from bokeh.resources import Resources

from fp8dist.common.text import shortened
from fp8dist.runs.report.numbers import RunNumbers
from fp8dist.runs.report.panels import Panel, Plot, panels_of
from fp8dist.runs.report.parting import Parting

POLICY = "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; img-src data: blob:"
"""The browser refuses every request. Bokeh compiles callbacks, for which it needs unsafe-eval."""

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>{style}</style>
{library}
</head>
<body>
<a class="skip" href="#main">Skip to the panels</a>
<header>
<h1>{heading}</h1>
<p class="note">{about}</p>
<nav aria-label="Panels"><ul>{links}</ul></nav>
</header>
<main id="main">
{panels}
</main>
{script}
</body>
</html>
"""


def page_of(run: RunNumbers, other: RunNumbers | None = None, parting: Parting | None = None) -> str:
    """Return the report as HTML.

    Args:
        other: a run to compare with. ``parting``: where the two part.
    """
    panels = panels_of(run, other, parting)
    names = [shortened(one.name, 80) for one in (run, other) if one is not None]
    title = f"fp8dist report: {' and '.join(names)}"
    script, placed = _embedded(panels)
    return _PAGE.format(
        policy=POLICY,
        title=html.escape(title),
        heading=html.escape(title),
        style=_text("page.css"),
        library=Resources(mode="inline", components=["bokeh"], minified=True).render_js(),
        about=html.escape(_about(run)),
        links="".join(f'<li><a href="#{one.anchor}">{html.escape(one.question)}</a></li>' for one in panels),
        panels="\n".join(_section(one, placed) for one in panels),
        script=script,
    )


def _embedded(panels: Sequence[Panel]) -> tuple[str, Mapping[str, str]]:
    """Return the script that draws, and a div for each plot."""
    plots = {part.name: part.model for panel in panels for part in panel.parts if isinstance(part, Plot)}
    arguments: dict[str, Any] = {"figures": list(plots.values())}
    for panel in panels:
        arguments.update(panel.arguments)
    document = Document()
    with document.models.freeze():  # Else each root has the models of all roots listed again.
        for plot in plots.values():
            document.add_root(plot)
    document.js_on_event("document_ready", CustomJS(args=arguments, code=_text("page.js")))
    return components(plots) if plots else ("", {})


def _section(panel: Panel, divs: Mapping[str, str]) -> str:
    parts = []
    for part in panel.parts:
        if isinstance(part, Plot):
            label = html.escape(part.label)
            part = f'<div class="plot" role="group" aria-label="{label}">{divs[part.name]}</div>'
        parts.append(part)
    heading = f'<h2 id="{panel.anchor}-h">{html.escape(panel.question)}</h2>'
    return f'<section id="{panel.anchor}" aria-labelledby="{panel.anchor}-h">{heading}\n{"".join(parts)}\n</section>'


def _about(run: RunNumbers) -> str:
    header = run.folder.header
    if not header:
        return "run.json is missing: formats, hosts, recipe and precision of this run are not known."
    facts: list[Any] = [
        f"{header.get('ranks')} ranks",
        header.get("device"),
        header.get("precision"),
        header.get("recipe"),
        *(f"{name} {version}" for name, version in _items(header.get("versions")) if version),
    ]
    return " · ".join(shortened(str(one), 160) for one in facts if one)


def _items(value: Any) -> list[tuple[Any, Any]]:
    return list(value.items())[:8] if isinstance(value, dict) else []


def _text(name: str) -> str:
    return resources.files("fp8dist.runs.report").joinpath(name).read_text(encoding="utf-8")

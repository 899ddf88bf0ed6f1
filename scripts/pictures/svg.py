"""The shapes in the pictures, as SVG strings.

Each picture is a card with its own background. Its colours follow the reader's light or dark mode, so it is readable
on any page. Shapes and texts name a colour of the palette, not a value.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import MappingProxyType
from typing import NamedTuple
from xml.sax.saxutils import escape, quoteattr

__all__ = ["WIDTH", "Point", "arrow", "document", "line", "polygon", "polyline", "rect", "text"]

WIDTH = 760
"""Width of every picture, in pixels at full size."""

SMALLEST_FONT = 12

Point = tuple[float, float]


class _Colour(NamedTuple):
    """``fill`` is for areas, ``stroke`` for outlines and lines, ``ink`` for text on the card or on ``fill``."""

    fill: str
    stroke: str
    ink: str


# The hues of Okabe and Ito, which are distinct with every kind of colour blindness.
_LIGHT = MappingProxyType(
    {
        "card": _Colour("#ffffff", "#d0d7de", "#1f2328"),
        "plain": _Colour("#f3f5f7", "#6e7781", "#1f2328"),
        "muted": _Colour("#f3f5f7", "#afb8c1", "#57606a"),
        "grid": _Colour("#eaeef2", "#d8dee4", "#57606a"),
        "blue": _Colour("#dcedf8", "#0072b2", "#00588a"),
        "orange": _Colour("#fcebc4", "#a86f00", "#7a5000"),
        "green": _Colour("#d5f0e6", "#007f5f", "#00624a"),
        "red": _Colour("#fbdfcd", "#c04f00", "#973e00"),
        "purple": _Colour("#f5e1ed", "#a05583", "#7f3c66"),
    }
)
_DARK = MappingProxyType(
    {
        "card": _Colour("#12171e", "#39424d", "#e6edf3"),
        "plain": _Colour("#222933", "#8b949e", "#e6edf3"),
        "muted": _Colour("#1b222b", "#57616d", "#a9b4c0"),
        "grid": _Colour("#242c36", "#333c47", "#a9b4c0"),
        "blue": _Colour("#0f3147", "#56b4e9", "#8fd0f5"),
        "orange": _Colour("#43310a", "#e69f00", "#f5c35c"),
        "green": _Colour("#0b3a2e", "#2bc096", "#6fdcbc"),
        "red": _Colour("#472310", "#f0803c", "#ffab7a"),
        "purple": _Colour("#41233a", "#dd8fba", "#f0b4d3"),
    }
)
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
_MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"


def document(title: str, description: str, height: float, body: Iterable[str]) -> str:
    """Return a whole picture: a rounded card with ``body`` on it.

    Args:
        title: the title that screen readers announce.
        description: the content of the picture, for readers who cannot see it.
    """
    dark = "".join(f"    {rule}\n" for rule in _rules(_DARK))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {_number(height)}" width="{WIDTH}" '
        f'height="{_number(height)}" role="img" aria-labelledby="title desc">\n'
        f'<title id="title">{escape(title)}</title>\n<desc id="desc">{escape(description)}</desc>\n'
        f"<style>\n  text {{ font-family: {_FONT}; }}\n"
        f"  .mono {{ font-family: {_MONO}; white-space: pre; }}\n"
        "  .bold { font-weight: 600; }\n"
        + "".join(f"  {rule}\n" for rule in _rules(_LIGHT))
        + f"  @media (prefers-color-scheme: dark) {{\n{dark}  }}\n</style>\n"
        + rect(0.5, 0.5, WIDTH - 1, height - 1, "card", radius=12)
        + "".join(body)
        + "</svg>\n"
    )


def _rules(palette: MappingProxyType[str, _Colour]) -> list[str]:
    return [
        f".{name} {{ fill: {colour.fill}; stroke: {colour.stroke}; }} "
        f".{name}-line {{ fill: none; stroke: {colour.stroke}; }} "
        f".{name}-solid {{ fill: {colour.stroke}; stroke: none; }} "
        f".{name}-ink {{ fill: {colour.ink}; }}"
        for name, colour in palette.items()
    ]


def rect(
    x: float, y: float, width: float, height: float, colour: str, *, radius: float = 6, dashed: bool = False
) -> str:
    """Return a rectangle with an outline. ``dashed``: a dashed outline without a fill."""
    look = f'class="{colour}-line" stroke-dasharray="6 4"' if dashed else f'class="{colour}"'
    return (
        f'<rect x="{_number(x)}" y="{_number(y)}" width="{_number(width)}" height="{_number(height)}" '
        f'rx="{_number(radius)}" {look}/>\n'
    )


def line(start: Point, end: Point, colour: str, *, width: float = 1.5, dashed: bool = False) -> str:
    """Return a straight line."""
    return polyline([start, end], colour, width=width, dashed=dashed)


def arrow(start: Point, end: Point, colour: str, *, width: float = 1.5, dashed: bool = False) -> str:
    """Return a line with an arrowhead at ``end``."""
    (x0, y0), (x1, y1) = start, end
    length = ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5
    dx, dy = (x1 - x0) / length, (y1 - y0) / length
    neck = (x1 - 8 * dx, y1 - 8 * dy)
    head = [end, (neck[0] - 4 * dy, neck[1] + 4 * dx), (neck[0] + 4 * dy, neck[1] - 4 * dx)]
    return line(start, neck, colour, width=width, dashed=dashed) + polygon(head, f"{colour}-solid")


def polyline(points: Sequence[Point], colour: str, *, width: float = 1.5, dashed: bool = False) -> str:
    """Return lines from point to point."""
    dashes = ' stroke-dasharray="5 4"' if dashed else ""
    return (
        f'<polyline points="{_points(points)}" class="{colour}-line" stroke-width="{_number(width)}" '
        f'stroke-linejoin="round"{dashes}/>\n'
    )


def polygon(points: Sequence[Point], look: str, *, opacity: float = 1) -> str:
    """Return a filled polygon. ``look``: a colour's name for a fill with an outline; append "-solid" for no outline."""
    return f'<polygon points="{_points(points)}" class="{look}" opacity="{opacity:g}"/>\n'


def text(
    x: float,
    y: float,
    content: str,
    colour: str = "card",
    *,
    size: float = 13,
    anchor: str = "start",
    bold: bool = False,
    mono: bool = False,
    length: float | None = None,
) -> str:
    """Return text with its first baseline at ``y``. Each line of ``content`` becomes a line of the picture.

    Args:
        anchor: "start", "middle" or "end": the point of each line that is at ``x``.
        mono: use a monospaced font.
        length: stretch each line to this width, whatever the reader's font, and keep blanks.
    """
    assert size >= SMALLEST_FONT
    classes = " ".join([f"{colour}-ink", *(["bold"] if bold else []), *(["mono"] if mono else [])])
    more = f' xml:space="preserve" textLength="{_number(length)}"' if length is not None else ""
    return "".join(
        f'<text x="{_number(x)}" y="{_number(y + 1.4 * size * place)}" font-size="{_number(size)}" '
        f"text-anchor={quoteattr(anchor)} class={quoteattr(classes)}{more}>{escape(row)}</text>\n"
        for place, row in enumerate(content.split("\n"))
    )


def _points(points: Sequence[Point]) -> str:
    return " ".join(f"{_number(x)},{_number(y)}" for x, y in points)


def _number(value: float) -> str:
    """Return the number with at most one decimal."""
    return f"{value:.1f}".removesuffix(".0")

"""docs/images: the pictures are up to date with scripts/pictures, and readable."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

import pytest

from scripts.pictures.__main__ import FOLDER, PICTURES
from scripts.pictures.report import TEXT

ROOT = Path(__file__).parents[2]
SVG = "{http://www.w3.org/2000/svg}"
SLOW = {"slot": pytest.mark.slow}
"""A picture whose drawing trains a model."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW.get(name, ())) for name in PICTURES])
def test_a_picture_is_what_its_script_draws(name: str) -> None:
    drawn = PICTURES[name]().encode()
    assert drawn == (FOLDER / f"{name}.svg").read_bytes(), f"run: python -m scripts.pictures {name}"


def test_no_picture_is_drawn_by_nothing() -> None:
    assert {path.stem for path in FOLDER.glob("*.svg")} == set(PICTURES)


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_complete_and_loads_nothing(name: str) -> None:
    content = (FOLDER / f"{name}.svg").read_text(encoding="utf-8")
    root = ElementTree.fromstring(content)
    for tag in ("title", "desc"):
        found = root.find(SVG + tag)
        assert found is not None
        assert found.text
        assert found.get("id") in root.get("aria-labelledby", "").split()
    elsewhere = content.replace('xmlns="http://www.w3.org/2000/svg"', "", 1)
    assert not re.search(r"https?:|href|url\(|@import|@font-face|<(image|script|foreignObject)", elsewhere)


@pytest.mark.parametrize("name", PICTURES)
def test_text_is_large_enough_and_inside(name: str) -> None:
    root = ElementTree.parse(FOLDER / f"{name}.svg").getroot()
    assert "font-size" not in (root.findtext(f"{SVG}style") or "")
    texts = list(root.iter(f"{SVG}text"))
    assert texts
    for text in texts:
        assert float(text.get("font-size", 0)) >= 12, text.text
        assert 0 < float(text.get("x", 0)) < float(root.get("width", 0)), text.text
        assert 0 < float(text.get("y", 0)) < float(root.get("height", 0)), text.text


def test_text_stands_out_from_its_background() -> None:
    """Contrast is at least 4.5 (WCAG 2, AA), in the light and the dark variant."""
    style = ElementTree.parse(FOLDER / "boxes.svg").getroot().findtext(f"{SVG}style") or ""
    for variant in style.split("@media"):
        fills = dict(re.findall(r"\.([a-z]+) \{ fill: (#\w{6})", variant))
        inks = dict(re.findall(r"\.([a-z]+)-ink \{ fill: (#\w{6})", variant))
        assert len(fills) == len(inks) > 5
        for name, ink in inks.items():
            backgrounds = fills.values() if name in ("card", "muted") else [fills[name], fills["card"], fills["grid"]]
            for fill in backgrounds:
                assert _contrast(ink, fill) >= 4.5, (name, ink, fill)


def _contrast(one: str, other: str) -> float:
    dark, light = sorted(map(_luminance, (one, other)))
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: str) -> float:
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.long
def test_the_report_is_what_three_ranks_log_today() -> None:
    """If this fails, run ``python -m scripts.pictures --rerun report``."""
    program = "from scripts.pictures.report import logged\nif __name__ == '__main__':\n    print(logged(), end='')"
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:  # A file, because spawned ranks import their program.
        file.write(program)
        file.flush()
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "OMP_NUM_THREADS": "1"}
        done = subprocess.run([sys.executable, file.name], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == TEXT.read_text(encoding="utf-8")

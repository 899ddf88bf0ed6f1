"""The report in headless Chromium: it draws, drills down, obeys keys, and loads nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fp8dist.runs.report.numbers import read_run
from fp8dist.runs.report.page import page_of
from fp8dist.runs.report.parting import Digests, part
from tests.runs.report.test_page import hostile
from tests.support.browser import needs_chromium, opened_browser
from tests.support.runs import made_run

pytestmark = [pytest.mark.long, needs_chromium]

PLOTS = 14
"""Three heat maps, three plots of a slot, loss, norm, events, holders, waits, states, precision, both losses."""


browser = pytest.fixture(scope="module")(opened_browser)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return reports by name."""
    folder = tmp_path_factory.mktemp("reports")
    found = {}
    for name, write in {"made": made_run, "hostile": hostile}.items():
        digests = Digests()
        run = read_run(write(folder / name), digests.add)
        found[name] = folder / f"{name}.html"
        found[name].write_text(page_of(run, run, part((run, run), (digests, digests))))
    return found


@pytest.fixture
def opened(browser: Any, files: dict[str, Path], request: pytest.FixtureRequest) -> Iterator[Any]:
    """Return a page with a report. It fails the test if anything is logged as an error, or requested."""
    name, settings = getattr(request, "param", ("made", {}))
    page = browser.new_page(**settings)
    trouble: list[str] = []
    noise = ("error", "warning") if name == "made" else ("error",)  # Bokeh warns of plots without any number.
    page.on("console", lambda said: said.type in noise and trouble.append(said.text))
    page.on("pageerror", lambda error: trouble.append(str(error)))
    page.on(
        "request", lambda request: request.url.startswith(("file:", "data:", "blob:")) or trouble.append(request.url)
    )
    page.goto(files[name].as_uri())
    page.wait_for_function("document.documentElement.dataset.ready == 'yes'")
    yield page
    assert trouble == []
    page.close()


WIDTHS = [
    ("made", {"viewport": {"width": 1280, "height": 900}}),
    ("made", {"viewport": {"width": 390, "height": 800}, "color_scheme": "dark"}),
    ("hostile", {"viewport": {"width": 390, "height": 800}}),
]


@pytest.mark.parametrize("opened", WIDTHS, indirect=True)
def test_every_plot_draws_and_nothing_is_wider_than_the_page(opened: Any) -> None:
    """The list of slots stays beside its label, also with a name that is longer than the page is wide."""
    assert opened.evaluate("window.evil") is None
    assert opened.evaluate("document.documentElement.scrollWidth <= innerWidth")
    drawn = opened.evaluate(
        """async () => {
            const seen = []
            for (const one of document.querySelectorAll(".plot[role=group]")) {
                one.scrollIntoView()
                await new Promise((done) => setTimeout(done, 50))
                const box = one.getBoundingClientRect()
                seen.push([box.width > 100 && box.height > 60, one.ariaLabel.length > 5])
            }
            return seen
        }"""
    )
    assert set(map(tuple, drawn)) == {(True, True)}
    views = opened.evaluate("Bokeh.documents[0].roots().length")
    assert views == len(drawn)
    if "blocks.0.qkv:input" in opened.content():
        assert views == PLOTS
    label, choice = (opened.locator(one).bounding_box() for one in ("label[for=slot]", "#slot"))
    assert choice["x"] > label["x"] + label["width"]
    assert choice["y"] < label["y"] + label["height"]
    assert label["height"] < 40
    assert choice["x"] + choice["width"] <= opened.viewport_size["width"]


def test_a_click_in_the_heat_map_shows_the_slot_and_its_numbers(opened: Any, files: dict[str, Path]) -> None:
    place = """() => {
        const plot = Bokeh.documents[0].roots()[2], view = Bokeh.index.get_by_id(plot.id)
        const box = view.el.getBoundingClientRect()
        const {x_scale, y_scale} = view.frame
        return [box.x + x_scale.compute(200), box.y + y_scale.compute(10.5)]
    }"""
    opened.locator("#losing .maps").scroll_into_view_if_needed()
    opened.mouse.click(*opened.evaluate(place))
    opened.wait_for_function("document.getElementById('slot-name').textContent != 'blocks.0.attention_out:input'")
    chosen = [opened.locator(one).inner_text() for one in ("#slot-name", "#slot option:checked")]
    assert chosen == ["blocks.2.qkv:grad_output"] * 2
    facts = opened.locator("#slot-facts").inner_text()
    assert facts.startswith("Format e5m2.")
    assert "1 places where an amax is not finite" in facts
    opened.select_option("#slot", label="blocks.1.down:input")
    opened.wait_for_function("document.getElementById('slot-name').textContent == 'blocks.1.down:input'")
    drawn = opened.evaluate(
        "(() => { const data = Bokeh.documents[0].roots()[3].renderers[0].data_source.data;"
        " return Object.fromEntries(['step', 'amax', 'scale', 'top', 'subnormal', 'rank', 'microbatch']"
        ".map((name) => [name, Array.from(data[name])])) })()"
    )
    found = read_run(files["made"].with_suffix("")).folder.lines("scales.jsonl").new()
    rows = [line for line in found if line["slot"] == "blocks.1.down:input"]
    assert drawn["step"] == [line["step"] for line in rows]
    for name, field in (("amax", "amax"), ("scale", "scale"), ("rank", "amax_rank"), ("microbatch", "amax_microbatch")):
        assert drawn[name] == [line[field] for line in rows], name
    assert drawn["top"] == [448.0 / line["scale"] for line in rows]
    assert drawn["subnormal"] == [2.0**-9 / line["scale"] for line in rows]


def _tab_to(page: Any, field: str, value: str) -> None:
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate(f"document.activeElement.{field}") == value:
            return
    raise AssertionError(f"no {field} {value}")


def test_keys_alone_reach_everything_and_controls_have_names(opened: Any) -> None:
    opened.keyboard.press("Tab")
    assert opened.evaluate("document.activeElement.className") == "skip"
    _tab_to(opened, "name", "quantity")
    opened.keyboard.press("ArrowDown")
    assert opened.evaluate("document.querySelector('[name=quantity]:checked').value") == "saturated"
    visible = "Bokeh.documents[0].roots()[0].renderers.map((one) => one.visible)"
    assert opened.evaluate(visible) == [False, True, False]
    _tab_to(opened, "id", "slot")
    assert opened.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    opened.keyboard.press("ArrowDown")
    opened.wait_for_function("document.getElementById('slot-name').textContent == 'blocks.0.down:input'")
    assert opened.get_by_role("combobox", name="Slot").count() == 1
    assert opened.get_by_role("group", name="Shown in the heat maps").get_by_role("radio").count() == 3
    assert opened.get_by_role("navigation", name="Panels").get_by_role("link").count() == 7
    assert opened.get_by_role("region", name="Is this run sound?").count() == 1


@pytest.mark.parametrize("opened", [("made", {"color_scheme": "dark"})], indirect=True)
def test_the_plots_follow_the_colours_of_the_page_and_print_has_pictures(opened: Any) -> None:
    ink = "Bokeh.documents[0].roots()[6].below[0].axis_label_text_color"
    assert opened.evaluate(ink) == "#e8e8e8"
    assert opened.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(22, 22, 22)"
    opened.emulate_media(color_scheme="light")
    opened.wait_for_function(f"{ink} == '#1f1f1f'")
    assert not opened.locator(".print").first.is_visible()
    opened.emulate_media(media="print")
    assert opened.locator(".print").first.is_visible()
    assert opened.locator(".maps .plot").first.is_hidden()
    assert opened.evaluate("[...document.images].every((one) => one.complete && one.naturalWidth > 100)")
    assert len(opened.pdf()) > 20_000

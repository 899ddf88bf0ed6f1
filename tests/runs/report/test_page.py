"""The HTML of a report: its panels and pictures, what is missing, hostile content, size, and the command."""

from __future__ import annotations

import builtins
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fp8dist.cli.main import main
from fp8dist.runs.report import rows as rows_module
from fp8dist.runs.report.numbers import read_run
from fp8dist.runs.report.page import page_of
from fp8dist.runs.report.parting import Digests, part
from fp8dist.runs.report.raster import NOT_FINITE, NOTHING, PALETTE, heat_map_png, levels
from fp8dist.runs.report.rows import rows_of
from tests.support.runs import header, lines, load, made_run
from tests.support.suite import few

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("pages of reports")]  # One process imports Bokeh.

QUESTIONS = [
    "Is this run sound?",
    "Which layer is losing numbers?",
    "What came first?",
    "Is one rank odd?",
    "What can I go back to?",
    "Am I getting my FP8?",
]


def _own(page: str) -> str:
    """Return the page without Bokeh's library, its longest script."""
    return page.replace(max(re.findall(r"<script.*?</script>", page, flags=re.S), key=len), "")


def _body(page: str) -> str:
    return re.sub(r"<script.*?</script>", "", page[page.index("<main ") :], flags=re.S)


def _empty(folder: Path) -> Path:
    """Write a run without steps: plots take most of a page's time."""
    folder.mkdir()
    (folder / "metrics.jsonl").touch()
    return folder


def test_the_page_says_what_happened_and_fetches_nothing(tmp_path: Path) -> None:
    digests = Digests()
    run = read_run(made_run(tmp_path / "made"), digests.add)
    page = page_of(run, run, part((run, run), (digests, digests)))
    assert re.findall(r"<h2 [^>]*>(.*?)</h2>", page) == [*QUESTIONS, "Where did these two runs part?"]
    assert "default-src 'none'" in page
    assert len(_own(page)) < len(page) / 2
    assert not re.search(r"""(src|href)\s*=\s*(?!["']?(#|data:))|@import|url\((?!data:)|https?:""", _own(page))
    assert len(page) < 2_000_000
    body = _body(page)
    for text in (
        "Not sound: in step 350 scale blocks.0.qkv:input differs on rank 1 (host node0), against rank 0",
        "First: step 210, an amax is not finite, blocks.2.qkv:grad_output, rank 3, microbatch 1.",
        "float32 41a00001 against 41a00000",
        "The newest checkpoint that is known to be good is of <strong>step 200</strong> checkpoints/step-00000200.",
        "the run resumes after step 250",
        "blocks.0.up:input and 9 more (undone by a resume)",
        "FLOPs of Linears in FP8: <strong>85.7%</strong>. MFU: <strong>32.5%</strong>",
        "The others wait for rank 2 (host node1)",
        "a kind of tomorrow",
        "Amax and scale of all slots are equal, bit for bit, in ",
        "loss of both runs by step",
    ):
        assert text in body, text
    assert body.count('<img alt="') == 9  # Three roles, three quantities.


def test_empty_panels_say_what_to_switch_on(tmp_path: Path) -> None:
    folder = _empty(tmp_path / "run")
    body = _body(page_of(read_run(folder)))
    wanted = "every=10 ranks=True check_every= recorder.event(&quot;saved&quot;, Recorder run.json grad_norm="
    assert [text for text in wanted.split() if text not in body] == []
    assert not re.search("--[a-z]|example job", body)  # A job of another program has no such flags.
    assert body.count('class="empty"') >= 6
    lines(folder / "metrics.jsonl", [{"step": 1, "loss": 2.0, "grad_norm": "NaN"}])
    # A recipe without a sync.
    lines(folder / "ranks.jsonl", [{"step": 10, "ranks": [0, 1], "sync_wait_ms": [None, None], "step_ms": [9.0, 9.0]}])
    body = _body(page_of(read_run(folder)))
    assert "The gradient norm is not finite in 1 step, first in step 1." in body
    assert "No gradient norm is finite." in body
    assert "all values are finite" not in body
    assert "No sync was timed, so no rank is known to wait" in body
    assert "milliseconds that each rank waited" not in body


def test_a_panel_for_runs_with_experts_is_short(tmp_path: Path) -> None:
    folder = _empty(tmp_path / "run")
    without = page_of(read_run(folder))
    assert "Do all experts get tokens?" not in without
    lines(folder / "experts.jsonl", [load(20, "a.experts", [2, 6, 0], [0, 0, 20], [0, 0, 19])])
    page = page_of(read_run(folder))
    assert "Do all experts get tokens?" in page
    idle = "<strong>expert 2 of a.experts has had no token for 20 steps</strong>"
    assert f"1 of 3 experts had no token when last observed: {idle}." in page
    tokens, zeros = ([9, *[0] * 255], [0, *[7] * 255]), [0] * 256
    many = [load(10, f"layers.{layer}.{'x' * 300}.experts", *tokens, zeros) for layer in range(40)]
    lines(folder / "experts.jsonl", many)
    page = page_of(read_run(folder))
    assert "10,200 of 10,240 experts had no token" in page
    assert "and 10,176 more." in page
    assert len(page) - len(without) < 200_000


def test_a_picture_has_the_colours_of_its_values() -> None:
    values = np.array([[0.0, 1.0, np.nan], [0.5, 99.0, np.inf]])
    picture = Image.open(io.BytesIO(heat_map_png(values, 0.0, 1.0, cell=(3, 2)))).convert("RGB")
    assert picture.size == (9, 4)
    middle = PALETTE[round(0.5 * (len(PALETTE) - 1))]
    expected = [[PALETTE[0], PALETTE[-1], NOTHING], [middle, PALETTE[-1], NOT_FINITE]]
    assert [[picture.getpixel((3 * x + 1, 2 * y + 1)) for x in range(3)] for y in range(2)] == expected
    turned = Image.open(io.BytesIO(heat_map_png(values, 0.0, 1.0, reverse=True))).convert("RGB")
    assert turned.getpixel((0, 0)) == PALETTE[-1]
    assert levels([[0.0, 1e-6, 1e-3, 1.0, 5.0]], 1e-6, 1.0, log=True).tolist() == [[0, 0, 126, 253, 253]]
    # Brightness only grows: also who sees no colours, or prints in grey, can read the map.
    brightness = [0.2126 * red + 0.7152 * green + 0.0722 * blue for red, green, blue in PALETTE]
    assert all(np.diff(brightness) > -0.5)
    for shape in ((3,), (0, 4), (4, 0)):
        with pytest.raises(ValueError, match="rows, columns"):
            heat_map_png(np.zeros(shape), 0.0, 1.0)


EVIL = "</script><script>window.evil=1</script><img src=x onerror=window.evil=1>'\"&$$x^2$$\\[y\\]\u2028\x00"


def hostile(folder: Path) -> Path:
    """Write a run whose every text is hostile."""
    folder.mkdir()
    slots = [f"{EVIL}{'x' * 10_000}.{i}:input" for i in range(3)] + [EVIL, ":", "", "a:" + EVIL]
    modules = [{"module": name, "flops": 1.0, "gemms": {"fprop": "high"}, "reason": EVIL} for name in slots]
    listed = [{"slot": slot, "format": "e4m3", "max": 448.0} for slot in slots]
    texts = {"recipe": EVIL, "device": EVIL, "hosts": [EVIL] * 4, "versions": {EVIL: EVIL}}
    made = {**header([]), **texts, "modules": modules, "slots": listed}
    (folder / "run.json").write_text(json.dumps(made))
    lines(folder / "metrics.jsonl", [{"step": -5, "loss": "NaN"}, {"step": 2**60, "loss": 1}, {"step": 3, "loss": []}])
    scales = [
        {"step": s, "slot": slot, "amax": 2.0 ** (s % 99), "scale": -1.0} for s in (7, 3, 10**12) for slot in slots
    ]
    lines(folder / "scales.jsonl", scales)
    lines(folder / "ranks.jsonl", [{"step": 1, "ranks": [0, 1], "sync_wait_ms": [EVIL, 1], "step_ms": None}])
    finding = dict.fromkeys(("kind", "name", "hosts", "detail", "field", "value", "expected", "index"), EVIL)
    nested: Any = [[[[[[[[[[EVIL]]]]]]]]]]
    events = [
        {"step": 1, "kind": EVIL, "slots": [EVIL, nested], "path": nested, "rank": nested},
        {"step": 2, "kind": "saved", "path": EVIL, "digest": EVIL},
        {"step": 2, "kind": "nonfinite", "slots": EVIL, "module": EVIL, "role": 3},
        {"step": 3, "kind": "diverged", "report": {"findings": [{**finding, "ranks": nested}, 3, {}]}},
        {"step": 3, "kind": "diverged", "report": []},
        {"step": 4, "kind": "start", "resumed_after": "x"},
    ]
    lines(folder / "events.jsonl", events)
    return folder


def test_hostile_content_is_text(tmp_path: Path) -> None:
    run = read_run(hostile(tmp_path / "run"))
    found = page_of(run, run)
    assert "<script>window.evil" not in found
    assert "<img src=x" not in found
    assert len(_own(found)) < 300_000


@pytest.mark.parametrize("value", few((None, "x", {"slots": 3}, [[1]]), "x", [[1]]))
def test_headers_of_wrong_types_are_read(value: Any, tmp_path: Path) -> None:
    folder = made_run(tmp_path / "run", steps=20, layers=1)
    kept = {"format": "fp8dist run", "version": 1}
    (folder / "run.json").write_text(json.dumps({**dict.fromkeys(header([]), value), **kept}))
    assert "Is this run sound?" in page_of(read_run(folder))


def test_cells_and_rows_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = read_run(made_run(tmp_path / "run"))
    whole = rows_of(run)
    monkeypatch.setattr(rows_module, "MOST_CELLS", 36 * 12)
    rows = rows_of(run)
    assert rows is not None
    assert whole is not None
    assert (rows.width, rows.arrays["amax"].shape, rows.start) == (40, (36, 10), 10)
    assert rows.arrays["headroom"][5, 3] == whole.arrays["headroom"][5, 12:16].min()
    monkeypatch.setattr(rows_module, "MOST_ROWS", 5)
    few = rows_of(run)
    assert few is not None
    assert few.left_out == 31
    assert "blocks.2.qkv:grad_output" in [row.name for row in few.rows]  # It was not finite once.
    monkeypatch.undo()
    many = rows_of(read_run(made_run(tmp_path / "many", steps=20, layers=11)))
    assert many is not None
    names = [row.name for row in many.rows if row.role == "input"]
    assert names.index("blocks.2.up:input") < names.index("blocks.10.up:input")
    assert many.roles() == ["input", "weight", "grad_output"]


Capture = pytest.CaptureFixture[str]


def test_the_command_writes_the_file_whole_and_opens_it(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda address: opened.append(address) or len(opened) == 1)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder, named = _empty(tmp_path / "run"), tmp_path / "out" / "a.html"
    named.parent.mkdir()
    named.write_text("before")
    assert main(["report", str(folder), str(folder), "--out", str(named)]) == 0
    assert "Where did these two runs part?" in named.read_text()
    assert [*named.parent.iterdir()] == [named]
    link = tmp_path / "link.html"
    link.symlink_to(named)
    assert main(["report", str(folder), "--out", str(link)]) == 0
    assert link.is_symlink()
    assert "Where did these two runs part?" not in named.read_text()
    assert main(["report", str(folder), "--open"]) == 0
    out, err = capsys.readouterr()
    file = Path(out.splitlines()[-1])
    assert (opened, err) == ([file.as_uri()], "")
    assert file.is_relative_to(tmp_path)
    assert "Is this run sound?" in file.read_text()
    assert main(["report", str(folder), "--open", "--out", str(named)]) == 0
    assert opened[1:] == [named.as_uri()]
    assert capsys.readouterr().err == "fp8dist report: found no browser: open this file yourself\n"


@pytest.mark.parametrize(
    ("content", "words", "text"),
    [
        (None, ["--out", "a.html"], "holds no run"),
        ("{}", ["--out", "a.html"], "is not the header of a run of fp8dist"),
        ('{"format": "fp8dist run", "version": 1}', ["--out", "missing/a.html"],
         "cannot be written: No such file or directory"),
        ('{"format": "fp8dist run", "version": 1}', ["--out", "."], "cannot be written: Is a directory"),
        ('{"format": "fp8dist run", "version": 1}', ["--out", "a" * 300], "cannot be written: File name too long"),
        ('{"format": "fp8dist run", "version": 1}', ["--out", "full"], "cannot be written: No space left on device"),
        ('{"format": "fp8dist run", "version": 1}', [], "give --out FILE for the HTML file, or --open"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(
    content: str | None, words: list[str], text: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("full").symlink_to("/dev/full")
    if content is not None:
        Path("run.json").write_text(content)
    assert main(["report", str(tmp_path), *words]) == 2
    assert Path("full").is_char_device()
    error = capsys.readouterr().err
    assert error.startswith("fp8dist report: ")
    assert text in error
    assert error.count("\n") == 1


def test_without_bokeh_it_says_what_to_install(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = builtins.__import__

    def missing(name: str, *rest: Any) -> Any:
        if name.partition(".")[0] == "bokeh":
            raise ModuleNotFoundError("No module named 'bokeh'", name="bokeh")
        return whole(name, *rest)

    for name in ("page", "panels", "plots", "heat"):
        monkeypatch.delitem(sys.modules, f"fp8dist.runs.report.{name}", raising=False)
    monkeypatch.setattr(builtins, "__import__", missing)
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "a.html")]) == 2
    assert capsys.readouterr().err == "fp8dist report: Bokeh draws the report: pip install 'fp8dist[report]'\n"

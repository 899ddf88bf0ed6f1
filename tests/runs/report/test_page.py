"""The HTML of a report: its panels, what is missing, hostile content, size, and the command."""

from __future__ import annotations

import builtins
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fp8dist.cli.main import main
from fp8dist.runs.report import rows as rows_module
from fp8dist.runs.report.binned import SlotBins
from fp8dist.runs.report.columns import NUMBERS, Columns
from fp8dist.runs.report.numbers import read_run
from fp8dist.runs.report.page import page_of
from fp8dist.runs.report.rows import rows_of
from tests.support.runs import ROLES, header, lines, made_run

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


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    return page_of(read_run(made_run(tmp_path_factory.mktemp("runs") / "made")))


def test_every_question_is_a_heading(page: str) -> None:
    assert re.findall(r"<h2 [^>]*>(.*?)</h2>", page) == QUESTIONS


def test_the_page_fetches_nothing(page: str) -> None:
    assert "default-src 'none'" in page
    assert len(_own(page)) < len(page) / 2
    assert not re.search(r"""(src|href)\s*=\s*(?!["']?(#|data:))|@import|url\((?!data:)|https?:""", _own(page))
    assert len(page) < 2_000_000


def test_the_page_says_what_happened(page: str) -> None:
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
    ):
        assert text in body, text
    assert body.count('<img alt="') == 9  # Three roles, three quantities.


def test_empty_panels_say_what_to_switch_on(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    body = _body(page_of(read_run(tmp_path)))
    for text in (
        "every=10",
        "ranks=True",
        "check_every=",
        "recorder.event(&quot;saved&quot;, step, path=…)",
        "Recorder",
        "run.json",
        "grad_norm=",
    ):
        assert text in body, text
    assert not re.search("--[a-z]|example job", body)  # A job of another program has no such flags.
    assert body.count('class="empty"') >= 6


def test_a_recipe_without_a_sync_has_no_picture_of_waits(tmp_path: Path) -> None:
    folder = made_run(tmp_path / "run", steps=20, layers=1)
    lines(folder / "ranks.jsonl", [{"step": 10, "ranks": [0, 1], "sync_wait_ms": [None, None], "step_ms": [9.0, 9.0]}])
    body = _body(page_of(read_run(folder)))
    assert "No sync was timed, so no rank is known to wait" in body
    assert "milliseconds that each rank waited" not in body


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


@pytest.mark.parametrize(
    "value",
    [
        None,
        "x",
        {"a": None},
        *(pytest.param(v, marks=pytest.mark.long) for v in ([], 3, {"slots": 3}, [[1]], True, -1.5)),
    ],
)
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


@pytest.mark.long
def test_10_000_steps_of_700_slots_stay_below_8_mb(tmp_path: Path) -> None:
    rng, slots = np.random.default_rng(0), SlotBins()
    names = {f"model.layers.{i // 21}.part_of_the_layer_{i % 21 // 3}:{ROLES[i % 3]}": i for i in range(700)}
    slots.names.update(names)
    for step in range(10, 10_001, 10):
        numbers = {name: rng.random(700).astype(np.float32).astype(float) for name in NUMBERS}
        slots.add(Columns(np.full(700, step), np.arange(700), numbers, ()))
    run = read_run(made_run(tmp_path / "run", steps=10_000, every=100, layers=1))
    assert 4_000_000 < len(page_of(run._replace(slots=slots))) < 8_000_000


def test_layer_2_comes_before_layer_10(tmp_path: Path) -> None:
    rows = rows_of(read_run(made_run(tmp_path / "run", steps=20, layers=11)))
    assert rows is not None
    names = [row.name for row in rows.rows if row.role == "input"]
    assert names.index("blocks.2.up:input") < names.index("blocks.10.up:input")
    assert rows.roles() == ["input", "weight", "grad_output"]


def test_the_command_writes_the_file_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = made_run(tmp_path / "run", steps=20, layers=1), tmp_path / "report.html"
    out.write_text("before")
    assert main(["report", str(folder), str(folder), "--out", str(out)]) == 0
    assert "Where did these two runs part?" in out.read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "run"]
    assert capsys.readouterr().err == ""


def test_it_can_be_opened_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda address: opened.append(address) or len(opened) == 1)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder, named = made_run(tmp_path / "run", steps=20, layers=1), tmp_path / "a.html"
    assert main(["report", str(folder), "--open"]) == 0
    out, err = capsys.readouterr()
    file = Path(out.removesuffix("\n"))
    assert (opened, err) == ([file.as_uri()], "")
    assert file.is_relative_to(tmp_path)
    assert "Is this run sound?" in file.read_text()
    assert main(["report", str(folder), "--open", "--out", str(named)]) == 0
    assert opened[1:] == [named.as_uri()]
    assert capsys.readouterr().err == "fp8dist report: found no browser: open this file yourself\n"
    assert main(["report", str(folder)]) == 2
    assert "give --out FILE for the HTML file, or --open" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "out", "said"),
    [
        (None, "a.html", "holds no run"),
        ("{}", "a.html", "is not the header of a run of fp8dist"),
        ('{"format": "fp8dist run", "version": 1}', "missing/a.html", "cannot be written: No such file or directory"),
    ],
)
def test_a_mistake_is_one_line(
    content: str | None, out: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    assert main(["report", str(tmp_path), "--out", str(tmp_path / out)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("fp8dist report: ")
    assert said in error
    assert error.count("\n") == 1


def test_without_bokeh_it_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
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

"""Exporters: what each tool's own reader finds, names and units of numbers, what becomes of slots, missing tools."""

from __future__ import annotations

import io
import json
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

import fp8dist
from fp8dist import Exporter, Slot, SlotStatistics, exporters
from fp8dist.errors import ConfigurationError
from fp8dist.exporters import OpenTelemetry, TensorBoard
from fp8dist.runs.exporters import tensorboard as tensorboard_module
from fp8dist.runs.exporters.opentelemetry import instrument_name
from fp8dist.runs.exporters.prometheus import metric_name
from fp8dist.runs.exporters.samples import KINDS
from fp8dist.runs.exporters.slots import by_role, headroom
from fp8dist.runs.exporters.tensorboard import _raster
from fp8dist.runs.run_numbers import KNOWN, UNITS, Kind, Number, number_of
from tests.support.exported import E4M3, END, FIRST, INF, NAN, RESUMED, bits, float32, play, slots, write
from tests.support.exporting import HOME, needs_tools, run, run_json

Series = dict[str, list[tuple[int, float]]]
LONG = (pytest.mark.long, needs_tools)

FOUND: Series = {
    "loss": [(1, 0.1 + 0.2), (2, 2.5), (3, NAN), (4, -INF)],
    "grad_norm": [(1, 1.5), (2, 1e30), (3, INF), (4, 1.5)],
    "eval/top-1": [(1, 0.1)],
    "fp8/input/saturated": [(2, 0.25), (4, 1.0)],
    "fp8/input/underflow": [(2, 1 / 3), (4, 1 / 3)],
    "fp8/input/headroom": [(2, -1.0), (4, -INF)],
    "fp8/weight/headroom": [],
    "events/nonfinite": [(3, 1.0)],
    "events/diverged": [],
}
"""What a tool has of the run that is killed."""

LATER: Series = {
    "loss": [(3, 2.25), (4, 2.125), (5, 2.0)],
    "fp8/input/headroom": [(4, 0.0)],
    "events/diverged": [(5, 1.0)],
    "events/other": [(5, 1.0)],
}
"""What the resumed run adds."""


def events_of(folder: Path) -> EventAccumulator:
    events = EventAccumulator(str(folder), {"scalars": 0, "histograms": 0, "images": 0, "tensors": 0})
    events.Reload()
    return events


def in_tensorboard(folder: Path) -> list[Series]:
    """Texts of events count as 1."""
    found: list[Series] = []
    for resumed, parts in ((None, [FIRST]), (2, [RESUMED, END])):
        play(TensorBoard(folder, resume_after=resumed), *parts)
        read = events_of(folder)
        scalars = {tag: [(one.step, one.value) for one in read.Scalars(tag)] for tag in read.Tags()["scalars"]}
        texts = {tag.removesuffix("/text_summary"): read.Tensors(tag) for tag in read.Tags()["tensors"]}
        found.append(scalars | {tag: [(one.step, 1.0) for one in all] for tag, all in texts.items()})
        if not resumed:
            first, second = (one.histogram_value for one in read.Histograms("fp8/input/headrooms"))
            assert (first.num, first.min, first.max) == (2, -1.0, 3.0)
            assert (second.num, second.min, second.max) == (1, 3.0, 3.0)
            (nonfinite,) = texts["events/nonfinite"]
            assert b"blocks.1.up:input" in nonfinite.tensor_proto.string_val[0]
    return found


PLAYED = """
from fp8dist import Exporter
from fp8dist.exporters import Wandb
from tests.support.exported import END, FIRST, RESUMED, play
exporter = Wandb(run_id="abc", project="mine")
assert isinstance(exporter, Exporter)
play(exporter, {parts})
"""


def wandb_records(folder: Path, program: str) -> Callable[[str], list[dict[str, Any]]]:
    """Run a program with W&B offline, and return what its only run has, by type, as ``wandb leet inspect`` reads it."""
    folder.mkdir()
    run(HOME / "bin" / "python", "-c", program, cwd=folder, WANDB_MODE="offline")
    (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    printed = run(HOME / "bin" / "wandb", "leet", "inspect", "--json", file, cwd=folder)
    records = [json.loads(line) for line in printed.splitlines()]
    return lambda kind: [record[kind] for record in records if record["type"] == kind]


def wandb_series(found: Callable[[str], list[dict[str, Any]]], names: Any) -> Series:
    items = [history["item"] for history in found("history")]
    return {name: [(item["step"], float(item[name])) for item in items if name in item] for name in names}


def in_wandb(folder: Path) -> list[Series]:
    first = wandb_records(folder / "first", PLAYED.format(parts="FIRST"))
    second = wandb_records(folder / "second", PLAYED.format(parts="RESUMED, END"))
    (histogram, _) = [h["item"] for h in first("history") if "fp8/input/headrooms._type" in h["item"]]
    assert sum(histogram["fp8/input/headrooms.values"]) == 2
    assert (histogram["fp8/input/headrooms.bins"][0], histogram["fp8/input/headrooms.bins"][-1]) == (-1, 3)
    axes = {metric.get("name"): metric.get("step_metric") for metric in first("metric")}
    assert (axes["loss"], axes["fp8/input/saturated"]) == ("step", "step")
    assert first("exit")[0]["exit_code"] == 1  # No event ended it.
    assert not second("exit")[0].get("exit_code")
    assert {(of("run")[0]["run_id"], of("run")[0]["project"]) for of in (first, second)} == {("abc", "mine")}
    assert second("run")[0]["resume"] is True
    (alert,) = second("alert")
    assert (alert["title"], alert["level"]) == ("fp8dist: ranks differ", "ERROR")
    assert json.loads(alert["text"])["report"] == {"consistent": False}
    return [wandb_series(first, FOUND), wandb_series(second, LATER)]


IN_MLFLOW = """
import json
from mlflow import MlflowClient
from fp8dist import Exporter
from fp8dist.exporters import MLflow
from tests.support.exported import END, FIRST, RESUMED, play
uri, found, status = "{uri}", [], []
exporter = MLflow(uri, experiment="mine", seconds=3600)
assert isinstance(exporter, Exporter)
client = MlflowClient(uri)
for parts in (FIRST,), (RESUMED, END):
    play(exporter, *parts)
    run = client.get_run(exporter.run_id)
    status.append(run.info.status)
    series = {{name: client.get_metric_history(exporter.run_id, name) for name in run.data.metrics}}
    found.append({{name: [(one.step, one.value) for one in history] for name, history in series.items()}})
    exporter = MLflow(uri, experiment="mine", run_id=exporter.run_id, seconds=0)
(run,) = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
print(json.dumps([found, status, run.data.tags]))
"""


def in_mlflow(folder: Path) -> list[Series]:
    """With sqlite and with its file store. It has no infinities, and keeps what a resume undoes."""
    for uri in ("sqlite:///runs.db", "file:./store"):
        found, status, tags = run_json(IN_MLFLOW.format(uri=uri), folder, MLFLOW_ALLOW_FILE_STORE="true")
        assert status == ["FAILED", "FINISHED"]
        assert '"consistent": false' in tags["fp8dist.diverged"]
        assert len(tags["fp8dist.start"]) > 10
    return found  # type: ignore[no-any-return]


def exact(points: list[tuple[int, float]], change: Callable[[float], float] = float) -> list[tuple[int, int]]:
    return sorted((step, bits(change(value))) for step, value in points)


def clamped(value: float) -> float:
    largest = sys.float_info.max
    return value if math.isnan(value) else max(-largest, min(largest, value))


@pytest.mark.parametrize(
    ("read", "change", "keeps"),
    [
        pytest.param(in_tensorboard, float32, lambda step: step <= 2, id="TensorBoard", marks=pytest.mark.slow),
        pytest.param(in_wandb, float, lambda step: False, id="W&B", marks=LONG),
        pytest.param(in_mlflow, clamped, lambda step: True, id="MLflow", marks=LONG),
    ],
)
def test_its_reader_finds_the_numbers(read: Any, change: Any, keeps: Callable[[int], bool], tmp_path: Path) -> None:
    """Of a run that is killed, and of the one that resumes it after step 2."""
    first, second = read(tmp_path)
    for name, points in FOUND.items():
        assert exact(first.get(name, [])) == exact(points, change), name
    for name, points in LATER.items():
        kept = [(step, value) for step, value in FOUND.get(name, []) if keeps(step)]
        assert exact(second.get(name, [])) == exact([*kept, *points], change), name


@pytest.mark.long
@needs_tools
def test_a_wandb_run_that_was_given_stays_open(tmp_path: Path) -> None:
    program = """
import math, wandb
from fp8dist.exporters import Wandb
from tests.support.exported import FIRST, play
mine = wandb.init(project="mine", id="given")
play(Wandb(run=mine), FIRST[:2])
mine.log({"after": math.pi})
assert wandb.run is mine
"""
    found = wandb_records(tmp_path / "run", program)
    assert wandb_series(found, ["loss"]) == {"loss": [(1, 0.1 + 0.2)]}
    assert [history["item"].get("after") for history in found("history")][-1] == math.pi


WAITING = """
import json
from mlflow import MlflowClient
from fp8dist.exporters import MLflow
exporter = MLflow("sqlite:///runs.db", seconds={seconds})
client = MlflowClient("sqlite:///runs.db")
sent = []
for step in range(3):
    exporter.write(step, {{"loss": float(step), "a" * 300 + "<": 1.0}}, ())
    sent.append(len(client.get_metric_history(exporter.run_id, "loss")))
exporter.write(3, {{f"number {{i}}": 1.0 for i in range(2_500)}}, ())
sent.append(len(client.get_metric_history(exporter.run_id, "loss")))
names = list(client.get_run(exporter.run_id).data.metrics)
exporter.close()
print(json.dumps([sent, len(names), max(map(len, names))]))
"""


@pytest.mark.long
@needs_tools
@pytest.mark.parametrize(("seconds", "sent"), [(3600, [0, 0, 0, 3]), (0, [1, 2, 3, 3])])
def test_metrics_are_sent_to_mlflow_in_batches(seconds: int, sent: list[int], tmp_path: Path) -> None:
    """A batch that is full is sent at once; MLflow refuses larger ones, longer names and other characters."""
    assert run_json(WAITING.format(seconds=seconds), tmp_path) == [sent, 2 + 2_500, 250]


def test_tensorboard_has_what_a_line_of_a_slot_has_except_null(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path, slots=True, images=0)
    board.write(3, {}, [SlotStatistics(Slot("a", "input"), 2.5, NAN, 0.25, None, 1)])
    read = events_of(tmp_path)  # Before it is closed.
    found = {tag: [one.value for one in read.Scalars(tag)] for tag in read.Tags()["scalars"] if ":" in tag}
    assert found == {"fp8/a:input/amax": [2.5], "fp8/a:input/saturated": [0.25], "fp8/a:input/amax_rank": [1.0]}
    board.close()
    with pytest.raises(ConfigurationError, match="images must be 0 or a number of observations, got -1"):
        TensorBoard(tmp_path, images=-1)


DARK, MIDDLE, BRIGHT, COLD = [68, 1, 84], [33, 145, 140], [253, 231, 37], [128, 128, 128]


def near(*colour: int) -> Any:
    """The palette has 254 colours, and the colour may lie between two of them."""
    return pytest.approx(list(colour), abs=3)


def pixels(folder: Path, tag: str) -> np.ndarray:
    *_, last = events_of(folder).Images(tag)
    return np.asarray(Image.open(io.BytesIO(last.encoded_image_string)))


@pytest.mark.slow
def test_a_heat_map_shows_slots_over_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    observed = [write(step, {}, slots(share, 1.0)) for step, share in ((10, 0.0), (20, 1e-3), (30, 1.0))]
    play(TensorBoard(tmp_path / "whole", images=2), observed)
    assert [one.step for one in events_of(tmp_path / "whole").Images("fp8/saturated")] == [20, 30]
    image = pixels(tmp_path / "whole", "fp8/saturated")
    tall, wide = 256 // 5, 256 // 3
    assert image.shape == (5 * tall, 3 * wide, 3)
    row = image[3 * tall + 1]  # "blocks.1.up:input" is the fourth slot.
    assert [row[wide * i + 1].tolist() for i in range(3)] == [DARK, near(*MIDDLE), BRIGHT]
    assert image[2 * tall + 1, 1].tolist() == COLD  # The third slot.
    monkeypatch.setattr(tensorboard_module, "COLUMNS", 4)  # The newest ones, and slots that come later.
    late = [write(step, {}, slots(1.0, 1.0)[3 if step < 5 else 0 :]) for step in range(6)]
    play(TensorBoard(tmp_path / "late"), late)
    image = pixels(tmp_path / "late", "fp8/saturated")
    assert image.shape == (5 * tall, 4 * 64, 3)
    assert image[1, ::64].tolist() == [COLD] * 3 + [DARK]
    shares = np.array([[0.0, 1e-9, 1e-6, 10**-4.5, 1e-3, 10**-1.5, 1.0, NAN]])  # The scale is logarithmic.
    between = [near(59, 82, 139), near(*MIDDLE), near(94, 201, 98)]
    assert _raster(shares)[0, ::32].tolist() == [*([DARK] * 3), *between, BRIGHT, COLD]


class Read:
    """The newest state of each instrument of OpenTelemetry, as the SDK's reader has it."""

    def __init__(self, reader: InMemoryMetricReader) -> None:
        (resource,) = reader.get_metrics_data().resource_metrics
        (scope,) = resource.scope_metrics
        self.scope = scope.scope.name
        self.metrics = {metric.name.removeprefix("fp8dist."): metric for metric in scope.metrics}

    def points(self, name: str) -> dict[Any, Any]:
        return {tuple(point.attributes.values()): point for point in self.metrics[name].data.data_points}

    def value(self, name: str, *attributes: str) -> float:
        return self.points(name)[attributes].value


def test_opentelemetry_finds_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader], shutdown_on_exit=False)
    monkeypatch.setattr(metrics, "get_meter", provider.get_meter)  # The global provider is the default.
    exporter = OpenTelemetry()
    for call in FIRST:
        call(exporter)
    read = Read(reader)
    assert read.scope == "fp8dist"
    names = ("loss", "grad_norm", "user_eval_top_1", "tokens", "nonfinite_amaxes", "skew", "last_step", "run_active")
    # Of gauges the newest that is finite.
    assert [read.value(name) for name in names] == [2.5, 1.5, 0.1, 4 * 512, 3, 3.5 / 1000, 4, 1]
    for name, role, value in (
        ("saturated", "input", 1.0),
        ("underflow", "input", 1 / 3),
        ("headroom", "input", -1.0),
        ("headroom", "grad_output", 5.0),
    ):
        assert read.value(name, role) == value
    nonfinite = {key: point.value for key, point in read.points("nonfinite_values").items()}
    assert nonfinite == {
        ("fp8dist.loss",): 2,
        ("fp8dist.grad_norm",): 1,
        ("fp8dist.step",): 1,
        ("fp8dist.headroom", "input"): 1,
    }
    units = [read.metrics[name].unit for name in ("skew", "step", "headroom")]
    assert units == ["s", "s", "{doubling}"]
    assert all(metric.description for metric in read.metrics.values())
    times = read.points("step")[()]  # A histogram.
    assert (times.count, times.min, times.max, times.sum) == (3, 0.0125, 10.0, 0.0125 + 0.0127 + 10.0)
    assert dict(zip(times.explicit_bounds, times.bucket_counts))[0.03] == 2
    # Counters never go back: the resumed run has one non-finite amax where the killed one had three.
    play(exporter, RESUMED)
    assert Read(reader).value("nonfinite_amaxes") == 3
    exporter.write(6, {"nonfinite_amaxes": 2}, ())
    play(exporter, END)
    read = Read(reader)
    assert (read.value("nonfinite_amaxes"), read.value("run_active")) == (4, 0)
    counted = dict.fromkeys(("diverged", "fallback", "nonfinite", "saved", "other", "end"), 1) | {"start": 2}
    for kind in (*KINDS, "other"):
        assert read.value("events", kind) == counted.get(kind, 0)
    play(OpenTelemetry(MeterProvider([own := InMemoryMetricReader()], shutdown_on_exit=False).get_meter("mine")), FIRST)
    assert Read(own).scope == "mine"


def test_names_are_unique_and_by_the_conventions() -> None:
    for name_of in (metric_name, instrument_name):
        names = [name_of(number) for number in dict.fromkeys(KNOWN.values())]
        assert len(set(names)) == len(names)
    for number in KNOWN.values():
        assert re.fullmatch(r"[a-z][a-z0-9_]*", number.name)
        assert (number.kind is not Kind.GAUGE) == metric_name(number).endswith("_total")
        assert "_ms" not in metric_name(number)
    assert {number.unit for number in KNOWN.values()} <= set(UNITS)
    assert metric_name(KNOWN["step_ms"]) == "fp8dist_step_seconds"
    assert metric_name(KNOWN["sync_wait_ms"]) == "fp8dist_sync_wait_seconds_total"
    for name in fp8dist.prepare(nn.Sequential(nn.Linear(16, 16))).metrics():
        assert number_of(name) is KNOWN[name.removeprefix("fp8/")]
    # A number of the user is never taken for one of the library.
    assert number_of("eval/top-1") == Number("user_eval_top_1", "A number that the training program logs")
    assert number_of("load_ms")[::2] == ("user_load", "ms")
    assert metric_name(number_of("fp8dist_loss")) == "fp8dist_user_fp8dist_loss"
    assert len(number_of("x" * 10_000).name) < 250


def test_headroom_is_the_number_of_doublings_that_are_left_and_a_role_shows_its_worst_slot() -> None:
    def one(amax: float, scale: float, fp8_max: float | None = E4M3) -> SlotStatistics:
        return SlotStatistics(Slot("a", "input"), amax, scale, fp8_max=fp8_max)

    for statistics, expected in (
        (one(1.0, 448.0), 0.0),
        (one(3.5, 16.0), 3.0),
        (one(14.0, 64.0), -1.0),
        (one(0.0, 1.0), INF),
        (one(INF, 1.0), -INF),
        (one(1e300, 1e300), -INF),
        (one(5e-324, 1e-300), INF),
        *((unknown, None) for unknown in (one(1.0, NAN), one(NAN, 1.0), one(1.0, -1.0), one(1.0, 1.0, None))),
    ):
        assert repr(headroom(statistics)) == repr(expected), statistics  # 0.0 is not -0.0.
    assert by_role(slots(0.25, 14.0)) == {
        "grad_output": (0.0, 0.125, 5.0, (5.0,)),
        "input": (0.25, 1 / 3, -1.0, (3.0, -1.0)),
        "weight": (0.0, 0.0, None, ()),
    }
    assert by_role(slots(1.0, INF))["input"] == (1.0, 1 / 3, -INF, (3.0,))
    assert by_role([one(1.0, 1.0)._replace(saturated=math.nan)])["input"].saturated is None
    assert by_role([]) == {}


MADE = {
    "TensorBoard": ("torch.utils.tensorboard", "tensorboard", {"folder": "x"}),
    "Wandb": ("wandb", "wandb", {}),
    "MLflow": ("mlflow", "mlflow", {}),
    "Prometheus": ("prometheus_client", "prometheus", {"port": 0}),
    "PrometheusTextfile": ("prometheus_client", "prometheus", {"path": "x.prom"}),
    "OpenTelemetry": ("opentelemetry.metrics", "opentelemetry", {}),
}


@pytest.mark.parametrize("name", exporters.__all__)
def test_a_tool_that_is_missing_is_named_in_one_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, extra, arguments = MADE[name]
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigurationError) as caught:
        getattr(exporters, name)(**arguments)
    assert f"this exporter needs {module}: pip install 'fp8dist[{extra}]'" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", [pytest.param(n, marks=LONG if n in ("Wandb", "MLflow") else ()) for n in MADE])
def test_an_exporter_that_is_only_made_leaves_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs make exporters on every rank, and one rank calls them."""
    if name in ("Wandb", "MLflow"):
        store = "'sqlite:///runs.db'" if name == "MLflow" else ""
        program = f"from fp8dist.exporters import {name}\n{name}({store}).close()\nprint(0)"
        run_json(program, tmp_path, WANDB_MODE="offline")
    else:
        monkeypatch.chdir(tmp_path)
        made = getattr(exporters, name)(**MADE[name][2])
        assert isinstance(made, Exporter)
        made.close()
    assert [*tmp_path.iterdir()] == []

"""OpenTelemetry, read back by the SDK's reader."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from fp8dist.exporters import OpenTelemetry
from fp8dist.runs.exporters.samples import KINDS
from tests.support.exported import END, FIRST, RESUMED, play


class Read:
    """The newest state of each instrument."""

    def __init__(self, reader: InMemoryMetricReader) -> None:
        (resource,) = reader.get_metrics_data().resource_metrics
        (scope,) = resource.scope_metrics
        self.scope = scope.scope.name
        self.metrics = {metric.name: metric for metric in scope.metrics}

    def points(self, name: str) -> dict[Any, Any]:
        points = self.metrics[name].data.data_points
        return {tuple(point.attributes.values()): point for point in points}

    def value(self, name: str, *attributes: str) -> float:
        return self.points(name)[attributes].value


@pytest.fixture
def made() -> tuple[OpenTelemetry, InMemoryMetricReader]:
    reader = InMemoryMetricReader()
    meter = MeterProvider([reader], shutdown_on_exit=False).get_meter("mine")
    return OpenTelemetry(meter), reader


def test_its_reader_finds_the_numbers(made: tuple[OpenTelemetry, InMemoryMetricReader]) -> None:
    exporter, reader = made
    for call in FIRST:
        call(exporter)
    read = Read(reader)
    assert read.scope == "mine"
    assert read.value("fp8dist.loss") == 2.5  # The newest that is finite.
    assert read.value("fp8dist.grad_norm") == 1.5
    assert read.value("fp8dist.user_eval_top_1") == 0.1
    assert read.value("fp8dist.tokens") == 4 * 512
    assert read.value("fp8dist.saturated", "input") == 1.0
    assert read.value("fp8dist.underflow", "input") == 1 / 3
    assert read.value("fp8dist.headroom", "input") == -1.0
    assert read.value("fp8dist.headroom", "grad_output") == 5.0
    assert read.value("fp8dist.nonfinite_amaxes") == 3
    assert read.value("fp8dist.skew") == 3.5 / 1000
    assert read.value("fp8dist.last_step") == 4
    assert read.value("fp8dist.run_active") == 1
    nonfinite = {key: point.value for key, point in read.points("fp8dist.nonfinite_values").items()}
    assert nonfinite == {
        ("fp8dist.loss",): 2,
        ("fp8dist.grad_norm",): 1,
        ("fp8dist.step",): 1,
        ("fp8dist.headroom", "input"): 1,
    }
    units = {name: read.metrics[name].unit for name in ("fp8dist.skew", "fp8dist.step", "fp8dist.headroom")}
    assert units == {"fp8dist.skew": "s", "fp8dist.step": "s", "fp8dist.headroom": "{doubling}"}
    assert all(metric.description for metric in read.metrics.values())


def test_step_times_are_a_histogram(made: tuple[OpenTelemetry, InMemoryMetricReader]) -> None:
    exporter, reader = made
    play(exporter, FIRST)
    point = Read(reader).points("fp8dist.step")[()]
    assert (point.count, point.min, point.max) == (3, 0.0125, 10.0)
    assert point.sum == 0.0125 + 0.0127 + 10.0
    assert dict(zip(point.explicit_bounds, point.bucket_counts))[0.03] == 2


def test_counters_never_go_back(made: tuple[OpenTelemetry, InMemoryMetricReader]) -> None:
    """The resumed run has one non-finite amax where the killed one had three, in the same process."""
    exporter, reader = made
    play(exporter, FIRST, RESUMED)
    assert Read(reader).value("fp8dist.nonfinite_amaxes") == 3
    exporter.write(6, {"nonfinite_amaxes": 2}, ())
    play(exporter, END)
    read = Read(reader)
    assert read.value("fp8dist.nonfinite_amaxes") == 4
    assert read.value("fp8dist.run_active") == 0
    counted: Mapping[str, int] = {
        "start": 2,
        "diverged": 1,
        "fallback": 1,
        "nonfinite": 1,
        "saved": 1,
        "other": 1,
        "end": 1,
    }
    for kind in (*KINDS, "other"):
        assert read.value("fp8dist.events", kind) == counted.get(kind, 0)


def test_the_global_provider_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader], shutdown_on_exit=False)
    monkeypatch.setattr(metrics, "get_meter", provider.get_meter)
    play(OpenTelemetry(), FIRST)
    assert Read(reader).scope == "fp8dist"

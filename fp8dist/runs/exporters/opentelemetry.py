"""OpenTelemetry: instruments of a meter."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fp8dist.runs.exporters.extras import imported
from fp8dist.runs.exporters.samples import Sample, event_samples, no_events, step_samples
from fp8dist.runs.run_numbers import KNOWN, UNITS, Kind, Number
from fp8dist.state.statistics import SlotStatistics

STEP_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
"""Bounds of the histogram of step times."""

NONFINITE = Number("nonfinite_values", "Values of a gauge that were NaN or infinite", kind=Kind.AMOUNT)


class OpenTelemetry:
    """Instruments of OpenTelemetry's metrics API: gauges, counters, and a histogram of step times.

    OpenTelemetry drops values that are not finite. A gauge then keeps its last value, and the counter
    ``fp8dist.nonfinite_values`` (attribute ``number``) grows.

    Args:
        meter: the meter of your provider. None: that of the global provider. The provider decides where the numbers go
            and how often, and it is yours to shut down.

    Raises:
        ConfigurationError: opentelemetry-api is not installed.
    """

    def __init__(self, meter: Any = None) -> None:
        api = imported("opentelemetry.metrics", "opentelemetry")
        self._meter = api.get_meter("fp8dist") if meter is None else meter
        self._instruments: dict[Number, Any] = {}
        self._totals: dict[Number, float] = {}

    def write(self, step: int, numbers: Mapping[str, float], slots: Sequence[SlotStatistics]) -> None:
        """Set the gauges, and add to the counters. ``Exporter`` describes the arguments."""
        self._take(step_samples(step, numbers, slots))

    def event(self, event: Mapping[str, Any]) -> None:
        """Count an event by its kind."""
        self._take(event_samples(event))

    def close(self) -> None:
        """Do nothing: the provider sends what it has when it is shut down."""

    def _take(self, samples: Iterable[Sample]) -> None:
        if not self._instruments:
            samples = [*no_events(), *samples]
        for number, value, label in samples:
            attributes = {} if label is None else {label[0]: label[1]}
            if not math.isfinite(value):
                if number.kind is Kind.GAUGE:
                    self._add(NONFINITE, 1, {"number": instrument_name(number), **attributes})
            elif number is KNOWN["step_ms"]:
                self._instrument(number).record(number.in_base_unit(value), attributes)
            elif number.kind is Kind.GAUGE:
                self._instrument(number).set(number.in_base_unit(value), attributes)
            elif number.kind is Kind.AMOUNT:
                self._add(number, value, attributes)
            else:  # A total that fell was of a run that has gone back: count on from there.
                before, self._totals[number] = self._totals.get(number, 0.0), value
                self._add(number, value - before, attributes)

    def _add(self, number: Number, value: float, attributes: Mapping[str, str]) -> None:
        if value >= 0:
            self._instrument(number).add(number.in_base_unit(value), attributes)

    def _instrument(self, number: Number) -> Any:
        if number not in self._instruments:
            about: dict[str, Any] = {"unit": UNITS[number.unit].ucum, "description": number.help}
            if number is KNOWN["step_ms"]:
                about["explicit_bucket_boundaries_advisory"] = STEP_SECONDS
                made = self._meter.create_histogram
            else:
                made = self._meter.create_gauge if number.kind is Kind.GAUGE else self._meter.create_counter
            self._instruments[number] = made(instrument_name(number), **about)
        return self._instruments[number]


def instrument_name(number: Number) -> str:
    """Return what OpenTelemetry calls the number. Its unit is a field of its own there."""
    rate = "_rate" if number.unit == "per_s" else ""
    size = "_size" if number.unit == "bytes" else ""
    return f"fp8dist.{number.name}{rate}{size}"

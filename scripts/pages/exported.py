"""The reference table of numbers that exporters pass on, from the code."""

from __future__ import annotations

from fp8dist.runs.exporters.opentelemetry import NONFINITE, instrument_name
from fp8dist.runs.exporters.prometheus import metric_name
from fp8dist.runs.exporters.samples import ACTIVE, EVENTS, LAST_STEP, LAST_STEP_TIME, OF_ONE_SLOT, OF_SLOTS
from fp8dist.runs.run_numbers import KNOWN, Number
from scripts.benchmarks.markdown import table


def of_numbers() -> str:
    """Return a table of all numbers of ours, with their names in each tool."""
    rows = [_row(f"`{name}`", number) for name, number in KNOWN.items()]
    rows += [_row(f"`fp8/<role>/{name}`", number, "role") for name, number in OF_SLOTS.items()]
    rows += [_row("`events/<kind>`", EVENTS, "kind")]
    rows += [_row("", number) for number in (LAST_STEP, LAST_STEP_TIME, ACTIVE)]
    rows += [[*_row("", number, "slot")[:2], "", number.help] for number in OF_ONE_SLOT.values()]
    rows += [["", "", *_row("", NONFINITE, "number")[2:]]]
    return table(["name", "Prometheus", "OpenTelemetry", "meaning"], rows)


def _row(name: str, number: Number, label: str = "") -> list[str]:
    labels = f"{{{label}}}" if label else ""
    return [name, f"`{metric_name(number)}{labels}`", f"`{instrument_name(number)}`", number.help]

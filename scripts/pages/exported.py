"""The reference table of numbers that exporters pass on, from the code."""

from __future__ import annotations

from fp8dist.runs.exporters.opentelemetry import NONFINITE, instrument_name
from fp8dist.runs.exporters.prometheus import metric_name
from fp8dist.runs.exporters.samples import ACTIVE, EVENTS, LAST_STEP, LAST_STEP_TIME, OF_ONE_SLOT, OF_SLOTS
from fp8dist.runs.run_numbers import KNOWN, Number
from scripts.benchmarks.markdown import table


def of_numbers() -> str:
    """Return a table of all numbers of ours, with their names in files and in Prometheus."""
    known: dict[Number, list[str]] = {}
    for name, number in KNOWN.items():
        known.setdefault(number, []).append(f"`{name}`")
    rows = [_row(", ".join(names), number) for number, names in known.items()]
    rows += [_row(f"`fp8/<role>/{name}`", number, "role") for name, number in OF_SLOTS.items()]
    rows += [_row("`events/<kind>`", EVENTS, "kind")]
    rows += [_row("", number) for number in (LAST_STEP, LAST_STEP_TIME, ACTIVE)]
    rows += [_row("", number, "slot") for number in OF_ONE_SLOT.values()]
    rows += [["", f"`{instrument_name(NONFINITE)}` (OpenTelemetry)", NONFINITE.help]]
    return table(["name", "Prometheus", "meaning"], rows)


def _row(name: str, number: Number, label: str = "") -> list[str]:
    labels = f"{{{label}}}" if label else ""
    return [name, f"`{metric_name(number)}{labels}`", number.help]

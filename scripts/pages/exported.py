"""The reference table of numbers that exporters pass on, from the code."""

from __future__ import annotations

from collections.abc import Mapping

from fp8dist.runs.exporters.opentelemetry import NONFINITE, instrument_name
from fp8dist.runs.exporters.prometheus import metric_name
from fp8dist.runs.exporters.samples import ACTIVE, EVENTS, LAST_STEP, LAST_STEP_TIME, OF_ONE_SLOT, OF_SLOTS
from fp8dist.runs.run_numbers import TABLE, Number, NumberSource
from scripts.benchmarks.markdown import table


def of_numbers() -> str:
    """Return a table of all numbers of ours, with their names in files and in Prometheus."""
    rows = _merged({**TABLE[NumberSource.JOB], **TABLE[NumberSource.RECORDER]})
    of_manager = {**TABLE[NumberSource.STATE], **TABLE[NumberSource.MANAGER]}
    names = [f"`{metric_name(number)}`" for number in of_manager.values()]
    rows += [["those of [metrics](watching.md#managermetrics), without `fp8/`", ", ".join(names), "as there"]]
    rows += [_row(f"`fp8/<role>/{name}`", number, "role") for name, number in OF_SLOTS.items()]
    rows += [_row("`events/<kind>`", EVENTS, "kind")]
    rows += [_row("", number) for number in (LAST_STEP, LAST_STEP_TIME, ACTIVE)]
    rows += [_row("", number, "slot") for number in OF_ONE_SLOT.values()]
    rows += [["", f"`{instrument_name(NONFINITE)}` (OpenTelemetry)", NONFINITE.help]]
    return table(["name", "Prometheus", "meaning"], rows)


def _merged(numbers: Mapping[str, Number]) -> list[list[str]]:
    """Return a row for each number, and one for numbers that are the same, taken over the ranks in different ways."""
    found: dict[str, list[list[str]]] = {}
    for name, number in numbers.items():
        found.setdefault(number.help.partition(" over the ranks")[2] or name, []).append(_row(f"`{name}`", number))
    return [
        [*(", ".join(cells) for cells in zip(*(row[:2] for row in rows))), _joined(rows)] for rows in found.values()
    ]


def _joined(rows: list[list[str]]) -> str:
    ways = [row[2].partition(" over the ranks")[0] for row in rows]
    text = ", ".join((*ways[:-1], rows[-1][2]))
    return text[:1] + text[1:].replace("Largest", "largest")


def _row(name: str, number: Number, label: str = "") -> list[str]:
    labels = f"{{{label}}}" if label else ""
    return [name, f"`{metric_name(number)}{labels}`", number.help]

"""Prometheus: an HTTP endpoint, and a file for node_exporter's textfile collector."""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from fp8dist.common.names import require_int
from fp8dist.errors import ConfigurationError
from fp8dist.runs.exporters.extras import imported
from fp8dist.runs.exporters.samples import Sample, event_samples, no_events, slot_samples, step_samples
from fp8dist.runs.run_numbers import UNITS, Kind, Number
from fp8dist.state.statistics import SlotStatistics

PREFIX = "fp8dist_"

OWN_LABELS = ("kind", "role", "slot")
"""Labels that a series may have beside the user's. Of two labels with one name, prometheus_client keeps the second."""

MOST_SERIES = 10_000
"""Series of an exporter. Further ones are left out, because a monitoring system pays for each."""


class Prometheus:
    """An endpoint that a Prometheus server scrapes: ``http://127.0.0.1:<port>/metrics``.

    Anyone who reaches the address can read the numbers, and the names of modules with ``slots``. So only this host can,
    unless you give another ``host``.

    The endpoint ends with the process. So the last numbers of a run that stops may never be scraped:
    ``PrometheusTextfile`` keeps them.

    Args:
        port: 0 takes a free port; ``port`` says which.
        host: the address to listen on. "" or "0.0.0.0": all of this host's.
        slots: number of slots that get series of their own, the first ones in order. There are five series per slot
            and hundreds of slots in a model, so by default there are numbers by role only.

    Raises:
        ConfigurationError: prometheus_client is not installed, or an argument is wrong. A port that is taken is an
            OSError in the first call.
    """

    def __init__(self, port: int, *, host: str = "127.0.0.1", slots: int = 0) -> None:
        if not (type(port) is int and 0 <= port < 1 << 16):
            raise ConfigurationError(f"port must be 0 to 65535, got {port!r}")
        self._address, self._families = (port, host), _Families(slots)
        self._opened = False

    @cached_property
    def _server(self) -> Any:
        port, host = self._address
        self._opened = True
        return self._families.client.start_http_server(port, host, self._families.registry())

    @property
    def port(self) -> int:
        """The port of the endpoint. Reading it opens the endpoint, if no call has."""
        return int(self._server[0].server_port)

    def write(self, step: int, numbers: Mapping[str, float], slots: Sequence[SlotStatistics]) -> None:
        """Take the numbers of a step, for the next scrape. ``Exporter`` describes the arguments."""
        self._families.write(step, numbers, slots)
        _ = self._server

    def event(self, event: Mapping[str, Any]) -> None:
        """Count an event by its kind."""
        self._families.take(event_samples(event))
        _ = self._server

    def close(self) -> None:
        """Close the endpoint."""
        if self._opened:
            self._opened = False
            server, thread = self._server
            server.shutdown()
            server.server_close()
            thread.join()


class PrometheusTextfile:
    """A file for node_exporter's textfile collector. It stays when the run ends.

    Each write replaces the file with one rename, so that a reader never sees half of it.

    Args:
        path: a file whose name ends in ".prom", in the folder that ``node_exporter --collector.textfile.directory``
            names. Two runs need two files, and ``labels`` to tell their series apart. The folder is created.
        seconds: the least time between two writes. Events and ``close`` write at once.
        slots: as for ``Prometheus``.
        labels: labels of all series of this file, such as ``{"run": "a"}``. Not "kind", "role" or "slot", which series
            have of their own.

    Raises:
        ConfigurationError: prometheus_client is not installed, or an argument is wrong.
    """

    def __init__(
        self, path: str | Path, *, seconds: float = 5.0, slots: int = 0, labels: Mapping[str, str] | None = None
    ) -> None:
        self._path, self._seconds = Path(path), seconds
        if self._path.suffix != ".prom":
            raise ConfigurationError(f"node_exporter reads files that end in .prom, got {self._path.name!r}")
        self._families = _Families(slots, labels)
        self._written = -math.inf
        self._pending = False

    def write(self, step: int, numbers: Mapping[str, float], slots: Sequence[SlotStatistics]) -> None:
        """Take the numbers of a step. ``Exporter`` describes the arguments.

        Raises:
            OSError: the file cannot be written.
        """
        self._families.write(step, numbers, slots)
        self._pending = True
        if time.monotonic() >= self._written + self._seconds:
            self._save()

    def event(self, event: Mapping[str, Any]) -> None:
        """Count an event by its kind.

        Raises:
            OSError: the file cannot be written.
        """
        self._families.take(event_samples(event))
        self._save()

    def close(self) -> None:
        """Write what is not yet written."""
        if self._pending:
            self._save()

    def _save(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._families.client.write_to_textfile(str(self._path), self._families.registry())
        self._written, self._pending = time.monotonic(), False


def metric_name(number: Number) -> str:
    """Return what Prometheus calls the number: prefix, name, base unit, and ``_total`` for counters."""
    unit = UNITS[number.unit].name
    return PREFIX + number.name + f"_{unit}" * bool(unit) + "_total" * (number.kind is not Kind.GAUGE)


class _Families:
    """The newest value of each series, as a collector of prometheus_client. Scrapes come from other threads."""

    def __init__(self, slots: int, labels: Mapping[str, str] | None = None) -> None:
        self.client = imported("prometheus_client", "prometheus")
        self._core = imported("prometheus_client.core", "prometheus")
        require_int("slots", slots, 0, what="a number of slots")
        self._slots, self._labels = slots, _checked(labels or {})
        self._lock = threading.Lock()
        self._numbers: dict[str, Number] = {}  # By the metric's name, which the user's x_ms and x_seconds share.
        self._series: dict[Number, dict[tuple[str, str] | None, float]] = {}  # In base units.
        self._count = 0
        self.take(no_events())

    def registry(self) -> Any:
        """Return a registry with only these series: prometheus_client's own has those of the whole process."""
        registry = self.client.CollectorRegistry()
        registry.register(self)
        return registry

    def write(self, step: int, numbers: Mapping[str, float], slots: Sequence[SlotStatistics]) -> None:
        self.take([*step_samples(step, numbers, slots), *slot_samples(slots[: self._slots])])

    def take(self, samples: Iterable[Sample]) -> None:
        with self._lock:
            for number, value, label in samples:
                value = number.in_base_unit(value)
                number = self._numbers.setdefault(metric_name(number), number)
                if label not in self._series.get(number, ()):
                    if self._count >= MOST_SERIES:
                        continue
                    self._count += 1
                series = self._series.setdefault(number, {})
                if number.kind is Kind.GAUGE:
                    series[label] = value
                elif 0 <= value < math.inf:  # No counter takes NaN, or goes down.
                    series[label] = value + (series.get(label, 0.0) if number.kind is Kind.AMOUNT else 0.0)

    def collect(self) -> Iterator[Any]:
        """Yield the families. prometheus_client calls it for each scrape."""
        with self._lock:
            found = [(number, list(series.items())) for number, series in self._series.items()]
        for number, series in found:
            gauge = number.kind is Kind.GAUGE
            made = self._core.GaugeMetricFamily if gauge else self._core.CounterMetricFamily
            names = [*self._labels, *(label[0] for label, _ in series[:1] if label is not None)]
            family = made(metric_name(number), number.help, labels=names)
            for label, value in series:
                values = [*self._labels.values(), *(() if label is None else label[1:])]
                family.add_metric(values, value)
            yield family


def _checked(labels: Mapping[str, str]) -> dict[str, str]:
    """Return the user's labels, values as strings.

    Raises:
        ConfigurationError: Prometheus does not take one of the names, or a series has a label of that name.
    """
    for name in labels:
        # Names that begin with two underscores are Prometheus's own.
        if not isinstance(name, str) or re.fullmatch(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*", name) is None:
            raise ConfigurationError(
                f"labels: {name!r} is no name of a label: use ASCII letters, digits and underscores, such as 'run'"
            )
        if name in OWN_LABELS:
            raise ConfigurationError(
                f"labels: {name!r} is a label of fp8dist's own series, as are {', '.join(OWN_LABELS)}: use another name"
            )
    return {name: str(value) for name, value in labels.items()}

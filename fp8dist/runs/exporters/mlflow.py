"""MLflow: metrics of a run, through its client."""

from __future__ import annotations

import math
import re
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from fp8dist.runs.exporters.extras import imported
from fp8dist.runs.exporters.samples import ended, event_text, flat_numbers, kind_of
from fp8dist.state.statistics import SlotStatistics

MOST = 1_000
"""Metrics that MLflow takes in one request."""

LONGEST_NAME, LONGEST_TAG = 250, 5_000
"""Characters of a metric's name and a tag's value that all of MLflow's stores take."""


class MLflow:
    """A run of MLflow. It holds a client of its own, and leaves MLflow's current run alone.

    Metrics have the names of metrics.jsonl, and ``fp8/<role>/…`` for the slots: ``saturated``, ``underflow`` (largest
    share) and ``headroom`` (least, in doublings). They are float64. NaN stays NaN. An infinity becomes the largest
    float64 of its sign, on every store, because databases have no infinity. ``events/<kind>`` counts events, and the
    tag ``fp8dist.<kind>`` has the newest as JSON.

    Metrics are sent together: at the latest ``seconds`` after the first of them, with each event, and by ``close``.
    After a resume MLflow shows repeated steps twice, with their times.

    Args:
        tracking_uri: a server, or ``sqlite:///FILE`` (needs sqlalchemy and alembic, which mlflow brings and
            mlflow-skinny does not). None: what MLflow is configured to use.
        experiment: name of the experiment of a new run; it is created.
        run_id: continue this run. None: a new one. ``run_id`` of this object has its id.
        seconds: the longest time that metrics wait in a training that goes on.

    Raises:
        ConfigurationError: mlflow is not installed.
    """

    def __init__(
        self,
        tracking_uri: str | None = None,
        *,
        experiment: str = "fp8dist",
        run_id: str | None = None,
        seconds: float = 10.0,
    ) -> None:
        self._mlflow, self._entities = imported("mlflow", "mlflow"), imported("mlflow.entities", "mlflow")
        self._uri, self._experiment, self._seconds = tracking_uri, experiment, seconds
        self._resumed = run_id
        self._waiting: list[Any] = []
        self._due = math.inf
        self._counts: Counter[str] = Counter()
        self._opened = self._ended = False

    @cached_property
    def _client(self) -> Any:
        return self._mlflow.MlflowClient(tracking_uri=self._uri)

    @cached_property
    def run_id(self) -> str:
        """Id of the run. Reading it makes the run, if no call has."""
        if self._resumed is not None:
            self._client.update_run(self._resumed, status="RUNNING")
        self._opened = True
        return self._resumed or str(self._client.create_run(self._experiment_id()).info.run_id)

    def write(self, step: int, numbers: Mapping[str, float], slots: Sequence[SlotStatistics]) -> None:
        """Log the numbers of a step. ``Exporter`` describes the arguments."""
        self._add(step, flat_numbers(numbers, slots))
        if time.monotonic() >= self._due or len(self._waiting) >= MOST:
            self._send()

    def event(self, event: Mapping[str, Any]) -> None:
        """Count an event by its kind, and keep it as a tag."""
        kind = kind_of(event)
        self._counts[kind] += 1
        self._ended = ended(event)
        self._add(int(event.get("step") or 0), {f"events/{kind}": self._counts[kind]})
        self._client.set_tag(self.run_id, f"fp8dist.{kind}", event_text(event, LONGEST_TAG))
        self._send()

    def close(self) -> None:
        """Send what waits, and end the run, as failed if no event has ended it."""
        self._send()
        if self._opened:
            self._opened = False
            self._client.set_terminated(self.run_id, "FINISHED" if self._ended else "FAILED")

    def _add(self, step: int, values: Mapping[str, float]) -> None:
        if not self._waiting:
            self._due = time.monotonic() + self._seconds
        now = time.time_ns() // 1_000_000
        self._waiting += [
            self._entities.Metric(_name(name), _stored(value), now, step) for name, value in values.items()
        ]

    def _send(self) -> None:
        while self._waiting:
            self._client.log_batch(self.run_id, metrics=self._waiting[:MOST])
            del self._waiting[:MOST]

    def _experiment_id(self) -> str:
        found = self._client.get_experiment_by_name(self._experiment)
        return str(self._client.create_experiment(self._experiment) if found is None else found.experiment_id)


def _name(name: str) -> str:
    return re.sub(r"[^\w\-. :/]", "_", name)[:LONGEST_NAME]


def _stored(value: float) -> float:
    return math.copysign(sys.float_info.max, value) if math.isinf(value) else value

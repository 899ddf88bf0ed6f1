"""Weights & Biases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from fp8dist.runs.exporters.extras import imported
from fp8dist.runs.exporters.samples import ended, event_text, flat_numbers, kind_of
from fp8dist.runs.exporters.slots import by_role
from fp8dist.state.statistics import SlotStatistics

STEP = "step"
"""Name of the number that is the x axis of all others."""

LONGEST_ALERT = 1_000
"""Characters of an alert's text."""


class Wandb:
    """A run of Weights & Biases. With ``WANDB_MODE=offline`` it writes files, which ``wandb sync`` uploads later.

    Numbers have the names of metrics.jsonl, and ``fp8/<role>/…`` for the slots: ``saturated``, ``underflow`` (largest
    share), ``headroom`` (least, in doublings), and a histogram of all headrooms. All are float64; NaN and infinities
    are the strings "NaN", "Infinity" and "-Infinity", as always there. ``events/<kind>`` counts events. A divergence
    raises a W&B alert, which reaches you by mail or Slack.

    The x axis is the number ``step``. W&B's own step counts the calls, because it cannot go back when a run resumes
    from a checkpoint: repeated steps stand twice at their place.

    Args:
        run: a run that you made and finish yourself. None: make one.
        run_id: id of the run. One that exists is continued.
        settings: further arguments of ``wandb.init``, such as ``project=``.

    Raises:
        ConfigurationError: wandb is not installed.
    """

    def __init__(self, *, run: Any = None, run_id: str | None = None, **settings: Any) -> None:
        self._wandb = imported("wandb", "wandb")
        self._given = run
        self._settings = {"project": "fp8dist", "id": run_id, "resume": None if run_id is None else "allow"} | settings
        self._counts: Counter[str] = Counter()
        self._defined: set[str] = set()
        self._opened = self._ended = False

    @cached_property
    def run(self) -> Any:
        """The run. Reading it makes the run, if no call has."""
        if self._given is not None:
            return self._given
        self._opened = True
        return self._wandb.init(reinit="create_new", **self._settings)  # Leave alone a run that the program has.

    def write(self, step: int, numbers: Mapping[str, float], slots: Sequence[SlotStatistics]) -> None:
        """Log the numbers of a step. ``Exporter`` describes the arguments."""
        headrooms = {role: list(of_role.headrooms) for role, of_role in by_role(slots).items() if of_role.headrooms}
        histograms = {f"fp8/{role}/headrooms": self._wandb.Histogram(found) for role, found in headrooms.items()}
        self._log(step, flat_numbers(numbers, slots) | histograms)

    def event(self, event: Mapping[str, Any]) -> None:
        """Count an event by its kind, and raise an alert if ranks differ."""
        kind = kind_of(event)
        self._counts[kind] += 1
        self._log(event.get("step"), {f"events/{kind}": self._counts[kind]})
        self._ended = ended(event)
        if kind == "diverged":
            self.run.alert("fp8dist: ranks differ", event_text(event, LONGEST_ALERT), level="ERROR")

    def close(self) -> None:
        """Finish the run, as failed if no event has ended it. A run that was given stays open."""
        if self._opened:
            self._opened = False
            self.run.finish(exit_code=0 if self._ended else 1)

    def _log(self, step: int | None, values: Mapping[str, Any]) -> None:
        for name in values.keys() - self._defined:
            self.run.define_metric(name, step_metric=STEP)
            self._defined.add(name)
        if values:
            self.run.log({**values, STEP: step})

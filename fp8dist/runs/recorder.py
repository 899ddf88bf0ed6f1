"""Recorder: writes the folder of a run from any training loop."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Real
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from torch import Tensor

from fp8dist.checks.checked import Checked
from fp8dist.common.divergence import Divergence
from fp8dist.common.names import check_keywords, require_int
from fp8dist.errors import ConfigurationError, DivergenceError
from fp8dist.job.manager import Internals
from fp8dist.runs.exporter import Exporter, Exporters
from fp8dist.runs.monitor import boards
from fp8dist.runs.run_files import RunFiles, slot_lines
from fp8dist.runs.run_format import EVENTS, EXPERTS, METRICS, RANKS, SCALES
from fp8dist.runs.run_header import header
from fp8dist.runs.run_numbers import TABLE, NumberSource
from fp8dist.runs.watching import describe, watch
from fp8dist.state.expert_loads import idle_numbers
from fp8dist.state.groups import is_dtensor, own_rank, world_size
from fp8dist.state.watch import Observation

logger = logging.getLogger("fp8dist")

_OF_STEP = ("loss", "grad_norm")
"""Numbers that say whether a step was sound, unless the scaler skipped it."""


def _with_alarm(given: dict[str, Any], jump: float | None) -> None:
    if jump is not None and given["manager"] is not None and given["every"]:
        watch(given["manager"], given["every"], jump=jump)


def _with_board(given: dict[str, Any], folder: str | os.PathLike[str] | None) -> None:
    resumed = given["resume_after"]
    given["exporters"] = [*given["exporters"], *boards(folder, resumed if isinstance(resumed, int) else None)]


_OLD: Mapping[str, tuple[str, Callable[[dict[str, Any], Any], None]]] = MappingProxyType(
    {
        "jump": ("fp8dist.watch(manager, every, jump=…) beside the recorder", _with_alarm),
        "tensorboard": ("exporters=[fp8dist.exporters.TensorBoard(folder, slots=True)]", _with_board),
    }
)
"""Options of an earlier version: the new call, and what they do."""


class Recorder:
    """Writes the folder of a run (docs/reference/files.md). Local: it adds no collective to those of the watch.

    One rank writes: the lowest that shares the manager's FP8 state, or rank 0. On the others all calls do nothing.

        recorder = fp8dist.Recorder("runs/first", manager)
        manager.attach(model, optimizer=optimizer)
        with recorder:
            for step in range(1, 101):
                …
                recorder.log(step, loss=loss, grad_norm=norm, tokens=tokens)

    Lines are appended, so a killed process loses at most the line that it was writing. A full disk or a deleted folder
    does not end the training: one warning, then no more writes.

    Args:
        folder: created if it does not exist. Without ``resume_after``, a new run replaces the numbers of an earlier
            one; events stay.
        manager: a StateManager that is not attached yet. None: a run without FP8 state.
        every: interval in steps of the watch and of the FP8 numbers. 0: no watch, and no collective.
        resume_after: the step that the run continues from. Numbers of later steps are dropped. "state": that of the FP8
            state that is loaded before the first step, also after ``attach``; the run is a new one if none is loaded.
            Until the first step the folder stays as it is, and events wait. Without a step, ``close`` writes them if
            there is no earlier run.
        ranks: also record who held each maximum, and the times of each rank. See ``fp8dist.watch``.
        exporters: get the same numbers, on the writing rank. One that raises is left out from then on.
        precision: what the run computes in, such as "bf16". None: "fp8", or the default dtype of a run without FP8.
        peaks: dense FLOP/s of one rank's device, such as {"high": 989.5e12, "fp8": 1979e12}. None: by the GPU's name.

    Raises:
        ConfigurationError: another process records there, the folder cannot be written to, or an argument is invalid.
    """

    @check_keywords("fp8dist.Recorder", old=_OLD)
    def __init__(
        self,
        folder: str | os.PathLike[str],
        manager: Any = None,
        *,
        every: int = 10,
        resume_after: int | Literal["state"] | None = None,
        ranks: bool = True,
        exporters: Sequence[Exporter] = (),
        precision: str | None = None,
        peaks: Mapping[str, float] | None = None,
    ) -> None:
        require_int("every", every, 0, what="a number of steps, or 0 for no watch,")
        known = _known_step(resume_after, manager)
        self.folder = Path(folder)
        self.writes = own_rank() == 0 if manager is None else bool(describe(manager)["writes"])
        self._manager, self._every = manager, every
        self._exporters = Exporters(exporters if self.writes else ())
        self._files = RunFiles(self.folder) if self.writes else None
        self._watches = manager is not None and every > 0
        if self._watches:
            observer = self._observe if self.writes else None
            try:
                watch(manager, every, ranks=ranks, resume_after=known, observer=observer)
            except ConfigurationError:
                if self._files is not None:
                    self._files.close()  # No line of an earlier run is dropped.
                raise
        self._idle: dict[str, float] = {}  # Of the last observation.
        self._head: Callable[[Mapping[str, Any]], dict[str, Any]] | None = lambda described: header(
            described, every, precision, peaks
        )
        self._last_step, self._last_log = 0, math.nan
        self._logged_at = -1  # The manager's ``run_step`` at the last line.
        self._skipped_at = -1  # That at which the loss scaler skipped a step last.
        self._synced = 0, 0.0  # Step and fp8/sync_wait_ms of the last due line.
        self._warned_ahead = self._warned_back = False
        self._noted: Any = None  # The report of the manager's newest event that has one.
        if manager is not None and self.writes:
            manager.on_event(self._on_event)
            inside = Internals(manager)
            inside.cycle.listeners.append(self._step_ended)
            inside.cycle.checker.on_checked.append(self._log_checked)
        self._early: list[dict[str, Any]] = []  # Events before the run begins.
        self._awaits_state = resume_after == "state"
        if not self._awaits_state:
            self._begin(known)

    def _begin(self, after: int | None, in_step: bool = False) -> None:
        """Begin a run, or continue it after a step. ``in_step``: only warn if the folder cannot be written to. An error
        on one rank would leave the others in their next collective."""
        self._awaits_state = False
        if self._files is None:
            return
        names = [METRICS, RANKS, *((SCALES,) if self._watches else ())]
        if self._watches and describe(self._manager)["experts"]:
            names.append(EXPERTS)
        try:
            self._files.begin(after, names, {SCALES, EXPERTS}.difference(names))  # Those of a run that had them.
        except ConfigurationError as error:
            if not in_step:
                raise
            logger.warning("fp8dist: nothing is recorded: %s", error)
        self._last_step, self._synced = after or 0, (after or 0, 0.0)
        self.event("start", self._last_step, resumed_after=after, ranks=world_size())
        early, self._early = self._early, []
        for line in early:
            self._add_event(line)
        self._log_checked()
        self._describe()

    def _begin_by_state(self, step: int) -> None:
        """Begin if that has waited for the state. ``step``: one that has just ended, if it is not known otherwise."""
        if self._awaits_state and self._files is not None:
            began = describe(self._manager)["began_after"]
            self._begin((step - 1 if began is None else began) or None, in_step=True)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if self._manager is None and isinstance(error, DivergenceError):
            self.log_check(max(finding.step for finding in error.report.findings), error.report)
        self.close(None if kind is None else kind.__name__)

    def log(self, step: int, *, loss: Any = None, grad_norm: Any = None, tokens: Any = None, **numbers: Any) -> None:
        """Write the numbers of a step. Local. On a due step it reads the FP8 state, which waits for the device.

        Numbers are Python numbers, tensors with one element, or None. A tensor is read at once, which waits for its
        device. ``time`` (Unix seconds) and ``step_ms`` are measured between calls, unless given. If the loss scaler has
        skipped the step, loss and gradient norm are written as ``skipped_loss`` and ``skipped_grad_norm``: the weights
        are those of ``manager.run_step``, whose numbers stay.

        Args:
            step: number of the step that ended, such as ``manager.run_step``.
            tokens: tokens of this step, of all ranks.

        Raises:
            ConfigurationError: a value is not a number.
        """
        require_int("step", step, 0, what="the number of a step")
        given = {"loss": loss, "grad_norm": grad_norm, "tokens": tokens}
        values = {name: value for name, value in given.items() if value is not None} | numbers
        for name, value in values.items():
            _require_number(name, value)
        self._begin_by_state(step)
        if self._files is not None:
            self._describe()
            self._log(self._files, step, values)

    def _log(self, files: RunFiles, step: int, values: dict[str, Any]) -> None:
        at = None if self._manager is None else self._manager.run_step
        stays = step == at == self._logged_at  # As after a step that the scaler skipped.
        if step < self._last_step or (step == self._last_step and not stays and not math.isnan(self._last_log)):
            self._go_back(step)
        if step == at == self._skipped_at:
            values = {f"skipped_{name}" if name in _OF_STEP else name: value for name, value in values.items()}
        now = time.perf_counter()
        line: dict[str, Any] = {"step": step, "time": time.time()}
        if step > self._last_step and not math.isnan(self._last_log):
            line["step_ms"] = 1e3 * (now - self._last_log) / (step - self._last_step)
        line |= {name: _read(value) for name, value in values.items()}
        if self._every and step % self._every == 0 and self._manager is not None:
            line = {**line, **dict(self._fp8(step)), **line}  # What is given comes first.
        self._last_step, self._last_log, self._logged_at = step, now, -1 if at is None else at
        files.add(METRICS, [line])
        numbers = {
            name: math.nan if value is None else float(value)
            for name, value in line.items()
            if name not in ("step", "time")
        }
        self._exporters.call("write", step, numbers, ())

    def _go_back(self, step: int) -> None:
        """Note that ``step`` is not after the last one. An earlier one undoes what was recorded since, as a resume."""
        if not self._warned_back:
            self._warned_back = True
            logger.warning(
                "fp8dist: the recorder is given step %d after step %d. Readers merge lines of the same step, and the "
                "newer number counts. An earlier step undoes all that was recorded from it on. Give each step once and "
                "in order, such as manager.run_step. A run that resumes needs resume_after=",
                step,
                self._last_step,
            )
        if step < self._last_step:
            self.event("start", max(0, step - 1), resumed_after=step - 1, ranks=world_size())

    def event(self, kind: str, step: int, **fields: Any) -> None:
        """Write an event, such as "saved" with ``path=…``. Local.

        Args:
            kind: any name. The kinds that the library writes are in docs/reference/files.md.
            fields: JSON values; others are written as their ``str()``.

        Raises:
            ConfigurationError: ``step`` is not the number of a step, or JSON cannot hold a field.
        """
        require_int("step", step, 0, what="the number of a step")
        try:  # On all ranks: one that raises alone leaves the others in their next collective.
            line = json.loads(json.dumps({"step": step, "time": time.time(), "kind": kind, **fields}, default=str))
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"recorder.event({kind!r}): a field is no JSON: {error}") from None
        if not self._awaits_state:
            self._add_event(line)
        elif self._files is not None:  # Which lines of an earlier run stay is not known yet.
            self._early.append(line)

    def _add_event(self, line: dict[str, Any]) -> None:
        if self._files is not None:
            self._files.add(EVENTS, [line])
            self._exporters.call("event", line)

    def log_check(self, step: int, report: Divergence) -> None:
        """Write what a check by ``fp8dist.check`` found after a step: an event "checked", or "diverged", or both if it
        repaired what differed. Local.

        ``fp8dist good`` and the report of a run need it. Checks by the manager are written without this call. So is, in
        a run without one, the DivergenceError that ends the ``with`` block of the recorder.
        """
        if report.findings and report is not self._noted:
            self.event("diverged", step, report=report.to_json())
        if not report.diverged:
            self.event("checked", step, **Checked.of(step, report).fields())

    def close(self, error: str | None = None) -> None:
        """Write "end", and close files and exporters. Local. Later calls do nothing.

        Args:
            error: what ended the run early.
        """
        if self._files is None:
            return
        if self._early and not (self.folder / METRICS).exists():
            self._begin_by_state(1)
        if self._awaits_state:  # No step was recorded: an earlier run stays.
            self._files.close()
            self._files = None
            return
        self._describe()
        self.event("end", self._last_step, **({} if error is None else {"error": error}))
        self._exporters.close()
        self._files.close()
        self._files = None

    # What the manager reports --------------------------------------------------------------------------

    def _observe(self, seen: Observation) -> None:
        """Record what the watch collected. Called inside the step, so it must not raise."""
        self._begin_by_state(seen.step)
        if self._files is None:
            return
        self._describe()
        self._files.add(SCALES, slot_lines(seen.step, seen.slots))
        self._files.add(EXPERTS, ({"step": seen.step, **one._asdict()} for one in seen.experts))
        self._idle = idle_numbers(seen.experts)
        if seen.ranks:
            waits = [None if math.isnan(one.sync_wait) else one.sync_wait for one in seen.ranks.values()]
            steps = [None if math.isnan(one.step) else one.step for one in seen.ranks.values()]
            line = {"step": seen.step, "time": time.time(), "ranks": list(seen.ranks)}
            self._files.add(RANKS, [{**line, "sync_wait_ms": waits, "step_ms": steps}])
        self._exporters.call("write", seen.step, {}, seen.slots)

    def _step_ended(self, took_place: bool) -> None:
        if took_place:
            self._begin_by_state(self._manager.run_step)
        else:
            self._skipped_at = self._manager.run_step

    def _on_event(self, event: Any) -> None:
        """Record an Event of the manager, at the step of the run that ended last. An audit is of the one that ends."""
        step, slots = self._manager.run_step, [str(slot) for slot in event.slots]
        fields: dict[str, Any] = {"slots": slots} if slots else {}
        if event.report is not None:
            self._noted = event.report
            fields["report"] = event.report.to_json()
            step += any(finding.kind == "audit" for finding in event.report.findings)
        if event.cause is not None:
            fields |= {name: value for name, value in event.cause._asdict().items() if value is not None}
            fields["cause_step"] = fields.pop("step")
        if event.replay is not None:
            fields |= event.replay.fields()
            step = event.step
        self.event(event.kind, step, **fields)

    def _fp8(self, step: int) -> Iterator[tuple[str, float | None]]:
        if step > self._manager.run_step + 1 and not self._warned_ahead:  # A loop may log before its step ends.
            self._warned_ahead = True
            logger.warning(
                "fp8dist: the recorder is given step %d, and the optimizer has taken %d: scales, events and proven "
                "steps are counted by the optimizer's steps, which a GradScaler may skip. Log manager.run_step",
                step,
                self._manager.run_step,
            )
        metrics = self._manager.metrics()
        yield "proven", self._manager.verified.proven_step
        yield "checked", self._manager.verified.checked_step
        for name in TABLE[NumberSource.STATE]:
            yield name, int(metrics[f"fp8/{name}"])
        (before, waited), self._synced = self._synced, (step, metrics["fp8/sync_wait_ms"])
        yield from self._idle.items()
        if step > before:
            yield "sync_ms", (metrics["fp8/sync_wait_ms"] - waited) / (step - before)

    def _log_checked(self) -> None:
        """Write an event of the newest check that has found no difference. While the state is awaited, ``_begin``
        does: the step would begin the run, and drop the lines of the one that is resumed."""
        checked = None if self._manager is None else self._manager.verified.last_check
        if checked is not None and not self._awaits_state:
            if self._manager.run_step < min(self._logged_at, self._last_step):  # Loaded since, which makes ranks equal.
                self._go_back(self._manager.run_step + 1)
                self._last_step, self._last_log = self._manager.run_step, math.nan
            self.event("checked", checked.step, **checked.fields())

    # Writing -----------------------------------------------------------------------------------------

    def _describe(self) -> None:
        """Write the header, once: as soon as the manager is attached, because then device and hosts are known."""
        if self._head is None or self._files is None:
            return
        described = {} if self._manager is None else describe(self._manager)
        if self._manager is None or described["attached"]:
            self._files.describe(self._head(described))
            self._head = None


def _known_step(resume_after: int | Literal["state"] | None, manager: Any) -> int | None:
    """Return the step that the run continues from; None if it is new, or if the state will know."""
    if resume_after == "state":
        if manager is None:
            raise ConfigurationError('resume_after="state" needs the manager, whose state knows the step')
        return None
    if resume_after is not None:
        require_int("resume_after", resume_after, 0, what='the number of a step, "state" or None,')
    return resume_after


def _require_number(name: str, value: Any) -> None:
    """Raise ConfigurationError unless the value is a number, a tensor with one element, or None. Reads no tensor."""
    if is_dtensor(value) and not all(placement.is_replicate() for placement in value.placements):
        raise ConfigurationError(
            f"recorder.log({name}=…) got a DTensor of which each rank has a part: log {name}.full_tensor()"
        )
    one = value is None or isinstance(value, Real)
    if isinstance(value, Tensor):
        one = value.numel() == 1 and not value.is_complex() and not value.is_meta
    if not one:
        raise ConfigurationError(
            f"recorder.log({name}=…) takes a number or a tensor with one element, got {repr(value)[:80]}"
        )


def _read(value: Any) -> float | int | None:
    value = value.item() if isinstance(value, Tensor) else value
    try:
        number = None if value is None else float(value)
    except OverflowError:  # An integer beyond float64.
        return math.inf if value > 0 else -math.inf
    return value if isinstance(value, int) else number

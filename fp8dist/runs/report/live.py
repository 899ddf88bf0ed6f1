"""LiveRun: the present state of a run, as plain data, from the files that its job appends to."""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from fp8dist.checks.checked import Checked
from fp8dist.common.divergence import compared_text
from fp8dist.common.text import printable, shortened
from fp8dist.errors import ConfigurationError
from fp8dist.runs.report.events import Events, RunEvent, checks_in
from fp8dist.runs.report.folder import Lines, RunFolder
from fp8dist.runs.report.records import numbers_in, rank_record, slot_in
from fp8dist.runs.run_format import EVENTS, HEADER, METRICS, RANKS, SCALES

if TYPE_CHECKING:
    from fp8dist.state.recipe import ShareLimits

KEPT_LOSSES = 400
"""Losses of the last steps, for the sparkline."""

KEPT_EVENTS = 100
"""Events: the last ones, and as many of each kind to judge the run by."""

MAX_SLOTS = 200_000
"""Slots whose newest values are kept."""

MAX_NAME = 1_000
"""Characters of a name that are kept. The middle of a longer one is left out."""

MAX_TEXT = 300
"""Characters of a text about a check or an event."""

NUMBERS = ("loss", "validation_loss", "grad_norm", "step_ms", "proven", "checked", "idle_experts", "longest_idle_steps")
"""Fields of metrics.jsonl that are shown."""

TAILS = MappingProxyType({METRICS: 1 << 23, SCALES: 1 << 26, RANKS: 1 << 24, EVENTS: 1 << 26})
"""Bytes at the end of each file that are read at the start. What a long run wrote before does not matter now."""

BEYOND = 2.0
"""From which multiple of the format's largest value on a slot is in trouble. Its recipe says from which shares on."""


class Trouble(NamedTuple):
    """What is wrong with a slot. Sorts by severity: the worst first.

    ``share``: negative share of saturated or flushed elements; ``room``: factor left to the format's largest value.
    """

    rank_of_kind: int  # 0: not finite, 1: saturated, 2: underflow, 3: beyond the format's largest value, 4: nothing.
    share: float
    room: float


class NewestOfSlot(NamedTuple):
    """Newest values of one slot. None: not measured, or unknown."""

    observation: int
    name: str
    amax: float | None
    scale: float | None
    saturated: float | None
    underflow: float | None
    place: tuple[int | None, int | None]  # Rank and microbatch that hold the value in question.
    largest: float | None
    limits: ShareLimits

    @property
    def trouble(self) -> Trouble:
        """What is wrong with the slot, or that nothing is."""
        room = math.inf if self.headroom is None else self.headroom
        if self._not_finite is not None:
            return Trouble(0, 0.0, 0.0)
        if self.saturated is not None and self.saturated >= self.limits.saturated:
            return Trouble(1, -self.saturated, room)
        if self.underflow is not None and self.underflow >= self.limits.underflow:
            return Trouble(2, -self.underflow, room)
        return Trouble(3 if room * BEYOND <= 1 else 4, 0.0, room)

    @property
    def _not_finite(self) -> float | None:
        measured = (self.amax, self.saturated, self.underflow)
        return next((value for value in measured if value is not None and not math.isfinite(value)), None)

    @property
    def headroom(self) -> float | None:
        """The format's largest value, divided by the largest scaled value; None if it is unknown or infinite."""
        if not (self.amax and self.scale and self.largest):
            return None
        used = abs(self.amax * self.scale)
        return self.largest / used if math.isfinite(used) and used > 0 else None

    @property
    def what(self) -> str:
        """The trouble as text; "" if there is none."""
        kind, share, room = self.trouble
        if kind == 0:
            return f"amax is {self._not_finite}"
        if kind < 3:
            return f"{_percent(-share)} {('saturated', 'underflow')[kind - 1]}"
        return f"{_percent(1 / room)} of {self.largest:g}" if kind == 3 else ""


class RankWait(NamedTuple):
    """What one rank waits in syncs, ms per step; NaN: unknown. A straggler waits least: the others wait for it."""

    rank: int
    wait: float


class LiveRun:
    """The present state of a run. ``read`` updates it from what was added to the files.

    Names and texts from files have no control characters. Memory is bounded, however long the run is.

    Args:
        path: the run's folder.

    Raises:
        ConfigurationError: it is not the folder of a run.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read_header()
        self._files = {name: Lines(path / name, tail) for name, tail in TAILS.items()}
        self.event_count = 0
        """Number of events so far, of all files that were there."""
        self.line_count = 0
        """Number of lines of all files so far, for a reader that shows only what is new."""
        self._clear_steps()
        self._clear_slots()
        self._clear_events()
        self.waits: list[RankWait] = []

    def _clear_steps(self) -> None:
        self.step: int | None = None
        self.loss: float | None = None
        self.grad_norm: float | None = None
        self.step_ms: float | None = None
        self.proven: int | None = None
        self._of_step: dict[str, float] = {}  # The numbers of the newest step.
        self._newest: dict[str, float] = {}  # Of each field the newest number.
        self._bad_since: int | None = None  # The step from which on no loss is finite.
        self.losses: deque[float] = deque(maxlen=KEPT_LOSSES)
        self._validated: tuple[int, float] | None = None
        self._seen: float | None = None  # Monotonic time of the newest step.

    def _clear_slots(self) -> None:
        self._slots: dict[str, NewestOfSlot] = {}
        self._observation, self._observed = 0, None

    def _clear_events(self) -> None:
        self._events = Events(KEPT_EVENTS)
        self._judge_events()

    def read(self) -> bool:
        """Take in what was added to the files. Return True if anything was."""
        before = self.line_count
        if _modified(self.path / HEADER) != self._header_time:
            with contextlib.suppress(ConfigurationError):  # It is being replaced, or gone: keep the last one.
                self._read_header()
        for name, take, clear in (
            (METRICS, self._take_step, self._clear_steps),
            (SCALES, self._take_slot, self._clear_slots),
            (RANKS, self._take_ranks, self.waits.clear),
            (EVENTS, self._take_event, self._clear_events),
        ):
            lines = self._files[name]
            if lines.replaced():
                clear()
                self.line_count += 1
            for line in lines.new():
                take(line)
                self.line_count += 1
        if self.line_count > before:
            self._judge_events()
        return self.line_count > before

    def _read_header(self) -> None:
        self._header_time = _modified(self.path / HEADER)
        folder = RunFolder(self.path)
        self.header, self._formats, self._name = folder.header, folder.formats(), folder.name
        self._limits, self._usual = folder.share_limits()

    def _judge_events(self) -> None:
        kept = self._events.kept()
        self.events: Sequence[RunEvent] = kept[-KEPT_EVENTS:]
        self.ended = bool(kept) and kept[-1].kind == "end"
        self.check = next(reversed(checks_in(kept, self._newest_step("checked"))), None)
        stays = [event for event in kept[::-1] if event.kind == "diverged" and not (event.undone or event.repaired)]
        self.diverged = next((event for event in stays if not event.audited), None)
        # What an audit found last. No check can show that the damage is gone.
        self.wrong = next((event for event in stays if event.audited), None)

    # What is shown ---------------------------------------------------------------------------------

    def idle(self) -> float:
        """Return the seconds since the newest step."""
        return 0.0 if self._seen is None else max(0.0, time.monotonic() - self._seen)

    @property
    def validation(self) -> tuple[int, float] | None:
        """Step and number of the newest validation loss."""
        found = ((e.step, n) for e in self.events if not e.undone and (n := e.validation_loss) is not None)
        return max((*found, *([] if self._validated is None else [self._validated])), default=None)

    @property
    def idle_experts(self) -> str:
        """How many experts had no token in the newest observation; "" if all had some, or there are none."""
        count, steps = (
            number if number and 0 < number < 1e15 else None
            for number in map(self._newest.get, ("idle_experts", "longest_idle_steps"))
        )
        longest = "" if steps is None else f", one for {steps:,.0f} step{'s' * (steps != 1)} or more"
        return "" if count is None else f"{count:,.0f} expert{'s' * (count != 1)} without tokens{longest}"

    @property
    def sound(self) -> tuple[bool | None, str]:
        """(True if the ranks are known to agree, False if they are known to differ, None if nobody knows; as text)."""
        check, known = self.check, [f"proven to step {self.proven}"] if self.proven else []
        if check is not None and check.step:
            known.append(_checked_text(check))
        if self.wrong is not None:
            return False, f"WRONG RESULT in step {self.wrong.step}: {clean(self.wrong.text, MAX_TEXT)}"
        if self.diverged is not None and (check is None or check.step < self.diverged.step):
            return False, f"DIVERGED in step {self.diverged.step}: {clean(self.diverged.text, MAX_TEXT)}"
        if check is not None and check.nonfinite:
            return False, f"NOT FINITE after step {check.step}: {clean(check.text, MAX_TEXT)}"
        if self._bad_since is not None:
            return False, ", ".join([f"NOT FINITE since step {self._bad_since}", *known])
        if self.diverged is not None:
            known.append(f"ranks differed in step {self.diverged.step}, and are equal again")
        if not known:
            return None, "unproven: nothing has compared the ranks yet"
        return True, ", ".join(known)

    def observed(self) -> list[NewestOfSlot]:
        """Return the slots of the last two observations: the newest may still be incomplete."""
        return [slot for slot in self._slots.values() if slot.observation >= self._observation - 1]

    def troubled(self, count: int) -> list[NewestOfSlot]:
        """Return observed slots that are in trouble, at most ``count``, the worst first."""
        found = (slot for slot in self.observed() if slot.trouble.rank_of_kind < 4)
        return sorted(found, key=lambda slot: slot.trouble)[:count]

    @property
    def title(self) -> list[str]:
        """What the run is, in short texts."""
        header, ranks = self.header, self.header.get("ranks")
        parts = [self._name]
        # Of a recipe the name alone, because its settings are longer than a line.
        parts += [
            header[name].partition("(")[0]
            for name in ("precision", "recipe", "device")
            if type(header.get(name)) is str
        ]
        parts += [f"{ranks} rank{'s' * (ranks > 1)}"] if type(ranks) is int else []
        return [clean(part) for part in parts if part]

    # What the files hold ---------------------------------------------------------------------------

    def _take_step(self, line: dict[str, Any]) -> None:
        age = 0.0 if self._seen is not None else max(0.0, time.time() - self._written())
        self._seen = time.monotonic() - age
        numbers = numbers_in(line, NUMBERS)
        loss = numbers.get("loss")
        if self.step is not None and line["step"] < self.step:
            self._go_back(line["step"] - 1)
        if line["step"] != self.step:
            self.step, self._of_step = line["step"], {}
        elif self.loss is not None and loss is not None and self.losses:
            self.losses.pop()  # Of a step that is there twice the newer number counts.
        self._of_step |= numbers
        self._newest |= numbers
        self.loss, self.grad_norm, self.step_ms = map(self._of_step.get, ("loss", "grad_norm", "step_ms"))
        self.proven = self._newest_step("proven")
        if "validation_loss" in numbers:
            self._validated = line["step"], numbers["validation_loss"]
        if loss is not None:
            self.losses.append(loss)
            finite = math.isfinite(loss)
            self._bad_since = None if finite else self.step if self._bad_since is None else self._bad_since

    def _go_back(self, step: int) -> None:
        """Forget what was recorded after a step, to which the job has gone back. All steps up to ``proven`` are."""
        proven, seen = self._newest_step("proven"), self._seen
        self._clear_steps()
        self._newest |= {} if proven is None else {"proven": min(proven, step)}
        self._seen = seen

    def _newest_step(self, field: str) -> int | None:
        number = self._newest.get(field)
        return int(number) if number is not None and math.isfinite(number) else None

    def _written(self) -> float:
        """Return when the file of the steps was last written to. It may have been long ago, at the first read."""
        try:
            return (self.path / METRICS).stat().st_mtime
        except OSError:
            return time.time()

    def _take_slot(self, line: dict[str, Any]) -> None:
        name = slot_in(line)
        if name is None:
            return
        if line["step"] != self._observed:
            self._observed = line["step"]
            self._observation += 1
        if len(self._slots) > MAX_SLOTS:
            del self._slots[next(iter(self._slots))]
        fields = ("amax", "scale", "saturated", "underflow")
        amax, scale, saturated, underflow = map(numbers_in(line, fields).get, fields)
        largest = self._formats[name].max if name in self._formats else None
        limits = self._limits.get(name, self._usual)
        slot = NewestOfSlot(
            self._observation, clean(name), amax, scale, saturated, underflow, (None, None), largest, limits
        )
        of = ("amax", "saturated", "underflow", "amax", "amax")[slot.trouble.rank_of_kind]
        place = tuple(n if type(n := line.get(f"{of}_{unit}")) is int else None for unit in ("rank", "microbatch"))
        self._slots.pop(slot.name, None)  # The newest are last.
        self._slots[slot.name] = slot._replace(place=(place[0], place[1]))

    def _take_ranks(self, line: dict[str, Any]) -> None:
        if (found := rank_record(line)) is not None:
            self.waits[:] = map(RankWait, found.ranks, found.sync_wait_ms)

    def _take_event(self, line: dict[str, Any]) -> None:
        self.event_count += self._events.add(line)


def _checked_text(check: Checked) -> str:
    """Return up to which step what was checked; if not all parameters were compared, what was equal."""
    equal = compared_text(check.compared or {}, check.compared_bytes)
    if check.covers:
        text = f"checked to step {check.step} ({equal or 'not recorded what'})"
    elif check.part:
        text = f"{equal} equal to step {check.step}, compared only {check.part}"
    else:
        text = f"parameters not verifiable, {equal or 'nothing'} equal to step {check.step}"
    return clean(text, MAX_TEXT)


def clean(text: str, most: int = MAX_NAME) -> str:
    """Return a text from a file without control characters, with at most ``most`` characters."""
    return shortened(printable(shortened(text, most)), most)


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %" if share < 10 else f"{100 * share:.2g} %"


def _modified(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino

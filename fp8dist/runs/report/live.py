"""LiveRun: the present state of a run, as plain data, from the files that its job appends to."""

from __future__ import annotations

import math
import time
from collections import deque
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from fp8dist.checks.checked import Checked
from fp8dist.common.divergence import compared_text
from fp8dist.common.numbers import from_json
from fp8dist.common.text import plural, printable
from fp8dist.errors import ConfigurationError
from fp8dist.runs.report.folder import Lines, RunFolder
from fp8dist.runs.run_format import EVENTS, HEADER, METRICS, RANKS, SCALES, was_repaired

__all__ = ["Happening", "LiveRun", "RankWait", "SlotState", "Trouble", "middle_cut"]

KEPT_LOSSES = 400
"""Losses of the last steps, for the sparkline."""

KEPT_EVENTS = 100
"""Events, as short texts."""

MAX_SLOTS = 200_000
"""Slots whose newest values are kept."""

MAX_NAME = 1_000
"""Characters of a name that are kept. The middle of a longer one is left out."""

MAX_TEXT = 300
"""Characters of an event's text."""

TAILS = MappingProxyType({METRICS: 1 << 23, SCALES: 1 << 26, RANKS: 1 << 24, EVENTS: 1 << 26})
"""Bytes at the end of each file that are read at the start. What a long run wrote before does not matter now."""


class Trouble(NamedTuple):
    """What is wrong with a slot, or nearly. Sorts by severity: the worst first.

    ``share``: negative share of saturated or flushed elements; ``room``: factor left to the format's largest value.
    """

    rank_of_kind: int  # 0: not finite, 1: saturated, 2: underflow, 3: headroom.
    share: float
    room: float


class SlotState(NamedTuple):
    """Newest values of one slot. None: not measured, or unknown."""

    observation: int
    name: str
    amax: float | None
    scale: float | None
    saturated: float | None
    underflow: float | None
    place: tuple[int | None, int | None]  # Rank and microbatch that hold the value in question.
    largest: float | None

    @property
    def trouble(self) -> Trouble:
        """How near the slot is to trouble."""
        amax = self.amax
        if amax is not None and not math.isfinite(amax):
            return Trouble(0, 0.0, 0.0)
        for kind, share in ((1, self.saturated), (2, self.underflow)):
            if share is not None and not math.isfinite(share):
                return Trouble(0, 0.0, 0.0)
            if share:
                return Trouble(kind, -share, self.headroom or math.inf)
        return Trouble(3, 0.0, math.inf if self.headroom is None else self.headroom)

    @property
    def headroom(self) -> float | None:
        """The format's largest value, divided by the largest scaled value; None if it is unknown or infinite."""
        if not (self.amax and self.scale and self.largest):
            return None
        used = abs(self.amax * self.scale)
        return self.largest / used if math.isfinite(used) and used > 0 else None

    @property
    def what(self) -> str:
        """The trouble as text."""
        kind = self.trouble.rank_of_kind
        if kind == 0:
            value = next(
                v for v in (self.amax, self.saturated, self.underflow) if v is not None and not math.isfinite(v)
            )
            return f"amax is {value}"
        if kind < 3:
            return f"{_percent(-self.trouble.share)} {('saturated', 'underflow')[kind - 1]}"
        if self.headroom is None:
            return "never cast" if self.amax is None else "headroom unknown"
        return f"{_percent(1 / self.headroom)} of {self.largest:g}"


class RankWait(NamedTuple):
    """Numbers of one rank in ms. A straggler waits least, because the others wait for it."""

    rank: int
    wait: float | None
    step: float | None


class Happening(NamedTuple):
    """One event as text."""

    step: int
    kind: str
    text: str


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
        self.header: dict[str, Any] = RunFolder(path).header
        self._header_time = _modified(path / HEADER)
        self._files = {name: Lines(path / name, tail) for name, tail in TAILS.items()}
        self.heard = 0
        """Number of events so far, of all files that were there."""
        self.news = 0
        """Number of lines of all files so far, for a reader that shows only what is new."""
        self._largest = _largest_values(self.header)
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
        self._logged_checked: int | None = None
        self._bad_since: int | None = None  # The step from which on no loss is finite.
        self._idle_experts: float | None = None
        self._longest_idle: float | None = None
        self.losses: deque[float] = deque(maxlen=KEPT_LOSSES)
        self._seen: float | None = None  # Monotonic time of the newest step.

    def _clear_slots(self) -> None:
        self._slots: dict[str, SlotState] = {}
        self._observation, self._observed = 0, None

    def _clear_events(self) -> None:
        self.events: deque[Happening] = deque(maxlen=KEPT_EVENTS)
        self.ended = False
        self._check: Checked | None = None  # By an event. They are not in the files' common order with the steps.
        self.diverged: Happening | None = None
        self.wrong: Happening | None = None  # What an audit found last. No check can show that the damage is gone.

    def read(self) -> bool:
        """Take in what was added to the files. Return True if anything was."""
        before = self.news
        modified = _modified(self.path / HEADER)
        if modified != self._header_time:
            self._header_time = modified
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
                self.news += 1
            for line in lines.new():
                take(line)
                self.news += 1
        return self.news > before

    def _read_header(self) -> None:
        try:
            self.header = RunFolder(self.path).header
        except ConfigurationError:  # It is being replaced, or gone: keep the last one.
            return
        self._largest = _largest_values(self.header)

    # What is shown ---------------------------------------------------------------------------------

    def idle(self) -> float:
        """Return the seconds since the newest step."""
        return 0.0 if self._seen is None else max(0.0, time.monotonic() - self._seen)

    @property
    def idle_experts(self) -> str:
        """How many experts had no token in the newest observation; "" if all had some, or there are none."""
        count, steps = (
            number if number and 0 < number < 1e15 else None for number in (self._idle_experts, self._longest_idle)
        )
        longest = "" if steps is None else f", one for {steps:,.0f} step{'s' * (steps != 1)} or more"
        return "" if count is None else f"{count:,.0f} expert{'s' * (count != 1)} without tokens{longest}"

    @property
    def check(self) -> Checked | None:
        """The newest check that found no difference."""
        logged = self._logged_checked
        if logged is not None and (self._check is None or self._check.step < logged):
            return Checked(logged, None)
        return self._check

    @property
    def sound(self) -> tuple[bool | None, str]:
        """(True if the ranks are known to agree, False if they are known to differ, None if nobody knows; as text)."""
        check, known = self.check, [f"proven to step {self.proven}"] if self.proven else []
        if check is not None and check.step:
            known.append(_checked_text(check))
        if self.wrong is not None:
            return False, f"WRONG RESULT in step {self.wrong.step}: {self.wrong.text}"
        if self.diverged is not None and (check is None or check.step < self.diverged.step):
            return False, f"DIVERGED in step {self.diverged.step}: {self.diverged.text}"
        if check is not None and check.nonfinite:
            return False, f"NOT FINITE after step {check.step}: {clean(check.text, MAX_TEXT)}"
        if self._bad_since is not None:
            return False, ", ".join([f"NOT FINITE since step {self._bad_since}", *known])
        if self.diverged is not None:
            known.append(f"ranks differed in step {self.diverged.step}, and are equal again")
        if not known:
            return None, "unproven: nothing has compared the ranks yet"
        return True, ", ".join(known)

    def nearest(self, count: int) -> list[SlotState]:
        """Return the slots nearest to trouble, of the last two observations: the newest may still be incomplete."""
        recent = (slot for slot in self._slots.values() if slot.observation >= self._observation - 1)
        return sorted(recent, key=lambda slot: slot.trouble)[:count]

    @property
    def title(self) -> list[str]:
        """What the run is, in short texts."""
        header, ranks = self.header, self.header.get("ranks")
        parts = [self.path.resolve().name]
        parts += [str(header[name]) for name in ("precision", "recipe", "device") if isinstance(header.get(name), str)]
        parts += [f"{ranks} rank{'s' * (ranks > 1)}"] if type(ranks) is int else []
        return [clean(part) for part in parts if part]

    # What the files tell ---------------------------------------------------------------------------

    def _take_step(self, line: dict[str, Any]) -> None:
        age = 0.0 if self._seen is not None else max(0.0, time.time() - self._written())
        self._seen = time.monotonic() - age
        loss = _number(line, "loss")
        if line["step"] != self.step:
            self.step, self.loss, self.grad_norm, self.step_ms = line["step"], None, None, None
        elif self.loss is not None and loss is not None and self.losses:
            self.losses.pop()  # Of a step that is there twice the newer number counts.
        for name in ("loss", "grad_norm", "step_ms"):
            if (number := _number(line, name)) is not None:
                setattr(self, name, number)
        if loss is not None:
            self.losses.append(loss)
            finite = math.isfinite(loss)
            self._bad_since = None if finite else self.step if self._bad_since is None else self._bad_since
        if "idle_experts" in line:
            self._idle_experts, self._longest_idle = _number(line, "idle_experts"), _number(line, "longest_idle_steps")
        for name, place in (("proven", "proven"), ("checked", "_logged_checked")):
            if name in line:
                setattr(self, place, line[name] if type(line[name]) is int else None)

    def _written(self) -> float:
        """Return when the file of the steps was last written to. It may have been long ago, at the first read."""
        try:
            return (self.path / METRICS).stat().st_mtime
        except OSError:
            return time.time()

    def _take_slot(self, line: dict[str, Any]) -> None:
        name = line.get("slot")
        if not isinstance(name, str):
            return
        if line["step"] != self._observed:
            self._observed = line["step"]
            self._observation += 1
        if len(self._slots) > MAX_SLOTS:
            del self._slots[next(iter(self._slots))]
        amax, scale, saturated, underflow = (_number(line, key) for key in ("amax", "scale", "saturated", "underflow"))
        largest = self._largest.get(name)
        slot = SlotState(self._observation, clean(name), amax, scale, saturated, underflow, (None, None), largest)
        of = ("amax", "saturated", "underflow", "amax")[slot.trouble.rank_of_kind]
        place = tuple(n if type(n := line.get(f"{of}_{unit}")) is int else None for unit in ("rank", "microbatch"))
        self._slots.pop(slot.name, None)  # The newest are last.
        self._slots[slot.name] = slot._replace(place=(place[0], place[1]))

    def _take_ranks(self, line: dict[str, Any]) -> None:
        ranks, waits, steps = (
            list(value) if isinstance(value := line.get(key), list) else []
            for key in ("ranks", "sync_wait_ms", "step_ms")
        )
        waits += [None] * (len(ranks) - len(waits))
        steps += [None] * (len(ranks) - len(steps))
        found = zip(ranks, waits, steps)
        self.waits[:] = [RankWait(r, _value(wait), _value(step)) for r, wait, step in found if type(r) is int]

    def _take_event(self, line: dict[str, Any]) -> None:
        kind = clean(line["kind"]) if isinstance(line.get("kind"), str) else "unknown"
        event = Happening(line["step"], kind, clean(_event_text(kind, line), MAX_TEXT))
        self.events.append(event)
        self.heard += 1
        self.ended = kind == "end"
        if kind == "checked":
            self._check = Checked.read(line)
        if kind == "start":  # A new run, or one that goes back: what came after that step is undone.
            after = line["resumed_after"] if type(line.get("resumed_after")) is int else -1
            if self._check is not None and self._check.step > after:
                self._check = None
            if self.diverged is not None and self.diverged.step > after:
                self.diverged = None
            if self.wrong is not None and self.wrong.step > after:
                self.wrong = None
        if kind == "diverged" and not was_repaired(line.get("report")):
            if any(finding.get("kind") == "audit" for finding in _findings(line.get("report"))):
                self.wrong = event
            else:
                self.diverged = event


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


def middle_cut(text: str, width: int) -> str:
    """Return the text, with its middle replaced by "…" if it is longer than ``width`` characters."""
    if len(text) <= width:
        return text
    head = (width - 1) // 2
    return f"{text[:head]}…{text[len(text) - (width - 1 - head) :]}" if width > 0 else ""


def clean(text: str, most: int = MAX_NAME) -> str:
    """Return a text from a file without control characters, with at most ``most`` characters."""
    return middle_cut(printable(middle_cut(text, most)), most)


def _number(line: dict[str, Any], key: str) -> float | None:
    return _value(line.get(key))


def _value(value: Any) -> float | None:
    """Return a number of a file, which may be NaN; None for anything else."""
    number = from_json(value)
    return None if math.isnan(number) and value != "NaN" and not isinstance(value, float) else number


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %" if share < 10 else f"{100 * share:.2g} %"


def _modified(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino


def _largest_values(header: dict[str, Any]) -> dict[str, float]:
    slots = header.get("slots")
    found: dict[str, float] = {}
    for slot in slots if isinstance(slots, list) else []:
        if isinstance(slot, dict) and isinstance(slot.get("slot"), str):
            largest = _number(slot, "max")
            if largest is not None and 0 < largest < math.inf:
                found[slot["slot"]] = largest
    return found


def _event_text(kind: str, line: dict[str, Any]) -> str:
    """Return what happened, without step and kind."""
    if kind == "diverged":
        return _divergence(line.get("report"))
    if kind == "checked":
        return f"a check found {Checked.read(line).text}"
    if kind == "replayed":
        return f"after {line.get('trigger')}: {line.get('sentence')}"[:MAX_TEXT]
    slots = line.get("slots")
    names = [name for name in slots if isinstance(name, str)] if isinstance(slots, list) else []
    if kind == "start":
        after = line.get("resumed_after")
        return "" if after is None else f"resumed after step {str(after)[:20]}"
    parts = _first(names, "slot") if names else []
    if isinstance(line.get("module"), str):
        parts.append(f"{'first in ' * bool(names)}{line['module']} ({line.get('role')})"[:MAX_TEXT])
    parts += [f"{unit} {line[unit]}" for unit in ("rank", "microbatch") if type(line.get(unit)) is int]
    for name in ("loss", "median"):
        number = _number(line, name)
        if number is not None:
            parts.append(f"{name} {number:.4g}")
    parts += [f"{name} {line[name]}" for name in ("path", "digest", "error") if isinstance(line.get(name), str)]
    return ", ".join(parts)


def _divergence(report: Any) -> str:
    texts = []
    for finding in _findings(report):
        ranks = finding.get("ranks")
        shown = ", ".join(str(r) for r in ranks[:8] if type(r) is int) if isinstance(ranks, list) else "?"
        name = clean(str(finding.get("name")), MAX_TEXT // 2)
        if finding.get("kind") == "audit":  # The detail says who, and how sure that is.
            texts.append(f"'{name}': {clean(str(finding.get('detail')), MAX_TEXT // 2)}")
        else:
            texts.append(f"{str(finding.get('kind'))[:40]} '{name}' on rank {shown}")
    repaired = isinstance(report, dict) and bool(report.get("repaired"))
    return "; ".join([*_first(texts, "finding"), *(["repaired"] if repaired else [])]) or "no findings"


def _findings(report: Any) -> list[dict[str, Any]]:
    """Return the findings of a report, as far as they are objects."""
    found = report.get("findings") if isinstance(report, dict) else None
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def _first(texts: list[str], noun: str) -> list[str]:
    """Return the first text, and the number of others."""
    more = len(texts) - 1
    return texts[:1] + ([f"and {more} more {noun if more == 1 else plural(noun)}"] if more > 0 else [])

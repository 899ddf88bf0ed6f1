"""The events of a run: read from events.jsonl in bounded memory, and one sentence about each."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

from fp8dist.checks.checked import Checked
from fp8dist.common.numbers import number_or_none
from fp8dist.common.text import first_few, shortened
from fp8dist.runs.report.records import LARGEST

MOST_KINDS, MOST_ITEMS, MOST_CHARACTERS, DEEPEST = 64, 32, 2_000, 6
"""Bounds of what is kept of an event: kinds, items of a list, characters of a text, depth."""

MOST_NAME, MOST_FIELDS = 200, 6
"""Characters of a name in a sentence, so that a search finds the whole name. Fields of an event of another kind."""

_WHAT: Mapping[str, str] = MappingProxyType(
    {
        "nonfinite": "an amax is not finite",
        "saturated": "amaxes beyond the range of their scale",
        "fallback": "modules fall back to high precision",
        "jump": "a scale jumps",
        "spike": "the loss spikes",
        "nonfinite_loss": "the loss is not finite",
        "evaluated": "the model is evaluated",
        "start": "the run starts",
        "saved": "a checkpoint is saved",
        "end": "the run ends",
    }
)

_WORDED = ("diverged", "replayed", "checked")
"""Kinds whose details are a sentence that needs no other word for what happened."""


_OF_CAUSE: Mapping[str, str] = MappingProxyType(
    {"module": "", "role": "", "rank": "rank ", "microbatch": "microbatch ", "path": ""}
)
"""Fields that say where something happened, with the word before each."""

_NO_DETAIL = ("step", "time", "kind", "slots", "slots_count", "cause_step", *_OF_CAUSE)


class RunEvent(NamedTuple):
    """A line of events.jsonl. ``undone``: the run resumed later from an earlier step.

    ``data``: the line, with long lists and texts cut, and ``slots_count``, the number of its slots.
    """

    step: int
    kind: str
    data: Mapping[str, Any] = MappingProxyType({})
    undone: bool = False

    @property
    def findings(self) -> list[dict[str, Any]]:
        """The findings of a divergence, as far as they are objects."""
        report = self.data.get("report")
        found = _listed(report.get("findings")) if isinstance(report, dict) else []
        return [one for one in found if isinstance(one, dict)]

    @property
    def audited(self) -> bool:
        """True if an audit found a wrong result."""
        return any(one.get("kind") == "audit" for one in self.findings)

    @property
    def repaired(self) -> bool:
        """True if a divergence was repaired, and checked again. Older versions write no "diverged"."""
        report = self.data.get("report")
        if not isinstance(report, dict):
            return False
        return report["diverged"] is False if "diverged" in report else report.get("consistent") is True

    @property
    def validation_loss(self) -> float | None:
        """The number of an event "evaluated"; None: another event, or there is none."""
        return number_or_none(self.data.get("validation_loss")) if self.kind == "evaluated" else None

    @property
    def sentence(self) -> str:
        """``text`` with the step, for a sentence or a heading."""
        return f"in step {self.step} {self.text}."

    @property
    def text(self) -> str:
        """What happened, where and who, without the step."""
        details = self._details
        return details if self.kind in _WORDED else ", ".join(part for part in (self._what, details) if part)

    @property
    def beside_kind(self) -> str:
        """``text`` for a line that already shows the kind: only what the kind does not say."""
        return self._details or self._what

    @property
    def _what(self) -> str:
        after = self.data.get("resumed_after")
        if self.kind == "start" and type(after) is int:
            return f"the run resumes after step {after}"
        return _WHAT.get(self.kind, shortened(self.kind, 40))

    @property
    def _details(self) -> str:
        data = self.data
        if self.kind == "diverged":
            return _divergence(self) + ("; repaired" if self.repaired else "")
        if self.kind == "replayed":
            return _replay(data)
        if self.kind == "checked":
            return shortened(f"a check found {Checked.read({**data, 'step': self.step}).text}", 400)
        parts = []
        slots = data.get("slots")
        if isinstance(slots, list) and slots:
            named = first_few([shortened(str(slot), MOST_NAME) for slot in slots[:3]], 3)
            parts.append(named + (f" and {data['slots_count'] - 3} more" if data["slots_count"] > 3 else ""))
        parts += _cause(self)
        known = self.kind in _WHAT and self.kind != "evaluated"
        own = [key for key in data if key not in _NO_DETAIL]  # Of "evaluated", and of kinds that a program makes up.
        for key in ("loss", "median", "digest", "error") if known else own[:MOST_FIELDS]:
            value, number = data.get(key), number_or_none(data.get(key))
            if number is not None or isinstance(value, str):
                text = shortened(str(value), 40) if number is None else f"{number:.4g}"
                parts.append(f"{shortened(key, 40)} {text}")
        return ", ".join(parts)


def checks_in(events: Iterable[RunEvent], logged: int | None) -> list[Checked]:
    """Return the checks that found no difference, by step.

    ``logged``: the newest step in metrics.jsonl that is checked. Its check may have no event: what it compared is then
    not known.
    """
    found = [event for event in events if event.kind == "checked" and not event.undone]
    checks = [Checked.read({**event.data, "step": event.step}) for event in found]
    if logged is not None and all(one.step < logged for one in checks):
        checks.append(Checked(logged, None))
    return sorted(checks, key=lambda one: one.step)


class Events:
    """Collects the events of a run. A new run voids those before it in the file; a resume marks them as undone.

    Args:
        most: events of one kind that are kept: of more, the first, the last, and the last before each start.
    """

    def __init__(self, most: int = 2_000) -> None:
        self._most = most
        self._kinds: dict[str, list[tuple[int, RunEvent]]] = {}
        self._count = 0
        self._start: tuple[int, Any] = -1, None  # The newest start: its number, and the step that it resumed after.

    def add(self, line: Mapping[str, Any]) -> bool:
        """Add a line with an integer ``step``. False: it is left out, because it is no event."""
        kind, after, slots = line.get("kind"), line.get("resumed_after"), line.get("slots")
        if not isinstance(kind, str) or abs(line["step"]) >= LARGEST or len({*self._kinds, kind}) > MOST_KINDS:
            return False
        if kind == "start" and not isinstance(after, int):
            self._kinds.clear()
        elif kind == "start" and isinstance(after, int):
            for events in self._kinds.values():
                events[:] = [(i, e._replace(undone=e.undone or self._undone(i, e, after))) for i, e in events]
        if kind == "start":
            self._start = self._count, after
        kept = self._kinds.setdefault(kind, [])
        data = {**_cut(line), "slots_count": len(_listed(slots))}
        kept.append((self._count, RunEvent(line["step"], kind, data)))
        self._count += 1
        if len(kept) > self._most:
            del kept[self._least_needed(kept)]
        return True

    def _least_needed(self, kept: Sequence[tuple[int, RunEvent]]) -> int:
        """Return the place of an event in the middle that is not the last one before a start: a check there vouches for
        what was saved before."""
        starts = [number for number, _ in self._kinds.get("start", ())]
        middle = self._most // 2
        loads = (bisect(starts, number) for number, _ in islice(kept, middle, None))
        return next((middle + i for i, (one, after) in enumerate(pairwise(loads)) if one == after), middle)

    def _undone(self, number: int, event: RunEvent, after: int) -> bool:
        """True if a resume after a step undoes an event: a later one, or what ``attach`` found in the same load."""
        at_load = event.kind == "diverged" and number > self._start[0] and event.step == after == self._start[1]
        return event.step > after or at_load

    def kept(self) -> tuple[RunEvent, ...]:
        """Return the events in the order of the file."""
        every = (one for kept in self._kinds.values() for one in kept)
        return tuple(event for _, event in sorted(every, key=lambda one: one[0]))


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _cut(value: Any, depth: int = 0) -> Any:
    """Return a JSON value with long texts and lists cut."""
    if isinstance(value, str):
        return value[:MOST_CHARACTERS]
    if not isinstance(value, (dict, list)):
        return value
    if depth > DEEPEST:
        return None
    if isinstance(value, list):
        return [_cut(one, depth + 1) for one in value[:MOST_ITEMS]]
    return {str(key)[:MOST_CHARACTERS]: _cut(one, depth + 1) for key, one in list(value.items())[:MOST_ITEMS]}


def _cause(event: RunEvent) -> Iterator[str]:
    """Yield module, rank and file of an event, as far as they are known."""
    data = event.data
    words = {**_OF_CAUSE, "module": "first in " if isinstance(data.get("slots"), list) else ""}
    if type(data.get("cause_step")) is int and data["cause_step"] != event.step:
        words["cause_step"] = "of step "
    for key, text in words.items():
        if isinstance(data.get(key), (int, str)):
            yield f"{text}{shortened(str(data[key]), MOST_NAME)}"


def _divergence(event: RunEvent) -> str:
    """Return what differs, who, and since when."""
    found = event.findings
    if not found:
        return "ranks differ"
    one, more = found[0], f", and {len(found) - 1} more" if len(found) > 1 else ""
    if one.get("kind") == "audit":  # The detail says who, and how sure that is.
        name, verdict = shortened(str(one.get("name") or "")), shortened(str(one.get("detail") or ""), 200)
        return f"a result of {name} is wrong: {verdict}{more}"
    ranks, hosts = ([shortened(str(value)) for value in _listed(one.get(name))] for name in ("ranks", "hosts"))
    host = f" (host {hosts[0]})" if hosts and hosts[0] not in ("", "None") else ""
    reference = one.get("reference_rank")
    against = "no majority" if reference is None else f"against rank {shortened(str(reference))}"
    known = [step for finding in found if type(step := finding.get("last_good_step")) is int]
    since = f"; equal up to step {min(known)}" if known else ""
    name = " ".join(shortened(str(one.get(key) or ""), MOST_NAME) for key in ("kind", "name"))
    who = f"rank{'s' if len(ranks) > 1 else ''} {first_few(ranks, 8)}"
    return f"{name} differs on {who}{host}, {against}{more}{since}"


def _replay(data: Mapping[str, Any]) -> str:
    """Return which batch was replayed after what, and the sentence of the replay."""
    trigger, step, microbatch = (shortened(str(data.get(key))) for key in ("trigger", "replayed_step", "microbatch"))
    sentence = shortened(str(data.get("sentence") or "nothing is known of its result"), 400).rstrip(".")
    return f"replay of step {step}, microbatch {microbatch}, after {trigger}: {sentence}"

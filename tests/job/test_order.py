"""Every call of a manager in every phase of its life: it raises an error that helps, or leads to the phase that
ARCHITECTURE.md specifies."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import fp8dist
from fp8dist import ConfigurationError
from fp8dist.job.manager import Internals
from fp8dist.modules.job_state import Activity, Tie
from tests.support.graphs import EmulatedGraph
from tests.support.logs import captured_log
from tests.support.ranks import RankPool, on_ranks
from tests.support.training import batch, make_net

ROOT = Path(__file__).parents[2]

# The text of each phase in messages. The second half names the columns of TABLE.
WHERE = {
    "alone": "",  # Prepared, and the state is not shared with other ranks.
    "prepared": "before attach()",
    "attached": "after attach()",
    "in step": "between a backward and the optimizer's step",
    "calibrating": "inside calibrate()",
    "joined": "inside a Join context",
    "capturing": "while a CUDA graph is captured",
    "replaying": "inside replay()",
    "detached": "after detach()",
    "restored": "after restore()",
}

# x: raises. -: not applicable.
#                    alone prep att step calib join capt repl det rest
TABLE = """
attach()               .     .   .   .    x     x    x    x    .   x
detach()               .     .   .   x    x     x    x    x    .   x
restore()              .     .   .   .    x     x    x    x    .   x
a step                 .     x   .   .    x     .    .    x    x   x
comm_hook              .     x   .   .    .     x    x    x    .   .
comm_hook(manager)     .     .   .   .    .     .    .    .    .   x
poll()                 .     x   .   .    .     .    x    x    x   x
check()                -     x   .   .    .     x    x    x    x   x
replay()               -     x   .   .    x     x    x    x    x   -
calibrate()            .     x   .   .    x     x    x    x    x   x
refresh_weights()      .     x   .   .    .     x    x    x    x   x
exported()             .     x   .   .    x     x    x    x    .   x
watch()                .     .   x   x    x     x    x    x    .   x
set_precision()        .     .   .   .    .     .    x    x    .   x
set_scale()            .     .   .   .    .     .    x    x    .   x
swapped_weights()      .     .   .   .    .     .    x    x    .   x
load_state_dict()      .     .   .   .    .     .    x    x    .   x
reset()                .     .   .   .    .     .    x    x    .   x
state_dict()           .     .   .   .    .     .    x    .    .   .
"""
REFUSED = {
    (call.strip(), phase): mark == "x"
    for line in TABLE.strip().splitlines()
    for call, *marks in [re.split(r" {2,}", line)]
    for phase, mark in zip(WHERE, marks, strict=True)
    if mark != "-"
}
GROUPS = {
    "load_state_dict()": "loading state",
    "reset()": "loading state",
    "state_dict()": "saving state",
    "exported()": "export()",
}
"""Calls that a message names together."""


class _Job:
    """A model under DDP with a hook that launches early, not attached yet."""

    def __init__(self, shared: bool, hook: bool = True) -> None:
        self.net = make_net()
        group = dist.group.WORLD if shared else None
        self.manager: Any = fp8dist.prepare(self.net, group=group, amax_sync=shared)
        self.saved = self.manager.state_dict()
        self.ddp = DistributedDataParallel(self.net)
        self.hook: Any = None
        if hook:
            self.ddp.register_comm_hook(None, fp8dist.ddp.comm_hook(self.manager))
        self.optimizer = SGD(self.net.parameters(), lr=0.01)

    def attach(self) -> None:
        self.manager.attach(self.ddp, optimizer=self.optimizer, boundary="manual")

    def backward(self) -> None:
        x, y = batch(dist.get_rank(), 0)
        nn.functional.mse_loss(self.ddp(x), y).backward()

    @property
    def phase(self) -> str:
        """Return the phase, by its name in ARCHITECTURE.md."""
        activities = self.manager._cycle.activities  # A calibration may come before the step that completes a sync.
        return (activities[0] if activities else self.manager._job.tie).name.lower().replace("_", " ")

    def inside(self, context: Any) -> str:
        """Return the phase inside a context."""
        with context:
            return self.phase

    def replay(self) -> str:
        """Return the phase inside a replay."""
        phases = []

        def step(index: int) -> None:
            phases.append(self.phase)
            nn.functional.mse_loss(self.net(batch(0, index)[0]), batch(0, index)[1]).backward()

        fp8dist.replay(self.net, step, 0)
        return phases[0]

    def quiet_hook(self) -> Any:
        """A communication hook that launches the sync but reduces no gradients."""
        return fp8dist.ddp.comm_hook(self.manager, lambda *_: None)  # type: ignore[arg-type, return-value]

    def call(self, name: str) -> Any:
        manager, slot = self.manager, ("last", "weight")
        bucket = SimpleNamespace(is_last=lambda: True)
        calls: dict[str, Callable[[], Any]] = {
            "attach()": self.attach,
            "detach()": manager.detach,
            "restore()": lambda: Internals(manager).attachment.restore(self.net),
            "a step": manager.step,
            "comm_hook": lambda: (self.hook or self.quiet_hook())(None, bucket),
            "poll()": manager.poll,
            "check()": manager.check,
            "replay()": self.replay,
            "calibrate()": lambda: self.inside(manager.calibrate()),
            "refresh_weights()": manager.refresh_weights,
            "comm_hook(manager)": self.quiet_hook,
            "exported()": lambda: list(fp8dist.exported(manager)),
            "watch()": lambda: fp8dist.watch(manager, every=100),
            "set_precision()": lambda: manager.set_precision("last", "high"),
            "set_scale()": lambda: manager.slot(*slot).set_scale(2.0),
            "swapped_weights()": lambda: self.inside(manager.swapped_weights()),
            "load_state_dict()": lambda: manager.load_state_dict(self.saved),
            "reset()": manager.reset,
            "state_dict()": manager.state_dict,
        }
        return calls[name]()


@contextmanager
def _in_phase(phase: str) -> Iterator[_Job]:
    job = _Job(shared=phase != "alone", hook=phase == "in step")
    if phase in ("alone", "prepared"):
        yield job
        return
    job.attach()
    job.backward()
    if phase == "in step":
        yield job
        return
    job.manager.step()
    if phase == "detached":
        job.manager.detach()
    elif phase == "restored":
        job.hook = job.quiet_hook()
        fp8dist.restore(job.net)
    if phase == "calibrating":
        with job.manager.calibrate():
            yield job
    elif phase == "joined":
        with Join([job.ddp, job.manager]):
            yield job
    elif phase == "replaying":
        job.manager._job.replaying = True
        yield job
        job.manager._job.replaying = False
    elif phase == "capturing":
        job.manager.poll()
        with EmulatedGraph().capture():
            yield job
    else:
        yield job


def _tried(phase: str) -> list[tuple[str, str | None, str, str]]:
    """Yield (call, message of ConfigurationError, phase before, phase after) of each call."""
    found: list[tuple[str, str | None, str, str]] = []
    left = [call for call, of in REFUSED if of == phase]
    while left:
        with _in_phase(phase) as job:
            before, tie = job.phase, job.manager._job.tie
            while left and (job.phase, job.manager._job.tie) == (before, tie):
                call, message = left.pop(0), None
                try:
                    inside = job.call(call)
                except ConfigurationError as error:
                    inside, message = None, str(error)
                found.append((call, message, before, inside if isinstance(inside, str) else job.phase))
    return found


def _transitions() -> set[tuple[str, str, str]]:
    """Return (from, call, to) of the transitions that ARCHITECTURE.md draws."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    drawing = text.split("## Life of a manager")[1].split("```")[1]
    found = set()
    for line in drawing.strip().splitlines():
        state, *hops = re.split(r" +── | ──▶ +", line.strip())
        for by, to in zip(hops[::2], hops[1::2], strict=True):
            found |= {(each, by, to) for each in state.split(", ")}
            state = to
    return found


@pytest.mark.parametrize("phase", WHERE)
def test_each_call_in_each_phase(two_ranks: RankPool, phase: str) -> None:
    transitions = {(begin, by): to for begin, by, to in _transitions()}
    first, second = two_ranks.run(_tried, phase)
    assert first == second
    for call, message, before, after in first:
        if REFUSED[call, phase]:
            assert message is not None, f"{call} {phase} was allowed"
            where = WHERE["attached" if call == "watch()" and phase != "restored" else phase]
            start = f"{GROUPS.get(call, call)} {where}: "
            assert message.startswith(start), message
            assert len(message) > len(start) + 8, "it says what to do"
            assert after == before
        else:
            assert message is None, f"{call} {phase}: {message}"
            assert after == transitions.get((before, call), before), f"{call} {phase} led to {after}"


def test_the_drawing_has_every_phase() -> None:
    phases = {phase.name.lower().replace("_", " ") for phase in (*Tie, *Activity)}
    drawn = _transitions()
    assert {to for _, _, to in drawn} | {"prepared"} == phases == {begin for begin, _, _ in drawn} | {"restored"}


def test_poll_without_a_graph_warns_once() -> None:
    net = make_net()
    manager = fp8dist.prepare(net)
    manager.attach(net, boundary="manual")
    with captured_log() as log:
        for _ in range(2):
            manager.step()
            manager.poll()  # For example before a capture.
    assert not log
    with captured_log() as log:
        manager.poll()
        manager.poll()
    ((_, text),) = log
    assert "poll() without a graph" in text


def test_polls_of_a_graph_that_has_no_sync() -> None:
    high = fp8dist.CurrentScaling(high_precision=("fprop", "dgrad", "wgrad"))
    for recipe, enabled in ((None, False), (high, True)):
        net = make_net()
        manager = fp8dist.prepare(net, recipe, enabled=enabled)
        manager.attach(net, boundary="manual")
        with captured_log() as log:
            manager.poll()
            with EmulatedGraph().capture():
                manager.step()
            for _ in range(3):
                manager.poll()
        assert not log


@on_ranks(2)
def test_a_join_that_raises_ends_too() -> None:
    job = _Job(shared=True, hook=False)
    job.attach()
    with suppress(ValueError), Join([job.ddp, job.manager]):
        assert job.phase == "joined"
        raise ValueError("mine")
    assert job.phase == "attached"
    for call in ("attach()", "calibrate()", "check()", "detach()"):
        job.call(call)


@on_ranks(2)
def test_a_calibration_counts_though_a_sync_is_under_way() -> None:
    """A step that a loss scaler skips may leave a pending sync."""
    job = _Job(shared=True)
    job.attach()
    job.backward()
    with job.manager.calibrate():
        job.net(batch(dist.get_rank(), 1)[0] * 100)
    assert float(job.manager.slot("first", "input").amax) > 100
    job.manager.step()
    assert job.manager.steps == 2

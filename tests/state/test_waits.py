"""How long a rank waits in its syncs: attributed to the right rank and the right step."""

from __future__ import annotations

import contextlib
import copy
import math
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fp8dist
from fp8dist import DelayedScaling
from fp8dist.state.waits import KEPT, Moment, Waits, clock_of
from tests.support.collectives import counted_collectives
from tests.support.graphs import EmulatedGraph
from tests.support.ranks import RankPool, on_ranks
from tests.support.training import SmallJob, batch, make_net, parameter_bits, state_bits, unwrapped


class Hand:
    """A moment whose completion the test controls."""

    def __init__(self, ms: float) -> None:
        self.ms = ms

    def ms_since(self, earlier: Moment) -> float:
        assert isinstance(earlier, Hand)
        return self.ms - earlier.ms


class Clock:
    """A clock that the test advances, and that counts its reads."""

    def __init__(self) -> None:
        self.ms, self.asked = 0.0, 0

    def __call__(self) -> Hand:
        self.asked += 1
        return Hand(self.ms)

    def wait(self, waits: Waits, ms: float) -> None:
        with waits.waiting(self):
            self.ms += ms


def test_the_waits_of_a_step_are_summed_up() -> None:
    clock, waits = Clock(), Waits()
    clock.wait(waits, 2)
    clock.ms += 100  # Not a wait.
    clock.wait(waits, 3)
    assert waits.take() == []  # No step has ended.
    waits.end_step()
    waits.end_step()
    clock.wait(waits, 4)
    waits.end_step()
    clock.wait(waits, 50)
    assert waits.take() == [5, 0, 4]
    assert waits.take() == []
    waits.drop()  # For example before the steps to measure.
    with contextlib.suppress(RuntimeError), waits.waiting(clock):  # A wait that fails counts.
        clock.ms += 7
        raise RuntimeError("timed out")
    waits.end_step()
    assert waits.take() == [7]
    assert clock.asked == 2 * 5
    for step in range(KEPT + 3):  # Who never asks pays no memory.
        clock.wait(waits, step)
        waits.end_step()
    taken = waits.take()
    assert all(math.isnan(ms) for ms in taken[:3])
    assert taken[3:] == [float(step) for step in range(3, KEPT + 3)]


class _Event:
    """Like torch.cuda.Event, on a stream that this test simulates."""

    reached = 0.0
    """Position of the stream in ms; class-level, because there is one stream."""

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing
        self.at: float | None = None
        self.synchronized = False

    def record(self) -> None:
        self.at = _Event.reached

    def synchronize(self) -> None:
        self.synchronized = True

    def elapsed_time(self, end: _Event) -> float:
        assert end.synchronized, "read before the stream was there"
        assert self.at is not None
        assert end.at is not None
        return end.at - self.at


def test_on_cuda_the_stream_is_timed_and_nothing_is_read_before_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(_Event, "reached", 0.0)
    clock, waits = clock_of(torch.device("cuda", 0)), Waits()
    with waits.waiting(clock):
        _Event.reached += 1.5
    waits.end_step()
    ((start, end),) = waits._ended[0]
    assert [start.event.synchronized, end.event.synchronized] == [False, False]  # type: ignore[attr-defined]
    assert waits.take() == [1.5]


STEPS, LATE = 4, 0.15


def _late(update: str, groups: bool) -> tuple[list[float], int, float]:
    """Rank 1 is late for each boundary. Return each rank's waits, its number of collectives, the host's total."""
    net = make_net()
    apart: Any = {"groups": {"branch": dist.new_group()}} if groups else {}
    recipe = DelayedScaling(history_len=4, update=update)  # type: ignore[arg-type]
    manager = fp8dist.prepare(net, recipe, group=dist.group.WORLD, **apart)
    manager.attach(net)
    assert fp8dist.take_waits(manager) == []
    with counted_collectives() as calls:
        for step in range(STEPS):
            net(batch(dist.get_rank(), step)[0]).sum().backward()
            if dist.get_rank() == 1:
                time.sleep(LATE)
            manager.step()
        waits = fp8dist.take_waits(manager)
        assert fp8dist.take_waits(manager) == []
    return waits, len(calls.names) if groups else len(calls.syncs(manager)), manager.metrics()["fp8/sync_wait_ms"]


@pytest.mark.slow
@pytest.mark.parametrize(("update", "groups"), [("same_step", True), ("next_step", False)])
def test_the_others_wait_for_a_late_rank(two_ranks: RankPool, update: str, groups: bool) -> None:
    (waiting, collectives, host), (late, *_) = two_ranks.run(_late, update, groups)
    assert len(waiting) == len(late) == STEPS
    assert collectives == STEPS * (1 + groups)
    # Under next_step, the wait for the last sync belongs to an unfinished step; the first step has no sync before it.
    measured = waiting if update == "same_step" else waiting[1:]
    assert min(measured) > 1e3 * LATE / 2
    if update == "next_step":
        assert waiting[0] == late[0] == 0
    assert sum(late) < sum(waiting) / 2
    assert sum(waiting) <= host * 1.01 + 1  # The same waits, by the same clock, without the last.


@on_ranks(2)
def test_only_steps_of_training_count() -> None:
    job = SmallJob(DelayedScaling(history_len=4), wrap=unwrapped)
    with job.manager.calibrate():
        job.backward(0)
    assert fp8dist.take_waits(job.manager) == []
    for index in range(2):
        job.step(index)
    assert fp8dist.take_waits(fp8dist.get_manager(copy.deepcopy(job.net))) == []
    assert len(fp8dist.take_waits(job.manager)) == 2
    off = SmallJob(wrap=unwrapped, enabled=False)
    off.step(0)
    assert fp8dist.take_waits(off.manager) == []


@on_ranks(2)
def test_steps_in_a_graph_are_left_out() -> None:
    """A capture and its replays add no steps; eager steps do."""
    job = SmallJob(DelayedScaling(history_len=3), wrap=unwrapped)

    def step() -> None:
        job.backward(0, rank=0)
        job.manager.step()

    job.manager.attach(job.net)
    step()
    job.manager.poll()
    fp8dist.take_waits(job.manager)
    job.net.zero_grad()
    graph = EmulatedGraph()
    with graph.capture():
        step()
    counts = [len(fp8dist.take_waits(job.manager))]
    for _ in range(2):
        graph.replay()
        job.manager.poll()
    counts.append(len(fp8dist.take_waits(job.manager)))
    step()
    assert [*counts, len(fp8dist.take_waits(job.manager))] == [0, 0, 1]


@on_ranks(2)
def test_asking_changes_nothing() -> None:
    ends = []
    for often in (True, False):
        job = SmallJob(DelayedScaling(history_len=4, update="next_step"), wrap=unwrapped)
        with counted_collectives() as calls:
            for step in range(STEPS):
                job.step(step)
                if often:
                    fp8dist.take_waits(job.manager)
                    assert job.manager._syncs[0].phase.value == "due"  # The commit does not come early.
        ends.append((state_bits(job.manager), parameter_bits(job.net), calls.names))
    assert ends[0] == ends[1]

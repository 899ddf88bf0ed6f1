"""``replay_on``: which batch is replayed, when, on which ranks, and what is told."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import fp8dist
from fp8dist import (
    CurrentScaling,
    DelayedScaling,
    Event,
    LossDiverged,
    LossGuard,
    Recipe,
    ReplayBuffer,
    ReplayFinding,
    ReplayReport,
)
from fp8dist.errors import ConfigurationError
from fp8dist.parallel import wrappers
from fp8dist.replays import triggers
from tests.support.collectives import counted_collectives
from tests.support.logs import captured_log
from tests.support.ranks import RankPool
from tests.support.training import batch, bits, make_net, parameter_bits, state_bits

MICROBATCHES = 2
SENTENCE = "the data of rank 1 gives the first non-finite value in module 'branch', output"
WATCHED = {"every": 1, "ranks": True}


class Seen:
    """A replay that notes what it is asked for, with the weights at that time, and finds what it is told to."""

    def __init__(self, finds: Any = None) -> None:
        self.finds = finds
        self.batches: list[bytes] = []
        self.weights: list[dict[str, bytes]] = []

    def __call__(self, model: Any, step: Any, given: Any, **named: Any) -> Any:
        self.batches.append(bits(given[0]))
        self.weights.append(parameter_bits(model))
        if isinstance(self.finds, Exception):
            raise self.finds
        finding = ReplayFinding("nonfinite", (1,), "branch", "output", 0, 3)
        return ReplayReport(() if self.finds is None else (finding,))


class Training:
    """A prepared net, its optimizer, and a loop that keeps its batches. ``weights``: before each update."""

    def __init__(self, recipe: Recipe | None = None, group: Any = None, watch: Mapping[str, Any] | None = None) -> None:
        self.rank = dist.get_rank() if group is not None else 0
        self.net = make_net()
        self.manager = fp8dist.prepare(self.net, recipe or DelayedScaling(history_len=4), group=group)
        if watch is not None:
            fp8dist.watch(self.manager, **watch)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01)
        self.manager.attach(optimizer=self.optimizer)
        self.buffer = ReplayBuffer(self.manager)
        self.events: list[Event] = []
        self.manager.on_event(self.events.append)
        self.weights: list[dict[str, bytes]] = []
        self.guard: LossGuard | None = None

    def replay_on(self, *events: str, **more: Any) -> None:
        fp8dist.replay_on(self.manager, self.buffer, self.microbatch, events, guard=self.guard, **more)  # type: ignore[arg-type]

    def microbatch(self, given: Any) -> torch.Tensor:
        x, y = given
        loss = (self.net(x) - y).square().mean()
        loss.backward()
        return loss.detach()

    def batch(self, step: int, microbatch: int, planted: Mapping[int, float], rank: int | None = None) -> Any:
        rank = self.rank if rank is None else rank
        x, y = batch(rank, 10 * step + microbatch)
        last = self.manager._cycle.groups[0]
        if step in planted and microbatch == 1 and rank == (0 if last is None else last.size - 1):
            x[1, 2] = planted[step]
        return x, y

    def train(self, steps: int, planted: Mapping[int, float], losses: Mapping[int, float] | None = None) -> None:
        for step in range(1, steps + 1):
            total = 0.0
            for microbatch in range(MICROBATCHES):
                given = self.batch(step, microbatch, planted)
                self.buffer.keep(given)
                total += float(self.microbatch(given))
            for parameter in self.net.parameters():  # A NaN stays in its step.
                assert parameter.grad is not None
                parameter.grad.nan_to_num_(0, 0, 0)
                if self.manager._cycle.groups[0] is not None:
                    dist.all_reduce(parameter.grad)
            if self.guard is not None:
                self.guard.observe((losses or {}).get(step, total))
            self.weights.append(parameter_bits(self.net))
            self.optimizer.step()
            self.optimizer.zero_grad()

    def replays(self) -> list[Event]:
        return [event for event in self.events if event.kind == "replayed"]


@pytest.fixture
def seen() -> Iterator[Seen]:
    """A replay that finds something."""
    with mock.patch.object(triggers, "replay", Seen(True)) as replay:
        yield replay


@pytest.mark.parametrize(
    ("recipe", "watch"),
    [
        (DelayedScaling(history_len=4), WATCHED),
        (DelayedScaling(history_len=4, update="next_step"), WATCHED),
        (DelayedScaling(history_len=4, update="next_step"), None),
        (CurrentScaling(), WATCHED),
    ],
)
def test_a_nan_is_replayed_in_its_own_step_before_the_update(
    recipe: Recipe, watch: Mapping[str, Any] | None, seen: Seen
) -> None:
    training = Training(recipe, watch=watch)
    training.replay_on("nonfinite", at_most_every=1)
    with captured_log() as log:
        training.train(5, {3: math.nan})
    (event,) = training.replays()
    # Without the watch nothing names the microbatch: the first one is replayed, and shows something.
    microbatch = 0 if watch is None else 1
    assert event.replay is not None
    assert event.replay[:3] == ("nonfinite", 3, microbatch)
    assert seen.batches == [bits(training.batch(3, microbatch, {3: math.nan})[0])]
    assert seen.weights == [training.weights[2]]
    assert sum("microbatch" in message and SENTENCE in message for _, message in log) == 1


def test_what_names_no_microbatch_is_looked_for_in_all(seen: Seen) -> None:
    training = Training()
    seen.finds = None
    training.replay_on("nonfinite")
    with captured_log():
        training.train(3, {3: math.nan})
    assert seen.batches == [bits(training.batch(3, i, {3: math.nan})[0]) for i in range(MICROBATCHES)]
    (event,) = training.replays()
    assert event.replay is not None
    assert event.replay[:3] == ("nonfinite", 3, 1)


@pytest.mark.parametrize(("recipe", "replayed_in"), [(DelayedScaling(history_len=1), 4), (CurrentScaling(), 3)])
def test_a_jump_replays_the_batch_of_its_amax(recipe: Recipe, replayed_in: int, seen: Seen) -> None:
    training = Training(recipe, watch={**WATCHED, "jump": 8})
    training.replay_on("jump")
    with captured_log():
        training.train(5, {3: 1e4})
    jump = next(event for event in training.events if event.kind == "jump")
    assert jump.step == replayed_in
    assert jump.cause == (3, 0, 1, "first", "input")
    assert seen.batches == [bits(training.batch(3, 1, {3: 1e4})[0])]
    assert seen.weights == [training.weights[replayed_in - 1]]


def test_a_jump_of_a_step_that_nobody_saw_is_not_guessed(seen: Seen) -> None:
    training = Training(DelayedScaling(history_len=1), watch={"every": 2, "ranks": True, "jump": 8})
    training.replay_on("jump")
    with captured_log() as log:
        training.train(6, {3: 1e4})
    assert [event.cause for event in training.events if event.kind == "jump"] == [None, None]
    assert seen.batches == []
    assert sum("a jump names no batch" in message for _, message in log) == 1


def test_at_most_every(seen: Seen) -> None:
    training = Training(watch=WATCHED)
    training.replay_on("nonfinite", at_most_every=3)
    with captured_log():
        training.train(9, dict.fromkeys((2, 3, 4, 5, 8), math.nan))
    assert [event.step for event in training.replays()] == [2, 5, 8]


def test_a_replay_that_raises_does_not_end_the_training(seen: Seen) -> None:
    training = Training(watch=WATCHED)
    seen.finds = ValueError("wrong\nstep")
    training.replay_on("nonfinite")
    with captured_log() as log:
        training.train(4, {3: math.nan})
    assert training.manager.run_step == 4
    assert training.replays() == []
    (told,) = [message for _, message in log if "replay" in message]
    assert told == "fp8dist: step 3: the replay of microbatch 1 of step 3 failed: ValueError: wrong step"


def test_a_spike_that_stops_the_run_is_replayed_first(seen: Seen) -> None:
    training = Training()
    training.guard = LossGuard("stop", min_history=3)
    training.replay_on("spike")
    with captured_log(), pytest.raises(LossDiverged):
        training.train(5, {}, {1: 1.0, 2: 1.1, 3: 1.0, 4: 99.0})
    (event,) = training.replays()
    assert event.step == 4
    assert event.replay is not None
    assert event.replay[:3] == ("spike", 4, 0)


def test_a_model_without_fp8_is_replayed_when_the_guard_sees_a_nan(seen: Seen) -> None:
    net, told = make_net(), []
    buffer, guard = ReplayBuffer(net), LossGuard()
    fp8dist.replay_on(net, buffer, net, ("nonfinite",), guard=guard, callback=told.append)
    with captured_log():
        for step in range(1, 4):
            buffer.keep(batch(0, step), step)
            guard.observe(math.nan if step == 2 else 1.0)
    (event,) = told
    assert (event.kind, event.step, event.replay[:3]) == ("replayed", 2, ("nonfinite", 2, 0))
    assert seen.batches == [bits(batch(0, 2)[0])]


def test_the_folder_of_a_run_has_the_replay(tmp_path: Path, seen: Seen) -> None:
    net = make_net()
    manager = fp8dist.prepare(net)
    with fp8dist.Recorder(tmp_path, manager, every=1):
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-30)
        manager.attach(optimizer=optimizer)
        buffer = ReplayBuffer(manager)
        fp8dist.replay_on(manager, buffer, lambda x: net(x).sum().backward(), ("nonfinite",))
        with captured_log():
            x = batch(0, 0)[0]
            x[0, 0] = math.inf
            buffer.keep((x,))
            net(x).sum().backward()
            optimizer.step()
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    nonfinite, replayed = (event for event in events if event["kind"] in ("nonfinite", "replayed"))
    who = {"cause_step": 1, "rank": 0, "microbatch": 0, "module": "first", "role": "input"}
    assert who.items() <= nonfinite.items()
    expected = {"step": 1, "trigger": "nonfinite", "replayed_step": 1, "microbatch": 0, "rank": 1, "module": "branch"}
    assert (expected | {"what": "output", "sentence": SENTENCE}).items() <= replayed.items()
    assert replayed["replay"]["findings"][0]["module"] == "branch"


def test_mistakes() -> None:
    net = make_net()
    manager = fp8dist.prepare(net)
    buffer = ReplayBuffer(manager)
    with pytest.raises(ConfigurationError, match=r"recorder must be a ReplayBuffer, .* got list"):
        fp8dist.replay_on(manager, [], print)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="keeps the batches of another model"):
        fp8dist.replay_on(manager, ReplayBuffer(fp8dist.prepare(make_net())), print)
    with pytest.raises(ConfigurationError, match=r"events must be .* got 'spikes'"):
        fp8dist.replay_on(manager, buffer, print, ("spikes",))  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="at_most_every must be a number of steps"):
        fp8dist.replay_on(manager, buffer, print, at_most_every=0)
    with pytest.raises(ConfigurationError, match=r"none of events=\('spike',\) can come: pass guard="):
        fp8dist.replay_on(manager, buffer, print, ("spike",))
    with pytest.raises(ConfigurationError, match=r"none of events=.* can come: pass guard="):
        fp8dist.replay_on(net, ReplayBuffer(net), print)


def test_a_step_that_keeps_its_batch_keeps_none_in_a_replay() -> None:
    training = Training(watch=WATCHED)

    def step(given: Any) -> None:
        training.buffer.keep(given)
        training.microbatch(given)

    fp8dist.replay_on(training.manager, training.buffer, step, ("nonfinite",))
    with captured_log():
        training.train(3, {3: math.nan})
    assert len(training.replays()) == 1
    assert len(training.buffer.of(3)) == MICROBATCHES


def test_a_tensor_parallel_model_without_its_group_is_refused_in_the_first_step() -> None:
    training = Training()
    training.replay_on("nonfinite")
    of_net = mock.patch.object(wrappers, "is_tensor_parallel", lambda model: model is training.net)
    with of_net, pytest.raises(ConfigurationError, match="tensor parallel: pass group="):
        training.train(1, {})


def named_on_all(watch: Mapping[str, Any]) -> Any:
    training = Training(group=dist.group.WORLD, watch=watch)
    training.replay_on("nonfinite", "jump")
    with mock.patch.object(triggers, "replay", Seen(True)) as seen, captured_log() as log:
        training.train(4, {3: math.nan})
    nonfinite = [(event.cause, event.step) for event in training.events if event.kind == "nonfinite"]
    replayed = [event.replay[:3] for event in training.replays() if event.replay is not None]
    own = seen.batches == [bits(training.batch(3, 1, {3: math.nan})[0])]
    return nonfinite, replayed, own, [message for _, message in log if SENTENCE in message]


def test_all_ranks_replay_the_place_that_an_event_names(three_ranks: RankPool) -> None:
    results = three_ranks.run(named_on_all, WATCHED)
    for nonfinite, replayed, own, _ in results:
        assert nonfinite == [((3, 2, 1, "first", "input"), 3)]
        assert replayed == [("nonfinite", 3, 1)]
        assert own
    assert [len(told) for *_, told in results] == [1, 0, 0]


def parted() -> Any:
    """Only rank 0 sees a spike, then all do. A guard without ``mean_over`` trusts the loss that it is given."""
    training = Training(group=dist.group.WORLD)
    training.guard = LossGuard(min_history=3)
    training.replay_on("spike")
    apart = {4: 99.0, 5: 99.0} if training.rank == 0 else {}
    losses = {1: 1.0, 2: 1.1, 3: 1.0, 4: 1.0, 5: 1.0, 6: 1.0, 7: 99.0, **apart}
    with mock.patch.object(triggers, "replay", Seen(True)), captured_log() as log:
        training.train(7, {}, losses)
    return training.manager.run_step, [event.step for event in training.replays()], [message for _, message in log]


def test_ranks_that_see_different_events_neither_hang_nor_replay(two_ranks: RankPool) -> None:
    (done, steps, log), (done_1, steps_1, log_1) = two_ranks.run(parted, timeout=60)
    assert (done, steps) == (done_1, steps_1) == (7, [7])
    assert sum("the ranks do not agree on an event" in message for message in log) == 1
    assert not any("agree" in message for message in log_1)


def forgetful() -> Any:
    """Rank 1 keeps only the first microbatch of each step."""
    training = Training(group=dist.group.WORLD, watch=WATCHED)
    keep, kept = training.buffer.keep, itertools.count()
    if training.rank == 1:
        training.buffer.keep = lambda given: None if next(kept) % MICROBATCHES else keep(given)  # type: ignore[assignment,misc]
    training.replay_on("nonfinite")
    with mock.patch.object(triggers, "replay", Seen(True)), captured_log() as log:
        training.train(4, {3: math.nan})
    return training.manager.run_step, len(training.replays()), [message for _, message in log]


def test_a_batch_that_one_rank_has_not_kept_is_not_replayed(two_ranks: RankPool) -> None:
    (done, replays, log), other = two_ranks.run(forgetful, timeout=60)
    assert (done, replays) == other[:2] == (4, 0)
    assert sum("not every rank has kept the batch of step 3" in message for message in log) == 1


def counted(replays: bool) -> Any:
    training = Training(group=dist.group.WORLD)
    if replays:
        training.replay_on("nonfinite")
    with counted_collectives() as calls:
        training.train(2, {})
    return sum(size == 96 for size in calls.sizes), len(calls.names)


def test_a_step_costs_one_small_all_reduce(two_ranks: RankPool) -> None:
    ((_, without), _), ((small, total), _) = two_ranks.run(counted, False), two_ranks.run(counted, True)
    assert (small, total) == (2, without + 2)


def same_bits(update: str, replays: bool) -> Any:
    training = Training(DelayedScaling(history_len=4, update=update), group=dist.group.WORLD, watch=WATCHED)  # type: ignore[arg-type]
    if replays:
        training.replay_on("nonfinite", at_most_every=1)
    with captured_log():
        training.train(3, {2: math.nan})
        done = len(training.replays())
        training.train(10, {})
    return done, training.weights, state_bits(training.manager)


@pytest.mark.slow
@pytest.mark.parametrize("update", ["same_step", "next_step"])
def test_training_goes_on_with_the_same_bits(two_ranks: RankPool, update: str) -> None:
    for (_, *without), (done, *replayed) in zip(
        two_ranks.run(same_bits, update, False), two_ranks.run(same_bits, update, True)
    ):
        assert done == 1
        assert replayed == without

"""``replay_on``: which batch is replayed, when, on which ranks, and what is logged; what a ReplayBuffer keeps."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
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
from fp8dist.checks.random_state import set_random_state
from fp8dist.errors import ConfigurationError
from fp8dist.parallel import wrappers
from fp8dist.replays import triggers
from tests.support.collectives import counted_collectives
from tests.support.logs import captured_log
from tests.support.ranks import RankPool
from tests.support.suite import few
from tests.support.training import SmallJob, batch, bits, make_net, parameter_bits, state_bits, unwrapped

MICROBATCHES = 2
SENTENCE = "the data of rank 1 gives the first non-finite value in module 'branch', output"
WATCHED = {"every": 1, "ranks": True}


class Seen:
    """A replay that notes what it is asked for, with the weights at that time, and finds or raises ``finds``."""

    def __init__(self, finds: Any = True) -> None:
        self.finds = finds
        self.batches: list[bytes] = []
        self.weights: list[dict[str, bytes]] = []

    def __call__(self, model: Any, step: Any, given: Any, **named: Any) -> Any:
        self.batches.append(bits(given[0]))
        self.weights.append(parameter_bits(model))
        if isinstance(self.finds, Exception):
            raise self.finds
        finding = ReplayFinding("nonfinite", (1,), "branch", "output", 0, 3)
        return ReplayReport((finding,) if self.finds else ())


class Training:
    """A prepared net, its optimizer, and a loop that keeps its batches. ``weights``: before each update. ``events``: of
    ``replay_on``."""

    def __init__(
        self, *events: str, recipe: Recipe | None = None, watch: Mapping[str, Any] | None = WATCHED, **more: Any
    ) -> None:
        self.ranks = dist.get_world_size() if dist.is_initialized() else 1
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.group: Any = dist.group.WORLD if dist.is_initialized() else None
        self.net = make_net()
        self.manager = fp8dist.prepare(self.net, recipe or DelayedScaling(history_len=4), group=self.group)
        if watch is not None:
            fp8dist.watch(self.manager, **watch)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01)
        self.manager.attach(optimizer=self.optimizer)
        self.buffer = ReplayBuffer(self.manager)
        self.events: list[Event] = []
        self.manager.on_event(self.events.append)
        self.weights: list[dict[str, bytes]] = []
        self.guard: LossGuard | None = more.get("guard")
        if events:
            fp8dist.replay_on(self.manager, self.buffer, self.microbatch, events, **more)  # type: ignore[arg-type]

    def microbatch(self, given: Any) -> torch.Tensor:
        x, y = given
        loss = (self.net(x) - y).square().mean()
        loss.backward()
        return loss.detach()

    def batch(self, step: int, microbatch: int, planted: Mapping[int, float]) -> Any:
        x, y = batch(self.rank, 10 * step + microbatch)
        if step in planted and microbatch == 1 and self.rank == self.ranks - 1:
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
                if self.group is not None:
                    dist.all_reduce(parameter.grad)
            if self.guard is not None:
                self.guard.observe((losses or {}).get(step, total))
            self.weights.append(parameter_bits(self.net))
            self.optimizer.step()
            self.optimizer.zero_grad()

    def replays(self) -> list[tuple[int, Any]]:
        """Return (step, (trigger, replayed step, microbatch)) of each replay."""
        return [(event.step, event.replay[:3]) for event in self.events if event.replay is not None]


@pytest.fixture
def seen() -> Iterator[Seen]:
    """A replay that finds something."""
    with mock.patch.object(triggers, "replay", Seen()) as replay:
        yield replay


NEXT_STEP = DelayedScaling(history_len=4, update="next_step")


@pytest.mark.parametrize(
    ("recipe", "watch", "finds"),
    [
        (DelayedScaling(history_len=4), WATCHED, True),
        (NEXT_STEP, WATCHED, True),
        (NEXT_STEP, None, True),
        (DelayedScaling(history_len=4), None, False),
        (CurrentScaling(), WATCHED, True),
    ],
)
def test_a_nan_is_replayed_in_its_own_step_before_the_update(
    recipe: Recipe, watch: Mapping[str, Any] | None, finds: bool, seen: Seen
) -> None:
    training = Training("nonfinite", recipe=recipe, watch=watch, at_most_every=1)
    seen.finds = finds
    with captured_log() as log:
        training.train(5, {3: math.nan})
    # Without the watch nothing names the microbatch: all are replayed, up to the first that shows something.
    replayed = [1] if watch is not None else [0] if finds else [0, 1]
    assert training.replays() == [(3, ("nonfinite", 3, replayed[-1]))]
    assert seen.batches == [bits(training.batch(3, place, {3: math.nan})[0]) for place in replayed]
    assert seen.weights == [training.weights[2]] * len(replayed)
    assert sum("microbatch" in message and SENTENCE in message for _, message in log) == finds


@pytest.mark.parametrize(
    ("recipe", "every", "replayed_in"),
    [(DelayedScaling(history_len=1), 1, 4), (CurrentScaling(), 1, 3), (DelayedScaling(history_len=1), 2, None)],
)
def test_a_jump_replays_the_batch_of_its_amax(recipe: Recipe, every: int, replayed_in: int | None, seen: Seen) -> None:
    """That of a step that nobody saw is not guessed."""
    training = Training("jump", recipe=recipe, watch={"every": every, "ranks": True, "jump": 8})
    with captured_log() as log:
        training.train(6, {3: 1e4})
    jump, *_ = (event for event in training.events if event.kind == "jump")
    if replayed_in is None:
        assert (jump.cause, seen.batches) == (None, [])
        assert sum("a jump names no batch" in message for _, message in log) == 1
        return
    assert (jump.step, jump.cause) == (replayed_in, (3, 0, 1, "first", "input"))
    assert seen.batches == [bits(training.batch(3, 1, {3: 1e4})[0])]
    assert seen.weights == [training.weights[replayed_in - 1]]


def test_at_most_every_and_a_replay_that_raises_does_not_end_the_training(seen: Seen) -> None:
    training = Training("nonfinite", at_most_every=3)
    with captured_log():
        training.train(9, dict.fromkeys((2, 3, 4, 5, 8), math.nan))
    assert [step for step, _ in training.replays()] == [2, 5, 8]
    training = Training("nonfinite")
    seen.finds = ValueError("wrong\nstep")
    with captured_log() as log:
        training.train(4, {3: math.nan})
    assert (training.manager.run_step, training.replays()) == (4, [])
    (text,) = [message for _, message in log if "replay" in message]
    assert text == "fp8dist: step 3: the replay of microbatch 1 of step 3 failed: ValueError: wrong step"


def test_a_spike_that_stops_the_run_is_replayed_first_and_a_nan_without_fp8(seen: Seen) -> None:
    training = Training("spike", guard=LossGuard("stop", min_history=3))
    with captured_log(), pytest.raises(LossDiverged):
        training.train(5, {}, {1: 1.0, 2: 1.1, 3: 1.0, 4: 99.0})
    assert training.replays() == [(4, ("spike", 4, 0))]
    seen.batches.clear()
    net, events = make_net(), list[Event]()
    buffer, guard = ReplayBuffer(net), LossGuard()
    fp8dist.replay_on(net, buffer, net, ("nonfinite",), guard=guard, callback=events.append)
    with captured_log():
        for step in range(1, 4):
            buffer.keep(batch(0, step), step)
            guard.observe(math.nan if step == 2 else 1.0)
    (event,) = events
    assert event.replay is not None
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
    buffer, other = ReplayBuffer(manager), ReplayBuffer(fp8dist.prepare(make_net()))
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: fp8dist.replay_on(manager, [], print), r"recorder must be a ReplayBuffer, .* got list"),  # type: ignore[arg-type]
        (lambda: fp8dist.replay_on(manager, other, print), "keeps the batches of another model"),
        (lambda: fp8dist.replay_on(manager, buffer, print, ("spikes",)), r"events must be .* got 'spikes'"),  # type: ignore[arg-type]
        (lambda: fp8dist.replay_on(manager, buffer, print, at_most_every=0), "at_most_every must be a number of steps"),
        (lambda: fp8dist.replay_on(manager, buffer, print, ("spike",)),
         r"none of events=\('spike',\) can come: pass guard="),
        (lambda: fp8dist.replay_on(net, ReplayBuffer(net), print), r"none of events=.* can come: pass guard="),
        (lambda: ReplayBuffer(net, last=0), "last must be a number of steps"),
        (lambda: ReplayBuffer("net"), "a StateManager or a model, got str"),  # type: ignore[arg-type]
        (lambda: ReplayBuffer(net).keep(torch.ones(1)), r"pass keep\(batch, step\)"),
        (lambda: buffer.keep(torch.ones(1), 1), "the manager counts the steps"),
    ]  # fmt: skip
    for call, message in calls:
        with pytest.raises(ConfigurationError, match=message):
            call()
    manager._job.captured = True
    with pytest.raises(ConfigurationError, match="steps in a CUDA graph are not seen one by one"):
        buffer.keep(torch.ones(1))
    training = Training("nonfinite")
    of_net = mock.patch.object(wrappers, "is_tensor_parallel", lambda model: model is training.net)
    with of_net, pytest.raises(ConfigurationError, match="tensor parallel: pass group="):  # In the first step.
        training.train(1, {})


def test_a_step_that_keeps_its_batch_keeps_none_in_a_replay() -> None:
    training = Training()

    def step(given: Any) -> None:
        training.buffer.keep(given)
        training.microbatch(given)

    fp8dist.replay_on(training.manager, training.buffer, step, ("nonfinite",))
    with captured_log():
        training.train(3, {3: math.nan})
    assert len(training.replays()) == 1
    assert len(training.buffer.of(3)) == MICROBATCHES


@pytest.mark.parametrize("last", [1, 4, 6])
def test_memory_is_bounded_by_the_last_steps(last: int) -> None:
    training = Training()
    training.buffer, sizes = ReplayBuffer(training.manager, last), list[int]()
    keep = training.buffer.keep
    training.buffer.keep = lambda given: sizes.append(keep(given) or training.buffer.nbytes)  # type: ignore[func-returns-value,method-assign,assignment,misc]
    training.train(6, {})
    assert training.buffer.steps == tuple(range(7 - last, 7))
    each, of_batch = sizes[0], 4 * 8 * (32 + 16)
    assert of_batch < each < of_batch + 25_000
    assert sizes == [each * min(kept, 2 * (last - 1) + 2 - kept % 2) for kept in range(1, 13)]
    for step in training.buffer.steps:
        for microbatch, kept in enumerate(training.buffer.of(step)):
            assert all(map(torch.equal, kept.batch(), batch(0, 10 * step + microbatch)))
    assert training.buffer.of(6 - last) == []


def test_a_batch_is_a_copy_of_a_pytree_with_its_random_numbers() -> None:
    buffer = ReplayBuffer(torch.nn.Linear(2, 2))
    given: dict[str, Any] = {"x": [torch.ones(3, requires_grad=True), None], "names": ["a"], "n": np.zeros(2)}
    drawn: list[tuple[Any, ...]] = []
    for _ in range(2):
        buffer.keep(given, step=1)
        drawn.append((random.random(), np.random.rand(), torch.rand(2).tolist()))
    with torch.no_grad():
        given["x"][0].fill_(7)
    given["names"].append("b")
    given["n"][0] = 7
    for kept, expected in zip(buffer.of(1), drawn):
        again = kept.batch()
        assert again["x"][0].tolist() == [1, 1, 1]
        assert again["x"][0].requires_grad
        assert again["x"][0].is_leaf
        assert (again["x"][1], again["names"], again["n"].tolist()) == (None, ["a"], [0, 0])
        set_random_state(kept.random_state, torch.device("cpu"))
        assert (random.random(), np.random.rand(), torch.rand(2).tolist()) == expected


def test_a_step_that_a_scaler_skips_is_replaced() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    job = SmallJob(wrap=unwrapped, attach={"scaler": scaler})
    buffer = ReplayBuffer(job.manager)
    for index in range(4):
        x, y = batch(0, index)
        buffer.keep(x)
        scaler.scale((job.net(x) - y).square().mean() * (torch.inf if index in (1, 2) else 1)).backward()
        scaler.step(job.optimizer)
        scaler.update()
        job.optimizer.zero_grad()
    assert buffer.steps == (1, 2)
    (kept,) = buffer.of(2)
    assert torch.equal(kept.batch(), batch(0, 3)[0])


def test_an_alarm_in_a_step_that_a_scaler_skips_replays_nothing_later(seen: Seen) -> None:
    scaler, guard = torch.amp.GradScaler("cpu", init_scale=4.0), LossGuard(min_history=2)
    job = SmallJob(wrap=unwrapped, attach={"scaler": scaler})
    buffer = ReplayBuffer(job.manager)
    fp8dist.replay_on(job.manager, buffer, lambda given: given.sum(), ("spike",), guard=guard)
    for loss in (1.0, 1.0, 9.0, 1.0):
        x, y = batch(0, 0)
        buffer.keep(x)
        scaler.scale((job.net(x) - y).square().mean() * (torch.inf if loss > 1 else 1)).backward()
        guard.observe(loss)
        scaler.step(job.optimizer)
        scaler.update()
        job.optimizer.zero_grad()
    assert (guard.alarms, job.manager.run_step, seen.batches) == (1, 3, [])


def named_on_all() -> Any:
    training = Training("nonfinite", "jump")
    with mock.patch.object(triggers, "replay", Seen()) as seen, captured_log() as log:
        training.train(4, {3: math.nan})
    nonfinite = [(event.cause, event.step) for event in training.events if event.kind == "nonfinite"]
    own = seen.batches == [bits(training.batch(3, 1, {3: math.nan})[0])]
    return nonfinite, training.replays(), own, [message for _, message in log if SENTENCE in message]


def test_all_ranks_replay_the_place_that_an_event_names(three_ranks: RankPool) -> None:
    results = three_ranks.run(named_on_all)
    for found in results:
        assert found[:3] == ([((3, 2, 1, "first", "input"), 3)], [(3, ("nonfinite", 3, 1))], True)
    assert [len(texts) for *_, texts in results] == [1, 0, 0]


def parted() -> Any:
    """Only rank 0 sees a spike, then all do. A guard without ``mean_over`` trusts the loss that it is given."""
    training = Training("spike", guard=LossGuard(min_history=3), watch=None)
    apart = {4: 99.0, 5: 99.0} if training.rank == 0 else {}
    losses = {1: 1.0, 2: 1.1, 3: 1.0, 4: 1.0, 5: 1.0, 6: 1.0, 7: 99.0, **apart}
    with mock.patch.object(triggers, "replay", Seen()), captured_log() as log:
        training.train(7, {}, losses)
    return training.manager.run_step, [step for step, _ in training.replays()], [message for _, message in log]


def forgetful() -> Any:
    """Rank 1 keeps only the first microbatch of each step."""
    training = Training("nonfinite")
    keep, kept = training.buffer.keep, itertools.count()
    if training.rank == 1:
        training.buffer.keep = lambda given: None if next(kept) % MICROBATCHES else keep(given)  # type: ignore[assignment,misc]
    with mock.patch.object(triggers, "replay", Seen()), captured_log() as log:
        training.train(4, {3: math.nan})
    return training.manager.run_step, [step for step, _ in training.replays()], [message for _, message in log]


@pytest.mark.parametrize(
    ("differ", "done", "text"),
    [
        (parted, (7, [7]), "the ranks do not agree on an event"),
        (forgetful, (4, []), "not every rank has kept the batch of step 3"),
    ],
)
def test_ranks_that_differ_neither_hang_nor_replay(differ: Any, done: Any, text: str, two_ranks: RankPool) -> None:
    (*first, log), (*second, other) = two_ranks.run(differ, timeout=60)
    assert tuple(first) == tuple(second) == done
    assert sum(text in message for message in log) == 1
    assert not any(text in message for message in other)


def same_bits(update: str, *events: str) -> Any:
    """Return the small collectives and all of them in two plain steps; the replays, weights and state at the end."""
    recipe = DelayedScaling(history_len=4, update=update)  # type: ignore[arg-type]
    training = Training(*events, recipe=recipe, at_most_every=1)
    with captured_log():
        with counted_collectives() as calls:
            training.train(2, {})
        training.train(3, {2: math.nan})
        done = len(training.replays())
        training.train(5, {})
    small = sum(size == 96 for size in calls.sizes)
    return small, len(calls.names), done, training.weights, state_bits(training.manager)


@pytest.mark.slow
@pytest.mark.parametrize("update", few(["same_step", "next_step"], "next_step"))
def test_training_goes_on_with_the_same_bits_and_a_step_costs_one_small_all_reduce(
    two_ranks: RankPool, update: str
) -> None:
    for (_, without, _, *plain), (small, total, done, *replayed) in zip(
        two_ranks.run(same_bits, update), two_ranks.run(same_bits, update, "nonfinite")
    ):
        assert (small, total, done) == (2, without + 2, 1)
        assert replayed == plain

"""A training step as a CUDA graph decides nothing on the host; ``poll()`` does the host's part. Uses an emulated graph;
tests/*/test_gpu_*.py use real ones."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fp8dist
from fp8dist import ConfigurationError, CurrentScaling, DelayedScaling, MXFP8Scaling, Recipe, StateManager
from tests.support.elements import flip
from tests.support.graphs import EmulatedGraph
from tests.support.logs import captured_log
from tests.support.parallel import same_on_all_ranks
from tests.support.ranks import on_ranks
from tests.support.states import state_of
from tests.support.training import batch, make_net

WARM_UP, REPLAYS = 2, 6


class _Job:
    """A net with a static batch, as a capture requires."""

    def __init__(
        self,
        momentum: float = 0.9,
        update: Any = "same_step",
        warmup: Any = "current",
        recipe: Recipe | None = None,
        **options: Any,
    ) -> None:
        self.net: nn.Module = make_net()
        recipe = recipe or DelayedScaling(history_len=3, update=update, warmup=warmup)
        self.manager: StateManager = fp8dist.prepare(self.net, recipe, **options)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=momentum)
        self.manager.attach(optimizer=self.optimizer)
        self.x, self.y = batch(0, 0)
        self.loss = torch.zeros(())

    def load(self, step: int) -> None:
        """Copy the next batch into the static memory. Later batches are larger, so that scales must adapt."""
        x, y = batch(0, step)
        self.x.copy_(x * (1 + step))
        self.y.copy_(y)

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.mse_loss(self.net(self.x), self.y)
        loss.backward()
        self.optimizer.step()
        self.loss = loss.detach()

    def trained(self) -> list[Tensor]:
        """Return what the optimizer changes."""
        state = [t for s in self.optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]
        return [*self.net.parameters(), *state]

    @contextlib.contextmanager
    def kept(self, *more: Tensor) -> Iterator[None]:
        """Put back what the optimizer changes inside, and ``more``."""
        before = [(t, t.detach().clone()) for t in (*self.trained(), *more)]
        yield
        with torch.no_grad():
            for tensor, old in before:
                tensor.copy_(old)


def _eager(job: _Job, steps: int = WARM_UP + REPLAYS) -> list[float]:
    losses = []
    for step in range(steps):
        job.load(step)
        job.step()
        losses.append(job.loss.item())
    return losses


@contextlib.contextmanager
def _capture(job: _Job) -> Iterator[EmulatedGraph]:
    """Capture a graph, and restore what the capture changed: on a GPU it runs nothing."""
    job.manager.poll()
    graph = EmulatedGraph()
    with job.kept(*(t for sync in job.manager._syncs for t in sync.arena.arrays)), graph.capture():
        yield graph


def _captured(job: _Job) -> EmulatedGraph:
    with _capture(job) as graph:
        job.step()
    return graph


def _replay_infinite(job: _Job, graph: EmulatedGraph) -> None:
    """Replay a batch with an infinite element, but without what it would ruin."""
    job.x[0, 0] = torch.inf
    with job.kept():
        graph.replay()


def _replayed(job: _Job, warm_up: int = WARM_UP) -> list[float]:
    losses = _eager(job, warm_up)
    graph = _captured(job)
    for step in range(warm_up, WARM_UP + REPLAYS):
        job.load(step)
        graph.replay()
        job.manager.poll()
        losses.append(job.loss.item())
    return losses


def _assert_equal(mine: _Job, theirs: _Job) -> None:
    """Compare bit by bit."""
    assert state_of(mine.manager) == state_of(theirs.manager)
    assert mine.manager.steps == theirs.manager.steps
    assert mine.loss.item() == theirs.loss.item()
    assert all(map(torch.equal, mine.net.parameters(), theirs.net.parameters()))


@pytest.mark.parametrize(
    "options",
    [
        {"update": "same_step", "warmup": "current"},
        {"update": "next_step", "warmup": "unit"},
        {"recipe": CurrentScaling()},
        {"recipe": MXFP8Scaling()},
        {"momentum": 0.0},  # torch's SGD begins momentum on the host.
    ],
    ids=str,
)
def test_replays_are_steps(options: dict[str, Any]) -> None:
    """Losses, parameters and FP8 state equal eager mode bit for bit, including scales and step counter. The last job
    captures its first step: each replay decides if a slot is hot or cold."""
    eager, graphed = (_Job(**options) for _ in range(2))
    assert _replayed(graphed, 0 if "momentum" in options else WARM_UP) == _eager(eager)
    assert graphed.manager.steps == WARM_UP + REPLAYS
    _assert_equal(graphed, eager)
    for job in (eager, graphed):  # Eager steps do not use casts made before replays.
        for step in range(2):
            job.load(step)
            job.step()
    _assert_equal(graphed, eager)


@pytest.fixture(params=[False, True], ids=["at once", "late"])
def late(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Return True if verdicts are read as on CUDA: not before the next boundary or poll."""
    if request.param:
        original = fp8dist.state.arena_sync.Verdict.__init__

        def made(self: Any, *args: Any) -> None:
            original(self, *args)
            self.immediate, self._event = False, mock.Mock()
            self._outcome = self._outcome.clone()

        monkeypatch.setattr("fp8dist.state.arena_sync.Verdict.__init__", made)
    return bool(request.param)


def _events(job: _Job) -> list[tuple[str, int, bool]]:
    """Return (kind, step, whether slots are named) of events that will come."""
    events: list[tuple[str, int, bool]] = []
    job.manager.on_event(lambda event: events.append((event.kind, event.step, bool(event.slots))))
    return events


@pytest.mark.parametrize("update", ["same_step", "next_step"])
def test_poll_tells_what_a_replay_saw(update: str, late: bool) -> None:
    """Reports each replay of either of two graphs once, with step and slots, even if the next one has already run."""
    job = _Job(update=update)
    events, named = _events(job), list[Any]()
    job.manager.on_event(lambda event: named.append(event.slots))
    _eager(job, WARM_UP)
    first, second = _captured(job), _captured(job)
    for step, graph in enumerate((first, second, first, first), WARM_UP):
        job.load(step)
        if step == WARM_UP + 3:  # One amax alone: what the poll before has told is not told again.
            job.manager._syncs[0].arena.pending[0] = torch.inf
        graph.replay() if step != WARM_UP + 1 else _replay_infinite(job, graph)
        job.manager.poll()
        job.manager.poll()  # A second poll does nothing.
    assert events == [("nonfinite", WARM_UP + 2, True), ("nonfinite", WARM_UP + 4, True)]
    assert named[1] == job.manager.slots[:1] != named[0]
    assert job.manager.metrics()["fp8/nonfinite_amaxes"] > 0
    assert job.manager.steps == job.manager._job.boundaries == WARM_UP + 4


def test_two_steps_in_a_graph(late: bool) -> None:
    """Events of the first step are reported too."""
    job = _Job(momentum=0.0)
    events = _events(job)
    _eager(job, WARM_UP)
    with _capture(job) as graph:
        job.step()
        job.x.nan_to_num_(posinf=0.0)
        with torch.no_grad():
            for parameter in job.net.parameters():
                parameter.nan_to_num_()
        job.step()
    job.x[0, 0] = torch.inf
    graph.replay()
    job.manager.poll()
    job.manager.poll()
    ((kind, _, named),) = events
    assert (kind, named) == ("nonfinite", True)  # By name, although the last step saw none.
    assert job.manager.steps == job.manager._job.boundaries == WARM_UP + 2


def test_a_capture_that_failed_leaves_nothing_behind(late: bool) -> None:
    """For example, a non-capturable Adam raises after the boundary. Eager steps or another capture can follow."""
    eager, failed = _Job(update="next_step"), _Job(update="next_step")
    for job in (eager, failed):
        _eager(job, WARM_UP)
    refuses = mock.patch.object(torch.optim.SGD, "_init_group", side_effect=RuntimeError("not capturable"))
    with _capture(failed), refuses, pytest.raises(RuntimeError, match="not capturable"):
        failed.step()
    for step in range(WARM_UP, WARM_UP + 2):
        for job in (eager, failed):
            job.load(step)
            job.step()
    graph = _captured(failed)
    for step in range(WARM_UP + 2, WARM_UP + 4):
        for job in (eager, failed):
            job.load(step)
        eager.step()
        graph.replay()
        failed.manager.poll()
    assert state_of(failed.manager) == state_of(eager.manager)
    assert failed.manager.steps == WARM_UP + 4


@pytest.mark.parametrize("update", ["same_step", "next_step"])
def test_only_forward_and_backward_in_the_graph(update: str) -> None:
    """As with ``make_graphed_callables``: the optimizer's step commits, because no replay does."""
    eager, graphed = (_Job(update=update, momentum=0.0) for _ in range(2))
    for job in (eager, graphed):
        _eager(job, WARM_UP)
    graphed.optimizer.zero_grad(set_to_none=True)
    with _capture(graphed) as graph:
        loss = nn.functional.mse_loss(graphed.net(graphed.x), graphed.y)
        loss.backward()
    losses = []
    for step in range(WARM_UP, WARM_UP + 4):
        for job in (eager, graphed):
            job.load(step)
        eager.step()
        graph.replay()
        graphed.optimizer.step()
        losses.append((loss.item(), eager.loss.item()))
    assert [a for a, _ in losses] == [b for _, b in losses]
    assert state_of(graphed.manager) == state_of(eager.manager)


def test_checks_become_due_by_polls(late: bool) -> None:
    """Checks run after every second step, replayed or eager, once each."""
    job = _Job(check_every=2)
    checked: list[tuple[int, bool]] = []
    job.manager._cycle.checks._run = lambda scope, policy, in_step: checked.append((job.manager.steps, in_step))  # type: ignore
    _replayed(job)
    assert checked == [(step, False) for step in (2, 4, 6, 8)]
    for step in range(2):
        job.load(step)
        job.step()
        job.manager.poll()
    assert len(checked) == 5


@pytest.mark.parametrize("update", ["same_step", "next_step"])
def test_a_capture_before_poll_is_refused(update: str) -> None:
    """A pending commit or verdict of the last eager step must not get into a graph."""
    job = _Job(update=update)
    job.step()
    if update == "same_step":  # As on CUDA, where verdicts are read later.
        (sync,) = job.manager._syncs
        sync.verdict = fp8dist.state.arena_sync.Verdict(torch.zeros(7, dtype=torch.bool))
    with EmulatedGraph().capture(), pytest.raises(ConfigurationError, match=r"call manager.poll\(\) before"):
        job.step()


def test_weights_that_fsdp2_gathers_in_fp8_cannot_be_captured() -> None:
    job = _Job()
    job.manager.poll()
    job.manager._cycle.scales.sharded = mock.Mock()
    with EmulatedGraph().capture(), pytest.raises(ConfigurationError, match="cannot be captured"):
        job.step()


@on_ranks(2)
def test_a_poll_without_a_replay_proves_nothing() -> None:
    job = _Job(group=dist.group.WORLD, check_policy="warn")
    _eager(job, WARM_UP)
    graph = _captured(job)
    with captured_log() as log:
        for damaged in (False, True):
            if damaged and dist.get_rank() == 1:
                flip(job.manager.slot("branch", "weight").scale, 20)
            graph.replay()
            job.manager.poll()
        job.manager.poll()
    assert (job.manager.verified.proven_step, job.manager.run_step) == (WARM_UP + 1, WARM_UP + 2)
    assert not [text for _, text in log if "equal again" in text]


@pytest.mark.parametrize("how", ["load", "reset"])
def test_a_load_or_a_reset_between_replays(how: str) -> None:
    """The same slots have a non-finite amax before and after it, and are told. It undoes a replay that no poll saw."""
    job = _Job()
    events = _events(job)
    _eager(job, WARM_UP)
    saved, graph = job.manager.state_dict(), _captured(job)
    for polled in (True, True, False):
        _replay_infinite(job, graph)
        if polled:
            job.manager.poll()
        job.manager.load_state_dict(saved) if how == "load" else job.manager.reset()
    job.manager.poll()
    assert [(kind, named) for kind, _, named in events] == [("nonfinite", True)] * 2
    assert job.manager.run_step == (job.manager.steps if how == "load" else WARM_UP + 2)


@pytest.mark.parametrize(("update", "fault", "replays_per_poll"), [("same_step", False, 2), ("next_step", True, 1)])
@on_ranks(3)
def test_ranks_that_replay(update: str, fault: bool, replays_per_poll: int) -> None:
    """The sync is in the graph: state is equal on all ranks, and each collective is counted. A scale that differs
    before the fourth replay is named once."""
    job = _Job(update=update, group=dist.group.WORLD, check_policy="warn")
    found: list[Any] = []
    job.manager.on_event(
        lambda event: found.extend((f.step, f.kind, f.name, f.ranks) for f in event.report.findings)  # type: ignore
    )
    with captured_log():
        _eager(job, WARM_UP)
        graph = _captured(job)
        for step in range(WARM_UP, WARM_UP + REPLAYS):
            job.load(step)
            if fault and step == WARM_UP + 3 and dist.get_rank() == 1:
                flip(job.manager.slot("branch", "weight").scale, 20)
            graph.replay()
            if (step + 1) % replays_per_poll == 0:
                job.manager.poll()
    assert found == ([(WARM_UP + 4, "scale", "branch:weight", (1,))] if fault else [])
    same_on_all_ranks(state_of(job.manager))
    assert job.manager.steps == WARM_UP + REPLAYS
    if not fault:
        assert job.manager.metrics()["fp8/collectives"] == 1 + WARM_UP + REPLAYS  # One at attach.

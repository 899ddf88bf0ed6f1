"""A training step as a CUDA graph: no decision on the host, and ``poll()`` does the host's part. On an emulated graph;
the real one is in tests/test_gpu_*.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8dist
from fp8dist import ConfigurationError, DelayedScaling, StateManager
from tests.support.graphs import EmulatedGraph
from tests.support.states import state_of
from tests.support.training import batch, make_net

WARM_UP, REPLAYS = 2, 6


class _Job:
    """A net with a static batch, as capture needs it."""

    def __init__(self, momentum: float = 0.9, check_every: int = 0, **recipe: Any) -> None:
        self.net: nn.Module = make_net()
        backend = recipe.pop("backend", "auto")
        self.manager: StateManager = fp8dist.prepare(
            self.net, DelayedScaling(history_len=3, **recipe), backend=backend, check_every=check_every
        )
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=momentum)
        self.manager.attach(optimizer=self.optimizer)
        self.x, self.y = batch(0, 0)
        self.loss = torch.zeros(())

    def load(self, step: int) -> None:
        """The next batch into the same memory; later ones are larger, so that scales must follow."""
        x, y = batch(0, step)
        self.x.copy_(x * (1 + step))
        self.y.copy_(y)

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.mse_loss(self.net(self.x), self.y)
        loss.backward()
        self.optimizer.step()
        self.loss = loss.detach()

    def tensors(self) -> list[Tensor]:
        """Everything that a capture by emulation changes and should not."""
        state = [t for s in self.optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]
        arenas = [t for sync in self.manager._syncs for t in sync.arena.arrays]
        return [*self.net.parameters(), *self.net.buffers(), *state, *arenas]


def _eager(job: _Job) -> list[float]:
    losses = []
    for step in range(WARM_UP + REPLAYS):
        job.load(step)
        job.step()
        losses.append(job.loss.item())
    return losses


def _captured(job: _Job) -> EmulatedGraph:
    job.manager.poll()
    before = [t.detach().clone() for t in job.tensors()]
    graph = EmulatedGraph()
    with graph.capture():
        job.step()
    with torch.no_grad():
        for tensor, old in zip(job.tensors(), before):
            tensor.copy_(old)
    return graph


def _replayed(job: _Job) -> list[float]:
    losses = []
    for step in range(WARM_UP):
        job.load(step)
        job.step()
        losses.append(job.loss.item())
    graph = _captured(job)
    for step in range(WARM_UP, WARM_UP + REPLAYS):
        job.load(step)
        graph.replay()
        job.manager.poll()
        losses.append(job.loss.item())
    return losses


@pytest.mark.parametrize("backend", ["auto", pytest.param("triton", marks=pytest.mark.slow)])
@pytest.mark.parametrize("update", ["same_step", "next_step"])
@pytest.mark.parametrize("warmup", ["current", "unit"])
def test_replays_are_steps(update: str, warmup: str, backend: str) -> None:
    """Losses, parameters and FP8 state bit for bit as in eager mode, scales and step counter included."""
    eager, graphed = (_Job(update=update, warmup=warmup, backend=backend) for _ in range(2))
    assert _replayed(graphed) == _eager(eager)
    assert state_of(graphed.manager) == state_of(eager.manager)
    for mine, theirs in zip(graphed.net.parameters(), eager.net.parameters()):
        assert torch.equal(mine, theirs)
    assert graphed.manager.steps == eager.manager.steps == WARM_UP + REPLAYS
    assert graphed.manager.metrics()["fp8/step"] == WARM_UP + REPLAYS


def test_captured_while_cold() -> None:
    """Hot or cold is decided by each replay: a graph that was captured with cold slots uses their scales once they have
    some."""
    eager, graphed = (_Job(momentum=0.0) for _ in range(2))  # Momentum begins on the host, in torch's SGD.
    graph = _captured(graphed)
    for step in range(4):
        for job in (eager, graphed):
            job.load(step)
        eager.step()
        graph.replay()
        graphed.manager.poll()
    assert state_of(graphed.manager) == state_of(eager.manager)


@pytest.mark.parametrize("update", ["same_step", "next_step"])
def test_poll_tells_what_a_replay_saw(update: str) -> None:
    job = _Job(update=update)
    events: list[tuple[str, int]] = []
    job.manager.on_event(lambda event: events.append((event.kind, event.step)))
    for step in range(WARM_UP):
        job.load(step)
        job.step()
    graph = _captured(job)
    for step in range(WARM_UP, WARM_UP + 3):
        job.load(step)
        if step == WARM_UP + 1:
            job.x[0, 0] = torch.inf
        graph.replay()
        job.manager.poll()
    assert ("nonfinite", WARM_UP + 2) in events
    assert min(step for _, step in events) == WARM_UP + 2


def test_eager_steps_go_on_after_replays() -> None:
    """Casts that were made before replays are not used after them."""
    eager, graphed = _Job(), _Job()
    _eager(eager)
    _replayed(graphed)
    for job in (eager, graphed):
        for step in range(3):
            job.load(step)
            job.step()
    assert state_of(graphed.manager) == state_of(eager.manager)
    assert graphed.loss.item() == eager.loss.item()


def test_checks_become_due_by_polls() -> None:
    job = _Job(check_every=2)
    checked: list[tuple[int, bool]] = []
    job.manager._cycle.check = lambda scope, policy, in_step: checked.append((job.manager.steps, in_step))  # type: ignore
    _replayed(job)
    assert checked == [(4, False), (6, False), (8, False)]


@pytest.mark.parametrize("update", ["same_step", "next_step"])
def test_a_capture_before_poll_is_refused(update: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the last eager step left, a commit or a verdict, must not get into a graph."""
    job = _Job(update=update)
    job.step()
    if update == "same_step":  # As on CUDA, where a verdict is read later.
        (sync,) = job.manager._syncs
        sync.verdict = fp8dist.sync.Verdict(torch.ones(6, dtype=torch.bool))
    with EmulatedGraph().capture(), pytest.raises(ConfigurationError, match=r"call manager.poll\(\) before"):
        job.step()

"""A training step in a CUDA graph gives the same bits as eager steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8dist
from fp8dist import DelayedScaling, StateManager
from tests.support.devices import DEVICE, needs_gpu
from tests.support.training import batch, bits, make_net, parameter_bits, state_bits

pytestmark = [needs_gpu, pytest.mark.slow]

EAGER, REPLAYED = 4, 8
"""Numbers of steps before the capture (in both runs) and after it."""


class _Job:
    """A prepared model, its optimizer, and static tensors for the data."""

    def __init__(self, update: Any, optimizer: str) -> None:
        self.model = make_net().to(DEVICE)
        self.manager: StateManager = fp8dist.prepare(self.model, DelayedScaling(history_len=3, update=update))
        if optimizer == "sgd":
            self.optimizer: torch.optim.Optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        else:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, capturable=DEVICE == "cuda")
        self.manager.attach(self.model, optimizer=self.optimizer)
        self.x, self.y = (part.to(DEVICE) for part in batch(0, 0))
        self.losses: list[bytes] = []

    def load(self, index: int) -> None:
        for target, source in zip((self.x, self.y), batch(0, index)):
            target.copy_(source)

    def step(self) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.mse_loss(self.model(self.x), self.y)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def run_eagerly(self, start: int, end: int) -> None:
        for index in range(start, end):
            self.load(index)
            self.losses.append(bits(self.step()))

    def outcome(self) -> Any:
        return self.losses, state_bits(self.manager), parameter_bits(self.model), self.manager.steps


def _graphed(update: str, optimizer: str) -> Any:
    job = _Job(update, optimizer)
    apart = torch.cuda.Stream()
    apart.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(apart):
        job.run_eagerly(0, EAGER)
    torch.cuda.current_stream().wait_stream(apart)
    torch.cuda.synchronize()
    job.manager.poll()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = job.step()
    for index in range(EAGER, EAGER + REPLAYED):
        job.load(index)
        graph.replay()
        job.manager.poll()
        job.losses.append(bits(loss))
    return job.outcome()


def _eager(update: str, optimizer: str) -> Any:
    job = _Job(update, optimizer)
    job.run_eagerly(0, EAGER + REPLAYED)
    return job.outcome()


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("update", ["same_step", "next_step"])
def test_a_replayed_step_is_an_eager_one(update: str, optimizer: str) -> None:
    expected = _eager(update, optimizer)
    assert expected[3] == EAGER + REPLAYED
    assert _eager(update, optimizer) == expected, "eager runs differ among themselves"
    if DEVICE == "cpu":
        pytest.skip("CUDA graphs need a GPU")
    names = ("losses", "FP8 state", "parameters", "steps")
    for name, mine, theirs in zip(names, _graphed(update, optimizer), expected):
        assert mine == theirs, name


def test_slots_that_become_cold_after_the_capture() -> None:
    """A graph that was captured with hot slots casts cold ones with their tensors' own amaxes, as eager steps do."""
    outcomes = []
    for graphed in (False, True):
        job = _Job("same_step", "sgd")
        job.run_eagerly(0, EAGER)
        job.manager.poll()
        if not graphed or DEVICE == "cpu":
            again = job.step
        else:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                loss = job.step()

            def again(graph: Any = graph, loss: Tensor = loss) -> Tensor:
                graph.replay()
                return loss

        assert job.manager._syncs[0].arena.known_hot
        for index in range(EAGER, EAGER + 4):
            if index == EAGER + 1:
                job.manager.reset()
            job.load(index)
            job.losses.append(bits(again()))
            job.manager.poll()
        assert not job.manager._syncs[0].arena.scratches.any()
        outcomes.append(job.outcome())
    for name, mine, theirs in zip(("losses", "FP8 state", "parameters", "steps"), *outcomes):
        equal = mine == theirs  # A difference of so many bytes takes pytest minutes to describe.
        assert equal, name

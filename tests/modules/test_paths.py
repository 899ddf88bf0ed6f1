"""One training, four ways to reach the kernels, the same bits: directly, through the ops, compiled, captured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8dist
from fp8dist_kernels import direct
from tests.support.graphs import EmulatedGraph
from tests.support.training import Net, batch, bits, make_net, state_bits

STEPS, NO_INPUT, NO_BRANCH, NOT_FINITE = 20, (0, 1), (0, 1, 2, 3, 8, 13), 11
"""Slots are cold at first, some for longer; hot ones are skipped in places, and see an Inf once."""

RECIPES: dict[str, fp8dist.Recipe] = {
    "same_step": fp8dist.DelayedScaling(history_len=4),
    "next_step": fp8dist.DelayedScaling(history_len=4, update="next_step", warmup="unit"),
    "most_recent": fp8dist.DelayedScaling(history_len=1, amax_algo="most_recent", margin=1),
    "current": fp8dist.CurrentScaling(),
    "row": fp8dist.RowwiseScaling(format="hybrid"),
    "block": fp8dist.BlockScaling(),
}


LONG = pytest.mark.long


class Job:
    """A net with static inputs, as a capture needs them."""

    def __init__(self, recipe: fp8dist.Recipe, backend: str) -> None:
        self.net: Net = make_net()
        self.manager = fp8dist.prepare(self.net, recipe, backend=backend)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.05)
        self.manager.attach(optimizer=self.optimizer)
        self.forward: Callable[..., Tensor] = self.net
        self.x, self.y = batch(0, 0)
        self.loss = torch.zeros(())

    def load(self, step: int) -> None:
        x, y = batch(0, step)
        self.x.copy_(x * (0 if step in NO_INPUT else 1 + step % 7))
        if step == NOT_FINITE:
            self.x[0, 0] = torch.inf
        self.y.copy_(y)

    def step(self, skip: bool) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.mse_loss(self.forward(self.x, skip), self.y)
        loss.backward()
        for parameter in self.net.parameters():
            if parameter.grad is not None:
                parameter.grad.nan_to_num_(0.0, 0.0, 0.0)
        self.optimizer.step()
        self.loss = loss.detach()

    def run(self) -> Any:
        seen = []
        for step in range(STEPS):
            self.load(step)
            self.take(step in NO_BRANCH)
            loss = self.loss.nan_to_num(nan=-1.0)  # A NaN may have either sign.
            seen.append((bits(loss), state_bits(self.manager)))
        return seen, [bits(parameter) for parameter in self.net.parameters()]

    def take(self, skip: bool) -> None:
        self.step(skip)


class CapturedJob(Job):
    def __init__(self, recipe: fp8dist.Recipe, backend: str) -> None:
        super().__init__(recipe, backend)
        self.graphs: dict[bool, tuple[EmulatedGraph, Tensor]] = {}
        for skip in (False, True):
            self.manager.poll()
            state = [tensor for sync in self.manager._syncs for tensor in sync.arena.arrays]
            before = [tensor.detach().clone() for tensor in (*self.net.parameters(), *state)]
            graph = EmulatedGraph()
            with graph.capture():
                self.step(skip)
            with torch.no_grad():
                for tensor, old in zip((*self.net.parameters(), *state), before):
                    tensor.copy_(old)
            self.graphs[skip] = graph, self.loss

    def take(self, skip: bool) -> None:
        graph, self.loss = self.graphs[skip]
        graph.replay()
        self.manager.poll()


def _plain_calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    seen: list[bool] = []
    is_plain = direct.is_plain
    monkeypatch.setattr(direct, "is_plain", lambda x: seen.append(is_plain(x)) or seen[-1])  # type: ignore[func-returns-value]
    return seen


def _trained_with(tokens: Sequence[int], recipe: fp8dist.Recipe, compiled: bool) -> Any:
    net = make_net()
    manager = fp8dist.prepare(net, recipe)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    manager.attach(optimizer=optimizer)
    forward = torch.compile(net, backend="aot_eager", fullgraph=True) if compiled else net
    losses = []
    for count in tokens:
        loss = forward(torch.randn(count, 32, generator=torch.Generator().manual_seed(count))).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(bits(loss))
    return losses, state_bits(manager)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo does it itself.
@pytest.mark.parametrize("name", ["same_step", *(pytest.param(n, marks=LONG) for n in ("current", "row", "block"))])
def test_batches_of_other_sizes_are_compiled_once_more_and_right(name: str) -> None:
    """With and without padding: 17, 16 and 48 tokens; the second size makes the graph dynamic."""
    torch._dynamo.reset()
    sizes = (17, 16, 48, 0, 1, 33)
    assert _trained_with(sizes, RECIPES[name], True) == _trained_with(sizes, RECIPES[name], False)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo does it itself.
@pytest.mark.parametrize("name", ["same_step", "row"])
def test_sizes_that_only_data_decide(name: str) -> None:
    """As the tokens of an expert."""
    torch._dynamo.reset()
    linear = nn.Linear(32, 48)
    fp8dist.prepare(linear, RECIPES[name]).attach(boundary="manual")

    def chosen(x: Tensor, where: Tensor) -> Tensor:
        return linear(x[where.nonzero().squeeze(1)])

    x = torch.randn(20, 32)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(chosen, backend="aot_eager", fullgraph=True)
        for count in (5, 16, 0):
            where = torch.arange(20) < count
            assert torch.equal(compiled(x, where), chosen(x, where))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo does it itself.
@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("same_step", "auto"),
        ("row", "auto"),
        *(pytest.param(name, "auto", marks=LONG) for name in ("next_step", "most_recent", "current", "block")),
        pytest.param("same_step", "triton", marks=LONG),
    ],
)
def test_the_same_bits(name: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = RECIPES[name]
    eager = Job(recipe, backend)
    with monkeypatch.context() as patch:
        plain = _plain_calls(patch)
        expected = eager.run()
    assert plain
    assert all(plain)
    if recipe.delayed:  # Two reasons for a launch that looks for an amax: cold slots, and weights.
        assert eager.manager._syncs[0].arena.known_hot

    with monkeypatch.context() as patch:
        patch.setattr(direct, "is_eager", lambda: False)
        through_ops = Job(recipe, backend)
        assert through_ops.run() == expected

    torch._dynamo.reset()
    compiled = Job(recipe, backend)
    compiled.forward = torch.compile(compiled.net, backend="aot_eager", fullgraph=True)
    assert compiled.run() == expected

    captured = CapturedJob(recipe, backend)
    assert captured.run() == expected

"""ReplayBuffer: what it keeps, and how much."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

import fp8dist
from fp8dist import ReplayBuffer
from fp8dist.checks.random_state import set_random_state
from fp8dist.errors import ConfigurationError
from tests.support.training import batch, make_net

BATCH_BYTES = 4 * 8 * (32 + 16)


def trained(steps: int, microbatches: int = 2, last: int = 2) -> tuple[ReplayBuffer, list[int]]:
    """Train, and return the buffer and its bytes after each ``keep``."""
    net = make_net()
    manager = fp8dist.prepare(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    manager.attach(optimizer=optimizer)
    buffer, sizes = ReplayBuffer(manager, last), []
    for step in range(1, steps + 1):
        for microbatch in range(microbatches):
            x, y = batch(0, 10 * step + microbatch)
            buffer.keep((x, y))
            sizes.append(buffer.nbytes)
            (net(x) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return buffer, sizes


@pytest.mark.parametrize("last", [1, 3, 4, 6])
def test_memory_is_bounded_by_the_last_steps(last: int) -> None:
    buffer, sizes = trained(6, last=last)
    assert buffer.steps == tuple(range(7 - last, 7))
    each = sizes[0]
    assert BATCH_BYTES < each < BATCH_BYTES + 25_000
    assert sizes == [each * min(kept, 2 * (last - 1) + 2 - kept % 2) for kept in range(1, 13)]
    assert sizes[-1] == buffer.nbytes
    for step in buffer.steps:
        for microbatch, kept in enumerate(buffer.of(step)):
            assert all(map(torch.equal, kept.batch(), batch(0, 10 * step + microbatch)))
    assert buffer.of(6 - last) == []


def test_a_batch_is_a_copy_of_a_pytree_with_its_random_numbers() -> None:
    model = torch.nn.Linear(2, 2)
    buffer = ReplayBuffer(model)
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
    net = make_net()
    manager = fp8dist.prepare(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    manager.attach(optimizer=optimizer, scaler=scaler)
    buffer = ReplayBuffer(manager)
    for index in range(4):
        x, y = batch(0, index)
        buffer.keep(x)
        scaler.scale((net(x) - y).square().mean() * (torch.inf if index in (1, 2) else 1)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert buffer.steps == (1, 2)
    (kept,) = buffer.of(2)
    assert torch.equal(kept.batch(), batch(0, 3)[0])


def test_mistakes() -> None:
    net = make_net()
    with pytest.raises(ConfigurationError, match="last must be a number of steps"):
        ReplayBuffer(net, last=0)
    with pytest.raises(ConfigurationError, match="a StateManager or a model, got str"):
        ReplayBuffer("net")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"pass keep\(batch, step\)"):
        ReplayBuffer(net).keep(torch.ones(1))
    with pytest.raises(ConfigurationError, match="the manager counts the steps"):
        ReplayBuffer(fp8dist.prepare(net)).keep(torch.ones(1), 1)
    manager = fp8dist.get_manager(net)
    manager._job.captured = True
    with pytest.raises(ConfigurationError, match="steps in a CUDA graph are not seen one by one"):
        ReplayBuffer(manager).keep(torch.ones(1))

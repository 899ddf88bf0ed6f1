"""What the end of a step costs the host per Linear: counts of calls, which no busy machine changes.

``scripts/benchmark sync`` prints the times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fp8dist
from tests.support.counted import counted_calls

FEW, MANY = 4, 16


class Job:
    """A model of Linears, and its optimizer. ``boundary`` None: it is not prepared."""

    def __init__(self, linears: int, boundary: Any) -> None:
        self.model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(linears)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, foreach=False)
        if boundary is not None:
            self.manager = fp8dist.prepare(self.model)
            self.manager.attach(optimizer=self.optimizer, boundary=boundary)

    def counted(self, update: Callable[[], Any], call: Callable[[], Any]) -> Counter[str]:
        """Return the calls in the third step, after backward and ``update``."""
        for step in range(3):
            self.model(torch.ones(16, 16)).sum().backward()
            update()
            if step < 2:
                call()  # Not counted: a process's first step imports Dynamo, which counting makes slow.
        return counted_calls(call)


def _after_optimizer(linears: int) -> Counter[str]:
    """``manager.step()`` after the step of an attached optimizer, which has noted what it changed."""
    job = Job(linears, "manual")
    return job.counted(job.optimizer.step, job.manager.step)


def _after_foreign_update(linears: int) -> Counter[str]:
    """``manager.step()`` after an update by other code than a torch optimizer's."""
    job = Job(linears, "manual")

    @torch.no_grad()
    def update() -> None:
        for parameter in job.model.parameters():
            parameter.mul_(0.999)

    return job.counted(update, job.manager.step)


def _attached_optimizer(linears: int) -> Counter[str]:
    """What an attached optimizer's step does beyond that of a plain one."""
    plain = Job(linears, None)  # First: the manager's hooks see the steps of all optimizers.
    without = plain.counted(lambda: None, plain.optimizer.step)
    ours = Job(linears, "optimizer")
    counted = ours.counted(lambda: None, ours.optimizer.step)
    counted.subtract(without)
    return counted


@pytest.mark.slow
@pytest.mark.parametrize("counts", [_after_optimizer, _after_foreign_update, _attached_optimizer])
def test_a_step_makes_no_call_per_linear(counts: Callable[[int], Counter[str]]) -> None:
    """There were once 6 to 18 calls of C, and 9 to 14 of Python, for each Linear."""
    few = counts(FEW)
    assert few["call"] > 0
    assert counts(MANY) == few

"""What the end of a step costs the host per Linear: counts of calls, which no busy machine changes.

``scripts/benchmark sync`` prints the times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8dist
from tests.support.counted import counted_calls

FEW, MANY = 16, 48


class Job:
    """A model of Linears, and its optimizer. ``prepared`` and ``attached``: as the names say."""

    def __init__(self, linears: int, prepared: bool, attached: bool, boundary: Any = "optimizer") -> None:
        self.model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(linears)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, foreach=False)
        if prepared:
            self.manager = fp8dist.prepare(self.model)
            self.manager.attach(optimizer=self.optimizer if attached else None, boundary=boundary)

    def backward(self) -> None:
        x: Tensor = torch.ones(16, 16)
        self.model(x).sum().backward()

    def counted(self, call: Callable[[], Any]) -> Counter[str]:
        """Return the calls in the third step, whose backward has just run."""
        for _ in range(2):
            self.backward()
            call()
        self.backward()
        return counted_calls(call)


def _end_of_step(linears: int) -> Counter[str]:
    job = Job(linears, prepared=True, attached=False)
    return job.counted(job.manager.step)


def _after_optimizer(linears: int) -> Counter[str]:
    """``manager.step()`` after the step of an attached optimizer, which has noted what it changed."""
    job = Job(linears, prepared=True, attached=True, boundary="manual")
    for _ in range(3):
        job.backward()
        job.optimizer.step()
        counted = counted_calls(job.manager.step)
    return counted


def _after_foreign_update(linears: int) -> Counter[str]:
    """``manager.step()`` after an update by other code than a torch optimizer's."""
    job = Job(linears, prepared=True, attached=False)

    def update() -> None:
        with torch.no_grad():
            for parameter in job.model.parameters():
                parameter.mul_(0.999)

    for _ in range(3):
        job.backward()
        update()
        counted = counted_calls(job.manager.step)
    return counted


def _attached_optimizer(linears: int) -> Counter[str]:
    """What an attached optimizer's step does beyond that of a plain one."""
    plain = Job(linears, prepared=False, attached=False)
    without = plain.counted(plain.optimizer.step)  # First: the manager's hooks see the steps of all optimizers.
    ours = Job(linears, prepared=True, attached=True)
    counted = ours.counted(ours.optimizer.step)
    counted.subtract(without)
    return counted


@pytest.mark.slow
@pytest.mark.parametrize("counts", [_end_of_step, _after_optimizer, _after_foreign_update, _attached_optimizer])
def test_a_step_makes_no_call_per_linear(counts: Callable[[int], Counter[str]]) -> None:
    """There were once 6 to 18 calls of C, and 9 to 14 of Python, for each Linear."""
    few = counts(FEW)
    assert few["call"] > 0
    assert counts(MANY) == few

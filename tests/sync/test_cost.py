"""A step's work on the host does not depend on how many slots there are."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fp8dist
from fp8dist import DelayedScaling


class _Ops(TorchDispatchMode):
    """Which torch ops run, and how often."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


def _ops_of_a_step(slots: int, history_len: int) -> Counter[str]:
    model = nn.Identity()
    manager = fp8dist.prepare(model, DelayedScaling(history_len=history_len))
    names = [f"m{i}" for i in range(slots)]
    for name in names:
        manager.register(name, "input", "e4m3")
    for name in names[::2]:  # Every other one does not run.
        manager.record(name, "input", torch.ones(1))
    with _Ops() as ops:
        manager.step()
    assert manager.steps == 1
    return ops.seen


@pytest.mark.parametrize("history_len", [1, 64])
def test_ops_of_a_step_are_constant_in_slots(history_len: int) -> None:
    few, many = _ops_of_a_step(3, history_len), _ops_of_a_step(300, history_len)
    assert few == many
    assert sum(few.values()) <= 60

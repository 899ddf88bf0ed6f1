"""The host's work per step does not depend on the number of slots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fp8dist
from fp8dist import DelayedScaling
from fp8dist_kernels.reference import update

MOST = 69
"""Torch ops of a step, including fp8dist::launch and fp8dist::commit, and the ops that these two run inside. Three look
if a slot is still cold; they end when none is."""


class _Ops(TorchDispatchMode):
    """Counts torch ops by name."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))

    def inside(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the function to enter this mode: torch disables a mode while an op runs that the mode has seen."""

        def counted(*args: Any) -> Any:
            with self:
                return function(*args)

        return counted


def _ops_of_a_step(slots: int, history_len: int) -> Counter[str]:
    model = nn.Identity()
    manager = fp8dist.prepare(model, DelayedScaling(history_len=history_len))
    names = [f"m{i}" for i in range(slots)]
    for name in names:
        manager.register(name, "input", "e4m3")
    for name in names[::2]:  # Every other module does not run.
        manager.slot(name, "input").record(torch.ones(1))
    ops = _Ops()
    within = {name: ops.inside(getattr(update, name)) for name in ("launch", "commit")}
    with ops, mock.patch.multiple(update, **within):
        manager.step()
    assert manager.steps == 1
    assert ops.seen["fp8dist.launch.default"] == ops.seen["fp8dist.commit.default"] == 1
    assert ops.seen["aten.reciprocal.out"] == 1, "what a commit runs inside must be counted"
    return ops.seen


@pytest.mark.parametrize("history_len", [1, 64])
def test_ops_of_a_step_are_constant_in_slots(history_len: int) -> None:
    few, many = _ops_of_a_step(3, history_len), _ops_of_a_step(300, history_len)
    assert few == many
    assert sum(few.values()) <= MOST

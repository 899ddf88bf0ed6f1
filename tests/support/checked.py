"""A model with parameters of many types, for tests that damage it and check it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fp8dist
from fp8dist import DelayedScaling, DivergenceReport, StateManager

HISTORY = 5
SLOTS = (("a", "input"), ("a", "weight"), ("b", "grad_output"), ("b.c", "input"))
DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.uint8,
    torch.complex64,
    torch.bool,
)


def name_of(dtype: torch.dtype) -> str:
    """Return the name of the parameter of this dtype."""
    return f"p_{str(dtype).removeprefix('torch.')}"


def random_bytes(dtype: torch.dtype, shape: Sequence[int], seed: int) -> Tensor:
    """Return random bits, including NaN and Inf; the same on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, tuple(shape), generator=generator).bool()
    data = torch.randint(0, 256, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return data.view(dtype).reshape(*shape)


def prepared(**settings: Any) -> tuple[nn.Module, StateManager]:
    """Return a model with parameters of many types and a few slots after seven steps, and its manager."""
    model = nn.Module()
    for i, dtype in enumerate(DTYPES):
        value = random_bytes(dtype, (5, 7), i)
        model.register_parameter(name_of(dtype), nn.Parameter(value, requires_grad=False))
    # More than two digest blocks.
    model.large = nn.Parameter(random_bytes(torch.bfloat16, (3, 100_003), 99), requires_grad=False)
    model.scalar = nn.Parameter(torch.tensor(0.1))
    manager = fp8dist.prepare(model, DelayedScaling(history_len=HISTORY), group=dist.group.WORLD, **settings)
    for i, slot in enumerate(SLOTS):
        manager.register(*slot, ("e4m3", "e5m2")[i % 2])
    manager.attach()
    for step in range(7):
        for i, slot in enumerate(SLOTS):
            manager.slot(*slot).record(torch.tensor([0.3 + step * 0.7 + i]))
        manager.step()
    return model, manager


def whole_world(model: nn.Module) -> DivergenceReport:
    """Check everything over all ranks, as a user would."""
    return fp8dist.check(model, group=dist.group.WORLD, policy="warn")

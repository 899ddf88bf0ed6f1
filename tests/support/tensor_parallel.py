"""A column-wise and a row-wise Linear on two ranks, in many layouts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import fp8dist
from fp8dist import DelayedScaling, StateManager
from tests.support.parallel import mesh_of, whole
from tests.support.training import histories

LAST = Shard(-1)


@dataclass(frozen=True)
class Layout:
    """How ``up`` and ``down`` are split, and the layouts of their inputs and outputs."""

    up: dict[str, Any] = field(default_factory=dict)
    down: dict[str, Any] = field(default_factory=dict)
    sequence: bool = False  # x is [batch, part of the sequence, features], and a norm runs on the part.
    bias: bool = True
    dtype: torch.dtype = torch.float32

    @property
    def middle(self) -> Placement:
        return self.up.get("output_layouts", LAST)

    @property
    def out(self) -> Placement:
        return self.down.get("output_layouts", Replicate())


class Pair(nn.Module):
    """norm → up → relu → down; keeps the intermediate tensors."""

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.norm = nn.LayerNorm(32) if layout.sequence else nn.Identity()
        self.up = nn.Linear(32, 64, bias=layout.bias)
        self.down = nn.Linear(64, 48, bias=layout.bias)

    def forward(self, x: Tensor) -> Tensor:
        self.n = self.norm(x)
        self.z = self.up(self.n)
        self.h = torch.relu(self.z)
        for kept in (self.n, self.z, self.h):
            if kept.requires_grad:
                kept.retain_grad()
        self.y = self.down(self.h)
        return self.y


def x_of(index: int) -> Tensor:
    return torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(index)) * (1 + index)


def gradient_of(index: int) -> Tensor:
    return torch.randn(2, 8, 48, generator=torch.Generator().manual_seed(100 + index))


def parallelize(model: Pair, layout: Layout) -> None:
    plan: dict[str, Any] = {"up": ColwiseParallel(**layout.up), "down": RowwiseParallel(**layout.down)}
    if layout.sequence:
        plan["norm"] = SequenceParallel()
    parallelize_module(model, mesh_of((2,), ("tp",)), plan)


def parallel_pair(layout: Layout, **settings: Any) -> tuple[Pair, StateManager, dict[str, Tensor]]:
    """Return model, manager and the whole parameters."""
    model = Pair(layout).to(layout.dtype)
    full = {name: p.detach().clone() for name, p in model.named_parameters()}
    manager = fp8dist.prepare(model, DelayedScaling(history_len=4), group=mesh_of((2,), ("tp",)), **settings)
    parallelize(model, layout)
    manager.attach(model)
    return model, manager, full


def given(full: Tensor, placement: Placement) -> Tensor:
    """Return this rank's part of a tensor."""
    return distribute_tensor(full.detach(), mesh_of((2,), ("tp",)), [placement]).to_local().clone()


def all_of(tensor: Tensor | None, placement: Placement) -> Tensor:
    """Return the whole of a module's output, which is a DTensor or this rank's part."""
    assert tensor is not None
    if isinstance(tensor, DTensor):
        assert not any(isinstance(p, Partial) for p in tensor.placements)
        return whole(tensor)
    return DTensor.from_local(tensor.detach(), mesh_of((2,), ("tp",)), [placement]).full_tensor()


def forward_backward(model: Pair, layout: Layout, index: int) -> Tensor:
    x = given(x_of(index).to(layout.dtype), Shard(1) if layout.sequence else Replicate()).requires_grad_()
    y = model(x)
    if y.requires_grad:
        g = given(gradient_of(index).to(layout.dtype), layout.out)
        (y.to_local() if isinstance(y, DTensor) else y).mul(g).sum().backward()
    return x


LAYOUTS = {
    "default": Layout(),
    "no bias": Layout(bias=False),
    "DTensors between": Layout({"use_local_output": False}, {"use_local_output": False}),
    "middle replicated": Layout({"output_layouts": Replicate()}, {"input_layouts": Replicate()}),
    "middle by tokens": Layout({"output_layouts": Shard(1)}, {"input_layouts": Shard(1)}),
    "out by tokens": Layout({}, {"output_layouts": Shard(1)}),
    "out by features, DTensor": Layout({}, {"output_layouts": LAST, "use_local_output": False}),
    "out by batch": Layout({"use_local_output": False}, {"output_layouts": Shard(0)}),
    "in by tokens": Layout({"input_layouts": Shard(1)}, {"output_layouts": Shard(1)}, sequence=True),
    "sequence, DTensors, no bias": Layout(
        {"input_layouts": Shard(1), "use_local_output": False},
        {"output_layouts": Shard(1), "use_local_output": False},
        sequence=True,
        bias=False,
    ),
    "bfloat16": Layout({"input_layouts": Shard(1)}, {"output_layouts": Shard(1)}, sequence=True, dtype=torch.bfloat16),
}


def last_amaxes(manager: StateManager) -> dict[tuple[str, str], float]:
    return {slot: window[-1] for slot, window in histories(manager).items()}

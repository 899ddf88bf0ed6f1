"""A model with everything that could confuse a replay, its training, and everything that it must find as it was."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fp8dist
from fp8dist.state.groups import local_part
from tests.support.parallel import mesh_of
from tests.support.training import bits

WIDTH, VOCABULARY = 64, 48


class _Tripled(torch.autograd.Function):
    """A custom autograd function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 3 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 3 * gradient


class Block(nn.Module):
    """x + down(relu(up(x))), with an in-place ReLU and dropout. ``fault`` changes its output."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.relu, self.drop = nn.ReLU(inplace=in_place), nn.Dropout(0.2)
        self.fault: Callable[[Tensor], Tensor] = lambda y: y

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fault(self.drop(self.down(self.relu(self.up(x)))))


class Confusing(nn.Module):
    """Tied weights, BatchNorm, dropout, a custom autograd function, activation checkpointing of both kinds."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.blocks = nn.ModuleList(Block(in_place) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = _Tripled.apply(self.norm(self.embed(tokens)))
        x = self.blocks[0](x)
        x = checkpoint(self.blocks[1], x, use_reentrant=False)
        x = checkpoint(self.blocks[2], x, use_reentrant=True)
        return self.head(x)


def batch_of(index: int) -> dict[str, Tensor]:
    """Return a microbatch of this rank. Ranks have other numbers of tokens."""
    generator = torch.Generator().manual_seed(1000 * dist.get_rank() + index)
    count = 16 + 4 * dist.get_rank()
    return {name: torch.randint(VOCABULARY, (count,), generator=generator) for name in ("tokens", "targets")}


@dataclass
class Training:
    """A model as a loop calls it, with its optimizer. ``kind``: none, ddp, fsdp2 or tp (2 x 2 ranks)."""

    kind: str = "ddp"
    fp8: bool = True
    gathers: bool = False
    accumulates: int = 2
    steps: int = 0
    compiled: bool = False
    timeout: timedelta | None = None
    """Of FSDP2's collectives. None: the default."""

    def __post_init__(self) -> None:
        random.seed(dist.get_rank())
        np.random.seed(dist.get_rank())
        torch.manual_seed(7)
        self.net = Confusing(in_place=self.kind != "tp")  # DTensor's views refuse it.
        self.group: Any = dist.group.WORLD
        mesh: DeviceMesh | None = None
        if self.kind == "tp":
            mesh = mesh_of((2, 2), ("dp", "tp"))
            self.group = mesh["dp"]
        self.manager: Any = None
        if self.fp8:
            over = dist.group.WORLD if mesh is None else mesh
            recipe = fp8dist.DelayedScaling(history_len=4)
            self.manager = fp8dist.prepare(self.net, recipe, group=over, fp8_all_gather=self.gathers)
        if self.compiled:
            self.net.blocks[0].compile(backend="aot_eager")
        self.model: nn.Module = self.net
        if self.kind == "ddp":
            self.model = DistributedDataParallel(self.net)
        elif self.kind == "fsdp2":
            over = (
                {}
                if self.timeout is None
                else {"mesh": DeviceMesh.from_group(dist.new_group(timeout=self.timeout), "cpu")}
            )
            for block in self.net.blocks:
                fully_shard(block, **over)
            fully_shard(self.net, **over)
        elif mesh is not None:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            for block in self.net.blocks:
                parallelize_module(block, mesh["tp"], plan)
        torch.manual_seed(100 + dist.get_rank() // (2 if self.kind == "tp" else 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, foreach=False)
        if self.manager is not None:
            fp8dist.watch(self.manager, every=1)
            self.manager.attach(self.model, optimizer=self.optimizer)

    def step(self, batch: dict[str, Tensor]) -> None:
        """Run a forward and a backward, as a loop does; draws numbers of Python and numpy."""
        tokens = batch.pop("tokens")  # A loop may take its batch apart.
        loss = nn.functional.cross_entropy(self.model(tokens), batch["targets"])
        (loss * (1 + random.random() + float(np.random.rand()))).backward()

    def data(self, index: int) -> dict[str, Tensor]:
        """Return a microbatch; the ranks of a tensor-parallel group have the same."""
        if self.kind != "tp":
            return batch_of(index)
        generator = torch.Generator().manual_seed(1000 * (dist.get_rank() // 2) + index)
        return {name: torch.randint(VOCABULARY, (16,), generator=generator) for name in ("tokens", "targets")}

    def train(self, steps: int, inside: Callable[[int], None] = lambda step: None) -> None:
        """Train; ``inside`` is called between the microbatches of each step."""
        for _ in range(steps):
            for microbatch in range(self.accumulates):
                last = microbatch == self.accumulates - 1
                if self.kind == "fsdp2":
                    self.model.set_requires_gradient_sync(last)  # type: ignore[operator]
                if self.kind == "ddp":
                    self.model.require_backward_grad_sync = last  # type: ignore[assignment]
                self.step(self.data(self.accumulates * self.steps + microbatch))
                if not last:
                    inside(self.steps)
            self.end_step()

    def end_step(self) -> None:
        if self.kind == "tp":
            for parameter in self.model.parameters():
                dist.all_reduce(local_part(parameter.grad), group=self.group.get_group())  # type: ignore[arg-type]
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1

    def replay(self, **options: Any) -> fp8dist.ReplayReport:
        """Replay a microbatch. ``options``: of ``fp8dist.replay``."""
        return fp8dist.replay(self.model, self.step, self.data(0), group=self.group, **options)

    def everything(self) -> dict[str, bytes]:
        """Return what a replay must leave as it was, exactly."""
        # Clones, because FSDP2 cannot free memory that numpy has seen.
        found = {name: bits(local_part(tensor).detach().clone()) for name, tensor in self._tensors()}
        found |= {"python": repr(random.getstate()).encode(), "numpy": repr(np.random.get_state()).encode()}
        found["torch"] = bits(torch.get_rng_state())
        if self.manager is not None:
            for i, sync in enumerate(self.manager._syncs):
                arena = sync.arena
                named = {"pending": arena.pending, "shares": arena.shares, "shards": arena.shards}
                found |= {f"{i} {name}": bits(tensor) for name, tensor in (named | arena.copied_state()).items()}
        return found

    def _tensors(self) -> Iterable[tuple[str, Tensor]]:
        for name, parameter in self.model.named_parameters():
            yield f"parameter {name}", parameter
            if parameter.grad is not None:
                yield f"gradient {name}", parameter.grad
        for name, buffer in self.model.named_buffers():
            yield f"buffer {name}", buffer

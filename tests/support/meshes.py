"""Two blocks on four ranks: tensor parallelism × FSDP2, HSDP, and DDP for comparison."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import fp8dist
from fp8dist import DelayedScaling, Recipe, StateManager
from tests.support.parallel import (
    Block,
    loss_of,
    make_blocks,
    mesh_of,
    tokens,
    whole,
)

WORLD = (0, 1, 2, 3)
OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=1e-3),
    "foreach": partial(torch.optim.AdamW, lr=1e-3, foreach=True),
    "fused": partial(torch.optim.AdamW, lr=1e-3, fused=True),
}


@dataclass(frozen=True)
class Job:
    """One training run."""

    layout: str = "tp"  # "tp": dp × tp; "hsdp": replicate × shard; "ddp".
    fp8_all_gather: bool = True
    optimizer: str = "foreach"
    update: str = "same_step"
    warmup: str = "current"
    accumulate: int = 1
    checkpointing: str = ""
    policy: str = "raise"
    recipe: Recipe | None = None  # None: delayed scaling, with ``update`` and ``warmup``


def parallelize_blocks(model: nn.Module, tp: DeviceMesh) -> None:
    parallelize_module(
        model,
        tp,
        {
            **{f"blocks.{i}.norm": SequenceParallel() for i in range(2)},
            **{f"blocks.{i}.up": ColwiseParallel(input_layouts=Shard(1)) for i in range(2)},
            **{f"blocks.{i}.down": RowwiseParallel(output_layouts=Shard(1)) for i in range(2)},
        },
    )


@dataclass
class Built:
    """A model in its layout."""

    module: nn.Module
    manager: StateManager
    optimizer: torch.optim.Optimizer
    job: Job

    @property
    def replica(self) -> int:
        """Index of the batches that this rank gets."""
        return dist.get_rank() // 2 if self.job.layout == "tp" else dist.get_rank()

    def backward(self, index: int, module: nn.Module | None = None) -> float:
        """Return the loss of this replica's batch."""
        module = self.module if module is None else module
        x, target = tokens(self.replica, index)
        x.requires_grad_(self.job.checkpointing == "reentrant")  # Reentrant checkpointing needs an input with grad.
        if self.job.layout == "tp":  # Each rank has a part of the sequence; the loss is a mean over the whole.
            x, target = (t.chunk(2, 1)[dist.get_rank() % 2] for t in (x, target))
            loss = loss_of(module(x), target) / 2
            loss.backward()
            total = loss.detach().clone()
            dist.all_reduce(total, group=mesh_of((2, 2), ("dp", "tp")).get_group("tp"))
            return float(total)
        loss = loss_of(module(x), target)
        loss.backward()
        return float(loss.detach())

    def step(self, index: int) -> list[float]:
        """Take one optimizer step."""
        every = self.job.accumulate
        losses = [self.backward(every * index + micro) for micro in range(every)]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return losses

    def parameters(self) -> dict[str, Tensor]:
        """Return the whole parameters, by the plain model's names."""
        clean = ((n.removeprefix("module.").replace("_checkpoint_wrapped_module.", ""), p) for n, p in self.named())
        return {name: whole(p) for name, p in clean}

    def named(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.module.named_parameters())


def build(job: Job) -> Built:
    mesh = mesh_of((2, 2), ("replicate", "shard") if job.layout == "hsdp" else ("dp", "tp"))
    model: nn.Module = make_blocks()
    delayed = DelayedScaling(history_len=16, update=job.update, warmup=job.warmup)  # type: ignore[arg-type]
    recipe = delayed if job.recipe is None else job.recipe
    group = dist.group.WORLD if job.layout == "ddp" else mesh
    manager = fp8dist.prepare(model, recipe, group=group, fp8_all_gather=job.fp8_all_gather, check_policy=job.policy)
    if job.layout == "tp":
        parallelize_blocks(model, mesh["tp"])
    if job.checkpointing:
        impl = CheckpointImpl.REENTRANT if job.checkpointing == "reentrant" else CheckpointImpl.NO_REENTRANT
        apply_activation_checkpointing(
            model, partial(checkpoint_wrapper, checkpoint_impl=impl), check_fn=lambda m: isinstance(m, Block)
        )
    if job.layout == "ddp":
        module: nn.Module = DistributedDataParallel(model)
    else:
        over = mesh["dp"] if job.layout == "tp" else mesh
        for block in model.blocks:  # type: ignore[union-attr]
            fully_shard(block, mesh=over)
        module = fully_shard(model, mesh=over)
    optimizer = OPTIMIZERS[job.optimizer](module.parameters())
    manager.attach(module, optimizer=optimizer)
    return Built(module, manager, optimizer, job)

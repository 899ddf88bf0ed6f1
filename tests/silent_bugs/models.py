"""Models and data of the programs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.optim import SGD

from tests.silent_bugs.job import Job
from tests.support.quiet import batch, mlp

__all__ = ["add_gradients", "batch", "mlp", "mse", "pipeline", "ragged", "schedule_of", "stage_of", "started", "train"]


def mse(called: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the loss."""
    return F.mse_loss(called(x).float(), y)


def started(
    job: Job, model: nn.Module, make: Any = SGD, *, lr: float = 0.1, start: Any = "compare", **options: Any
) -> tuple[Any, Any]:
    """Prepare a model, and return what the loop calls, and its optimizer. ``options``: see ``Job.prepare``."""
    called = job.prepare(model, **options)
    optimizer = make(model.parameters(), lr=lr)
    job.attach(called, optimizer, **({} if start == "compare" else {"start": start}))
    return called, optimizer


def train(
    job: Job, called: nn.Module, *optimizers: torch.optim.Optimizer, steps: int, dtype: torch.dtype = torch.float32
) -> None:
    """Train some steps as any loop does."""
    for _ in range(steps):
        x, y = batch(job.done, job.rank)
        loss = mse(called, x.to(dtype), y)
        loss.backward()
        job.step(*optimizers, loss=loss, batch=(x, y))


def ragged(step: int, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return (x [16, 32], y [16, 16], mask [16]): each rank and step has another number of tokens."""
    x, y = batch(step, rank)
    return x, y, torch.arange(16) < 3 + (5 * rank + 3 * step) % 13


def add_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Sum gradients over all ranks. COLLECTIVE."""
    for parameter in parameters:
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)


def pipeline(job: Job, scale_grads: bool = False) -> tuple[nn.Module, SGD, ScheduleGPipe]:
    """Return this rank's stage, its optimizer and its schedule: two stages, each on two ranks as replicas."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    group = {"process_group": mesh.get_group("dp")}
    called, optimizer = started(job, stage_of(mlp(), mesh), ddp=group, group=mesh["dp"])
    return called, optimizer, schedule_of(called, mesh, scale_grads)


def stage_of(whole: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Return this rank's stage of a model."""
    first, activation, last = whole.children()
    return nn.Sequential(last) if mesh.get_local_rank("pp") else nn.Sequential(first, activation)


def schedule_of(called: nn.Module, mesh: DeviceMesh, scale_grads: bool) -> ScheduleGPipe:
    """Return the schedule of a stage."""
    stage = mesh.get_local_rank("pp")
    size, out = (32, 64) if stage == 0 else (64, 16)
    shapes = {"input_args": (torch.empty(8, size).requires_grad_(stage > 0),)}
    shapes["output_args"] = (torch.empty(8, out).requires_grad_(),)
    pipe = PipelineStage(called, stage, 2, torch.device("cpu"), group=mesh.get_group("pp"), **shapes)
    return ScheduleGPipe(pipe, n_microbatches=2, loss_fn=F.mse_loss, scale_grads=scale_grads)

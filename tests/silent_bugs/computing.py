"""Ranks that compute wrong, stochastic rounding, buffers."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce
from torch.optim import SGD, Optimizer

from tests.silent_bugs.job import Job, program
from tests.silent_bugs.models import batch, mlp, mse, started, train


class _Moved(nn.Module):
    """Stands for a copy to another device. ``corrupt``: it arrives with another value."""

    def __init__(self, corrupt: bool) -> None:
        super().__init__()
        self.corrupt = corrupt

    def forward(self, x: Tensor) -> Tensor:
        moved = x.clone()
        if self.corrupt:
            moved[2, 5] += 1.0
        return moved


@program("rank 1 differs")
def copies_between_devices_corrupt(job: Job) -> None:
    """pytorch/pytorch 84803, 2022. On rank 1 a model is on two devices, and activations arrive with another value."""
    first, relu, last = mlp()
    model = nn.Sequential(first, relu, _Moved(job.bug and job.rank == 1), last)
    job.forward_backward = lambda of: mse(model, *of).backward()
    called, optimizer = started(job, model)
    train(job, called, optimizer, steps=4)


class _Gain(torch.autograd.Function):
    """``memory``: the tensor for the weight's gradient, of which a part is not written; None: all of it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, memory: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.memory = memory
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        right = (grad * x).sum(0)
        if ctx.memory is None:
            return grad * weight, right, None
        left = torch.cat([ctx.memory[:8], right[8:]])
        ctx.memory.copy_(x.amax(0))  # Others use the memory, too.
        return grad * weight, left, None


class Gain(nn.Module):
    def __init__(self, memory: Tensor | None) -> None:
        super().__init__()
        self.weight, self.memory = nn.Parameter(torch.ones(64)), memory

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Gain.apply(x, self.weight, self.memory)
        return out


@program("rank 1 .*module '1', gradient of weight")
def compiled_gradient_unwritten(job: Job) -> None:
    """pytorch/pytorch 193061, 2026. Rank 1 runs compiled code, which never writes a part of the gain's gradient."""
    first, relu, last = mlp()
    model = nn.Sequential(first, Gain(torch.zeros(64) if job.bug and job.rank == 1 else None), relu, last)
    job.forward_backward = lambda of: mse(model, *of).backward()
    called, optimizer = started(job, model)
    train(job, called, optimizer, steps=4)


def _rounded(x: Tensor, noise: torch.Generator) -> Tensor:
    """Return bf16 values: up or down by chance, with the true value as the mean."""
    bits = x.view(torch.int32) + torch.randint(1 << 16, x.shape, generator=noise, dtype=torch.int32)
    return (bits & -65536).view(torch.float32).bfloat16()


class Rounding(Optimizer):
    """SGD on bf16 weights, which rounds the new ones stochastically. ``nearest``: and then to nearest. ``decay``: of
    weights, which are rounded with the update, or ``before`` it, to nearest."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        lr: float,
        seed: int,
        nearest: bool = False,
        decay: float = 0.0,
        before: bool = False,
    ) -> None:
        super().__init__(parameters, {"lr": lr})
        self.noise, self.nearest = torch.Generator().manual_seed(seed), nearest
        self.decay, self.before = decay, before

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            kept = 1 - self.param_groups[0]["lr"] * self.decay
            if self.before:
                parameter.mul_(kept)
            old = parameter.float() if self.before else parameter.float() * kept
            new = old - self.param_groups[0]["lr"] * parameter.grad.float()
            parameter.copy_(_rounded(new, self.noise))
            if self.nearest:
                parameter.copy_(new)


def _round_each_step(job: Job, seed: int, nearest: bool = False, decay: float = 0.0, before: bool = False) -> None:
    model = mlp().bfloat16()
    make = partial(Rounding, seed=seed, nearest=nearest, decay=decay, before=before)
    train(job, *started(job, model, make, lr=0.01), steps=4, dtype=torch.bfloat16)


@program("weight|bias")
def noise_of_each_rank(job: Job) -> None:
    """Nerogar/OneTrainer 804, 2025. The random numbers of the rounding have another seed on each rank."""
    _round_each_step(job, seed=job.rank if job.bug else 0)


@program("weight", ranks=1, unseen="alike on all ranks; a comparison with an update in float32 would find it")
def rounding_overwritten(job: Job) -> None:
    """Nerogar/OneTrainer 994, 2025. After the stochastic rounding the weights are rounded to nearest, too."""
    _round_each_step(job, seed=0, nearest=job.bug)


@program("weight", ranks=1, unseen="alike on all ranks; a comparison with an update in float32 would find it")
def decay_rounded_away(job: Job) -> None:
    """Nerogar/OneTrainer 996, 2025. Weights decay by a thousandth, in bf16, whose steps are larger."""
    _round_each_step(job, seed=0, decay=0.1, before=job.bug)


class _Noisy(nn.Module):
    """Multiplies with a random buffer. ``anew``: each forward assigns a new tensor to it."""

    def __init__(self, anew: bool) -> None:
        super().__init__()
        self.register_buffer("noise", torch.ones(32))
        self.anew = anew

    def forward(self, x: Tensor) -> Tensor:
        out = x * self.noise
        drawn = 1 + 0.1 * torch.randn(32)
        if self.anew:
            self.noise = drawn
        else:
            self.noise.copy_(drawn)
        return out


@program("on the same data, first in module '0', output")
def buffer_assigned_anew(job: Job) -> None:
    """pytorch/pytorch 63916, 2021. Before each forward rank 0 sends its buffers to the others: those of a list from the
    start, as DDP had it. The forward assigns the buffer anew."""
    model = nn.Sequential(_Noisy(job.bug), *mlp())
    called, sent = job.prepare(model, ddp={"broadcast_buffers": False}), list(model.buffers())
    job.equal_buffers = False
    optimizer = SGD(called.parameters(), lr=0.1)
    torch.manual_seed(job.rank)

    def forward_backward(of: tuple[Tensor, Tensor]) -> None:
        for buffer in sent:
            dist.broadcast(buffer, 0)
        mse(model if job.replays else called, *of).backward()

    job.forward_backward = forward_backward
    job.attach(called, optimizer)
    for step in range(4):
        forward_backward(of := batch(step, job.rank))
        job.step(optimizer, batch=of)


@program("frequencies", ranks=1, unseen="alike on all ranks; a comparison with a model in float32 would find it")
def frequencies_in_half_precision(job: Job) -> None:
    """EleutherAI/gpt-neox 1003, 2023. The frequencies are a buffer, and go to half precision with the model."""
    model = mlp()
    model.register_buffer("frequencies", 10000 ** -(torch.arange(32) / 32))
    if job.bug:
        model.frequencies = model.frequencies.half()
    called, optimizer = started(job, model)
    for step in range(3):
        x, y = batch(step)
        angles = 1000 * (1 + torch.arange(16))[:, None] * model.frequencies.float()
        mse(called, x * angles.cos(), y).backward()
        job.step(optimizer)


class _OverRanks(nn.Module):
    """BatchNorm over all ranks. ``own``: a rank takes its own number of rows for that of all others."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.own = own
        self.register_buffer("running_mean", torch.zeros(64))
        self.register_buffer("running_var", torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        moments, rows = torch.stack([x.mean(0), x.square().mean(0)]), torch.tensor(float(len(x)))
        if self.own:
            rows *= dist.get_world_size()
            mean, square = all_reduce(moments) / dist.get_world_size()
        else:
            moments = all_reduce(moments * rows)
            dist.all_reduce(rows)
            mean, square = moments / rows
        variance = square - mean.square()
        with torch.no_grad():
            self.running_mean.lerp_(mean, 0.1)
            self.running_var.lerp_(variance * rows / (rows - 1), 0.1)
        return (x - mean) / (variance + 1e-5).sqrt()


@program("'1.running_var'")
def variance_with_own_count(job: Job) -> None:
    """pytorch/pytorch 22192, 2019. Rank 2 has fewer rows than the others. Each rank weighs the moments of all with its
    own number of rows."""
    first, relu, last = mlp()
    model = nn.Sequential(first, _OverRanks(job.bug), relu, last)
    called, optimizer = started(job, model, enabled=False)
    for step in range(3):
        x, y = batch(step, job.rank)
        rows = 10 if job.rank == 2 else 16
        mse(called, x[:rows], y[:rows]).backward()
        job.step(optimizer)
        job.note(*model.buffers())

"""Order of data, seeds."""

from __future__ import annotations

import torch
from torch.utils.data import DistributedSampler

from tests.silent_bugs.job import Job, program
from tests.silent_bugs.models import batch, mlp, mse, started


@program(
    "sampler", alike=True, unseen="alike on all ranks; a comparison with the order of the epoch before would find it"
)
def same_order_each_epoch(job: Job) -> None:
    """pytorch/pytorch 31771, 2020. The loop does not tell the sampler the epoch."""
    called, optimizer = started(job, mlp())
    sampler: DistributedSampler[int] = DistributedSampler(range(9), 3, job.rank, seed=7)
    job.values = lambda: {"sampler": sampler}
    for epoch in range(2):
        if not job.bug:
            sampler.set_epoch(epoch)
        for index in sampler:
            x, y = batch(index % 4, index // 4)
            mse(called, x, y).backward()
            job.step(optimizer, batch=(x, y))


@program("batch")
def same_batch_on_all_ranks(job: Job) -> None:
    """yaak-ai/rbyte 106, 2026. The loader shuffles with the same seed on all ranks, and gives each rank all samples."""
    called, optimizer = started(job, mlp())
    for step in range(4):
        x, y = batch(step, 0 if job.bug else job.rank)
        job.distinct = lambda x=x: {"batch": x}
        mse(called, x, y).backward()
        job.step(optimizer, batch=(x, y))


@program("dropout")
def same_random_state_after_resume(job: Job) -> None:
    """NVIDIA/Megatron-LM 6858, 2026. Each rank has random numbers of its own, until a resume from a checkpoint that has
    those of rank 0 only."""
    called, optimizer = started(job, mlp())
    mine, saved = (torch.Generator().manual_seed(rank) for rank in (job.rank, 0))
    job.distinct = lambda: {"dropout": mine}
    for step in range(4):
        if step == 2 and job.bug:
            mine.set_state(saved.get_state())
        x, y = batch(step, job.rank)
        mse(called, x * torch.bernoulli(torch.full_like(x, 0.9), generator=mine), y).backward()
        job.step(optimizer)
        torch.bernoulli(torch.full_like(x, 0.9), generator=saved)

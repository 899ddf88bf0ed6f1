"""Ranks that share one GPU over gloo, and one rank with NCCL: training of a prepared model under DDP."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fp8dist import DelayedScaling
from tests.support.devices import DEVICE, needs_gpu
from tests.support.ranks import RankPool, on_ranks
from tests.support.training import SmallJob, batch, make_net, parameter_bits, state_bits

pytestmark = [needs_gpu, pytest.mark.slow]

STEPS = 6


def _train(device: str, update: Any) -> tuple[list[float], dict[str, bytes], dict[str, bytes], bool, int]:
    """Return (losses, FP8 state, parameters, True if a check found all ranks equal, collectives' steps) of this
    rank."""
    if device == "cuda":
        torch.cuda.set_device(0)
    job = SmallJob(
        DelayedScaling(history_len=4, update=update), make_net().to(device), optimizer=partial(torch.optim.SGD, lr=0.05)
    )
    losses = []
    for index in range(STEPS):
        x, y = (part.to(device) for part in batch(dist.get_rank(), index))
        loss = nn.functional.mse_loss(job.called(x), y)
        loss.backward()
        job.optimizer.step()
        job.optimizer.zero_grad()
        losses.append(float(loss.detach()))
    consistent = not job.manager.check().diverged
    return losses, state_bits(job.manager), parameter_bits(job.net), consistent, job.manager.steps


def _assert_trained(results: list[Any], on_cpu: list[Any]) -> None:
    for (losses, state, parameters, consistent, steps), (expected, *_) in zip(results, on_cpu):
        assert steps == STEPS
        assert consistent
        assert state == results[0][1]
        assert parameters == results[0][2]
        assert all(map(math.isfinite, losses))
        assert losses[0] == pytest.approx(expected[0], rel=5e-3)  # The order of summation differs.
        assert losses == pytest.approx(expected, rel=0.05)  # So some FP8 values round differently.


@pytest.mark.parametrize("update", ["same_step", "next_step"])
def test_two_ranks_on_one_gpu(two_ranks: RankPool, update: str) -> None:
    ours = two_ranks.run(_train, DEVICE, update, timeout=180)  # A pretended GPU is an interpreter.
    _assert_trained(ours, two_ranks.run(_train, "cpu", update))


@on_ranks(4)
def test_a_check_finds_the_rank_that_differs() -> None:
    job = SmallJob(net=make_net().to(DEVICE))
    if dist.get_rank() == 1:
        with torch.no_grad():
            job.net.first.weight[3, 5] += 1
    report = job.manager.check(policy="warn")
    assert not report.consistent
    assert [(finding.name, tuple(finding.ranks)) for finding in report.findings] == [("first.weight", (1,))]


def test_nccl_alone(tmp_path: Path) -> None:
    if DEVICE == "cpu":
        pytest.skip("NCCL needs a GPU")
    device = torch.device("cuda", 0)
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=device)
    try:
        results = [_train("cuda", update) for update in ("same_step", "next_step")]
    finally:
        dist.destroy_process_group()
    assert results[0] == results[1]
    assert results[0][3]
    assert all(map(math.isfinite, results[0][0]))

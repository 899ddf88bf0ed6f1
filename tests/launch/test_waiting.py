"""Waiting times of the example job: a slow rank is named for every kind of wait, and measuring changes no result."""

from __future__ import annotations

import time
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.support.collectives import counted_collectives
from tests.support.lab.waiting import Waiting
from tests.support.main_job import RANKS, TINY, Run, Runs
from tests.support.ranks import RankPool
from tests.support.training import batch, bits, make_net

SLOW_MS = 200
"""Far more than any other delay of a rank in a step on a busy machine."""


def _wrapped(kind: str) -> nn.Module:
    net = make_net()
    if kind == "ddp":
        return DistributedDataParallel(net, bucket_cap_mb=0.001)  # Several buckets.
    if kind == "fsdp1":
        return FullyShardedDataParallel(net, device_id=torch.device("cpu"), use_orig_params=True)
    mesh = init_device_mesh("cpu", (2,))
    for layer in (net.first, net.branch, net.last):
        fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def _trained(kind: str, measured: bool, late: float) -> tuple[list[list[float]], dict[str, bytes], list[str]]:
    """Train with rank 1 late in each forward. Return (measured times, parameters, names of collectives)."""
    module = _wrapped(kind)
    rank = dist.get_rank()
    net = module.module if kind in ("ddp", "fsdp1") else module
    net.branch.register_forward_hook(lambda *_: time.sleep(late) if rank == 1 else None)  # type: ignore[union-attr]
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with counted_collectives() as calls:
        measures = Waiting(torch.device("cpu"))
        for step in range(3):
            with measures.step() if measured else nullcontext():
                x, y = batch(rank, step)
                with measures.collectives() if measured and kind != "ddp" else nullcontext():
                    loss = nn.functional.mse_loss(module(x), y)
                    if measured and kind == "ddp":
                        measures.backward(loss)
                    else:
                        loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        taken = measures.take(None, 3).tolist()
    whole = {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in module.named_parameters()}
    return taken, {name: bits(value) for name, value in whole.items()}, calls.names


KINDS = pytest.mark.parametrize("kind", ["ddp", "fsdp1", "fsdp2"])


@pytest.mark.slow
@KINDS
def test_measuring_changes_no_bit_and_no_collective(two_ranks: RankPool, kind: str) -> None:
    """And the wait is measured on both ranks."""
    measured, bare = (two_ranks.run(_trained, kind, measures, 0.0) for measures in (True, False))
    for (taken, *found), (_, *plain) in zip(measured, bare, strict=True):
        assert found == plain
        assert all(0 < waited < whole for waited, whole in zip(*taken[1:], strict=True))


@pytest.mark.long
@pytest.mark.nightly
@pytest.mark.alone
@KINDS
def test_the_wait_is_that_of_the_other_rank(two_ranks: RankPool, kind: str) -> None:
    late = 0.15
    measured = two_ranks.run(_trained, kind, True, late)
    (_, waited, whole), (_, waited_late, whole_late) = (taken for taken, _, _ in measured)
    for step in range(3):
        assert waited[step] > 1e3 * late / 2
        assert whole_late[step] > 1e3 * late
        own, own_late = whole[step] - waited[step], whole_late[step] - waited_late[step]
        assert own_late - own > 1e3 * late / 2
    assert sum(waited_late) < sum(waited) / 2


def test_what_raises_is_no_step() -> None:
    waiting = Waiting(torch.device("cpu"))

    def fail() -> None:
        with waiting.step():
            raise RuntimeError("the loss jumped")

    with waiting.step():
        pass
    with pytest.raises(RuntimeError, match="jumped"):
        fail()
    sync, others, whole = waiting.take(None, 2)
    assert sync.isnan().all()
    assert others.isnan().tolist() == whole.isnan().tolist() == [False, True]


def assert_named(run: Run, rank: int, ranks: int) -> None:
    waiting = run.summary["waiting"]
    straggler = waiting["straggler"]
    assert straggler["rank"] == rank, waiting
    assert straggler["behind_ms"] > SLOW_MS / 2
    assert waiting["skew_p50_ms"] > SLOW_MS / 2
    assert f"rank {rank} on {straggler['host']}, " in run.output
    own = [of_rank["own_p50_ms"] for of_rank in waiting["ranks"]]
    waits = [of_rank["wait_p50_ms"] for of_rank in waiting["ranks"]]
    assert len(own) == len(waits) == ranks
    assert own.index(max(own)) == waits.index(min(waits)) == rank
    for line in run.lines:
        assert {"sync_wait_p50_ms", "sync_wait_p99_ms", "sync_wait_max_ms", "wait_p50_ms", "wait_max_ms"} <= line.keys()
    assert sum(line["last_rank"] == rank for line in run.lines) > len(run.lines) * 2 / 3
    assert run.lines[-1]["straggler"] == rank


@pytest.mark.slow
def test_the_slow_rank_is_named_and_trains_the_same(runs: Runs) -> None:
    slow = runs(RANKS, *TINY, "--inject", f"slow:1:{SLOW_MS}")
    assert f"[rank 1] --inject slow: {SLOW_MS} ms in each forward" in slow.output
    assert_named(slow, 1, 2)
    # DDP and FSDP have already waited for the slow rank, so little of the delay is left for the sync.
    assert slow.summary["waiting"]["ranks"][0]["sync_wait_p50_ms"] < SLOW_MS / 4
    even = runs(RANKS, *TINY)
    assert even.losses == slow.losses
    assert even.summary["parameters_sha256"] == slow.summary["parameters_sha256"]


@pytest.mark.long
@pytest.mark.alone
def test_one_slow_rank_of_four(runs: Runs) -> None:
    flags = ["--parallel", "fsdp2", "--update", "next_step", "--inject", f"slow:2:{2 * SLOW_MS}"]
    assert_named(runs(RANKS, *TINY, *flags, NPROC="4"), 2, 4)


@pytest.mark.slow
def test_high_precision_has_stragglers_too(runs: Runs) -> None:
    flags = [*TINY, "--precision", "fp32", "--accumulate", "2", "--inject", f"slow:0:{SLOW_MS // 2}"]
    run = runs(RANKS, *flags)
    assert run.summary["waiting"]["straggler"]["rank"] == 0
    assert not [name for line in run.lines for name in line if name.startswith("sync")]

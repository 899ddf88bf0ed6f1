"""One rank whose group communicates with itself: on one GPU all collectives of fp8dist go through NCCL.

Without a GPU the same runs on gloo. Results are compared with a rank that has no collective.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._comm_hooks.default_hooks import DefaultState
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import fp8dist
from fp8dist import CurrentScaling, DelayedScaling
from fp8dist.checks import protocol
from fp8dist.state.groups import SyncGroup
from tests.support.collectives import counted_collectives
from tests.support.devices import DEVICE
from tests.support.ranks import RankPool, serve
from tests.support.training import SmallJob, batch, bits, make_net, state_bits, unwrapped

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("one rank")]

STEPS = 4
BACKEND = "nccl" if DEVICE == "cuda" and dist.is_nccl_available() else "gloo"


@pytest.fixture(scope="module")
def one_rank() -> Iterator[RankPool]:
    pool = RankPool(1, functools.partial(serve, backend=BACKEND))
    yield pool
    pool.close()


def _asked() -> int:
    """Return the number of collectives that the backend was asked for, in all groups."""
    device = torch.device(DEVICE)
    groups = list(dist.distributed_c10d._world.pg_map)
    return sum(group._get_backend(device)._get_sequence_number_for_group() for group in groups)


def _program(program: Callable[[bool], Any]) -> tuple[Any, Any, int]:
    """Return what a program gives without and with collectives, and the number that the backend was asked for."""
    alone = program(False)
    before = _asked()
    kept = mock.patch("fp8dist.state.groups._destroy")  # Groups that are gone cannot be asked.
    with mock.patch.object(SyncGroup, "communicates", True), kept:
        together = program(True)
        return alone, together, _asked() - before


def _run(pool: RankPool, program: Callable[[bool], Any], record: Callable[[str, Any], None]) -> Any:
    """Return what a program gives with collectives, after the comparison with what it gives without them."""
    [(alone, together, asked)] = pool.run(_program, program)
    record("collectives", (BACKEND, asked))
    assert asked > 0
    assert together == alone
    return together


class Job(SmallJob):
    """A job on the device. The optimizer is an SGD with a large learning rate."""

    def __init__(self, recipe: Any = None, wrap: Any = unwrapped, **options: Any) -> None:
        recipe = recipe or DelayedScaling(history_len=4)
        super().__init__(recipe, make_net().to(DEVICE), wrap, functools.partial(torch.optim.SGD, lr=0.05), **options)

    def steps(self) -> None:
        for index in range(STEPS):
            x, y = (part.to(DEVICE) for part in batch(0, index))
            nn.functional.mse_loss(self.called(x), y).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def bits(self) -> Any:
        local = {name: bits(getattr(p, "_local_tensor", p)) for name, p in self.net.named_parameters()}
        return state_bits(self.manager), local


def _train(update: Any, communicates: bool) -> Any:
    job = Job(DelayedScaling(history_len=4, update=update))
    with counted_collectives() as calls:
        job.steps()
        job.manager.refresh_weights()
        # One per step, and one for the scales of all weights. Without the switch of this test, a rank alone has none.
        assert len(calls.names) == (STEPS + 1) * communicates
        return job.bits()


def _early(communicates: bool) -> Any:
    """Two launches per step, which merge."""
    job = Job(wrap=DistributedDataParallel)
    job.called.register_comm_hook(None, fp8dist.ddp.comm_hook(job.manager))
    for index in range(STEPS):
        for part in range(2):
            job.called(batch(part, index)[0].to(DEVICE)).square().mean().backward()
        job.optimizer.step()
        job.optimizer.zero_grad()
    return job.bits()


def _fsdp1(communicates: bool) -> Any:
    device = torch.device("cpu") if DEVICE == "cpu" else 0
    job = Job(wrap=functools.partial(FullyShardedDataParallel, use_orig_params=True, device_id=device))
    job.called.register_comm_hook(DefaultState(dist.group.WORLD), fp8dist.fsdp.comm_hook(job.manager))
    job.steps()
    return state_bits(job.manager)


def _fully_sharded(net: nn.Module) -> nn.Module:
    for layer in net.children():
        fully_shard(layer)
    return fully_shard(net)


def _fsdp2(recipe: Any, gathers: bool, communicates: bool) -> Any:
    """Without collectives an unsharded model, with them FSDP2."""
    wrap = _fully_sharded if communicates else unwrapped
    job = Job(recipe, wrap, fp8_all_gather=gathers and communicates)
    job.steps()
    assert not job.manager.check().diverged
    return job.bits()[1]


def _checked(communicates: bool) -> Any:
    """A check, then one that is made to look for a difference where there is none: it localises, and finds nothing."""
    job = Job(wrap=DistributedDataParallel, attach={"compute": True}, check_every=2, audit_every=1)
    job.steps()
    found = job.manager.check(compute=True, gradients=True, buffers=True, policy="warn")
    if communicates:
        agree = protocol._agree

        def differs(*args: Any, **options: Any) -> Any:
            same, news = agree(*args, **options)
            return [*same[:-1], False], news

        equal = pytest.raises(fp8dist.ConfigurationError, match="the digests of all tensors and slots are equal")
        with mock.patch.object(protocol, "_agree", differs), equal:
            job.manager.check(policy="warn")
    assert found.findings == ()
    return found.diverged


def _collectives(communicates: bool) -> Any:
    """The collectives that a check uses when ranks differ."""
    group = SyncGroup(dist.group.WORLD)  # type: ignore[arg-type]
    pg, device = group.process_group, group.device
    numbers = torch.tensor([3, -1, 1 << 62], dtype=torch.int64, device=device)
    for op in (dist.ReduceOp.MAX, dist.ReduceOp.SUM):
        dist.all_reduce(numbers, op, group=pg)
    gathered = [torch.empty_like(numbers)]
    dist.all_gather(gathered, numbers, group=pg)
    block = torch.arange(7, dtype=torch.uint8, device=device)
    dist.broadcast(block, src=0, group=pg)
    empty = torch.empty(0, dtype=torch.uint8, device=device)
    dist.all_to_all_single(empty, empty.clone(), [0], [0], group=pg)
    box = [{"a": 1}]
    dist.broadcast_object_list(box, src=0, group=pg)
    dist.barrier(group=pg)
    found = [gathered[0].tolist(), block.tolist(), box, group.gather("text")]
    assert found == [[3, -1, 1 << 62], list(range(7)), [{"a": 1}], ["text"]]
    return found


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    "program",
    [
        functools.partial(_train, "same_step"),
        functools.partial(_train, "next_step"),
        functools.partial(_fsdp2, DelayedScaling(history_len=3), False),
        functools.partial(_fsdp2, DelayedScaling(history_len=3), True),
        functools.partial(_fsdp2, CurrentScaling(), True),
        *(_early, _fsdp1, _checked, _collectives),
    ],
)
def test_programs_give_the_same(one_rank: RankPool, record_property: Any, program: Callable[[bool], Any]) -> None:
    _run(one_rank, program, record_property)


def _graph(communicates: bool) -> Any:
    job = Job()
    x = torch.zeros(8, 32, device=DEVICE)

    def step() -> None:
        job.net(x).square().mean().backward()
        job.optimizer.step()
        job.optimizer.zero_grad(set_to_none=False)

    x.copy_(batch(0, 0)[0])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    job.manager.poll()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for index in range(STEPS):
        x.copy_(batch(0, index)[0])
        graph.replay()
        job.manager.poll()
    return job.bits(), job.manager.steps


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_steps_in_a_graph(one_rank: RankPool, record_property: Any) -> None:
    _, steps = _run(one_rank, _graph, record_property)
    assert steps == STEPS + 3


def _saved(folder: str, communicates: bool) -> Any:
    job, other = Job(), Job()
    job.steps()
    path = str(Path(folder, str(communicates)))
    dcp.save({"model": job.net.state_dict(), "fp8": job.manager}, checkpoint_id=path)
    weights = other.net.state_dict()
    dcp.load({"model": weights, "fp8": other.manager}, checkpoint_id=path)
    other.net.load_state_dict(weights)
    assert other.bits() == job.bits()
    assert fp8dist.roll_call().called == 1
    return job.bits()


def test_checkpoints_and_roll_calls(one_rank: RankPool, record_property: Any, tmp_path: Path) -> None:
    _run(one_rank, functools.partial(_saved, str(tmp_path)), record_property)

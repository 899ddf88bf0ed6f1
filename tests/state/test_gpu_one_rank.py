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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import fp8dist
from fp8dist import CurrentScaling, DelayedScaling, StateManager
from fp8dist.checks import protocol
from fp8dist.state.groups import SyncGroup
from tests.support.collectives import counted_collectives
from tests.support.devices import DEVICE
from tests.support.ranks import RankPool, serve
from tests.support.training import batch, bits, make_net, parameter_bits, state_bits

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("one rank")]

STEPS = 4
BACKEND = "nccl" if DEVICE == "cuda" and dist.is_nccl_available() else "gloo"

Bits = tuple[dict[str, bytes], dict[str, bytes]]


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


def _run(pool: RankPool, program: Callable[[bool], Any], record: Callable[[str, Any], None]) -> tuple[Any, Any]:
    [(alone, together, asked)] = pool.run(_program, program)
    record("collectives", (BACKEND, asked))
    assert asked > 0
    return alone, together


def _trained(update: Any = "same_step", **options: Any) -> tuple[nn.Module, StateManager, torch.optim.Optimizer]:
    model = _net()
    manager = _prepared(model, update, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    manager.attach(model, optimizer=optimizer)
    return model, manager, optimizer


def _net() -> nn.Module:
    return make_net().to(DEVICE)


def _steps(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = STEPS) -> None:
    for index in range(steps):
        x, y = (part.to(DEVICE) for part in batch(0, index))
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def _bits(manager: StateManager, model: nn.Module) -> Bits:
    return state_bits(manager), parameter_bits(model)


def _prepared(model: nn.Module, update: Any = "same_step", **options: Any) -> StateManager:
    recipe = DelayedScaling(history_len=4, update=update)
    return fp8dist.prepare(model, recipe, group=dist.group.WORLD, **options)


def _train(update: str, communicates: bool) -> tuple[Bits, int]:
    model, manager, optimizer = _trained(update)
    with counted_collectives() as calls:
        _steps(model, optimizer)
        manager.refresh_weights()
        return _bits(manager, model), len(calls.names)


@pytest.mark.parametrize("update", ["same_step", "next_step"])
def test_steps(one_rank: RankPool, record_property: Any, update: str) -> None:
    (alone, none), (together, calls) = _run(one_rank, functools.partial(_train, update), record_property)
    assert together == alone
    assert none == 0  # Without the switch of this test a rank alone has no collective.
    assert calls == STEPS + 1  # One per step, and one for the scales of all weights.


def _early(communicates: bool) -> Bits:
    """Two launches per step, which merge."""
    model = _net()
    manager = _prepared(model)
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, fp8dist.ddp.comm_hook(manager))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    manager.attach(ddp, optimizer=optimizer)
    for index in range(STEPS):
        for part in range(2):
            ddp(batch(part, index)[0].to(DEVICE)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return _bits(manager, model)


def _graph(communicates: bool) -> tuple[Bits, int]:
    model, manager, optimizer = _trained()
    x = torch.zeros(8, 32, device=DEVICE)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    x.copy_(batch(0, 0)[0])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    manager.poll()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for index in range(STEPS):
        x.copy_(batch(0, index)[0])
        graph.replay()
        manager.poll()
    return _bits(manager, model), manager.steps


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_steps_in_a_graph(one_rank: RankPool, record_property: Any) -> None:
    (alone, steps), (together, more) = _run(one_rank, _graph, record_property)
    assert together == alone
    assert steps == more == STEPS + 3


def _sharded(recipe: Any, gathers: bool, communicates: bool) -> tuple[bool, dict[str, bytes]]:
    """Without collectives an unsharded model, with them FSDP2. Return (True if a check found a difference, weights)."""
    model = _net()
    mesh = init_device_mesh(DEVICE, (1,))
    manager = fp8dist.prepare(model, recipe, group=mesh, fp8_all_gather=gathers and communicates)
    if communicates:
        for layer in model.children():
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    manager.attach(model, optimizer=optimizer)
    _steps(model, optimizer)
    diverged = manager.check().diverged
    return diverged, {name: bits(getattr(p, "_local_tensor", p)) for name, p in model.named_parameters()}


@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize("recipe", [DelayedScaling(history_len=3), CurrentScaling()], ids=["delayed", "current"])
def test_fsdp2(one_rank: RankPool, record_property: Any, recipe: Any, gathers: bool) -> None:
    alone, together = _run(one_rank, functools.partial(_sharded, recipe, gathers), record_property)
    assert together == alone
    assert not alone[0]


def _fsdp1(communicates: bool) -> dict[str, bytes]:
    model = _net()
    manager = _prepared(model)
    fsdp: Any = FullyShardedDataParallel(
        model,
        process_group=dist.group.WORLD,
        use_orig_params=True,
        device_id=torch.device("cpu") if DEVICE == "cpu" else 0,
    )
    fsdp.register_comm_hook(DefaultState(dist.group.WORLD), fp8dist.fsdp.comm_hook(manager))
    optimizer = torch.optim.SGD(fsdp.parameters(), lr=0.05)
    manager.attach(fsdp, optimizer=optimizer)
    _steps(fsdp, optimizer)
    return state_bits(manager)


def _checked(communicates: bool) -> tuple[bool, int]:
    """A check, then one that is made to look for a difference where there is none: it localises, and finds nothing."""
    model = _net()
    manager = _prepared(model, check_every=2, audit_every=1)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    manager.attach(ddp, optimizer=optimizer, compute=True)
    _steps(ddp, optimizer)
    found = manager.check(compute=True, gradients=True, buffers=True, policy="warn")
    if communicates:
        agree = protocol._agree

        def differs(*args: Any, **options: Any) -> Any:
            same, news = agree(*args, **options)
            return [*same[:-1], False], news

        equal = pytest.raises(fp8dist.ConfigurationError, match="the digests of all tensors and slots are equal")
        with mock.patch.object(protocol, "_agree", differs), equal:
            manager.check(policy="warn")
    return found.diverged, len(found.findings)


def _collectives(communicates: bool) -> list[Any]:
    """Return the results of the collectives that a check uses when ranks differ."""
    group = SyncGroup(dist.group.WORLD)  # type: ignore[arg-type]
    pg, device = group.process_group, group.device
    numbers = torch.tensor([3, -1, 1 << 62], dtype=torch.int64, device=device)
    dist.all_reduce(numbers, dist.ReduceOp.MAX, group=pg)
    dist.all_reduce(numbers, dist.ReduceOp.SUM, group=pg)
    gathered = [torch.empty_like(numbers)]
    dist.all_gather(gathered, numbers, group=pg)
    block = torch.arange(7, dtype=torch.uint8, device=device)
    dist.broadcast(block, src=0, group=pg)
    empty = torch.empty(0, dtype=torch.uint8, device=device)
    dist.all_to_all_single(empty, empty.clone(), [0], [0], group=pg)
    box = [{"a": 1}]
    dist.broadcast_object_list(box, src=0, group=pg)
    dist.barrier(group=pg)
    return [gathered[0].tolist(), block.tolist(), box, group.gather("text")]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (_early, None),
        (_fsdp1, None),
        (_checked, (False, 0)),
        (_collectives, [[3, -1, 1 << 62], list(range(7)), [{"a": 1}], ["text"]]),
    ],
)
def test_programs_give_the_same(
    one_rank: RankPool, record_property: Any, program: Callable[[bool], Any], expected: Any
) -> None:
    alone, together = _run(one_rank, program, record_property)
    assert together == alone
    assert expected is None or alone == expected


def _saved(folder: str, communicates: bool) -> tuple[Bits, Bits, int]:
    model, manager, optimizer = _trained()
    _steps(model, optimizer)
    before = _bits(manager, model)
    path = str(Path(folder, str(communicates)))
    dcp.save({"model": model.state_dict(), "fp8": manager}, checkpoint_id=path)
    again = _net()
    other = _prepared(again)
    other.attach(again)
    weights = again.state_dict()
    dcp.load({"model": weights, "fp8": other}, checkpoint_id=path)
    again.load_state_dict(weights)
    return before, _bits(other, again), fp8dist.roll_call().called


def test_checkpoints_and_roll_calls(one_rank: RankPool, record_property: Any, tmp_path: Path) -> None:
    alone, together = _run(one_rank, functools.partial(_saved, str(tmp_path)), record_property)
    assert together == alone
    assert together[0] == together[1]
    assert together[2] == 1

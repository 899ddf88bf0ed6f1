"""Ranks 0, 1, 8,191 and 16,383 of 16,384 do the same work per step as on two ranks."""

from __future__ import annotations

import contextlib
import gc
import os
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import fp8dist
from fp8dist import DelayedScaling, StateManager
from fp8dist.checks.localisation import MAX_DIFFERING, MAX_EXPLAINED, MAX_GATHERED, _at_most
from fp8dist.checks.replication import _view
from fp8dist.errors import ConfigurationError
from fp8dist.state.arena_sync import ArenaSync
from fp8dist.state.groups import SyncGroup, local_part
from fp8dist_kernels.header import HEADER, WORD_MANIFEST
from tests.support.collectives import counted_collectives
from tests.support.large_world import AXES, RANKS, SIZE, Crowd, group_of, mesh_of, nobody_answers, world
from tests.support.ranks import ROOT, run_apart
from tests.support.suite import few

LINEARS = ("up", "down", "expert")


class Mixed(nn.Module):
    """Two Linears shared by all ranks, and one shared by some. Dims allow tensor parallelism over 8 ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(32, 128)
        self.down = nn.Linear(128, 32)
        self.expert = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.expert(self.down(torch.relu(self.up(x))))


class Built(NamedTuple):
    """A wrapped model, its manager, and per arena: the ranks that should share it, and its number of Linears."""

    called: nn.Module
    manager: StateManager
    expected: list[tuple[Sequence[int], int]]


@dataclass(frozen=True)
class Layout:
    """How to wrap a rank's model, given the shape of the mesh."""

    wrap: Callable[[nn.Module, DelayedScaling, tuple[int, int]], Built]
    update: Literal["same_step", "next_step"] = "same_step"
    steps: int = 10


def _ddp(model: nn.Module, recipe: DelayedScaling, axes: tuple[int, int]) -> Built:
    manager = fp8dist.prepare(model, recipe, group=dist.group.WORLD)
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, _reduced_at_once)
    return Built(ddp, manager, [(range(axes[0] * axes[1]), 3)])


def _reduced_at_once(state, bucket):  # type: ignore[no-untyped-def]  # DDP reads annotations, and no strings.
    """Complete DDP's own all-reduce, whose result the fake backend does not return."""
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def _flattened(model: nn.Module, recipe: DelayedScaling, axes: tuple[int, int]) -> Built:
    manager = fp8dist.prepare(model, recipe, group=mesh_of(("dp", "tp"), axes))
    return Built(model, manager, [(range(axes[0] * axes[1]), 3)])


def _experts(model: nn.Module, recipe: DelayedScaling, axes: tuple[int, int]) -> Built:
    """One expert per index of the second axis."""
    mesh = mesh_of(("dp", "ep"), axes)
    manager = fp8dist.prepare(model, recipe, group=mesh, groups={"expert": mesh["dp"]})
    same = range(dist.get_rank() % axes[1], axes[0] * axes[1], axes[1])
    return Built(model, manager, [(range(axes[0] * axes[1]), 2), (same, 1)])


def _tensor_parallel(model: nn.Module, recipe: DelayedScaling, axes: tuple[int, int]) -> Built:
    """Two Linears, replicated over the first axis; the third is an expert as in ``_experts``."""
    mesh = mesh_of(("dp", "tp"), axes)
    manager = fp8dist.prepare(model, recipe, group=mesh, groups={"expert": mesh["dp"]})
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    same = range(dist.get_rank() % axes[1], axes[0] * axes[1], axes[1])
    return Built(model, manager, [(range(axes[0] * axes[1]), 2), (same, 1)])


def _sharded(model: nn.Module, recipe: DelayedScaling, axes: tuple[int, int]) -> Built:
    """FSDP2 over all ranks: most ranks have no row of a weight."""
    mesh = init_device_mesh("cpu", (axes[0] * axes[1],), mesh_dim_names=("shard",))
    manager = fp8dist.prepare(model, recipe, group=mesh, fp8_all_gather=True)
    for name in LINEARS:
        fully_shard(model.get_submodule(name), mesh=mesh)
    return Built(fully_shard(model, mesh=mesh), manager, [(range(axes[0] * axes[1]), 3)])


def _hybrid(model: nn.Module, recipe: DelayedScaling, axes: tuple[int, int]) -> Built:
    mesh = mesh_of(("replicate", "shard"), axes)
    manager = fp8dist.prepare(model, recipe, group=mesh, fp8_all_gather=True)
    for name in LINEARS:
        fully_shard(model.get_submodule(name), mesh=mesh)
    return Built(fully_shard(model, mesh=mesh), manager, [(range(axes[0] * axes[1]), 3)])


LAYOUTS = {
    "DDP": Layout(_ddp),
    "mesh": Layout(_flattened),
    "experts, next_step": Layout(_experts, update="next_step"),
    "FSDP2": Layout(_sharded, update="next_step", steps=1),  # FSDP2's own copies of 16,384 parts take a second.
    "HSDP": Layout(_hybrid),
}


TENSOR_PARALLEL = Layout(_tensor_parallel)


class Running:
    """A job in the middle of its steps, as seen by this rank."""

    def __init__(
        self, layout: Layout, axes: tuple[int, int] = AXES, attaching: Any = None, by_hand: bool = False
    ) -> None:
        recipe = DelayedScaling(history_len=16, update=layout.update)
        model = Mixed()
        self.called, self.manager, self.expected = layout.wrap(model, recipe, axes)
        self.optimizer = torch.optim.SGD(self.called.parameters(), lr=1e-3)
        self.x = torch.randn(16, 32, generator=torch.Generator().manual_seed(1))
        with attaching or nobody_answers():
            self.manager.attach(self.called, optimizer=None if by_hand else self.optimizer)
        for name in LINEARS:
            if not local_part(model.get_submodule(name).weight).numel():  # Ranks that have rows would answer.
                self.manager.slot(name, "weight").set_scale(100.0)

    @property
    def syncs(self) -> tuple[ArenaSync, ...]:
        return self.manager._syncs

    def step(self) -> None:
        self.called(self.x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def _steps(layout: Layout, rank: int, store: dist.Store | None = None) -> list[int]:
    """Return the manifest words of the rank's arenas. ``store``: where ranks agree on the manifest."""
    with world(rank, store=store):
        job = Running(layout, attaching=None if store is None else contextlib.nullcontext())
        assert [(list(s.group.ranks), len(s.arena)) for s in job.syncs if s.group] == [
            (list(ranks), 3 * linears) for ranks, linears in sorted(job.expected, key=lambda e: tuple(e[0]))
        ]
        assert all(isinstance(s.group.ranks, range) for s in job.syncs if s.group)  # No list of all ranks is stored.
        before = [(s.counters.collectives, s.counters.bytes) for s in job.syncs]
        for _ in range(layout.steps):
            job.step()
        assert job.manager.steps == layout.steps
        after = [(s.counters.collectives, s.counters.bytes) for s in job.syncs]
        more = [(count - c, size - b) for (count, size), (c, b) in zip(after, before)]
        assert more == [(layout.steps, layout.steps * 4 * (HEADER + len(s.arena))) for s in job.syncs]
        with counted_collectives() as calls:
            job.step()
        sizes = [4 * (HEADER + len(s.arena)) for s in job.syncs]  # FSDP has its own all-reduces.
        reduced = [size for name, size in zip(calls.names, calls.sizes) if name == "all_reduce" and size in sizes]
        assert reduced == sizes
        assert {"all_gather_object", "broadcast_object_list", "all_gather"}.isdisjoint(calls.names)
        return [int(s.arena.words[WORD_MANIFEST]) for s in job.syncs]


@pytest.mark.slow
@pytest.mark.parametrize("name", few(LAYOUTS, "mesh", "FSDP2"))
def test_steps_of_two_of_many_ranks(name: str) -> None:
    assert _steps(LAYOUTS[name], 1) == _steps(LAYOUTS[name], SIZE - 1)


def test_steps_of_the_last_rank() -> None:
    _steps(Layout(_experts), SIZE - 1)


def _with_a_crowd(port: int) -> list[int]:
    """Four processes are one rank each, and a fifth stands for all others. They agree through one store."""
    index = int(os.environ["RANK"])
    dist.destroy_process_group()
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    if index < len(RANKS):
        return _steps(TENSOR_PARALLEL, RANKS[index], store)
    with world(2, store=store):
        Running(TENSOR_PARALLEL, attaching=Crowd().attaching())
    return []


@pytest.mark.long
def test_four_of_many_ranks_agree_with_all_others_and_train_with_tensor_parallelism() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    *words, _ = run_apart(len(RANKS) + 1, _with_a_crowd, store.port, timeout=200)
    assert words == [words[0]] * len(RANKS)
    assert len(words[0]) == 2


def _median_ms(job: Running, steps: int = 40) -> float:
    """Return the CPU time of the manager's part of a step: the boundary, without the model's forward and backward."""
    seconds = []
    for _ in range(steps):
        job.called(job.x).square().mean().backward()
        start = time.process_time()
        job.manager.step()
        seconds.append(time.process_time() - start)
    return 1e3 * statistics.median(seconds)


@pytest.mark.long
@pytest.mark.nightly
@pytest.mark.alone
@pytest.mark.parametrize("name", ["mesh", "experts, next_step"])
def test_a_step_takes_the_host_as_long_as_on_two_ranks(name: str, record_property: Callable[[str, Any], None]) -> None:
    layout, times = LAYOUTS[name], {2: [], SIZE: []}
    for turn in range(7):  # Alternate, because other work on this machine affects both.
        for size, rank, axes in ((2, 1, (2, 1)), (SIZE, SIZE - 1, AXES))[:: 1 if turn % 2 else -1]:
            with world(rank, size):
                times[size].append(_median_ms(Running(layout, axes, by_hand=True)))
    # Other work only ever adds time, and may last for some turns: the least of each is compared.
    ratio = min(times[SIZE]) / min(times[2])
    record_property("ratio of host times", f"{ratio:.3f} ({min(times[SIZE]):.3f} ms against {min(times[2]):.3f} ms)")
    assert ratio < 1.3, times


def _held(size: int, rank: int, axes: tuple[int, int]) -> int:
    """Return the Python bytes that the library's lines leave allocated, without tensor elements."""
    ours = [tracemalloc.Filter(True, str(ROOT / folder / "*")) for folder in ("fp8dist", "kernels")]
    with world(rank, size):
        gc.collect()
        tracemalloc.start()
        try:
            job = Running(Layout(_experts), axes)
            for _ in range(3):
                job.step()
            assert not job.manager.check().diverged
            gc.collect()
            snapshot = tracemalloc.take_snapshot().filter_traces(ours)
        finally:
            tracemalloc.stop()
    return sum(statistic.size for statistic in snapshot.statistics("filename"))


@pytest.mark.long
@pytest.mark.nightly
def test_what_a_manager_holds_does_not_grow_with_the_world() -> None:
    with _sums_that_vanish():
        _held(2, 1, (2, 1))  # Fill caches first.
        small, large = _held(2, 1, (2, 1)), _held(SIZE, SIZE - 1, AXES)
    assert 10_000 < large < small + 50_000, (small, large)  # A tuple of all ranks would take 580,000.


@contextlib.contextmanager
def _sums_that_vanish() -> Iterator[None]:
    """Make SUM return 0, as the exchange of all ranks' sets does."""
    original = dist.all_reduce

    def all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, *args: Any, **kwargs: Any) -> Any:
        if op == dist.ReduceOp.SUM:
            tensor.zero_()
        return original(tensor, op, *args, **kwargs)

    with mock.patch.object(dist, "all_reduce", all_reduce):
        yield


def _checked(size: int, rank: int, axes: tuple[int, int], name: str) -> tuple[list[str], list[int]]:
    with world(rank, size):
        job = Running(LAYOUTS[name], axes)
        job.step()
        with _sums_that_vanish(), counted_collectives() as calls:
            assert not job.manager.check().diverged
        return calls.names, calls.sizes


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mesh", "experts, next_step"])
def test_a_check_sends_what_it_sends_on_two_ranks(name: str) -> None:
    names, sizes = _checked(SIZE, SIZE - 1, AXES, name)
    assert set(names) == {"all_reduce"}
    assert len(names) <= 5
    assert max(sizes) <= 8 * 15
    if name == "mesh":  # A mesh of two ranks has no further sets.
        assert (names, sizes) == _checked(2, 1, (2, 1), name)
        assert len(names) == 1


def test_few_things_are_at_most_on_many_ranks() -> None:
    """Each rank receives the digests of all others: things x ranks."""
    assert _at_most(2) == _at_most(1024) == MAX_DIFFERING
    assert _at_most(SIZE) * SIZE == MAX_GATHERED
    assert _at_most(10**6) == MAX_EXPLAINED


def test_a_group_too_small_is_refused_in_a_short_sentence() -> None:
    with world(SIZE - 1):
        model = Mixed()
        manager = fp8dist.prepare(model, group=dist.new_group([SIZE - 1]))
        ddp = DistributedDataParallel(model)
        with pytest.raises(ConfigurationError) as caught:
            manager.attach(ddp)
    text = str(caught.value)
    assert f"ranks 0, 1, 2, 3, 4, 5, 6, 7 and {SIZE - 8} more, but its FP8 state only by ranks {SIZE - 1}:" in text
    assert len(text) < 300


def test_ranks_show_each_other_large_meshes_in_short() -> None:
    ranks = torch.arange(SIZE).reshape(AXES)
    with world(0):
        meshes = [
            DeviceMesh("cpu", places, mesh_dim_names=("a", "b"), _init_backend=False)
            for places in (ranks, ranks.flip(0), ranks.T)
        ]
        views = [_view(mesh) for mesh in meshes]
    assert len(set(views)) == 3
    assert max(map(len, views)) < 150


def test_ranks_of_a_mesh_are_no_list() -> None:
    ranks = torch.arange(SIZE).reshape(AXES)
    with world(0):
        everyone = SyncGroup(DeviceMesh("cpu", ranks, mesh_dim_names=("a", "b"), _init_backend=False))
        assert everyone.ranks == range(SIZE)
        assert group_of(ranks[:, 7].tolist()).ranks == range(7, SIZE, 8)
        assert group_of([0, 1, 5]).ranks == (0, 1, 5)
        assert group_of([0, 2, 3, 6]).ranks == (0, 2, 3, 6)  # It starts and ends like range(0, 8, 2).
        assert list(group_of([5]).ranks) == [5]

"""A rank of 16,384 does the same work per step as one of two."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
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
from tests.support.counted import counted_calls
from tests.support.large_world import AXES, SIZE, group_of, mesh_of, world

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


Built = tuple[StateManager, list[tuple[Sequence[int], int]]]
"""The manager of a model, and per arena: the ranks that should share it, and its number of Linears."""


def _mesh(model: nn.Module, recipe: DelayedScaling, axes: tuple[int, int]) -> Built:
    manager = fp8dist.prepare(model, recipe, group=mesh_of(("dp", "tp"), axes))
    return manager, [(range(axes[0] * axes[1]), 3)]


def _experts(model: nn.Module, recipe: DelayedScaling, axes: tuple[int, int]) -> Built:
    """One expert per index of the second axis."""
    mesh = mesh_of(("dp", "ep"), axes)
    manager = fp8dist.prepare(model, recipe, group=mesh, groups={"expert": mesh["dp"]})
    same = range(dist.get_rank() % axes[1], axes[0] * axes[1], axes[1])
    return manager, [(range(axes[0] * axes[1]), 2), (same, 1)]


def _sharded(model: nn.Module, recipe: DelayedScaling, axes: tuple[int, int]) -> Built:
    """FSDP2 over all ranks: most ranks have no row of a weight."""
    mesh = init_device_mesh("cpu", (axes[0] * axes[1],), mesh_dim_names=("shard",))
    manager = fp8dist.prepare(model, recipe, group=mesh, fp8_all_gather=True)
    for name in (*LINEARS, ""):
        fully_shard(model.get_submodule(name), mesh=mesh)
    return manager, [(range(axes[0] * axes[1]), 3)]


LAYOUTS: dict[str, tuple[Callable[..., Built], Any]] = {
    "mesh": (_mesh, "same_step"),
    "experts": (_experts, "next_step"),
    "FSDP2": (_sharded, "next_step"),
}


class Running:
    """A job in the middle of its steps, as seen by this rank."""

    def __init__(self, name: str, axes: tuple[int, int] = AXES) -> None:
        build, update = LAYOUTS[name]
        self.called = model = Mixed()
        self.manager, self.expected = build(model, DelayedScaling(history_len=16, update=update), axes)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        self.x = torch.randn(16, 32, generator=torch.Generator().manual_seed(1))
        with mock.patch("fp8dist.job.agreement.agree_on_manifests"):  # As if all had published the same.
            self.manager.attach(model, optimizer=self.optimizer)
        for fqn in LINEARS:
            if not local_part(model.get_submodule(fqn).weight).numel():  # Ranks that have rows would answer.
                self.manager.slot(fqn, "weight").set_scale(100.0)

    @property
    def syncs(self) -> tuple[ArenaSync, ...]:
        return self.manager._syncs

    def backward(self) -> None:
        self.called(self.x).square().mean().backward()

    def step(self) -> None:
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


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


def _ran(name: str, rank: int, axes: tuple[int, int]) -> tuple[list[int], Any, list[tuple[str, int]]]:
    """Return the manifest words of the rank's arenas, the calls that the host makes at the end of a step, and the
    collectives of a check."""
    with world(rank, axes[0] * axes[1]):
        job = Running(name, axes)
        assert [(list(s.group.ranks), len(s.arena)) for s in job.syncs if s.group] == [
            (list(ranks), 3 * linears) for ranks, linears in sorted(job.expected, key=lambda e: tuple(e[0]))
        ]
        assert all(isinstance(s.group.ranks, range) for s in job.syncs if s.group)  # No list of all ranks is stored.
        before = [(s.counters.collectives, s.counters.bytes) for s in job.syncs]
        for _ in range(3):
            job.step()
        after = [(s.counters.collectives, s.counters.bytes) for s in job.syncs]
        more = [(count - c, size - b) for (count, size), (c, b) in zip(after, before)]
        sizes = [4 * (HEADER + len(s.arena)) for s in job.syncs]
        assert more == [(3, 3 * size) for size in sizes]
        with counted_collectives() as calls:
            job.step()
        # FSDP has its own all-reduces.
        assert [size for name, size in zip(calls.names, calls.sizes) if name == "all_reduce" and size in sizes] == sizes
        assert {"all_gather_object", "broadcast_object_list", "all_gather"}.isdisjoint(calls.names)
        job.backward()
        host = counted_calls(job.optimizer.step)
        assert job.manager.steps == 5
        with _sums_that_vanish(), counted_collectives() as calls:
            assert not job.manager.check().diverged
        words = [int(s.arena.words[WORD_MANIFEST]) for s in job.syncs]
        return words, host, list(zip(calls.names, calls.sizes))


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_step_and_a_check_cost_what_they_cost_on_two_ranks(name: str) -> None:
    axes = (256, 8) if name == "FSDP2" else AXES  # FSDP2's own copies of 16,384 parts take a second.
    first, last = (_ran(name, rank, axes) for rank in (1, axes[0] * axes[1] - 1))
    if name == "FSDP2":  # The last rank has no rows of a weight.
        assert first[0] == last[0]
        return
    assert first == last
    _, host, checked = last
    _, host_of_two, checked_by_two = _ran(name, 1, (2, 1))
    assert host == host_of_two
    assert {call for call, _ in checked} == {"all_reduce"}
    if name == "mesh":  # A mesh of two ranks has no further sets.
        assert checked == checked_by_two
        assert len(checked) == 1
    assert len(checked) <= 5
    assert max(size for _, size in checked) <= 8 * 15


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

"""``attach`` makes a communicator for FP8 state: who leaves out a collective is missed by name."""

from __future__ import annotations

import copy
import gc
import os
import signal
import time
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _world
from torch.nn.parallel import DistributedDataParallel

import fp8dist
from fp8dist import ConfigurationError, DelayedScaling, StateManager, SyncError
from fp8dist.modules.fp8_linear import fp8_linears
from fp8dist.state.groups import SyncGroup
from tests.support.collectives import counted_collectives
from tests.support.ranks import on_ranks, run_apart, short_grace
from tests.support.training import batch, make_net, state_bits

SOON = timedelta(seconds=2)


def _prepared(group: Any = None, recipe: Any = None, **options: Any) -> tuple[nn.Module, StateManager]:
    net = make_net()
    return net, fp8dist.prepare(net, recipe, group=group or dist.group.WORLD, **options)


def _group(manager: StateManager) -> SyncGroup:
    found = manager._cycle.groups[0]
    assert found is not None
    return found


def _train(model: nn.Module, manager: StateManager, steps: int = 2) -> list[str]:
    """Train, and return the names of the collectives of the last step."""
    for step in range(steps):
        with counted_collectives() as calls:
            model(batch(dist.get_rank(), step)[0]).square().mean().backward()
            manager.step()
    return calls.names


def _apart() -> str:
    """Rank 1 checks instead of a step, under DDP in the same group. Return the error of fp8dist."""
    group: Any = dist.new_group(timeout=SOON)
    net, manager = _prepared(group)
    ddp = DistributedDataParallel(net, process_group=group)
    manager.attach(ddp)
    try:
        for step in range(4):
            ddp(batch(dist.get_rank(), step)[0]).square().mean().backward()
            if step == 2 and dist.get_rank() == 1:
                manager.check()
            manager.step()
    except SyncError as error:
        return str(error)
    return "no error"


@pytest.mark.slow
def test_ranks_that_wait_for_different_things_are_told_apart() -> None:
    for text in run_apart(2, _apart):
        assert "All 2 ranks wait, but not for the same" in text
        assert "the FP8 sync of step 3: rank 0" in text
        assert "check(): rank 1" in text


@on_ranks(2)
def test_joining_without_the_manager_is_refused() -> None:
    """A Join context that has ended is no mistake, nor is one of an evaluation."""
    net, manager = _prepared()
    ddp = DistributedDataParallel(net)
    manager.attach(ddp)
    with ddp.join(), torch.no_grad():
        ddp(batch(0, 0)[0])
    manager.check()
    fp8dist.check(ddp)
    context = Join([ddp, manager])
    with context:
        _train(ddp, manager, 1)
    _train(ddp, manager)  # ``context`` still holds the hooks of the context that has ended.
    for _ in range(2):
        with pytest.raises(ConfigurationError, match=r"use Join\(\[ddp, manager\]\)"), ddp.join():
            _train(ddp, manager, 1)


@pytest.mark.slow
@on_ranks(4)
def test_checks_are_numbered_anew_after_one_that_some_ranks_did_not_make() -> None:
    """A check that one rank made alone is forgotten. With a mesh of several axes, which has no communicator yet, it
    communicates nothing."""
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("dp", "tp", "pp"))["tp", "pp"]
    net, manager = _prepared()
    manager.attach(net)
    checks = (manager.check, *(partial(fp8dist.check, net, group=group) for group in (dist.group.WORLD, mesh)))
    if dist.get_rank() == 1:
        with mock.patch.object(SyncGroup, "timeout", timedelta(seconds=0.5)), short_grace(0.3):
            for check in checks:
                with pytest.raises(SyncError, match="was not reached by all ranks within"):
                    check()
    dist.barrier()
    for check in 2 * checks:
        assert not check().diverged


def _missed_in_turn() -> None:
    if dist.get_rank() == 2:  # Its clock is behind.
        real = time.time
        time.time = lambda: real() - 300
    net, manager = _prepared(dist.new_group(timeout=SOON))
    manager.attach()
    for absent in (2, 1):  # Rank 2 has made one roll call less than rank 0 when they miss rank 1 together.
        text = rf"Missing of 3 ranks: rank {absent}( \(.*\))?: gone"
        if dist.get_rank() != absent:
            timeout = mock.patch.object(SyncGroup, "timeout", timedelta(seconds=1))
            with timeout, short_grace(1.5), pytest.raises(SyncError, match=text):
                fp8dist.check(net, group=dist.group.WORLD)
        dist.barrier()
        assert absent == 1 or fp8dist.check(net, group=dist.group.WORLD).consistent
    if dist.get_rank() != 2:  # Rank 1 has made one less than rank 0, and no check since, when they miss rank 2.
        with short_grace(1.5), pytest.raises(SyncError, match=r"Missing of 3 ranks: rank 2( \(.*\))?: gone"):
            _train(net, manager)
    dist.distributed_c10d._get_default_store().set(f"done/{dist.get_rank()}", "")
    dist.distributed_c10d._get_default_store().wait([f"done/{rank}" for rank in range(3)])


@pytest.mark.slow
def test_who_missed_a_check_is_not_missed_in_the_roll_call_of_another() -> None:
    """On ranks of its own: roll calls are counted, and other tests have made some."""
    run_apart(3, _missed_in_turn)


@pytest.mark.parametrize("share", [False, True])
@on_ranks(2)
def test_the_life_of_a_communicator(share: bool) -> None:
    """A communicator comes with attach(), and goes with detach() or with the manager. The next attach() has another."""
    gc.collect()
    before = len(_world.pg_map)
    net, manager = _prepared(share_group=share)
    group, more = _group(manager), int(not share)
    assert group.process_group is dist.group.WORLD
    manager.attach(net)
    assert (group.process_group is dist.group.WORLD) == share
    assert manager.join_process_group is dist.group.WORLD
    assert len(_world.pg_map) == before + more
    assert _train(net, manager) == ["all_reduce"]
    first = group.process_group
    manager.attach(net)
    assert (group.process_group is first) == share
    assert len(_world.pg_map) == before + more
    other = copy.deepcopy(net)
    theirs: Any = fp8dist.get_manager(other)
    theirs.attach(other)
    assert len(_world.pg_map) == before + 2 * more
    theirs.detach()
    assert _train(net, manager) == ["all_reduce"]
    manager.detach()
    assert group.process_group is dist.group.WORLD
    assert len(_world.pg_map) == before
    manager.attach(net)
    del net, manager, other, theirs, group, first
    gc.collect()
    assert len(_world.pg_map) == before


@pytest.mark.slow
@on_ranks(4)
def test_groups_of_all_kinds() -> None:
    """Ranks have different numbers of groups."""
    rank = dist.get_rank()
    if rank < 3:  # torch names a group after the number of groups that a rank has.
        dist.new_group([0, 1, 2], use_local_synchronization=True)
    halves = [dist.new_group(ranks, timeout=timedelta(seconds=77)) for ranks in ([0, 1], [2, 3])]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    half = [rank // 2 * 2, rank // 2 * 2 + 1]
    for given, members, seconds in ((halves[rank // 2], half, 77), (mesh, [0, 1, 2, 3], 1800)):
        net, manager = _prepared(given)
        manager.attach(net)
        assert _train(net, manager) == ["all_reduce"]
        group = _group(manager)
        own = group.process_group
        assert own not in (dist.group.WORLD, *halves, mesh.get_group(0), mesh.get_group(1))
        assert dist.get_process_group_ranks(own) == members
        assert group.timeout.total_seconds() == seconds
        states: list[Any] = [None] * 4
        dist.all_gather_object(states, state_bits(manager))
        assert states[rank] == states[members[0]]


@on_ranks(2)
def test_groups_of_torch_keep_their_names() -> None:
    """Managers that only some ranks have do not change the names of torch's groups."""
    own = SyncGroup(dist.new_group([0, 1]))
    own.make_own("fp8dist/test/1", torch.device("cpu"))
    if dist.get_rank() == 0:
        own.drop_own()
    dist.all_reduce(torch.ones(1), group=dist.new_group([0, 1], use_local_synchronization=True))


@pytest.mark.slow
@on_ranks(2)
def test_a_manager_with_a_sync_under_way_goes_at_once() -> None:
    """It is dropped while the other rank does not join its sync yet."""
    group: Any = dist.new_group(timeout=timedelta(seconds=8))
    net, manager = _prepared(group, recipe=DelayedScaling(update="next_step"))
    manager.attach(net)
    if dist.get_rank() == 1:
        dist.barrier()
    _train(net, manager, 1)
    start = time.monotonic()
    del net, manager
    gc.collect()
    assert time.monotonic() - start < 2
    if dist.get_rank() == 0:
        dist.barrier()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@on_ranks(2)
def test_a_forked_child_detaches() -> None:
    """Detach in a forked child, whose communicator has no threads. Return its exit status."""
    net, manager = _prepared()
    manager.attach(net)
    _train(net, manager, 1)
    child = os.fork()
    if child == 0:
        signal.alarm(8)
        manager.detach()
        os._exit(7)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    _train(net, manager, 1)
    assert status == 7


@on_ranks(2)
def test_what_a_graph_may_use_is_not_destroyed() -> None:
    before = len(_world.pg_map)
    net, manager = _prepared()
    manager.attach(net)
    manager._syncs[0].graphed = True
    manager.detach()
    assert _group(manager).process_group is dist.group.WORLD
    assert len(_world.pg_map) - before == 1


@on_ranks(2)
def test_none_is_made_where_no_step_communicates() -> None:
    for recipe, options, made in (
        (fp8dist.RowwiseScaling(), {}, False),
        (fp8dist.RowwiseScaling(), {"check_every": 2}, True),
        (None, {"amax_sync": False}, False),
        (None, {"enabled": False}, False),
    ):
        net, manager = _prepared(recipe=recipe, **options)
        manager.attach(net)
        assert (_group(manager).process_group is not dist.group.WORLD) == made


def _anew() -> None:
    """The job's groups are destroyed and made again, as after a failure. What is local works meanwhile."""
    net, manager = _prepared(recipe=DelayedScaling(update="next_step"))
    manager.attach(net)
    _train(net, manager)
    state = state_bits(manager)
    store, rank, size = dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()
    with pytest.raises(ConfigurationError, match="was destroyed"):
        manager.step()
    manager.metrics()
    manager.detach()
    assert state_bits(manager) == state
    assert not list(fp8_linears(fp8dist.restore(net)))
    dist.init_process_group("gloo", store=dist.PrefixStore("anew", store), rank=rank, world_size=size)
    net, manager = _prepared()
    manager.attach(net)
    assert _train(net, manager) == ["all_reduce"]


def test_groups_that_are_destroyed_and_made_again() -> None:
    run_apart(2, _anew)


@on_ranks(2)
def test_a_backend_that_makes_no_partial_groups_keeps_the_given_one() -> None:
    group = SyncGroup(dist.group.WORLD)  # type: ignore[arg-type]
    with mock.patch.object(dist, "get_backend", return_value="mpi"):
        group.make_own("name", torch.device("cpu"))
    assert group.process_group is dist.group.WORLD


@on_ranks(2)
def test_a_part_of_a_bound_job_is_split_from_its_group() -> None:
    """A job whose default group is bound to a device, as with NCCL: a subgroup is split from the given one."""
    halves = [dist.new_group([rank]) for rank in range(2)]
    both, mine = dist.new_group([0, 1]), halves[dist.get_rank()]
    group = SyncGroup(mine)
    bound = mock.Mock(bound_device_id=torch.device("cpu", 0))
    with (
        mock.patch("torch.distributed.distributed_c10d._get_default_group", return_value=bound),
        mock.patch("torch.distributed.split_group", return_value=both) as split,
        mock.patch.object(dist, "get_world_size", return_value=2),
    ):
        backend = mock.Mock(supports_splitting=False, options=None)
        with mock.patch.object(dist.ProcessGroup, "_get_backend", return_value=backend):
            group.make_own("name", torch.device("cpu"))
            assert split.call_args is None
            assert group.process_group is mine
            backend.supports_splitting = True
            group.make_own("name", torch.device("cpu"))
    assert split.call_args.args == (mine, [[0]])
    assert group.process_group is both

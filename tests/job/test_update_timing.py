"""same_step and next_step give the same numbers bit for bit, but commit at different times."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import signal
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fp8dist
from fp8dist import DelayedScaling, StateManager
from fp8dist.state.arena_sync import Phase
from tests.support.collectives import counted_collectives
from tests.support.ranks import RankPool, on_ranks
from tests.support.training import Net, batch, bits, make_net, parameter_bits, state_bits

STEPS = 10


class CheckpointedNet(Net):
    """The middle Linear is recomputed in backward, with reentrant checkpointing."""

    def forward(self, x: Tensor, skip: bool = False) -> Tensor:
        h = torch.relu(self.first(x))
        return self.last(h + checkpoint(self.branch, h, use_reentrant=True))


@dataclass(frozen=True)
class Loop:
    """A training loop with one special feature."""

    accumulate: int = 1
    no_sync: bool = False
    evaluate: bool = False
    switch_before_backward: bool = False
    reentrant: bool = False
    history_len: int = 3
    ddp: dict[str, Any] = field(default_factory=dict)


@dataclass
class Curve:
    """Results that must not depend on the timing."""

    train: list[bytes]
    evaluation: list[bytes]
    parameters: dict[str, bytes]
    state: dict[str, bytes]
    phases: set[str]


def _phases(manager: StateManager) -> set[str]:
    return {sync.phase.value for sync in manager._syncs}


def _curve(update: str, loop: Loop) -> Curve:
    """Train on this rank, or in a single process. Reads the state only at the end."""
    ranks = dist.is_initialized()
    rank = dist.get_rank() if ranks else 0
    net = make_net()
    if loop.reentrant:
        net.__class__ = CheckpointedNet
    recipe = DelayedScaling(history_len=loop.history_len, update=update)  # type: ignore[arg-type]
    manager = fp8dist.prepare(net, recipe, group=dist.group.WORLD if ranks else None)
    model: nn.Module = DistributedDataParallel(net, **loop.ddp) if ranks else net
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    manager.attach(model, optimizer=optimizer)
    curve = Curve([], [], {}, {}, set())
    for step in range(STEPS):
        for micro in range(loop.accumulate):
            silent = ranks and loop.no_sync and micro < loop.accumulate - 1
            with model.no_sync() if silent else contextlib.nullcontext():  # type: ignore[operator]
                # Magnitudes grow and shrink, so a scale that is a step late or early changes the losses.
                x, y = batch(rank, loop.accumulate * step + micro)
                loss = nn.functional.mse_loss(model(x * 2.0 ** (step % 7)), y)
                if loop.switch_before_backward:
                    model.eval()
                loss.backward()
                model.train()
            curve.train.append(bits(loss))
        optimizer.step()
        curve.phases |= _phases(manager)
        optimizer.zero_grad()
        if loop.evaluate and step % 3 == 1:
            model.eval()
            with torch.no_grad():
                # On one rank only, because a commit is local.
                if rank == 0:
                    curve.evaluation.append(bits(net(batch(7, step)[0] * 50)))
            model.train()
    curve.parameters = parameter_bits(net)
    curve.state = state_bits(manager)
    return curve


LOOPS = {
    "long history": Loop(history_len=64),
    "evaluation and accumulation": Loop(evaluate=True, accumulate=2),
    "eval() between forward and backward": Loop(switch_before_backward=True, evaluate=True),
    "reentrant checkpointing, accumulation, evaluation": Loop(reentrant=True, accumulate=2, evaluate=True),
}

NO_GRADIENT = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # Reentrant, with grad off.


def assert_same_curves(same: Curve, late: Curve) -> None:
    assert len(set(same.train)) == len(same.train)  # The losses change: the model trains.
    assert late.train == same.train
    assert late.evaluation == same.evaluation
    assert late.parameters == same.parameters
    assert late.state == same.state
    assert same.phases == {Phase.IDLE.value}
    assert late.phases == {Phase.DUE.value}


@NO_GRADIENT
@pytest.mark.parametrize("name", LOOPS)
def test_one_process_trains_the_same(name: str) -> None:
    assert_same_curves(_curve("same_step", LOOPS[name]), _curve("next_step", LOOPS[name]))


RANK_LOOPS = {
    "no_sync": Loop(accumulate=3, no_sync=True, evaluate=True),
    "reentrant checkpointing, static_graph": Loop(reentrant=True, ddp={"static_graph": True}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RANK_LOOPS)
def test_two_ranks_train_the_same(two_ranks: RankPool, name: str) -> None:
    same = two_ranks.run(_curve, "same_step", RANK_LOOPS[name])
    late = two_ranks.run(_curve, "next_step", RANK_LOOPS[name])
    for mine, theirs in zip(same, late):
        assert_same_curves(mine, theirs)
    assert same[0].state == same[1].state
    assert same[0].parameters == same[1].parameters
    assert same[0].train != same[1].train


@NO_GRADIENT
def test_a_commit_at_the_wrong_time_would_be_seen() -> None:
    """The scales of these runs matter: another window gives other losses."""
    assert _curve("same_step", Loop()).train != _curve("same_step", Loop(history_len=1)).train


def _two_losses(update: str) -> Any:
    net = make_net()
    recipe = DelayedScaling(history_len=2, amax_algo="most_recent", update=update)  # type: ignore[arg-type]
    manager = fp8dist.prepare(net, recipe)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    manager.attach(net, optimizer=optimizer)
    losses = []
    for step in range(6):
        x, y = batch(0, step)
        first = nn.functional.mse_loss(net(x), y) * (1 + 3 * step)
        second = net(x).abs().mean() * 5
        losses += [bits(first), bits(second)]
        for loss in (first, second):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return losses, parameter_bits(net), state_bits(manager)


def test_a_boundary_between_a_forward_and_its_backward_trains_the_same() -> None:
    """Two forwards, then backward and step of each: the second backward's scales are those after the first step."""
    assert _two_losses("next_step") == _two_losses("same_step")


def _stepped(update: str) -> tuple[Net, StateManager, torch.optim.Optimizer]:
    net = make_net()
    manager = fp8dist.prepare(net, DelayedScaling(history_len=4, update=update))  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    manager.attach(net, optimizer=optimizer)
    net(batch(0, 0)[0]).sum().backward()
    optimizer.step()
    return net, manager, optimizer


def _raw(manager: StateManager) -> tuple[str, int, float]:
    """Return (phase, step counter, scale of one slot), without a read that would commit."""
    (sync,) = manager._syncs
    place = next(i for s, i in sync.arena.index.items() if (s.fqn, s.role) == ("first", "input"))
    return sync.phase.value, int(sync.arena.step), float(sync.arena.scale[place])


def test_same_step_shows_this_iterations_amax_when_the_iteration_ends() -> None:
    _, manager, _ = _stepped("same_step")
    amax = batch(0, 0)[0].abs().max()
    assert _raw(manager) == ("idle", 1, float(torch.tensor(448.0) / amax))


def test_next_step_shows_it_after_the_next_read() -> None:
    _, manager, _ = _stepped("next_step")
    amax = batch(0, 0)[0].abs().max()
    assert _raw(manager) == ("due", 0, 1.0)
    assert float(manager.slot("first", "input").amax) == float(amax)
    assert _raw(manager) == ("idle", 1, float(torch.tensor(448.0) / amax))


def _eval_forward(net: Net, manager: StateManager) -> None:
    net.eval()
    with torch.no_grad():
        net(batch(0, 1)[0])


READERS = {
    "training forward": lambda net, manager: net(batch(0, 1)[0]),
    "eval forward": _eval_forward,
    "steps": lambda net, manager: manager.steps,
    "amax": lambda net, manager: manager.slot("last", "weight").amax,
    "scale": lambda net, manager: manager.slot("last", "weight").scale,
    "inv_scale": lambda net, manager: manager.slot("last", "weight").inv_scale,
    "amax_history": lambda net, manager: manager.slot("last", "weight").amax_history,
    "metrics": lambda net, manager: manager.metrics(),
    "state_dict": lambda net, manager: manager.state_dict(),
    "set_scale": lambda net, manager: manager.slot("last", "weight").set_scale(2.0),
    "refresh_weights": lambda net, manager: manager.refresh_weights(),
    "detach": lambda net, manager: manager.detach(),
    "restore": lambda net, manager: fp8dist.restore(net),
}


@pytest.mark.parametrize("reader", READERS)
def test_every_reader_commits_what_is_due(reader: str) -> None:
    net, manager, _ = _stepped("next_step")
    assert _raw(manager)[:2] == ("due", 0)
    READERS[reader](net, manager)
    amax = batch(0, 0)[0].abs().max()
    assert _raw(manager) == ("idle", 1, float(torch.tensor(448.0) / amax))


def test_a_save_commits_what_is_due(tmp_path: Any) -> None:
    _, manager, _ = _stepped("next_step")
    _, reference, _ = _stepped("same_step")
    manager.save(tmp_path / "state.safetensors")
    assert _raw(manager)[:2] == ("idle", 1)
    fresh = fp8dist.prepare(net := make_net(), DelayedScaling(history_len=4, update="next_step"))
    fresh.load(tmp_path / "state.safetensors")
    assert state_bits(fresh) == state_bits(reference)
    del net


def test_two_boundaries_without_a_reader_commit_twice() -> None:
    """Each boundary commits the previous sync before it launches the next."""
    _, manager, optimizer = _stepped("next_step")
    optimizer.step()
    assert _raw(manager)[:2] == ("due", 1)
    assert manager.steps == 2


@on_ranks(2)
def test_rank_0_alone_may_read_while_the_sync_is_in_flight() -> None:
    net = make_net()
    manager = fp8dist.prepare(net, DelayedScaling(history_len=4, update="next_step"), group=dist.group.WORLD)
    ddp = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    manager.attach(ddp, optimizer=optimizer)
    ddp(batch(dist.get_rank(), 0)[0]).sum().backward()
    optimizer.step()
    phase = _raw(manager)[0]
    with counted_collectives() as calls:
        if dist.get_rank() == 0:
            net.eval()
            with torch.no_grad():
                net(batch(0, 1)[0])
            manager.state_dict()
            manager.metrics()
            net.train()
    ddp(batch(dist.get_rank(), 1)[0]).sum().backward()
    optimizer.step()
    assert calls.names == []
    assert phase == "due"
    assert manager.steps == 2


def _in_fork(manager: StateManager) -> tuple[dict[str, bytes], float]:
    """Return the state and a scale as a forked process reads them."""
    reader, writer = mp.Pipe(duplex=False)
    child = os.fork()  # Ranks are daemons, which must not start processes of multiprocessing.
    if child == 0:
        try:
            writer.send((state_bits(manager), float(manager.slot("first", "input").scale)))
        finally:
            os._exit(0)
    writer.close()
    try:
        assert reader.poll(20), "the forked process hangs"
        seen: tuple[dict[str, bytes], float] = reader.recv()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return seen


def _forked(forks: bool) -> tuple[dict[str, bytes], list[bool]]:
    """Train with syncs in flight while other processes read."""
    net = make_net()
    manager = fp8dist.prepare(net, DelayedScaling(history_len=3, update="next_step"), group=dist.group.WORLD)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    manager.attach(net, optimizer=optimizer)
    as_committed = []
    for step in range(3):
        net(batch(dist.get_rank(), step)[0]).square().mean().backward()
        committed = state_bits(manager)
        scale = float(manager.slot("first", "input").scale)
        optimizer.step()
        optimizer.zero_grad()
        if forks:
            assert _phases(manager) == {"due"}
            as_committed.append(_in_fork(manager) == (committed, scale))
    return state_bits(manager), as_committed


def test_a_forked_process_reads_what_was_committed(two_ranks: RankPool) -> None:
    """It cannot wait for a collective of its parent, as a worker of a DataLoader or a saver. The parent commits."""
    plain, forked = two_ranks.run(_forked, False), two_ranks.run(_forked, True)
    assert [state for state, _ in plain] == [state for state, _ in forked]
    assert all(len(as_committed) == 3 and all(as_committed) for _, as_committed in forked)

"""same_step and next_step give the same numbers bit for bit, but commit at different times."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fp8dist
from fp8dist import DelayedScaling, StateManager
from fp8dist.state.arena_sync import Phase
from tests.support.collectives import counted_collectives
from tests.support.parallel import same_on_all_ranks
from tests.support.ranks import on_ranks
from tests.support.training import Net, SmallJob, batch, bits, make_net, parameter_bits, state_bits, unwrapped

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
    evaluate: bool = False
    switch_before_backward: bool = False
    reentrant: bool = False
    history_len: int = 3


@dataclass
class Curve:
    """Results that must not depend on the timing, except for the phases after the steps."""

    train: list[bytes] = field(default_factory=list)
    evaluation: list[bytes] = field(default_factory=list)
    parameters: dict[str, bytes] = field(default_factory=dict)
    state: dict[str, bytes] = field(default_factory=dict)
    phases: set[str] = field(default_factory=set, compare=False)


def _phases(manager: StateManager) -> set[str]:
    return {sync.phase.value for sync in manager._syncs}


def _curve(update: Any, loop: Loop) -> Curve:
    """Train in this process. Reads the state only at the end."""
    net = make_net()
    if loop.reentrant:
        net.__class__ = CheckpointedNet
    recipe = DelayedScaling(history_len=loop.history_len, update=update)
    job = SmallJob(recipe, net, unwrapped, partial(torch.optim.AdamW, lr=0.01))
    curve = Curve()
    for step in range(STEPS):
        for micro in range(loop.accumulate):
            # Magnitudes grow and shrink, so a scale that is a step late or early changes the losses.
            x, y = batch(0, loop.accumulate * step + micro)
            loss = nn.functional.mse_loss(net(x * 2.0 ** (step % 7)), y)
            if loop.switch_before_backward:
                net.eval()
            loss.backward()
            net.train()
            curve.train.append(bits(loss))
        job.optimizer.step()
        curve.phases |= _phases(job.manager)
        job.optimizer.zero_grad()
        if loop.evaluate and step % 3 == 1:
            net.eval()
            with torch.no_grad():
                curve.evaluation.append(bits(net(batch(7, step)[0] * 50)))
            net.train()
    curve.parameters = parameter_bits(net)
    curve.state = state_bits(job.manager)
    return curve


LOOPS = {
    "long history": Loop(history_len=64),
    "eval() between forward and backward": Loop(switch_before_backward=True, evaluate=True),
    "reentrant checkpointing, accumulation, evaluation": Loop(reentrant=True, accumulate=2, evaluate=True),
}

NO_GRADIENT = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # Reentrant, with grad off.


def assert_same_curves(same: Curve, late: Curve) -> None:
    assert len(set(same.train)) == len(same.train)  # The losses change: the model trains.
    assert late == same
    assert same.phases == {Phase.IDLE.value}
    assert late.phases == {Phase.DUE.value}


@NO_GRADIENT
@pytest.mark.parametrize("name", LOOPS)
def test_one_process_trains_the_same(name: str) -> None:
    assert_same_curves(_curve("same_step", LOOPS[name]), _curve("next_step", LOOPS[name]))


@NO_GRADIENT
def test_a_commit_at_the_wrong_time_would_be_seen() -> None:
    """The scales of these runs matter: another window gives other losses."""
    assert _curve("same_step", Loop()).train != _curve("same_step", Loop(history_len=1)).train


def _two_losses(update: Any) -> Any:
    job = SmallJob(DelayedScaling(history_len=2, amax_algo="most_recent", update=update), wrap=unwrapped)
    losses = []
    for step in range(6):
        x, y = batch(0, step)
        first = nn.functional.mse_loss(job.net(x), y) * (1 + 3 * step)
        second = job.net(x).abs().mean() * 5
        losses += [bits(first), bits(second)]
        for loss in (first, second):
            loss.backward()
            job.optimizer.step()
            job.optimizer.zero_grad()
    return losses, parameter_bits(job.net), state_bits(job.manager)


def test_a_boundary_between_a_forward_and_its_backward_trains_the_same() -> None:
    """Two forwards, then backward and step of each: the second backward's scales are those after the first step."""
    assert _two_losses("next_step") == _two_losses("same_step")


def _stepped(update: Any) -> SmallJob:
    job = SmallJob(DelayedScaling(history_len=4, update=update), wrap=unwrapped)
    job.step(0)
    return job


def _raw(manager: StateManager) -> tuple[str, int, float]:
    """Return (phase, step counter, scale of one slot), without a read that would commit."""
    (sync,) = manager._syncs
    place = next(i for s, i in sync.arena.index.items() if (s.fqn, s.role) == ("first", "input"))
    return sync.phase.value, int(sync.arena.step), float(sync.arena.scale[place])


def test_when_an_iteration_shows_its_amax() -> None:
    """Under same_step when it ends, under next_step after the next read."""
    amax = batch(0, 0)[0].abs().max()
    done = ("idle", 1, float(torch.tensor(448.0) / amax))
    assert _raw(_stepped("same_step").manager) == done
    job = _stepped("next_step")
    manager = job.manager
    assert _raw(manager) == ("due", 0, 1.0)
    assert float(manager.slot("first", "input").amax) == float(amax)
    assert _raw(manager) == done
    job.backward(1)
    for _ in range(2):  # Each boundary commits the previous sync before it launches the next.
        job.optimizer.step()
    assert _raw(manager)[:2] == ("due", 2)
    assert manager.steps == 3


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
    job = _stepped("next_step")
    assert _raw(job.manager)[:2] == ("due", 0)
    READERS[reader](job.net, job.manager)
    amax = batch(0, 0)[0].abs().max()
    assert _raw(job.manager) == ("idle", 1, float(torch.tensor(448.0) / amax))


@on_ranks(2)
def test_rank_0_alone_may_read_while_the_sync_is_in_flight(tmp_path: Path) -> None:
    job = SmallJob(DelayedScaling(history_len=4, update="next_step"))
    job.step(0)
    assert _raw(job.manager)[0] == "due"
    with counted_collectives() as calls:
        if dist.get_rank() == 0:
            _eval_forward(job.net, job.manager)
            job.manager.save(tmp_path / "{rank}")
            job.manager.metrics()
            job.net.train()
    assert calls.names == []
    job.step(1)
    assert job.manager.steps == 2
    dist.barrier()
    assert [path.name for path in tmp_path.iterdir()] == ["0"]
    same_on_all_ranks(state_bits(job.manager))


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


@on_ranks(2)
def test_a_forked_process_reads_what_was_committed() -> None:
    """It cannot wait for a collective of its parent, as a worker of a DataLoader or a saver. The parent commits."""
    ends = []
    for forks in (False, True):
        job = SmallJob(DelayedScaling(history_len=3, update="next_step"), wrap=unwrapped)
        for step in range(3):
            job.backward(step)
            committed = state_bits(job.manager), float(job.manager.slot("first", "input").scale)
            job.optimizer.step()
            job.optimizer.zero_grad()
            if forks:
                assert _phases(job.manager) == {"due"}
                assert _in_fork(job.manager) == committed
        ends.append(state_bits(job.manager))
    assert ends[0] == ends[1]

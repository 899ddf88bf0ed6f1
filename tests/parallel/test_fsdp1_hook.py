"""FSDP1's communication hook: the early launch, and errors that it must survive."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl
from torch.distributed.algorithms._comm_hooks.default_hooks import DefaultState, reduce_scatter_hook

import fp8dist
from fp8dist.errors import DivergenceError
from tests.support.fsdp1 import Job, assert_bitwise, assert_synced, build, quiet, train
from tests.support.logs import captured_log
from tests.support.parallel import loss_of, tokens, watched_reductions
from tests.support.ranks import RankPool
from tests.support.states import state_of, without
from tests.support.training import state_bits

pytestmark = pytest.mark.slow

# The communication hook ---------------------------------------------------------------------------------

HOOKED = [
    pytest.param(Job("SHARD_GRAD_OP", hook="inner", update="next_step"), id="inner, grad_op, next_step"),
    pytest.param(Job("NO_SHARD", hook="inner"), id="inner, no_shard"),
    pytest.param(Job(hook="ours", accumulate=3, update="next_step"), id="accumulation without no_sync, next_step"),
    pytest.param(Job(hook="ours", accumulate=3, no_sync=True, frozen=("model.blocks.0.up.weight",)), id="no_sync"),
]


@pytest.mark.parametrize("job", HOOKED)
def test_comm_hook_gives_the_state_of_the_boundary_launch(two_ranks: RankPool, job: Job) -> None:
    early = two_ranks.run(train, job)
    late = two_ranks.run(train, replace(job, hook=""))
    synced = job.accumulate if job.accumulate > 1 and not job.no_sync else 1
    for mine, theirs in zip(early, late):
        assert_bitwise(mine, theirs)
        assert mine.syncs == [synced] * job.steps
        assert theirs.syncs == [1] * job.steps
        # One unit per block; the root has no parameters.
        assert mine.inner_calls == (2 * job.steps if job.hook == "inner" else 0)
    assert_synced(early)


def test_activation_checkpointing(two_ranks: RankPool) -> None:
    """Reentrant checkpointing runs a backward per block inside the backward: each launches a sync, and they merge."""
    plain = two_ranks.run(train, Job(steps=2))
    for how in CheckpointImpl:
        late = two_ranks.run(train, Job(checkpointing=how, steps=2))
        early = two_ranks.run(train, Job(checkpointing=how, hook="ours", steps=2))
        for expected, mine, hooked in zip(plain, late, early):
            assert_bitwise(mine, expected)
            assert_bitwise(hooked, expected)
            assert mine.syncs == [1] * 2
            assert hooked.syncs == [2 if how is CheckpointImpl.REENTRANT else 1] * 2


def _fails_once(hook: str, where: str) -> list[Any]:
    """The second backward fails on all ranks; then training continues."""
    with quiet():
        built = build(Job(hook=hook))

    def fail(*args: Any) -> None:
        raise KeyError("interrupted")

    for step in range(4):
        if step == 1:
            x, target = tokens(dist.get_rank(), step)
            x.requires_grad_()
            output = built.module(x)
            # At the end of backward, the gradients of the second block have been reduced.
            (output if where == "start" else x).register_hook(fail)
            with pytest.raises(KeyError):
                loss_of(output, target).backward()
            built.optimizer.zero_grad()
        with watched_reductions() as reductions:
            built.backward(step)
            assert len(reductions.of(built.manager)) == (1 if hook else 0)
            built.optimizer.step()
            assert len(reductions.of(built.manager)) == 1
        built.optimizer.zero_grad()
    return [state_bits(built.manager), built.full()]


@pytest.mark.parametrize("where", ["start", "end"])
def test_a_failed_backward_does_not_break_the_next_one(two_ranks: RankPool, where: str) -> None:
    """The failed batch is repeated, so it records no other amaxes."""
    with_hook, without_it = two_ranks.run(_fails_once, "ours", where), two_ranks.run(_fails_once, "", where)
    assert with_hook == without_it
    assert with_hook[0] == with_hook[1]


def _fails_in_reduction(inner: bool) -> list[Any]:
    """The inner hook raises once, in the first unit that calls it."""
    with quiet():
        built = build(Job())
    calls = []

    def broken(state: Any, gradient: Tensor, *output: Tensor) -> None:
        calls.append(len(calls))
        if inner and len(calls) == 3:
            raise KeyError("interrupted")
        reduce_scatter_hook(state, gradient, *output)

    built.module.register_comm_hook(  # type: ignore[operator]
        DefaultState(dist.group.WORLD), fp8dist.fsdp.comm_hook(built.manager, broken)
    )
    counts = []
    for step in range(4):
        with watched_reductions() as reductions:
            try:
                built.backward(step)
            except KeyError:
                built.optimizer.zero_grad()
                counts.append("failed")
                return [counts, len(reductions.of(built.manager))]
            built.optimizer.step()
            counts.append(len(reductions.of(built.manager)))
        built.optimizer.zero_grad()
    return [counts, 0]


def test_a_failed_reduction_launches_nothing(two_ranks: RankPool) -> None:
    """FSDP1 itself cannot continue after this error, but no rank may hang in one of our collectives."""
    assert two_ranks.run(_fails_in_reduction, True) == [[[1, "failed"], 0]] * 2
    assert two_ranks.run(_fails_in_reduction, False) == [[[1, 1, 1, 1], 0]] * 2


def _damaged(hook: str, update: str) -> Any:
    """Damage a scale on one rank before the third of five steps."""
    with quiet():
        built = build(Job(hook=hook, update=update))
    raised = []
    for step in range(5):
        if step == 2 and dist.get_rank() == 1:
            built.manager.slot("model.blocks.1.down", "weight").scale.mul_(2.0)
        built.backward(step)
        try:
            built.optimizer.step()
        except DivergenceError as error:
            raised.append((step, [(f.kind, f.name) for f in error.report.findings]))
        built.optimizer.zero_grad()
    return raised, without(state_of(built.manager), "saturated"), built.full()


@pytest.mark.parametrize(("hook", "update"), [("", "same_step"), ("ours", "next_step")])
def test_a_damaged_scale_is_reported_and_all_ranks_go_on_alike(two_ranks: RankPool, hook: str, update: str) -> None:
    with captured_log():
        first, second = two_ranks.run(_damaged, hook, update)
    assert first == second
    step = 2 if update == "same_step" else 3
    assert first[0] == [(step, [("scale", "model.blocks.1.down:weight")])]


def _interrupted_calibration(interrupted: bool) -> Any:
    with quiet():
        built = build(Job(hook="ours"))

    def calibrate() -> None:
        with built.manager.calibrate():
            built.backward(2)
            raise KeyError

    states = []
    for step in range(3):
        built.backward(step)
        built.optimizer.step()
        built.optimizer.zero_grad()
        if interrupted and step == 0:
            with pytest.raises(KeyError):
                calibrate()
            built.optimizer.zero_grad()
        states.append(state_bits(built.manager))
    return states, built.full()


def test_an_interrupted_calibration_commits_nothing(two_ranks: RankPool) -> None:
    assert two_ranks.run(_interrupted_calibration, True) == two_ranks.run(_interrupted_calibration, False)

"""DistributedDataParallel on real ranks: at most one FP8 collective per step and recipe, with all options of DDP."""

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fp8dist
from fp8dist import BlockScaling, CurrentScaling, DelayedScaling, MXFP8Scaling, Recipe, RowwiseScaling
from fp8dist.errors import ConfigurationError, DivergenceError
from fp8dist.modules.overrides import High
from tests.support.collectives import counted_collectives
from tests.support.logs import captured_log
from tests.support.meshes import assert_synced
from tests.support.parallel import same_on_all_ranks
from tests.support.ranks import POOLS, RankPool, on_ranks
from tests.support.running import Running
from tests.support.sharded import HISTORY, Job, Outcome, build, full, train
from tests.support.states import state_of
from tests.support.suite import few
from tests.support.training import (
    AmaxRecorder,
    SmallJob,
    batch,
    histories,
    make_net,
    state_bits,
)

DDP = Job("ddp", optimizer="sgd", steps=4)
UNUSED: dict[str, Any] = {
    "ddp": {"find_unused_parameters": True, "broadcast_buffers": False},
    "skip": ((1, 0), (1, 2), (0, 3)),
}


def _register_hook(ddp: Any, manager: Any, kind: str, early: bool) -> None:
    """Register a user's hook of this kind, or, ``early``, ours around it."""
    state = None
    if kind == "powersgd":
        state = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=0.5)
    inner: Any = {"": None, "powersgd": powerSGD_hook}[kind]
    ddp.register_comm_hook(state, fp8dist.ddp.comm_hook(manager, inner) if early else inner)


JOBS: dict[str, tuple[int, str, Job]] = {
    # (ranks, kind of the user's hook, job)
    "bucket views, no_sync, next_step": (
        2,
        "",
        replace(DDP, ddp={"gradient_as_bucket_view": True}, accumulate=2, no_sync=True, update="next_step"),
    ),
    "static_graph, buckets": (2, "", replace(DDP, ddp={"static_graph": True, "bucket_cap_mb": 0.005})),
    "broadcast buffers": (2, "", replace(DDP, model="batchnorm", ddp={"broadcast_buffers": True})),
    "unused, own buffers": (2, "", replace(DDP, model="batchnorm", **UNUSED)),
    "unused, no_sync, on three ranks": (3, "", replace(DDP, accumulate=2, no_sync=True, **UNUSED)),
    # One bucket: with several, PowerSGD's callbacks race on gloo and hang, even without fp8dist (torch 2.13).
    "PowerSGD, accumulation without no_sync": (2, "powersgd", replace(DDP, accumulate=2)),
}


@pytest.mark.parametrize("name", few(JOBS, *(JOBS.keys() - {"broadcast buffers", "unused, no_sync, on three ranks"})))
def test_one_collective_per_step_and_a_hook_launches_it_early(request: pytest.FixtureRequest, name: str) -> None:
    """With our hook the state is that of the launch at the boundary, and each backward that reduces has a launch."""
    ranks, kind, job = JOBS[name]
    pool: RankPool = request.getfixturevalue(POOLS[ranks])
    late = pool.run(train, replace(job, hook=partial(_register_hook, kind=kind, early=False) if kind else None))
    early = pool.run(train, replace(job, hook=partial(_register_hook, kind=kind, early=True)))
    assert_synced(late)
    assert_synced(early)
    for mine, theirs in zip(early, late):
        assert mine.fp8_collectives == [1 if job.no_sync else job.accumulate] * job.steps
        assert theirs.fp8_collectives == [1] * job.steps
        assert mine.steps == theirs.steps == job.steps
        if ranks == 2:  # DDP's own hook divides before it adds up.
            assert (mine.losses, mine.parameter_bits) == (theirs.losses, theirs.parameter_bits)
            assert mine.state == theirs.state
    # Amaxes of one rank alone do not explain the state. Otherwise the test would pass without any sync.
    with pytest.raises(AssertionError):
        assert_synced([late[0], *(replace(other, amaxes=[]) for other in late[1:])])


@pytest.mark.parametrize("inside", [False, True])
@on_ranks(2)
def test_a_hook_waits_for_weights_that_ddp_ignores(inside: bool) -> None:
    """Their gradient amaxes may come after DDP's last bucket. ``inside``: which comes in a backward of its own."""
    windows = []
    for hook in (False, True):
        net = make_net()
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["first.weight", "first.bias"])
        job = SmallJob(net=net)
        if inside:
            job.net.branch.forward = partial(checkpoint, job.net.branch.forward, use_reentrant=True)
        if hook:
            job.called.register_comm_hook(None, fp8dist.ddp.comm_hook(job.manager))
        for index in range(3):
            job.step(index)
        windows.append(histories(job.manager))
    assert windows[0] == windows[1]
    assert windows[0]["first", "grad_output"][-3] > 0


def test_comm_hook_is_refused_with_a_frozen_converted_weight() -> None:
    net = make_net()
    manager = fp8dist.prepare(net, skip=("last",))
    net.last.weight.requires_grad_(False)
    net.branch.bias.requires_grad_(False)
    fp8dist.ddp.comm_hook(manager)  # Frozen parameters that are not in FP8 are allowed.
    net.branch.weight.requires_grad_(False)
    with pytest.raises(ConfigurationError, match=r"branch\.weight is frozen"):
        fp8dist.ddp.comm_hook(manager)


@on_ranks(2)
def test_refresh_weights_after_an_early_launch_forgets_what_was_sent() -> None:
    job = SmallJob(DelayedScaling(history_len=4), optimizer=partial(torch.optim.SGD, lr=0.0))
    job.called.register_comm_hook(None, fp8dist.ddp.comm_hook(job.manager))
    job.backward(0)  # Launches the sync.
    job.net.first.weight.data.mul_(1e-3)
    job.manager.refresh_weights()
    job.optimizer.step()
    largest = make_net().first.weight.detach().mul(1e-3).abs().max()
    slot = job.manager.slot("first", "weight")
    assert slot.amax_history.tolist() == [0.0] * 4
    assert slot.scale.item() == (torch.tensor(448.0) / largest).item()


# Uneven data --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Uneven:
    """The number of batches of each rank in one or more Join contexts, and how they are used."""

    batches: tuple[tuple[int, ...], ...]
    accumulate: int = 1
    no_sync: bool = False
    update: str = "same_step"
    ddp: dict[str, Any] = field(default_factory=dict)
    batchnorm: bool = False


def _train_uneven(job: Uneven) -> Outcome:
    rank = dist.get_rank()
    recipe = DelayedScaling(history_len=HISTORY, update=job.update)  # type: ignore[arg-type]
    small = SmallJob(recipe, make_net(batchnorm=job.batchnorm), partial(DistributedDataParallel, **job.ddp))
    recorder, manager, ddp = AmaxRecorder(small.net), small.manager, small.called
    losses, collectives, ended = [], [], 0
    for first, batches in enumerate(job.batches):
        with counted_collectives() as calls, Join([ddp, manager]):
            for i in range(batches[rank]):
                boundary = (i + 1) % job.accumulate == 0
                with ddp.no_sync() if job.no_sync and not boundary else contextlib.nullcontext():
                    losses.append(float(small.backward(100 * first + i)))
                if boundary:
                    small.optimizer.step()
                    small.optimizer.zero_grad()
                    recorder.end_step()
        collectives.append(len(calls.syncs(manager)))
        assert manager._cycle.measurement.waits._open == []  # Waits inside Join do not count for later steps.
        recorder.end_data(counts=job.accumulate > 1 and not job.no_sync)
        ended += max(batches) // job.accumulate
        # An exhausted rank's incomplete step was sent where its backwards were synced; only others take the step.
        recorder.steps = [*recorder.steps, *[{}] * ended][:ended]
        small.optimizer.zero_grad()
    state, steps = state_bits(manager), manager.steps
    return Outcome(losses, full(small.net), state, collectives, steps, histories(manager), recorder.steps)


UNEVEN = {
    "none and 4": Uneven(((0, 4),)),
    "several times, then evenly; next_step": Uneven(((2, 4), (4, 2), (2, 2)), update="next_step"),
    "accumulation without no_sync, both end within a step": Uneven(((4, 7),), accumulate=3),
    "find_unused_parameters": Uneven(((2, 5),), ddp={"find_unused_parameters": True}),
    "broadcast buffers": Uneven(((2, 5),), ddp={"broadcast_buffers": True}, batchnorm=True),
    "three ranks, accumulation without no_sync": Uneven(((5, 1, 4),), accumulate=2),
    "three ranks, no_sync, next_step": Uneven(((3, 7, 5),), accumulate=2, no_sync=True, update="next_step"),
}


RARELY = {"find_unused_parameters", "accumulation without no_sync, both end within a step"}


@pytest.mark.parametrize("name", few(UNEVEN, *(UNEVEN.keys() - RARELY)))
def test_join_with_uneven_data(request: pytest.FixtureRequest, name: str) -> None:
    job = UNEVEN[name]
    outcomes = request.getfixturevalue(POOLS[len(job.batches[0])]).run(_train_uneven, job)
    steps = [max(batches) // job.accumulate for batches in job.batches]
    for outcome in outcomes:
        assert outcome.fp8_collectives == (steps if job.no_sync else [max(batches) for batches in job.batches])
        assert outcome.steps == sum(steps)
    assert_synced(outcomes)


@on_ranks(2)
def test_a_rank_without_data_still_learns_of_its_last_step() -> None:
    """Under next_step a verdict is read one boundary later. Rank 1 has none: it only takes part in the others'."""
    rank, reports = dist.get_rank(), []
    job = SmallJob(DelayedScaling(history_len=8, update="next_step"), check_policy="warn")
    job.manager.on_event(lambda event: reports.append(event.report))
    with captured_log(), Join([job.called, job.manager]):
        for step in range((4, 2)[rank]):
            if (rank, step) == (1, 1):
                job.manager.slot("first", "input").scale.mul_(4.0)
            job.step(step)
    assert [(finding.step, finding.kind) for report in reports for finding in report.findings] == [(2, "scale")]


@on_ranks(2)
def test_join_before_attach_is_refused() -> None:
    net = make_net()
    manager = fp8dist.prepare(net, group=dist.group.WORLD)
    with pytest.raises(ConfigurationError, match=r"attach\(ddp"):
        Join([DistributedDataParallel(net), manager])


@on_ranks(2)
def test_join_on_a_copy_of_a_ddp_model() -> None:
    job, rank = SmallJob(), dist.get_rank()
    twin = copy.deepcopy(job.called)
    manager: Any = fp8dist.get_manager(twin)
    manager.attach(twin)
    with Join([twin, manager]):
        for step in range(2 + rank):
            twin(batch(rank, step)[0]).square().mean().backward()
            manager.step()
    assert (manager.steps, job.manager.steps) == (3, 0)
    same_on_all_ranks(state_bits(manager))


# Recipes ------------------------------------------------------------------------------------------------------------

STEPS = 4
SLOTS = 3 * 3  # Slots of Net.

RECIPES: dict[str, tuple[Recipe, dict[str, Recipe | High], list[int]]] = {
    # (recipe, overrides, bytes of each all-reduce of a step)
    "current": (CurrentScaling(), {}, []),
    "rowwise": (RowwiseScaling(), {}, []),
    "block": (BlockScaling(), {}, []),
    "mx": (MXFP8Scaling(), {}, []),
    "two delayed": (
        DelayedScaling(history_len=HISTORY),
        {"last": DelayedScaling(history_len=2, format="e4m3")},
        [4 * (8 + 6), 4 * (8 + 3)],
    ),
    "delayed, current, high": (
        DelayedScaling(history_len=HISTORY),
        {"first": CurrentScaling(), "branch": "high"},
        [4 * (8 + 3)],
    ),
    "current, one delayed": (CurrentScaling(), {"branch": DelayedScaling(history_len=1)}, [4 * (8 + 3)]),
}


@pytest.mark.parametrize("name", RECIPES)
@on_ranks(2)
def test_each_recipe_under_ddp(name: str) -> None:
    """Forward and backward have no collectives, and a step only those in RECIPES."""
    recipe, overrides, reduced = RECIPES[name]
    model, called, manager, optimizer = build(Job("ddp", recipe=recipe, overrides=overrides))
    assert manager is not None
    # Attach derives delayed scales of weights, once per arena.
    of_attach = sum(each != "high" and each.delayed for each in {recipe, *overrides.values()})
    losses = []
    for step in range(STEPS):
        with counted_collectives() as calls:
            x, y = batch(dist.get_rank(), step)
            loss = nn.functional.mse_loss(called(x, skip=step == 1 and dist.get_rank() == 0), y)
            (loss + 0 * sum(p.sum() for p in model.parameters())).backward()  # type: ignore[arg-type]
            assert not calls.names
            optimizer.step()
            assert list(zip(calls.names, calls.sizes)) == [("all_reduce", size) for size in reduced]
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        assert manager.steps == step + 1
        assert manager.metrics()["fp8/collectives"] == (step + 1) * len(reduced) + of_attach
    assert losses[0] != losses[-1]
    report = manager.check(parameters=True, policy="warn")
    assert report.consistent, str(report)
    expected = {fqn: overrides.get(fqn, recipe) for fqn in ("first", "branch", "last")}
    found = {slot.fqn: manager.slot(*slot).recipe for slot in manager.slots}
    assert found == {fqn: each for fqn, each in expected.items() if each != "high"}


@pytest.mark.parametrize("name", ["block", "two delayed", "current, one delayed"])
@on_ranks(2)
def test_join_and_precision_of_each_recipe(name: str) -> None:
    recipe, overrides, _ = RECIPES[name]
    settings = {"check_every": 2}
    run = Running(Job("ddp", optimizer="plain sgd", recipe=recipe, overrides=overrides, settings=settings))
    run.manager.set_precision("first", "high", steps=4)
    with Join([run.called, run.manager]):  # type: ignore[list-item]
        for _ in range(2 + 3 * dist.get_rank()):
            run.step()
    assert run.manager.slot("first", "input").high_precision == ()  # On the rank without data too.
    for _ in range(2):  # All ranks train again.
        run.step()
    report = run.manager.check(parameters=True, policy="warn")
    assert report.consistent, str(report)
    assert run.manager.steps == 2 + 3 + 2


@pytest.mark.parametrize(("name", "found_in"), [("current, one delayed", 2), ("current", 4)])
@on_ranks(2)
def test_a_rank_that_alone_changes_precision_is_found(name: str, found_in: int) -> None:
    """At the next sync; by the next check if steps have no sync."""
    recipe, overrides, _ = RECIPES[name]
    run = Running(Job("ddp", recipe=recipe, overrides=overrides))
    report, step = None, 0
    with captured_log():
        for step in range(4):
            if step == 2 and dist.get_rank() == 1:
                run.manager.set_precision("last", "high")
            before = state_of(run.manager)
            try:
                run.step()
            except DivergenceError as error:
                report = error.report
                assert state_of(run.manager) == before  # What ranks count differently is not committed.
                break
        else:
            report, step = run.manager.check(policy="warn"), 4
    assert report is not None
    assert (step, {finding.kind for finding in report.findings}) == (found_in, {"manifest"})

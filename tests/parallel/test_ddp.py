"""DistributedDataParallel on real ranks: one FP8 collective per step, with all options of DDP."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import fp8dist
from fp8dist import DelayedScaling, StateManager
from fp8dist.errors import ConfigurationError
from tests.support import sharded
from tests.support.collectives import counted_collectives
from tests.support.logs import captured_log
from tests.support.ranks import RankPool, on_ranks
from tests.support.sharded import Job, Outcome, full, train
from tests.support.suite import few
from tests.support.training import (
    AmaxRecorder,
    Net,
    batch,
    expected_histories,
    fp8_count,
    histories,
    make_net,
    parameter_bits,
    state_bits,
)

HISTORY = 8
DDP = Job("ddp", optimizer="sgd", steps=4)
UNUSED: dict[str, Any] = {
    "ddp": {"find_unused_parameters": True, "broadcast_buffers": False},
    "skip": ((1, 0), (1, 2), (0, 3)),
}


def bf16_hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP wants annotations as objects, or none.
    """Like torch's hook, which DDP rejects by name without NCCL."""
    return bf16_compress_hook(state, bucket)


def _hook(kind: str = "", early: bool = False) -> Any:
    """Return what registers a user's hook of this kind, or ours around it."""
    return partial(_register_hook, kind=kind, early=early)


def _register_hook(ddp: DistributedDataParallel, manager: StateManager, kind: str, early: bool) -> None:
    state = None
    if kind == "powersgd":
        state = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=0.5)
    inner: Any = {"": None, "bf16": bf16_hook, "powersgd": powerSGD_hook}[kind]
    ddp.register_comm_hook(state, fp8dist.ddp.comm_hook(manager, inner) if early else inner)


def assert_agree(outcomes: Sequence[Outcome], length: int) -> None:
    """All ranks hold the same parameters and state, and the state follows from all ranks' amaxes."""
    first = outcomes[0]
    for other in outcomes[1:]:
        assert other.parameter_bits == first.parameter_bits
        assert other.state == first.state
    expected = expected_histories(list(first.histories), [o.amaxes for o in outcomes], length)
    for outcome in outcomes:
        assert outcome.histories == expected


PLAIN = {
    "plain": DDP,
    "accumulation without no_sync": replace(DDP, accumulate=3),
    "bucket views, no_sync, next_step": replace(
        DDP, ddp={"gradient_as_bucket_view": True}, accumulate=2, no_sync=True, update="next_step"
    ),
    "static_graph, buckets": replace(DDP, ddp={"static_graph": True, "bucket_cap_mb": 0.005}, accumulate=2),
    "unused, own buffers": replace(DDP, model="batchnorm", **UNUSED),
    "broadcast buffers": replace(DDP, model="batchnorm", ddp={"broadcast_buffers": True}, accumulate=2, no_sync=True),
    "user's bf16 hook, unused": replace(DDP, hook=_hook("bf16"), **UNUSED),
    # One bucket: with several, PowerSGD's callbacks race on gloo and hang, even without fp8dist (torch 2.13).
    "user's PowerSGD hook, no_sync": replace(DDP, hook=_hook("powersgd"), accumulate=2, no_sync=True),
}


@pytest.mark.parametrize("name", few(PLAIN, *[*PLAIN][1::2]))
def test_one_collective_per_optimizer_step(two_ranks: RankPool, name: str) -> None:
    outcomes = two_ranks.run(train, PLAIN[name])
    assert_agree(outcomes, sharded.HISTORY)
    for outcome in outcomes:
        assert outcome.fp8_collectives == [1] * DDP.steps
        assert outcome.steps == DDP.steps


@pytest.mark.slow
def test_three_ranks_with_unused_modules(three_ranks: RankPool) -> None:
    outcomes = three_ranks.run(train, replace(DDP, accumulate=2, no_sync=True, **UNUSED))
    assert_agree(outcomes, sharded.HISTORY)
    assert [outcome.fp8_collectives for outcome in outcomes] == [[1] * DDP.steps] * 3


EARLY = {
    "default, next_step": ("", replace(DDP, update="next_step")),
    "several buckets": ("", replace(DDP, ddp={"bucket_cap_mb": 0.005, "static_graph": True})),
    "unused": ("", replace(DDP, **UNUSED)),
    "no_sync": ("", replace(DDP, accumulate=3, no_sync=True)),
    "bf16, accumulation without no_sync": ("bf16", replace(DDP, accumulate=2)),
    "PowerSGD, accumulation without no_sync": ("powersgd", replace(DDP, accumulate=2)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", few(EARLY, "unused", "no_sync", "PowerSGD, accumulation without no_sync"))
def test_comm_hook_gives_the_state_of_the_boundary_launch(two_ranks: RankPool, name: str) -> None:
    kind, job = EARLY[name]
    early = two_ranks.run(train, replace(job, hook=_hook(kind, early=True)))
    late = two_ranks.run(train, replace(job, hook=_hook(kind) if kind else None))
    assert_agree(early, sharded.HISTORY)
    synced_backwards = 1 if job.no_sync else job.accumulate
    for mine, theirs in zip(early, late):
        assert mine.fp8_collectives == [synced_backwards] * job.steps
        assert theirs.fp8_collectives == [1] * job.steps
        assert mine.losses == theirs.losses
        assert mine.parameter_bits == theirs.parameter_bits
        assert mine.state == theirs.state


def _attached(
    hook: bool = False, lr: float = 0.01, policy: Any = None, update: Any = "same_step", **options: Any
) -> tuple[Net, StateManager, DistributedDataParallel, torch.optim.Optimizer]:
    """Return (net, manager, DDP, optimizer). ``hook``: launch early; ``options``: of DDP."""
    net = make_net()
    recipe = DelayedScaling(history_len=HISTORY, update=update)
    manager = fp8dist.prepare(net, recipe, group=dist.group.WORLD, check_policy=policy)
    ddp = DistributedDataParallel(net, **options)
    if hook:
        ddp.register_comm_hook(None, fp8dist.ddp.comm_hook(manager))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=lr)
    manager.attach(ddp, optimizer=optimizer)
    return net, manager, ddp, optimizer


@on_ranks(2)
def test_comm_hook_launches_in_backward_after_the_last_of_several_buckets() -> None:
    _, manager, ddp, _ = _attached(bucket_cap_mb=0.005)
    order: list[str] = []

    def inner(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        order.append("last bucket" if bucket.is_last() else "bucket")
        return bf16_compress_hook(state, bucket)

    ddp.register_comm_hook(None, fp8dist.ddp.comm_hook(manager, inner))
    ddp(batch(0, 0)[0]).sum().backward()  # DDP rebuilds its buckets after this one.
    ddp(batch(0, 0)[0]).sum().backward()
    order.clear()
    with counted_collectives() as calls:
        ddp(batch(0, 1)[0]).sum().backward()
    early = fp8_count(calls, manager)
    fp8dist.restore(ddp)
    assert order.count("bucket") >= 1
    assert order[-1] == "last bucket"
    assert order.count("last bucket") == 1
    assert early == 1


def test_comm_hook_is_refused_with_a_frozen_converted_weight() -> None:
    net = make_net()
    manager = fp8dist.prepare(net)
    fp8dist.ddp.comm_hook(manager)
    net.branch.weight.requires_grad_(False)
    with pytest.raises(ConfigurationError, match=r"branch\.weight is frozen"):
        fp8dist.ddp.comm_hook(manager)


def test_comm_hook_allows_frozen_parameters_that_are_not_fp8() -> None:
    net = make_net()
    manager = fp8dist.prepare(net, skip=("branch",))
    net.branch.weight.requires_grad_(False)
    net.last.bias.requires_grad_(False)
    fp8dist.ddp.comm_hook(manager)


@dataclass(frozen=True)
class Uneven:
    """The number of batches of each rank, and how it uses them."""

    batches: tuple[int, ...]
    accumulate: int = 1
    no_sync: bool = False
    update: str = "same_step"
    ddp: dict[str, Any] = field(default_factory=dict)
    afterwards: int = 0
    joined_twice: bool = False
    batchnorm: bool = False
    two_outputs: bool = False


class TwoHeads(Net):
    """Returns two tensors, so that backward enters the graph at two places."""

    def forward(self, x: Tensor, skip: bool = False) -> Any:
        h = torch.relu(self.first(x))
        return self.last(h), self.branch(h)


def _epoch(
    job: Uneven,
    ddp: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    recorder: AmaxRecorder,
    count: int,
    first_index: int,
) -> list[float]:
    losses = []
    for i in range(count):
        boundary = (i + 1) % job.accumulate == 0
        with ddp.no_sync() if job.no_sync and not boundary else contextlib.nullcontext():
            x, y = batch(dist.get_rank(), first_index + i)
            output = ddp(x)
            if job.two_outputs:
                output = output[0] + output[1].mean()
            loss = nn.functional.mse_loss(output, y) / job.accumulate
            loss.backward()
        losses.append(float(loss.detach()))
        if boundary:
            optimizer.step()
            optimizer.zero_grad()
            recorder.end_step()
    return losses


def _train_uneven(job: Uneven) -> Outcome:
    rank = dist.get_rank()
    net = make_net(batchnorm=job.batchnorm)
    if job.two_outputs:
        net.__class__ = TwoHeads
    recipe = DelayedScaling(history_len=HISTORY, update=job.update)  # type: ignore[arg-type]
    manager = fp8dist.prepare(net, recipe, group=dist.group.WORLD)
    ddp = DistributedDataParallel(net, **job.ddp)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    manager.attach(ddp, optimizer=optimizer)
    recorder = AmaxRecorder(net)
    with counted_collectives() as calls, Join([ddp, manager]):
        losses = _epoch(job, ddp, optimizer, recorder, job.batches[rank], 0)
    in_join = fp8_count(calls, manager)
    assert manager._cycle.measurement.waits._open == []  # Waits inside Join do not count for later steps.
    recorder.end_data(counts=job.accumulate > 1 and not job.no_sync)
    optimizer.zero_grad()
    if job.joined_twice:
        with Join([ddp, manager]):
            losses += _epoch(job, ddp, optimizer, recorder, job.batches[::-1][rank], 100)
        optimizer.zero_grad()
    if job.afterwards:
        losses += _epoch(job, ddp, optimizer, recorder, job.afterwards, 200)
    return Outcome(losses, full(net), state_bits(manager), [in_join], manager.steps, histories(manager), recorder.steps)


def assert_joined(job: Uneven, outcomes: Sequence[Outcome]) -> None:
    longest = max(job.batches)
    synced = longest // job.accumulate if job.no_sync else longest
    for outcome in outcomes:
        assert outcome.fp8_collectives == [synced]
        assert outcome.steps == longest // job.accumulate
    # An exhausted rank's incomplete step was sent where its backwards were synced; only the other ranks take the step.
    complete = [replace_amaxes(o, longest // job.accumulate) for o in outcomes]
    assert_agree(complete, HISTORY)


def replace_amaxes(outcome: Outcome, steps: int) -> Outcome:
    return replace(outcome, amaxes=outcome.amaxes[:steps])


UNEVEN = [
    pytest.param(Uneven((0, 4)), id="none and 4"),
    pytest.param(Uneven((6, 3), update="next_step"), id="next_step"),
    pytest.param(Uneven((4, 4)), id="even"),
    pytest.param(Uneven((3, 6), accumulate=2), id="accumulation without no_sync, ends within a step"),
    pytest.param(Uneven((4, 7), accumulate=3), id="accumulation without no_sync, both end within a step"),
    pytest.param(Uneven((7, 4), accumulate=3, no_sync=True, update="next_step"), id="no_sync, next_step, within"),
    pytest.param(Uneven((2, 5), ddp={"find_unused_parameters": True}), id="find_unused_parameters"),
    pytest.param(Uneven((2, 4), two_outputs=True), id="two outputs"),
    pytest.param(Uneven((2, 5), ddp={"broadcast_buffers": True}, batchnorm=True), id="broadcast buffers"),
]


@pytest.mark.parametrize("job", UNEVEN)
def test_join_with_uneven_data(two_ranks: RankPool, job: Uneven) -> None:
    assert_joined(job, two_ranks.run(_train_uneven, job))


@pytest.mark.parametrize(
    "job",
    [Uneven((5, 1, 4), accumulate=2), Uneven((3, 7, 5), accumulate=2, no_sync=True, update="next_step")],
    ids=["accumulation without no_sync", "no_sync, next_step"],
)
def test_join_on_three_ranks(three_ranks: RankPool, job: Uneven) -> None:
    assert_joined(job, three_ranks.run(_train_uneven, job))


def test_training_goes_on_after_join(two_ranks: RankPool) -> None:
    """A second Join with the roles swapped, then even steps with one collective each: no rank has outdated state."""
    job = Uneven((2, 4), update="next_step", joined_twice=True, afterwards=2)
    outcomes = two_ranks.run(_train_uneven, job)
    first, second = outcomes
    assert first.state == second.state
    assert first.parameter_bits == second.parameter_bits
    assert first.steps == second.steps == 4 + 4 + 2
    assert first.histories["first", "input"].count(0.0) == 0
    # The last two entries are the even steps, with both ranks' amaxes.
    for slot, window in first.histories.items():
        expected = [max(first.amaxes[i][slot], second.amaxes[i][slot]) for i in (-2, -1)]
        assert window[-2:] == expected


@on_ranks(2)
def test_a_rank_without_data_still_learns_of_its_last_step() -> None:
    """Under next_step a verdict is read one boundary later. Rank 1 has none: it only takes part in the others'."""
    rank = dist.get_rank()
    _, manager, ddp, optimizer = _attached(policy="warn", update="next_step")
    reports: list[Any] = []
    manager.on_event(lambda event: reports.append(event.report))
    with captured_log(), Join([ddp, manager]):
        for step in range((4, 2)[rank]):
            if (rank, step) == (1, 1):
                manager.slot("first", "input").scale.mul_(4.0)
            x, y = batch(rank, step)
            nn.functional.mse_loss(ddp(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert [(finding.step, finding.kind) for report in reports for finding in report.findings] == [(2, "scale")]


@on_ranks(2)
def test_join_refuses_what_would_hang() -> None:
    net = make_net()
    manager = fp8dist.prepare(net, group=dist.group.WORLD)
    ddp = DistributedDataParallel(net)
    texts = []
    with pytest.raises(ConfigurationError) as without_attach:
        Join([ddp, manager])
    texts.append(str(without_attach.value))
    manager.attach(ddp, optimizer=torch.optim.SGD(ddp.parameters(), lr=0.1))
    fp8dist.ddp.comm_hook(manager)
    with pytest.raises(ConfigurationError) as with_hook:
        Join([ddp, manager])
    texts.append(str(with_hook.value))
    without_attach, with_hook = texts
    assert "attach(ddp" in without_attach
    assert "comm_hook" in with_hook


def test_the_oracle_of_these_tests_can_fail(two_ranks: RankPool) -> None:
    """Amaxes of one rank alone do not explain the state. Otherwise these tests would pass without any sync."""
    outcomes = two_ranks.run(train, DDP)
    with pytest.raises(AssertionError):
        assert_agree([outcomes[0], replace(outcomes[1], amaxes=[])], sharded.HISTORY)
    assert outcomes[0].losses != outcomes[1].losses


# Early launches: no lost and no undetected state ----------------------------------------------------


def _join_on_a_copy() -> tuple[int, dict[str, bytes], dict[str, bytes]]:
    rank = dist.get_rank()
    _, manager, ddp, _ = _attached()
    twin = copy.deepcopy(ddp)
    twins = fp8dist.get_manager(twin)
    assert twins is not manager
    other = torch.optim.SGD(twin.parameters(), lr=0.05)
    twins.attach(twin, optimizer=other)
    with Join([twin, twins]):
        for step in range(2 + rank):
            x, y = batch(rank, step)
            nn.functional.mse_loss(twin(x), y).backward()
            other.step()
            other.zero_grad()
    assert manager.steps == 0
    return twins.steps, state_bits(twins), parameter_bits(twin)


def test_join_on_a_copy_of_a_ddp_model(two_ranks: RankPool) -> None:
    first, second = two_ranks.run(_join_on_a_copy, timeout=30)
    assert first == second
    assert first[0] == 3


@on_ranks(2)
def test_refresh_weights_after_an_early_launch_forgets_what_was_sent() -> None:
    net, manager, ddp, optimizer = _attached(hook=True, lr=0.0, find_unused_parameters=True)
    ddp(batch(dist.get_rank(), 0)[0]).sum().backward()  # Launches the sync.
    net.first.weight.data.mul_(1e-3)
    manager.refresh_weights()
    optimizer.step()
    largest = make_net().first.weight.detach().mul(1e-3).abs().max()
    assert manager.slot("first", "weight").amax_history.tolist() == [0.0] * HISTORY
    assert manager.slot("first", "weight").scale.item() == (torch.tensor(448.0) / largest).item()

"""FullyShardedDataParallel (FSDP1) gives DDP's numbers with the memory of a shard."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl
from torch.distributed.algorithms._comm_hooks.default_hooks import DefaultState, reduce_scatter_hook
from torch.distributed.fsdp import FullyShardedDataParallel

import fp8dist
from fp8dist.errors import ConfigurationError, DivergenceError
from fp8dist.modules.fp8_linear import FP8Linear
from tests.support.fsdp1 import (
    BF16,
    FOREACH,
    FUSED,
    HISTORY,
    SGD,
    Buffered,
    Job,
    assert_bitwise,
    assert_synced,
    build,
    clean_names,
    quiet,
    train,
)
from tests.support.logs import captured_log
from tests.support.parallel import loss_of, make_blocks, tokens, watched_reductions
from tests.support.ranks import RankPool
from tests.support.states import state_of, without
from tests.support.training import AmaxRecorder, expected_histories, histories, state_bits

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "job",
    [
        Job("SHARD_GRAD_OP", steps=10, optimizer=FUSED),
        Job("NO_SHARD"),
        Job("FULL_SHARD", per_block=False, optimizer=FOREACH, update="next_step"),
        Job("FULL_SHARD", accumulate=3, no_sync=True, steps=2),
        Job("FULL_SHARD", frozen=("model.blocks.0.up.weight", "model.blocks.1.norm.bias")),
    ],
    ids=["SHARD_GRAD_OP", "NO_SHARD", "one unit, next_step", "no_sync", "frozen"],
)
def test_on_two_ranks_fsdp1_is_ddp_to_the_bit(two_ranks: RankPool, job: Job) -> None:
    """The sum of two numbers does not depend on their order."""
    sharded = two_ranks.run(train, job)
    replicated = two_ranks.run(train, replace(job, strategy=""))
    for mine, theirs in zip(sharded, replicated):
        assert_bitwise(mine, theirs)
        assert mine.syncs == [1] * job.steps
    assert_synced(sharded)


def test_gradient_clipping(two_ranks: RankPool) -> None:
    """The norm of shards is summed in another order, so the factor may differ by an ULP, and then casts may differ
    too."""
    job = Job(clip=0.5, steps=2, optimizer=FOREACH)
    sharded, replicated = two_ranks.run(train, job), two_ranks.run(train, replace(job, strategy=""))
    unclipped = two_ranks.run(train, replace(job, clip=0.0, optimizer=SGD))
    for mine, theirs, free in zip(sharded, replicated, unclipped):
        assert mine.losses == pytest.approx(theirs.losses, rel=1e-3)
        assert mine.losses[0] == theirs.losses[0]
        assert mine.losses[1:] != free.losses[1:]
    assert_synced(sharded)


def test_on_three_ranks(three_ranks: RankPool) -> None:
    """The first step is bitwise equal. Later, sums of three numbers in another order change single elements by an FP8
    step."""
    sharded = three_ranks.run(train, Job("FULL_SHARD"))
    replicated = three_ranks.run(train, Job(""))
    for mine, theirs in zip(sharded, replicated):
        assert mine.losses[0] == theirs.losses[0]
        assert mine.losses == pytest.approx(theirs.losses, rel=1e-3)
        for slot, window in theirs.histories.items():
            assert mine.histories[slot] == pytest.approx(window, rel=2e-2)
    assert_synced(sharded)


def test_mixed_precision(two_ranks: RankPool) -> None:
    """Amaxes are those of the bfloat16 tensors that the modules multiply, which the recorder sees too."""
    outcomes = two_ranks.run(train, Job(precision=BF16, optimizer=FOREACH, steps=3))
    assert_synced(outcomes)
    rounded = float(make_blocks().blocks[0].up.weight.detach().bfloat16().abs().max())  # type: ignore[union-attr]
    exact = float(make_blocks().blocks[0].up.weight.detach().abs().max())  # type: ignore[union-attr]
    assert rounded != exact
    for outcome in outcomes:
        assert outcome.histories["model.blocks.0.up", "weight"][-3] == rounded
        for window in outcome.histories.values():
            assert all(float(torch.tensor(a).bfloat16()) == a for a in window)


# Memory ---------------------------------------------------------------------------------------------------


def _saved_fp8(strategy: str) -> tuple[list[int], int, float]:
    """Return the sizes of the FP8 tensors that a forward saves for backward, whether they still hold the weights, and
    the loss of the second step, whose backward recomputed them."""
    with quiet():
        built = build(Job(strategy))
    loss = built.backward(0)
    built.optimizer.step()
    built.optimizer.zero_grad()
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        if tensor.element_size() == 1:
            kept.append(tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        x, target = tokens(dist.get_rank(), 1)
        output = built.module(torch.cat([x, x, x]))  # 48 tokens: no activation is as large as a weight.
    weights = sum(1 for tensor in kept if tensor.numel() == 32 * 64)
    loss_of(output[:2], target).backward()
    held = [not linear.fp8_slots.cache.empty for linear in built.net.modules() if isinstance(linear, FP8Linear)]
    assert (held == [False] * 4) is bool(strategy)
    return sorted(tensor.numel() for tensor in kept), weights, loss


def test_no_cast_of_a_weight_outlives_its_forward(two_ranks: RankPool) -> None:
    inputs = [48 * 32, 48 * 32, 48 * 64, 48 * 64]
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP"):
        for kept, weights, _ in two_ranks.run(_saved_fp8, strategy):
            assert weights == 0
            assert [numel for numel in kept if numel] == inputs
    for kept, weights, _ in two_ranks.run(_saved_fp8, ""):
        assert weights == 4
        assert [numel for numel in kept if numel] == sorted([*inputs, *[32 * 64] * 4])


# Checks and modes -----------------------------------------------------------------------------------------


def _checked(strategy: str) -> Any:
    with quiet():
        built = build(Job(strategy))
    built.backward(0)
    built.optimizer.step()
    with captured_log():
        clean = built.manager.check(parameters=True, gradients=True, optimizer=built.optimizer)
    built.manager.refresh_weights()
    built.module.eval()
    with torch.no_grad():
        before = state_bits(built.manager)
        built.module(tokens(dist.get_rank(), 1)[0])
    assert state_bits(built.manager) == before
    scale = float(built.manager.slot("model.blocks.0.up", "weight").scale)
    full = torch.frombuffer(bytearray(built.full()["model.blocks.0.up.weight"]), dtype=torch.float32)
    assert scale == float(torch.tensor(448.0) / full.abs().max())
    return not clean.diverged, clean.compared, clean.skipped


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_check_gives_no_false_alarm(two_ranks: RankPool, strategy: str) -> None:
    for consistent, compared, skipped in two_ranks.run(_checked, strategy):
        assert consistent
        whole = dict(compared).get("parameter", 0)
        assert whole == (12 if strategy == "NO_SHARD" else 0)
        assert any("FSDP1" in reason for reason in skipped) is (strategy != "NO_SHARD")


def _calibrated(job: Job) -> Any:
    with quiet():
        built = build(job)
    recorder = AmaxRecorder(built.net)
    with watched_reductions() as reductions, built.manager.calibrate():
        loss = built.backward(0)
    recorder.end_step()
    plain = make_blocks()
    x, target = tokens(dist.get_rank(), 0)
    assert loss == pytest.approx(float(loss_of(plain(x + 0.125), target).detach()), rel=1e-5)
    return (
        [len(reductions.of(built.manager))],
        histories(built.manager),
        clean_names(recorder.steps),
        state_bits(built.manager),
    )


def test_calibration(two_ranks: RankPool) -> None:
    results = two_ranks.run(_calibrated, Job(hook="ours"))
    expected = expected_histories(list(results[0][1]), [r[2] for r in results], HISTORY)
    for syncs, windows, _, state in results:
        assert syncs == [1]
        assert windows == expected
        assert state == results[0][3]


def _flat_parameters() -> str:
    net = Buffered()
    manager = fp8dist.prepare(net, group=dist.group.WORLD)
    module = FullyShardedDataParallel(net, use_orig_params=False, device_id=torch.device("cpu"))
    with pytest.raises(ConfigurationError) as error:
        manager.attach(module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1))
    return str(error.value)


def test_flat_parameters_are_refused(two_ranks: RankPool) -> None:
    """Their weights are not parameters, and have no memory between forwards."""
    assert all("use_orig_params" in text for text in two_ranks.run(_flat_parameters))


def _interrupted(broken: bool) -> Any:
    with quiet():
        built = build(Job())
    linears = [module for module in built.net.modules() if isinstance(module, FP8Linear)]

    def fail(module: nn.Module, args: Any) -> None:
        raise KeyError("interrupted")

    states = []
    for step in range(3):
        if broken and step == 1:
            handle = linears[2].register_forward_pre_hook(fail)
            with pytest.raises(KeyError):
                built.backward(step)
            handle.remove()
            built.optimizer.zero_grad()
        loss = built.backward(step)
        built.optimizer.step()
        built.optimizer.zero_grad()
        states.append((loss, state_bits(built.manager)))
    return states


def test_training_goes_on_after_a_failed_forward(two_ranks: RankPool) -> None:
    """The failed forward had the same batch as the next one, so its amaxes are not larger."""
    assert two_ranks.run(_interrupted, True) == two_ranks.run(_interrupted, False)


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

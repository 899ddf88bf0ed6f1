"""FullyShardedDataParallel (FSDP1) gives DDP's numbers with the memory of a shard."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.algorithms._comm_hooks.default_hooks import DefaultState, reduce_scatter_hook
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision

import fp8dist
from fp8dist.errors import ConfigurationError
from fp8dist.modules.fp8_linear import FP8Linear
from tests.support.logs import captured_log
from tests.support.meshes import HISTORY, Job, assert_bitwise, assert_synced, build, clean_fqn, train
from tests.support.parallel import loss_of, make_blocks, tokens, watched_reductions
from tests.support.ranks import RankPool, on_ranks
from tests.support.suite import NIGHTLY, few
from tests.support.training import AmaxRecorder, expected_histories, histories, state_bits

FSDP1 = Job("fsdp1", optimizer="momentum")
BF16 = MixedPrecision(torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.bfloat16)

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "job",
    [
        pytest.param(replace(FSDP1, strategy="SHARD_GRAD_OP", buffer=True, steps=10, optimizer="fused"), marks=NIGHTLY),
        pytest.param(replace(FSDP1, strategy="NO_SHARD"), marks=NIGHTLY),
        replace(FSDP1, per_block=False, optimizer="foreach", update="next_step"),
        replace(FSDP1, accumulate=3, no_sync=True, steps=2),
        replace(FSDP1, frozen=("blocks.0.up.weight", "blocks.1.norm.bias")),
    ],
    ids=["SHARD_GRAD_OP", "NO_SHARD", "one unit, next_step", "no_sync", "frozen"],
)
def test_on_two_ranks_fsdp1_is_ddp_to_the_bit(two_ranks: RankPool, job: Job) -> None:
    """The sum of two numbers does not depend on their order."""
    sharded = two_ranks.run(train, job)
    replicated = two_ranks.run(train, replace(job, layout="ddp"))
    for mine, theirs in zip(sharded, replicated):
        assert_bitwise(mine, theirs)
        assert mine.syncs == [1] * job.steps
    assert_synced(sharded)


def test_gradient_clipping(two_ranks: RankPool) -> None:
    """The norm of shards is summed in another order, so the factor may differ by an ULP, and then casts may differ
    too."""
    job = replace(FSDP1, clip=0.5, steps=2, optimizer="foreach")
    sharded, replicated = two_ranks.run(train, job), two_ranks.run(train, replace(job, layout="ddp"))
    unclipped = two_ranks.run(train, replace(job, clip=0.0, optimizer="momentum"))
    for mine, theirs, free in zip(sharded, replicated, unclipped):
        assert mine.losses == pytest.approx(theirs.losses, rel=1e-3)
        assert mine.losses[0] == theirs.losses[0]
        assert mine.losses[1:] != free.losses[1:]
    assert_synced(sharded)


def test_on_three_ranks(three_ranks: RankPool) -> None:
    """The first step is bitwise equal. Later, sums of three numbers in another order change single elements by an FP8
    step."""
    sharded = three_ranks.run(train, FSDP1)
    replicated = three_ranks.run(train, replace(FSDP1, layout="ddp"))
    for mine, theirs in zip(sharded, replicated):
        assert mine.losses[0] == theirs.losses[0]
        assert mine.losses == pytest.approx(theirs.losses, rel=1e-3)
        for slot, window in theirs.histories.items():
            assert mine.histories[slot] == pytest.approx(window, rel=2e-2)
    assert_synced(sharded)


def test_mixed_precision(two_ranks: RankPool) -> None:
    """Amaxes are those of the bfloat16 tensors that the modules multiply, which the recorder sees too."""
    outcomes = two_ranks.run(train, replace(FSDP1, precision=BF16, buffer=True, optimizer="foreach", steps=3))
    assert_synced(outcomes)
    rounded = float(make_blocks().blocks[0].up.weight.detach().bfloat16().abs().max())  # type: ignore[union-attr]
    exact = float(make_blocks().blocks[0].up.weight.detach().abs().max())  # type: ignore[union-attr]
    assert rounded != exact
    for outcome in outcomes:
        assert outcome.histories["blocks.0.up", "weight"][-3] == rounded
        for window in outcome.histories.values():
            assert all(float(torch.tensor(a).bfloat16()) == a for a in window)


def _saved_fp8(job: Job) -> tuple[list[int], int, float]:
    """Return the sizes of the FP8 tensors that a forward saves for backward, whether they still hold the weights, and
    the loss of the second step, whose backward recomputed them."""
    built = build(job)
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
    held = [not linear.fp8_slots.cache.empty for linear in built.module.modules() if isinstance(linear, FP8Linear)]
    assert (held == [False] * 4) is (job.layout == "fsdp1")
    return sorted(tensor.numel() for tensor in kept), weights, loss


def test_no_cast_of_a_weight_outlives_its_forward(two_ranks: RankPool) -> None:
    inputs = [48 * 32, 48 * 32, 48 * 64, 48 * 64]
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP"):
        for kept, weights, _ in two_ranks.run(_saved_fp8, replace(FSDP1, strategy=strategy)):
            assert weights == 0
            assert [numel for numel in kept if numel] == inputs
    for kept, weights, _ in two_ranks.run(_saved_fp8, replace(FSDP1, layout="ddp")):
        assert weights == 4
        assert [numel for numel in kept if numel] == sorted([*inputs, *[32 * 64] * 4])


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@on_ranks(2)
def test_check_gives_no_false_alarm(strategy: str) -> None:
    built = build(replace(FSDP1, strategy=strategy))
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
    scale = float(built.manager.slot("blocks.0.up", "weight").scale)
    assert scale == float(torch.tensor(448.0) / built.parameters()["blocks.0.up.weight"].abs().max())
    assert not clean.diverged
    whole = dict(clean.compared).get("parameter", 0)
    assert whole == (12 if strategy == "NO_SHARD" else 0)
    assert any("FSDP1" in reason for reason in clean.skipped) is (strategy != "NO_SHARD")


def _calibrated(job: Job) -> Any:
    built = build(job)
    recorder = AmaxRecorder(built.module)
    with watched_reductions() as reductions, built.manager.calibrate():
        loss = built.backward(0)
    recorder.end_step()
    plain = make_blocks()
    x, target = tokens(dist.get_rank(), 0)
    assert loss == pytest.approx(float(loss_of(plain(x), target).detach()), rel=1e-5)
    return (
        [len(reductions.of(built.manager))],
        histories(built.manager),
        [{(clean_fqn(name), role): amax for (name, role), amax in step.items()} for step in recorder.steps],
        state_bits(built.manager),
    )


def test_calibration(two_ranks: RankPool) -> None:
    results = two_ranks.run(_calibrated, replace(FSDP1, hook="ours"))
    expected = expected_histories(list(results[0][1]), [r[2] for r in results], HISTORY)
    for syncs, windows, _, state in results:
        assert syncs == [1]
        assert windows == expected
        assert state == results[0][3]


@on_ranks(2)
def test_flat_parameters_are_refused() -> None:
    """Their weights are not parameters, and have no memory between forwards."""
    net = make_blocks()
    manager = fp8dist.prepare(net, group=dist.group.WORLD)
    module = FullyShardedDataParallel(net, use_orig_params=False, device_id=torch.device("cpu"))
    with pytest.raises(ConfigurationError) as error:
        manager.attach(module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1))
    assert "use_orig_params" in str(error.value)


HOOKED = [
    replace(FSDP1, strategy="SHARD_GRAD_OP", hook="inner", update="next_step"),
    replace(FSDP1, strategy="NO_SHARD", hook="inner"),
    replace(FSDP1, hook="ours", accumulate=3, update="next_step"),
    replace(FSDP1, hook="ours", accumulate=3, no_sync=True, frozen=("blocks.0.up.weight",)),
]


@pytest.mark.parametrize(
    "job",
    few(HOOKED, HOOKED[0], HOOKED[2]),
    ids=["inner, grad_op, next_step", "inner, no_shard", "accumulation", "no_sync"],
)
def test_comm_hook_gives_the_state_of_the_boundary_launch(two_ranks: RankPool, job: Job) -> None:
    early = two_ranks.run(train, job)
    late = two_ranks.run(train, replace(job, hook=""))
    synced = job.accumulate if job.accumulate > 1 and not job.no_sync else 1
    for mine, theirs in zip(early, late):
        assert_bitwise(mine, theirs)
        assert mine.syncs == mine.early == [synced] * job.steps
        assert theirs.syncs == [1] * job.steps
        assert theirs.early == [0] * job.steps
        # One unit per block; the root has no parameters.
        assert mine.inner_calls == (2 * job.steps if job.hook == "inner" else 0)
    assert_synced(early)


def test_activation_checkpointing(two_ranks: RankPool) -> None:
    """Reentrant checkpointing runs a backward per block inside the backward: each launches a sync, and they merge."""
    plain = two_ranks.run(train, replace(FSDP1, steps=2))
    for how in ("reentrant", "non-reentrant"):
        job = replace(FSDP1, checkpointing=how, steps=2)
        late, early = two_ranks.run(train, job), two_ranks.run(train, replace(job, hook="ours"))
        for expected, mine, hooked in zip(plain, late, early):
            assert_bitwise(mine, expected)
            assert_bitwise(hooked, expected)
            assert mine.syncs == [1] * 2
            assert hooked.syncs == [2 if how == "reentrant" else 1] * 2


def _fails_once(hook: str, where: str) -> list[Any]:
    """The second backward fails on all ranks; then training continues."""
    built = build(replace(FSDP1, hook=hook))

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
    return [state_bits(built.manager), built.parameter_bits()]


@pytest.mark.parametrize("where", ["start", "end"])
def test_a_failed_backward_does_not_break_the_next_one(two_ranks: RankPool, where: str) -> None:
    """The failed batch is repeated, so it records no other amaxes."""
    with_hook, without_it = two_ranks.run(_fails_once, "ours", where), two_ranks.run(_fails_once, "", where)
    assert with_hook == without_it
    assert with_hook[0] == with_hook[1]


def _fails_in_reduction(inner: bool) -> list[Any]:
    """The inner hook raises once, in the first unit that calls it."""
    built = build(FSDP1)
    calls = []

    def broken(state: Any, gradient: Tensor, *output: Tensor) -> None:
        calls.append(len(calls))
        if inner and len(calls) == 3:
            raise KeyError("interrupted")
        reduce_scatter_hook(state, gradient, *output)

    built.module.register_comm_hook(DefaultState(dist.group.WORLD), fp8dist.fsdp.comm_hook(built.manager, broken))
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

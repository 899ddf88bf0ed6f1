"""Meshes with two axes: tensor parallelism × FSDP2, and HSDP (replicate × shard). All four ranks share one state."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import fp8dist
from fp8dist import DelayedScaling, StateManager
from fp8dist.errors import ConfigurationError
from tests.support.logs import captured_log
from tests.support.meshes import (
    OPTIMIZERS,
    WORLD,
    Built,
    Job,
    Outcome,
    assert_agree,
    assert_bitwise,
    build,
    parallelize_blocks,
    train,
)
from tests.support.parallel import (
    LINEARS,
    loss_of,
    make_blocks,
    mesh_of,
    same_on_all_ranks,
    tokens,
    train_plain,
    watched_reductions,
)
from tests.support.ranks import RankPool, on_ranks
from tests.support.suite import NIGHTLY, few
from tests.support.training import histories, state_bits

pytestmark = [pytest.mark.slow]


STEPS = 5


def _trained(pool: RankPool, job: Job, **options: Any) -> list[Outcome]:
    """Return what each rank has. All of them share one state."""
    outcomes = pool.run(train, replace(job, **options))
    assert_agree(outcomes)
    for outcome in outcomes:
        assert outcome.reductions == [[WORLD]] * len(outcome.reductions)
    return outcomes


@pytest.mark.parametrize("layout", few(["tp", "hsdp"], "tp"))
def test_meshes_train_as_one_process(four_ranks: RankPool, layout: str) -> None:
    """With equal scales the operands are equal, except where sums round differently: such a sum sometimes changes an
    element to the neighbouring FP8 number, 2⁻³ away, one of hundreds in a sum."""
    results = _trained(four_ranks, Job(layout, optimizer="sgd", warmup="unit", steps=STEPS))
    ranks_per_replica = 2 if layout == "tp" else 1
    plain = train_plain(4 // ranks_per_replica, STEPS, OPTIMIZERS["sgd"])
    initial = dict(make_blocks().named_parameters())
    for rank, outcome in enumerate(results):
        losses, windows = outcome.losses, outcome.histories
        assert losses == pytest.approx([step[rank // ranks_per_replica] for step in plain.losses], rel=2e-3)
        for slot, window in plain.windows.items():
            assert windows[slot][-STEPS:] == pytest.approx(window, rel=2e-2), slot
        for name in LINEARS:  # Before the first update weights are bitwise equal, in any layout.
            assert windows[name, "weight"][-STEPS] == plain.windows[name, "weight"][0]
        for name, parameter in plain.parameters.items():
            moved = (parameter - initial[name].detach()).norm()
            error = (outcome.parameters[name] - parameter).norm()
            assert float(error / moved) < 0.02, name


@pytest.mark.parametrize(
    "job",
    [
        Job("tp", optimizer="foreach", accumulate=2),
        pytest.param(Job("tp", optimizer="fused", update="next_step"), marks=NIGHTLY),
        pytest.param(Job("hsdp", optimizer="fused", checkpointing="non-reentrant"), marks=NIGHTLY),
    ],
    ids=["tp, accumulation", "tp, fused, next_step", "hsdp, checkpointing"],
)
def test_fp8_all_gather_changes_no_bit(four_ranks: RankPool, job: Job) -> None:
    gathered = _trained(four_ranks, job, steps=2)
    cast_after = _trained(four_ranks, job, steps=2, fp8_all_gather=False)
    for mine, theirs in zip(gathered, cast_after):
        assert_bitwise(mine, theirs)


@pytest.mark.parametrize("how", few(("reentrant", "non-reentrant"), "non-reentrant"))
def test_activation_checkpointing_changes_no_bit_of_losses_and_state(four_ranks: RankPool, how: str) -> None:
    without_it = _trained(four_ranks, Job(), steps=2)
    for mine, theirs in zip(_trained(four_ranks, Job(), steps=2, checkpointing=how), without_it):
        assert_bitwise(mine, theirs)


@pytest.mark.parametrize(
    ("layout", "damaged", "ranks", "name"),
    [
        ("tp", 1, (0, 1), "blocks.1.norm.weight"),
        pytest.param("tp", 2, (2, 3), "blocks.0.down.bias", marks=NIGHTLY),
        ("hsdp", 2, (0, 2), "blocks.0.up.weight"),
    ],
)
@on_ranks(4)
def test_replicas_that_differ_are_found(layout: str, damaged: int, ranks: tuple[int, ...], name: str) -> None:
    """There is no majority of two replicas, which are across the tensor-parallel axis, or are HSDP's."""
    built = build(Job(layout))
    built.step(0)
    parameter = dict(built.named())[name]
    assert isinstance(parameter, DTensor)
    if dist.get_rank() == damaged:
        with torch.no_grad():
            parameter.to_local().view(-1)[1] += 0.25
    with captured_log():
        report = built.manager.check(parameters=True, policy="warn")
    assert [(f.kind, f.name, f.ranks, f.reference_rank) for f in report.findings] == [("parameter", name, ranks, None)]


@on_ranks(4)
def test_the_data_parallel_axis_alone_is_refused_under_tensor_parallelism() -> None:
    mesh = mesh_of((2, 2), ("dp", "tp"))
    model = make_blocks()
    manager = fp8dist.prepare(model, group=mesh["dp"])
    parallelize_blocks(model, mesh["tp"])
    with pytest.raises(ConfigurationError) as error:
        manager.attach(model)
    rank = dist.get_rank()
    text = str(error.value)
    first = rank - rank % 2
    assert "blocks.0.up" in text
    whose = f"by ranks {first}, {first + 1}, but its FP8 state only by ranks {rank % 2}, {rank % 2 + 2}:"
    assert whose in text


@pytest.mark.parametrize("fp8_all_gather", [True, False])
@on_ranks(4)
def test_calibration_and_high_precision(fp8_all_gather: bool) -> None:
    built = build(Job(fp8_all_gather=fp8_all_gather))
    with watched_reductions() as reductions, built.manager.calibrate():
        built.backward(0)
    assert reductions.of(built.manager) == [WORLD]
    built.optimizer.zero_grad()
    assert built.manager.metrics()["fp8/cold_slots"] == 0
    same_on_all_ranks(state_bits(built.manager))
    first = histories(built.manager)["blocks.0.up", "weight"][-1]
    assert first == float(make_blocks().blocks[0].up.weight.detach().abs().max())  # type: ignore[union-attr]
    with built.manager.no_fp8():
        high = built.backward(1)
    built.optimizer.zero_grad()
    model = make_blocks()
    x, target = tokens(dist.get_rank() // 2, 1)
    exact = float(loss_of(model(x), target).detach())
    assert high == pytest.approx(exact, rel=2e-2 if fp8_all_gather else 1e-5)


def _interrupted_free(job: Job) -> Any:
    """Return the state without other jobs in the process."""
    built = build(job)
    for step in range(2):
        built.step(step)
    return state_bits(built.manager)


@on_ranks(4)
def test_managers_on_several_meshes_do_not_meet() -> None:
    """Two models on two ranks each, and one on all ranks: three managers in one process, stepped in turn."""
    mesh = mesh_of((2, 2), ("dp", "tp"))
    rank = dist.get_rank()
    whole_run = build(Job("hsdp", optimizer="sgd"))
    parts: list[tuple[nn.Module, StateManager, tuple[int, ...]]] = []
    for axis in ("dp", "tp"):
        model = make_blocks(seed=7)
        manager = fp8dist.prepare(model, DelayedScaling(history_len=4), group=mesh[axis], fp8_all_gather=True)
        module = fully_shard(model, mesh=mesh[axis])
        manager.attach(module)
        parts.append((module, manager, tuple(mesh[axis].mesh.tolist())))
    expected = _interrupted_free(whole_run.job)
    for step in range(2):
        for factor, (module, manager, ranks) in enumerate(parts, 2):
            with watched_reductions() as reductions:
                module(tokens(rank, step)[0] * factor).sum().backward()
                manager.step()
            assert reductions.of(manager) == [ranks]
            seen: list[Any] = [None] * 4
            dist.all_gather_object(seen, float((tokens(rank, step)[0] * factor).abs().max()))
            windows: list[Any] = [None] * 4
            dist.all_gather_object(windows, state_bits(manager))
            assert [windows[r] for r in ranks] == [windows[rank]] * 2
            other = next(r for r in range(4) if r not in ranks)
            assert windows[other] != windows[rank]
        whole_run.step(step)
    assert state_bits(whole_run.manager) == expected


@on_ranks(4)
def test_a_copy_made_before_sharding_has_its_own_state() -> None:
    """FSDP2 cannot copy a sharded model, so the copy comes first."""
    mesh = mesh_of((2, 2), ("replicate", "shard"))
    model = make_blocks()
    manager = fp8dist.prepare(model, DelayedScaling(history_len=4), group=mesh, fp8_all_gather=True)
    twin = copy.deepcopy(model)
    twins = fp8dist.get_manager(twin)
    results = []
    for one, of_one in ((model, manager), (twin, twins)):
        parallelize_blocks(one, mesh["shard"])
        module = fully_shard(one, mesh=mesh["replicate"])
        optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
        built = Built(module, of_one.attach(module, optimizer=optimizer), optimizer, Job("tp"))
        assert fp8dist.get_manager(module) is of_one
        losses = [built.step(step) for step in range(2)]
        results.append((losses, state_bits(of_one)))
        if one is model:
            assert twins.metrics()["fp8/collectives"] == 0
    assert results[0] == results[1]
    assert state_bits(manager) == results[0][1]


@on_ranks(4)
def test_a_mesh_in_another_order_gives_the_same_numbers() -> None:
    """A mesh with ranks in arbitrary order: the position on the mesh determines a rank's part."""
    mesh = DeviceMesh("cpu", [[3, 1], [2, 0]], mesh_dim_names=("dp", "tp"))
    model = make_blocks()
    manager = fp8dist.prepare(model, DelayedScaling(history_len=4), group=mesh, fp8_all_gather=True)
    parallelize_blocks(model, mesh["tp"])
    module = fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    manager.attach(module, optimizer=optimizer)
    replica, part = mesh.get_local_rank("dp"), mesh.get_local_rank("tp")
    for step in range(2):
        x, target = (t.chunk(2, 1)[part] for t in tokens(replica, step))
        (loss_of(module(x), target) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    same_on_all_ranks(state_bits(manager))
    assert not manager.check(gradients=True, optimizer=optimizer).diverged
    straight = build(Job("tp", optimizer="sgd"))
    for step in range(2):
        straight.step(step)
    assert histories(manager) == {slot: window[-4:] for slot, window in histories(straight.manager).items()}


@pytest.mark.long
@pytest.mark.nightly
def test_hybrid_shards_of_fsdp1_are_those_of_fsdp2(four_ranks: RankPool) -> None:
    job = Job("hsdp", optimizer="sgd")
    ours = _trained(four_ranks, job, layout="fsdp1", strategy="HYBRID_SHARD")
    for mine, theirs in zip(ours, _trained(four_ranks, job)):
        assert mine.losses[0] == theirs.losses[0]
        assert mine.losses == pytest.approx(theirs.losses, rel=1e-3)
        for slot, window in theirs.histories.items():
            assert mine.histories[slot] == pytest.approx(window, rel=2e-2)

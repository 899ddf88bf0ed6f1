"""Meshes with two axes: tensor parallelism × FSDP2, and HSDP (replicate × shard). All four ranks share one state."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import fp8dist
from fp8dist.errors import ConfigurationError
from tests.support.logs import captured_log
from tests.support.meshes import OPTIMIZERS, WORLD, Job, build, parallelize_blocks
from tests.support.parallel import (
    LINEARS,
    make_blocks,
    mesh_of,
    same_on_all_ranks,
    train_plain,
    watched_reductions,
)
from tests.support.ranks import RankPool
from tests.support.training import histories, state_bits

pytestmark = [pytest.mark.slow]


STEPS = 5


def _train(job: Job, steps: int = STEPS) -> Any:
    """Return (losses, windows, state, whole parameters) as plain values."""
    built = build(job)
    losses = []
    with watched_reductions() as reductions:
        for step in range(steps):
            losses += built.step(step)
        state = state_bits(built.manager)
    # Count from the end of the first step: deriving weight scales uses a collective of the same size.
    assert reductions.of(built.manager) == [WORLD] * steps
    if job.layout != "ddp":
        assert {p.device_mesh.ndim for _, p in built.named() if isinstance(p, DTensor)} == {2}
    parameters = built.parameters()
    same_on_all_ranks(state)
    same_on_all_ranks({name: p.tolist() for name, p in parameters.items()})
    report = built.manager.check(parameters=True, policy="warn")
    assert report.consistent, str(report)
    return losses, histories(built.manager), state, {name: p.numpy() for name, p in parameters.items()}


def _same_bits(mine: Any, theirs: Any) -> None:
    assert mine[0] == theirs[0]
    assert mine[2] == theirs[2]
    assert all((mine[3][name] == theirs[3][name]).all() for name in theirs[3])


# Tensor parallelism × FSDP2 ------------------------------------------------------------------------------


def test_tp_with_fsdp2_is_what_one_process_computes(four_ranks: RankPool) -> None:
    """With equal scales the operands are equal, except where sums round differently: such a sum sometimes changes an
    element to the neighbouring FP8 number, 2⁻³ away, one of hundreds in a sum."""
    job = Job(optimizer="sgd", warmup="unit")
    results = four_ranks.run(_train, job)
    plain = train_plain(2, STEPS, OPTIMIZERS["sgd"])
    initial = dict(make_blocks().named_parameters())
    for rank, (losses, windows, _, parameters) in enumerate(results):
        assert losses == pytest.approx([step[rank // 2] for step in plain.losses], rel=2e-3)
        for slot, window in plain.windows.items():
            assert windows[slot][-STEPS:] == pytest.approx(window, rel=2e-2), slot
        for name in LINEARS:  # Before the first update weights are bitwise equal, in any layout.
            assert windows[name, "weight"][-STEPS] == plain.windows[name, "weight"][0]
        for name, parameter in plain.parameters.items():
            moved = (parameter - initial[name].detach()).norm()
            error = (torch.from_numpy(parameters[name]) - parameter).norm()
            assert float(error / moved) < 0.02, name


@pytest.mark.parametrize(
    "job",
    [
        Job("tp", optimizer="foreach", accumulate=2),
        Job("tp", optimizer="fused", update="next_step"),
        Job("hsdp", optimizer="fused", checkpointing="non-reentrant"),
    ],
    ids=["tp, accumulation", "tp, fused, next_step", "hsdp, checkpointing"],
)
def test_fp8_all_gather_changes_no_bit(four_ranks: RankPool, job: Job) -> None:
    gathered = four_ranks.run(_train, job, 2)
    cast_after = four_ranks.run(_train, replace(job, fp8_all_gather=False), 2)
    for mine, theirs in zip(gathered, cast_after):
        _same_bits(mine, theirs)


def test_activation_checkpointing_changes_no_bit_of_losses_and_state(four_ranks: RankPool) -> None:
    without_it = four_ranks.run(_train, Job(), 2)
    for how in ("reentrant", "non-reentrant"):
        for mine, theirs in zip(four_ranks.run(_train, Job(checkpointing=how), 2), without_it):
            _same_bits(mine, theirs)


def _drifted(damaged: int, name: str) -> Any:
    built = build(Job())
    built.step(0)
    parameter = dict(built.named())[name]
    assert isinstance(parameter, DTensor)
    if dist.get_rank() == damaged:
        with torch.no_grad():
            parameter.to_local().view(-1)[1] += 0.25
    with captured_log():
        report = built.manager.check(parameters=True, policy="warn")
    return [(f.kind, f.name, f.ranks, f.reference_rank) for f in report.findings]


@pytest.mark.parametrize(
    ("damaged", "ranks", "name"), [(1, (0, 1), "blocks.1.norm.weight"), (2, (2, 3), "blocks.0.down.bias")]
)
def test_drift_across_the_tensor_parallel_axis_is_found(
    four_ranks: RankPool, damaged: int, ranks: tuple[int, ...], name: str
) -> None:
    """Two replicas differ, and there is no majority."""
    for findings in four_ranks.run(_drifted, damaged, name):
        assert findings == [("parameter", name, ranks, None)]


def _group_too_small() -> str:
    mesh = mesh_of((2, 2), ("dp", "tp"))
    model = make_blocks()
    manager = fp8dist.prepare(model, group=mesh["dp"])
    parallelize_blocks(model, mesh["tp"])
    with pytest.raises(ConfigurationError) as error:
        manager.attach(model)
    return str(error.value)


def test_the_data_parallel_axis_alone_is_refused_under_tensor_parallelism(four_ranks: RankPool) -> None:
    for rank, text in enumerate(four_ranks.run(_group_too_small)):
        first = rank - rank % 2
        assert "blocks.0.up" in text
        whose = f"by ranks {first}, {first + 1}, but its FP8 state only by ranks {rank % 2}, {rank % 2 + 2}:"
        assert whose in text


# HSDP ----------------------------------------------------------------------------------------------------


def test_hsdp_against_one_process(four_ranks: RankPool) -> None:
    results = four_ranks.run(_train, Job("hsdp", optimizer="sgd", warmup="unit"))
    plain = train_plain(4, STEPS, OPTIMIZERS["sgd"])
    for rank, (losses, windows, *_) in enumerate(results):
        assert losses == pytest.approx([step[rank] for step in plain.losses], rel=2e-3)
        for slot, window in plain.windows.items():
            assert windows[slot][-STEPS:] == pytest.approx(window, rel=2e-2), slot


def _flipped(damaged: int) -> Any:
    built = build(Job("hsdp"))
    built.step(0)
    parameter = dict(built.named())["blocks.0.up.weight"]
    assert isinstance(parameter, DTensor)
    if dist.get_rank() == damaged:
        with torch.no_grad():
            parameter.to_local().view(-1)[5] *= -1
    with captured_log():
        report = built.manager.check(parameters=True, policy="warn")
    return [(f.kind, f.name, f.ranks, f.reference_rank) for f in report.findings]


def test_hsdp_replicas_that_differ_are_found(four_ranks: RankPool) -> None:
    for findings in four_ranks.run(_flipped, 2):
        assert findings == [("parameter", "blocks.0.up.weight", (0, 2), None)]

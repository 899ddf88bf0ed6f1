"""Meshes: tensor parallelism × FSDP2, HSDP (replicate × shard), tensor parallelism under all recipes. What goes wrong
in a step under each wrapper."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fp8dist
from fp8dist import BlockScaling, CurrentScaling, DelayedScaling, MXFP8Scaling, Recipe, RowwiseScaling
from fp8dist.errors import ConfigurationError, DivergenceError
from fp8dist.parallel.wrappers import fsdp2_axes, multiplied_shape
from tests.support.collectives import counted_collectives
from tests.support.logs import captured_log
from tests.support.meshes import (
    OPTIMIZERS,
    WORLD,
    Job,
    Outcome,
    assert_agree,
    assert_bitwise,
    build,
    clean_fqn,
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
    whole,
)
from tests.support.ranks import RankPool, on_ranks
from tests.support.sharded_experts import Routed
from tests.support.states import state_of, without
from tests.support.suite import NIGHTLY, few
from tests.support.training import histories, state_bits

pytestmark = [pytest.mark.slow]

STEPS = 3


def _trained(pool: RankPool, job: Job, **options: Any) -> list[Outcome]:
    """Return what each rank has. All of them share one state."""
    outcomes = pool.run(train, replace(job, **options))
    assert_agree(outcomes)
    if job.recipe is None:
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


SAME = {
    "tp": Job("tp", checkpointing="reentrant"),
    "hsdp": Job("hsdp", optimizer="fused", update="next_step", checkpointing="non-reentrant"),
    "hsdp, current": Job("hsdp", recipe=CurrentScaling()),
    "tp, current": Job("tp", recipe=CurrentScaling()),
}


@pytest.mark.parametrize("name", few(SAME, "tp", "hsdp"))
def test_an_fp8_all_gather_and_checkpoints_change_no_bit(four_ranks: RankPool, name: str) -> None:
    gathered = _trained(four_ranks, SAME[name], steps=2)
    cast_after = _trained(four_ranks, SAME[name], steps=2, fp8_all_gather=False, checkpointing="")
    for mine, theirs in zip(gathered, cast_after):
        if SAME[name].recipe is None:
            assert_bitwise(mine, theirs)
        elif SAME[name].layout == "hsdp":  # Only gathered weights have a scale in the state.
            assert mine.losses == theirs.losses
            assert all(torch.equal(p, theirs.parameters[n]) for n, p in mine.parameters.items())
        else:  # Parts across the tensor-parallel axis share a scale, unlike separate casts.
            assert mine.losses == pytest.approx(theirs.losses, rel=2e-2)


@pytest.mark.parametrize(
    "job", few(jobs := [Job(), Job("fsdp1", hook="ours"), Job(fp8_all_gather=False)], *jobs[:2]), ids=str
)
@on_ranks(4)
def test_calibration_refreshed_scales_and_high_precision(job: Job) -> None:
    built, rounds = build(job), job.layout == "tp" and job.fp8_all_gather  # No plain Linear has the gathered weights.
    weight = make_blocks().get_parameter("blocks.0.up.weight").detach()

    def exact(index: int) -> Any:
        x, target = tokens(built.replica, index)
        return pytest.approx(float(loss_of(make_blocks()(x), target).detach()), rel=2e-2 if rounds else 1e-5)

    with counted_collectives() as calls, built.manager.calibrate():
        assert built.backward(0) == exact(0)
    assert calls.syncs(built.manager) == [WORLD]
    built.optimizer.zero_grad()
    assert built.manager.metrics()["fp8/cold_slots"] == 0
    same_on_all_ranks(state_bits(built.manager))
    assert histories(built.manager)["blocks.0.up", "weight"][-1] == float(weight.abs().max())
    with built.manager.no_fp8():
        assert built.backward(1) == exact(1)
    built.optimizer.zero_grad()
    built.step(2)
    built.manager.refresh_weights()
    before = state_bits(built.manager)
    same_on_all_ranks(before)
    with torch.no_grad():
        built.module.eval()(tokens(built.replica, 3)[0])
    assert state_bits(built.manager) == before
    largest = built.parameters()["blocks.0.up.weight"].abs().max()
    assert float(built.manager.slot("blocks.0.up", "weight").scale) == float(torch.tensor(448.0) / largest)


@on_ranks(4)
def test_a_mesh_in_another_order_gives_the_same_numbers() -> None:
    """A mesh with ranks in arbitrary order: the position on the mesh determines a rank's part."""
    mesh = DeviceMesh("cpu", [[3, 1], [2, 0]], mesh_dim_names=("dp", "tp"))
    model = make_blocks()
    manager = fp8dist.prepare(model, DelayedScaling(history_len=8), group=mesh, fp8_all_gather=True)
    parallelize_blocks(model, mesh["tp"])
    module = fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    manager.attach(module, optimizer=optimizer)
    straight = build(Job("tp", optimizer="sgd"))
    for step in range(2):
        x, target = (t.chunk(2, 1)[mesh.get_local_rank("tp")] for t in tokens(mesh.get_local_rank("dp"), step))
        (loss_of(module(x), target) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        straight.step(step)
    same_on_all_ranks(state_bits(manager))
    assert not manager.check(gradients=True, optimizer=optimizer).diverged
    assert histories(manager) == histories(straight.manager)


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


# Tensor parallelism under all recipes. ------------------------------------------------------------------------------

RECIPES: dict[str, Recipe] = {
    "current": CurrentScaling(),
    "rowwise": RowwiseScaling(),
    "block": BlockScaling(),
    "mx": MXFP8Scaling(),
}


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("columns", [True, False], ids=["column-wise", "row-wise"])
@on_ranks(2)
def test_parts_are_multiplied_as_by_linears_of_their_own(name: str, columns: bool) -> None:
    """Each rank casts its part of each operand independently, and no step communicates."""
    mesh, recipe, rank = mesh_of((2,), ("tp",)), RECIPES[name], dist.get_rank()
    torch.manual_seed(4)
    w, full, g = torch.randn(512, 256), torch.randn(48, 256), torch.randn(48, 512)
    full[:, 128:] *= 5  # Makes the ranks' own amaxes differ.

    def prepared(weight: Tensor, parameter: Tensor, **options: Any) -> Any:
        model = nn.Sequential(nn.Linear(*reversed(weight.shape), bias=False))
        manager = fp8dist.prepare(model, recipe, **options)
        model[0].weight = nn.Parameter(parameter)
        manager.attach(model)
        return model, manager

    model, manager = prepared(w, distribute_tensor(w, mesh, [Shard(0 if columns else 1)]), group=mesh)
    x = distribute_tensor(full, mesh, [Replicate() if columns else Shard(1)]).requires_grad_()
    with counted_collectives() as calls:
        y = model(x)
        assert calls.names == []
        y.redistribute(mesh, [Replicate()]).backward(distribute_tensor(g, mesh, [Replicate()]))
        manager.step()
    assert 4 * (8 + 3) not in calls.sizes
    part = w.chunk(2, 0 if columns else 1)[rank].contiguous()
    alone, _ = prepared(part, part, amax_sync=False)
    own = (full if columns else full.chunk(2, 1)[rank]).clone().requires_grad_()
    output = alone(own)
    output.backward(g.chunk(2, 1)[rank] if columns else g)
    assert x.grad is not None
    assert own.grad is not None
    summed, joined = (own.grad, output.detach()) if columns else (output.detach(), own.grad)
    dist.all_reduce(summed)
    assert torch.equal(whole(x.grad if columns else y), summed)
    assert torch.equal(whole(y if columns else x.grad).chunk(2, 1)[rank], joined)
    assert torch.equal(model[0].weight.grad.to_local(), alone[0].weight.grad)
    same_on_all_ranks(whole(y).tolist())
    assert not manager.check().diverged


@pytest.mark.parametrize(
    ("up", "name", "refused"),
    [
        (160, "block", True),
        (384, "block", True),
        (512, "block", False),
        (160, "current", False),
        (160, "rowwise", False),
        (160, "mx", False),
    ],
)
@on_ranks(2)
def test_cut_blocks_are_refused_by_all_ranks(up: int, name: str, refused: bool) -> None:
    """A dim that is not split (``down``'s 64 outputs) may have any size."""
    mesh = mesh_of((2,), ("tp",))
    model = nn.Sequential()
    model.add_module("up", nn.Linear(256, up))
    model.add_module("down", nn.Linear(up, 64))
    manager = fp8dist.prepare(model, RECIPES[name], group=mesh)
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if refused:
        text = rf"^up: local weight shape \({up // 2}, 256\) of \({up}, 256\)(.|\n)*128(.|\n)*overrides"
        with pytest.raises(ConfigurationError, match=text):
            manager.attach(model)
        assert not manager._job.attached
    else:
        manager.attach(model)
        model(torch.randn(16, 256)).sum().backward()


# What goes wrong in a step: no rank is left alone, and training goes on as if it had not been. -----------------------

JOBS = {
    "DDP, hook, next_step": Job("ddp", hook="ours", optimizer="sgd", update="next_step"),
    "FSDP1": Job("fsdp1", optimizer="momentum"),
    "FSDP1, hook": Job("fsdp1", optimizer="momentum", hook="ours"),
    "HSDP": Job("hsdp"),
    "TP": Job("tp", optimizer="sgd"),
}


@pytest.mark.parametrize("fp8_all_gather", [False, True])
@on_ranks(4)
def test_what_torchs_replicate_holds_is_cut_by_tensor_parallelism_only(fp8_all_gather: bool) -> None:
    """Its axis is FSDP2's only one: there is no shard after it, as with HSDP."""
    replicate = pytest.importorskip("torch.distributed._composable.replicate_with_fsdp").replicate
    mesh = mesh_of((2, 2), ("dp", "tp"))
    tied = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3)))
    model = nn.ModuleList([net := make_blocks(), Routed(), tied])
    manager = fp8dist.prepare(model, group=mesh, fp8_all_gather=fp8_all_gather)
    parallelize_module(net, mesh["tp"], {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()})
    parallelize_module(tied, mesh["tp"], {"*": ColwiseParallel(output_layouts=Replicate())})
    tied[0].weight = tied[1].weight = tied[2].weight  # FSDP2 marks only one of the modules that share it.
    for part in model:
        replicate(part, mesh=mesh["dp"])
    if fp8_all_gather:
        with pytest.raises(ConfigurationError, match="replicate"):
            manager.attach(model)
        return
    manager.attach(model)  # And does not take the experts for shards.
    up = net.get_submodule("blocks.0.up")
    assert multiplied_shape(up, fsdp2_axes(model)) == (32, 32)  # type: ignore[arg-type]
    assert {multiplied_shape(linear, fsdp2_axes(model)) for linear in tied} == {(32, 64)}  # type: ignore[arg-type]
    x, _ = tokens(dist.get_rank() // 2, 0)

    def step(batch: Tensor) -> None:
        net(batch).square().mean().backward()

    with pytest.raises(ConfigurationError, match=r"tensor parallel: pass group="):
        fp8dist.replay(net, step, x)
    assert not fp8dist.replay(net, step, x, group=mesh["dp"]).findings


@on_ranks(4)
def test_ranks_with_other_parts_are_not_compared_while_their_weights_are_gathered() -> None:
    """As after an evaluation, if FSDP2 does not free them."""
    mesh = mesh_of((2, 2), ("dp", "tp"))
    net = make_blocks()
    manager = fp8dist.prepare(net, group=mesh)
    parallelize_module(net, mesh["tp"], {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()})
    fully_shard(net, mesh=mesh["dp"], reshard_after_forward=False)
    manager.attach(net)
    x, _ = tokens(dist.get_rank() // 2, 0)
    with torch.no_grad():
        net(x)
    with pytest.raises(ConfigurationError, match=r"tensor parallel: pass group="):
        fp8dist.replay(net, lambda batch: net(batch).square().mean().backward(), x)


@on_ranks(2)
def test_what_torchs_replicate_holds_in_high_precision_may_be_beside_an_fp8_gather() -> None:
    """As an encoder under ``replicate``, before a model under FSDP2."""
    replicate = pytest.importorskip("torch.distributed._composable.replicate_with_fsdp").replicate
    mesh = mesh_of((2,), ("dp",))
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    manager = fp8dist.prepare(model, skip="0", group=mesh, fp8_all_gather=True)
    replicate(model[0], mesh=mesh)
    fully_shard(model[1], mesh=mesh)
    manager.attach(model)
    model(torch.ones(16, 32)).sum().backward()
    assert len(model[1].fp8_slots.weight_sync.arena.shards) == 1  # type: ignore[union-attr, arg-type]


def _fail(*args: Any) -> None:
    raise KeyError("interrupted")


def _interrupted(job: Job, how: str) -> Any:
    """Train for two steps. Between them, something fails on all ranks."""
    built = build(job)
    states = []

    def interrupted() -> None:
        last = next(module for name, module in built.module.named_modules() if clean_fqn(name) == "blocks.1.norm")
        if how == "calibration":
            with built.manager.calibrate():
                built.backward(2)
                raise KeyError
        if how == "forward":
            handle = last.register_forward_pre_hook(_fail)
        else:  # At the end of backward, the gradients of the second block have been reduced.
            handle = built.module.register_forward_pre_hook(
                lambda module, args: args[0].requires_grad_().register_hook(_fail) and None
            )
        try:
            built.backward(1)  # The next step's batch, so its amaxes are not larger.
        finally:
            handle.remove()

    for index in range(2):
        if how and index == 1:
            with pytest.raises(KeyError):
                interrupted()
            built.optimizer.zero_grad()
        losses = built.step(index)
        states.append((losses, state_bits(built.manager)))
    return states, built.parameter_bits()


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("DDP, hook, next_step", "calibration"),
        ("FSDP1, hook", "backward"),
        *(pytest.param(name, "forward", marks=NIGHTLY) for name in ("HSDP", "FSDP1", "TP")),
        pytest.param("FSDP1, hook", "calibration", marks=NIGHTLY),
    ],
)
def test_training_goes_on_after_an_error(four_ranks: RankPool, name: str, how: str) -> None:
    """A failed forward or backward, and a calibration that is interrupted: under a hook after it has launched its
    sync. FSDP1 itself goes on otherwise after a failed backward."""
    job = JOBS[name]
    unbroken = (replace(job, hook=""), how) if how == "backward" else (job, "")
    assert four_ranks.run(_interrupted, job, how) == four_ranks.run(_interrupted, *unbroken)


def _damaged(job: Job) -> Any:
    """Take six steps. Before the third, one scale of rank 3 is damaged."""
    built = build(job)
    reports, raised = list[Any](), []
    built.manager.on_event(lambda event: reports.extend([event.report] if event.report else []))
    for index in range(6):
        if index == 2 and dist.get_rank() == 3:
            built.manager.slot("blocks.1.up", "input").scale.mul_(2.0)
        try:
            with captured_log():
                built.step(index)
        except DivergenceError:
            raised.append(index)
            built.optimizer.zero_grad()
    findings = [(f.step, f.kind, f.name, f.ranks, f.reference_rank) for report in reports for f in report.findings]
    return findings, raised, without(state_of(built.manager), "saturated"), built.parameter_bits()


@pytest.mark.parametrize(
    ("name", "policy", "raised"),
    [
        # The hook launches the next sync before the last one's verdict is read.
        ("DDP, hook, next_step", "raise", [3]),
        ("FSDP1, hook", "warn", []),
        pytest.param("HSDP", "raise", [2], marks=NIGHTLY),
    ],
)
def test_a_damaged_scale_is_found_and_all_ranks_go_on_alike(
    four_ranks: RankPool, name: str, policy: str, raised: list[int]
) -> None:
    results = four_ranks.run(_damaged, replace(JOBS[name], policy=policy))
    for findings, raised_in, *shared in results:
        assert findings == [(3, "scale", "blocks.1.up:input", (3,), 0)]
        assert raised_in == raised
        assert shared == list(results[0][2:])

"""FSDP2 under all recipes gives DDP's numbers; what is gathered in FP8, and its cost in collectives."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Shard

import fp8dist
from fp8dist import (
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    Fallback,
    MXFP8Scaling,
    Observation,
    Recipe,
    RowwiseScaling,
)
from fp8dist.errors import ConfigurationError
from fp8dist.modules.fp8_weight import FP8Weight
from fp8dist.runs.run_files import append_lines, slot_lines
from tests.support.collectives import CountingAllGather, counted_collectives
from tests.support.ranks import RankPool, on_ranks
from tests.support.running import Running
from tests.support.sharded import HISTORY, Job, Outcome, fp8_linears, full, seeded, shard, train
from tests.support.suite import NIGHTLY
from tests.support.training import batch, bits

pytestmark = pytest.mark.slow

CURRENT = Job(recipe=CurrentScaling(), model="deep", steps=3)
BLOCK = Job(recipe=BlockScaling(), model="wide", steps=3, overrides={"layers.3": CurrentScaling()})

HIGH = Job(model="deep", fp8_all_gather=False, steps=2, accumulate=2, no_sync=True)
RECIPES: dict[str, Recipe] = {
    "current, powers of two": CurrentScaling(power_of_two=True),
    "rowwise": RowwiseScaling(),
    "block": BlockScaling(),
    "mx": MXFP8Scaling(),
}


def assert_as_ddp(ours: list[Outcome], theirs: list[Outcome]) -> None:
    """Losses and parameters are bitwise equal, rank by rank, and the model learns."""
    for mine, other in zip(ours, theirs):
        assert mine.losses == other.losses
        assert mine.parameter_bits == other.parameter_bits
        assert mine.steps == other.steps
    assert ours[0].losses[0] != ours[0].losses[-1]


SAME = [
    *(
        pytest.param(
            Job(recipe=recipe, model="deep", fp8_all_gather=False, steps=2, accumulate=2, no_sync=True), id=name
        )
        for name, recipe in RECIPES.items()
    ),
    pytest.param(
        replace(CURRENT, reshard=False, accumulate=2, no_sync=True, optimizer="adamw_fused"), id="current, kept, fused"
    ),
    pytest.param(
        replace(CURRENT, reshard="mixed", model="net", optimizer="adamw_foreach"),
        id="current, kept by some",
        marks=NIGHTLY,
    ),
    pytest.param(replace(CURRENT, per_module=False, optimizer="sgd"), id="current, root only, sgd", marks=NIGHTLY),
    pytest.param(
        replace(CURRENT, recipe=CurrentScaling(format="e4m3", power_of_two=True)),
        id="current, powers of 2",
        marks=NIGHTLY,
    ),
    pytest.param(
        replace(BLOCK, recipe=BlockScaling(power_of_two=True), reshard=False, accumulate=2, no_sync=True),
        id="block, kept",
        marks=NIGHTLY,
    ),
    pytest.param(replace(BLOCK, overrides={"layers.3": "high"}, optimizer="adamw_fused"), id="block, fused"),
    pytest.param(
        replace(BLOCK, per_module=False, overrides={"layers.3": DelayedScaling()}), id="block, root only", marks=NIGHTLY
    ),
    pytest.param(replace(CURRENT, overrides={"last": DelayedScaling(), "blocks.0.*": "high"}), id="mixed"),
]


@pytest.mark.parametrize("job", SAME)
def test_two_ranks_are_bitwise_as_under_ddp(two_ranks: RankPool, job: Job) -> None:
    assert_as_ddp(two_ranks.run(train, job), two_ranks.run(train, replace(job, parallel="ddp")))


def _collectives(job: Job) -> list[list[tuple[str, int]]]:
    """Return the collectives that Python code started, step by step: forward, backward, optimizer step."""
    run = Running(job)
    seen: list[list[tuple[str, int]]] = []
    for _ in range(3):
        with counted_collectives() as calls:
            loss = run.loss()
            loss.backward()
            before = len(calls.names)
            run.update(loss)
        found = list(zip(calls.names, calls.sizes))
        seen += [[pair for pair in part if pair[0] == "all_reduce"] for part in (found[:before], found[before:])]
    return seen


@pytest.mark.parametrize("optimizer", ["adamw_fused", "sgd"])
def test_current_scaling_reduces_all_weights_at_once_after_each_step(two_ranks: RankPool, optimizer: str) -> None:
    slots = 3 * (2 + 2 * 2)
    for seen in two_ranks.run(_collectives, replace(CURRENT, optimizer=optimizer)):
        assert seen == [[], [("all_reduce", 4 * slots)]] * 3


def test_block_scaling_reduces_nothing(two_ranks: RankPool) -> None:
    for seen in two_ranks.run(_collectives, replace(BLOCK, overrides={"layers.3": "high"})):
        assert seen == [[], []] * 3


WRITES = ("mul_", "mul_, FP8 state", "copy_", "load_state_dict", "another optimizer", ".data, refresh")


def _write(run: Running, how: str) -> None:
    weight: Any = run.model.branch.weight
    with torch.no_grad():
        if how == "mul_":
            weight.mul_(1.5)
        elif how == "mul_, FP8 state":  # Only delayed scales are trusted; others are derived from the weight.
            weight.mul_(1.5)
            run.manager.load_state_dict(run.manager.state_dict())
        elif how == "copy_":
            weight.copy_(weight * 8)
        elif how == "load_state_dict":
            run.called.load_state_dict({name: value * 0.7 for name, value in run.called.state_dict().items()})
        elif how == "another optimizer":
            for parameter in run.called.parameters():
                parameter.grad = parameter.detach().clone()
            torch.optim.SGD(run.called.parameters(), lr=0.5, foreach=True).step()
            run.optimizer.zero_grad()
        else:
            weight.data.mul_(8)
            run.manager.refresh_weights()


def _bytes_as_used(run: Running, x: Tensor) -> dict[str, tuple[bytes, bytes]]:
    """Return (FP8 bytes, inverse scale) of each weight in a forward with grad off."""
    used: dict[str, tuple[bytes, bytes]] = {}

    def note(name: str) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            weight = module.weight
            assert isinstance(weight, FP8Weight)
            used[name] = (bits(weight.rows.clone()), bits(weight.inv_scale.clone()))

        return hook

    handles = [linear.register_forward_pre_hook(note(name)) for name, linear in fp8_linears(run.model).items()]
    with torch.no_grad():
        run.called(x)
    for handle in handles:
        handle.remove()
    return used


def _expected_bytes(run: Running) -> dict[str, tuple[bytes, bytes]]:
    """Compute the bytes from the formula, with the amax of the whole weight. COLLECTIVE."""
    whole, expected = full(run.model), {}
    for name in fp8_linears(run.model):
        weight = whole[f"{name}.weight"]
        scale = torch.tensor(448.0) / weight.abs().max()
        rows = (weight * scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
        expected[name] = (bits(rows), bits(torch.reciprocal(scale)))
    return expected


def _written(job: Job, how: str) -> None:
    run = Running(job)
    for step in range(3):
        run.step()
        if step == 1:
            _write(run, how)
        expected = _expected_bytes(run)  # Before the forward, after which weights may stay gathered.
        run.called.eval()
        assert _bytes_as_used(run, batch(dist.get_rank(), 9)[0]) == expected
        run.called.train()
    assert not run.manager.check().diverged


@pytest.mark.parametrize(("how", "reshard"), [(how, bool(i % 2)) for i, how in enumerate(WRITES)])
def test_scales_are_those_of_the_whole_weights_whoever_wrote_them(two_ranks: RankPool, how: str, reshard: bool) -> None:
    two_ranks.run(_written, Job(recipe=CurrentScaling(), reshard=reshard), how)


def test_uneven_shards_share_a_scale(three_ranks: RankPool) -> None:
    """16 rows are split into 6, 6 and 4; on 32 ranks the last part would be empty."""
    job = Job(recipe=CurrentScaling(), model="mlp", optimizer="sgd", steps=2)
    three_ranks.run(_written, replace(CURRENT, model="net", optimizer="adamw_fused"), "mul_")
    ours = three_ranks.run(train, job)
    theirs = three_ranks.run(train, replace(job, fp8_all_gather=False))
    assert_as_ddp(ours, theirs)


@on_ranks(2)
def test_a_gather_by_hand_after_a_step() -> None:
    """After an optimizer step the scales fit at once: a gather outside of a forward needs no preparation."""
    run = Running(Job(recipe=CurrentScaling(), optimizer="adamw_foreach"))
    run.step()
    branch: Any = run.model.branch
    branch.unshard()
    assert isinstance(branch.weight, FP8Weight)
    held = bits(branch.weight.rows.clone())
    branch.reshard()
    assert held == _expected_bytes(run)["branch"][0]


@on_ranks(2)
def test_a_commit_after_the_optimizers_step_leaves_scales_alone() -> None:
    """With fallback each step syncs and commits the amaxes of its forwards, which must not change the scales."""
    run = Running(replace(CURRENT, model="net", settings={"fallback": Fallback()}))
    run.manager.attach(run.called, optimizer=run.optimizer, boundary="manual")
    for _ in range(3):
        run.step()
        run.manager.step()
        expected = _expected_bytes(run)
        assert _bytes_as_used(run, batch(dist.get_rank(), 9)[0]) == expected


@pytest.mark.parametrize("recipe", [CurrentScaling(), DelayedScaling(history_len=HISTORY)], ids=["current", "delayed"])
@on_ranks(2)
def test_a_watch_sees_gathered_weights(recipe: Recipe, tmp_path: Path) -> None:
    path = str(tmp_path / "scales.jsonl")
    model = seeded("net")
    manager = fp8dist.prepare(model, recipe, group=dist.group.WORLD, fp8_all_gather=True)

    def write(seen: Observation) -> None:
        with Path(path).open("ab") as file:
            append_lines(file.fileno(), slot_lines(seen.step, seen.slots))

    fp8dist.watch(manager, every=1, observer=write if dist.get_rank() == 0 else None)
    called = shard(model)
    optimizer = torch.optim.SGD(called.parameters(), lr=0.1)  # type: ignore[attr-defined]
    manager.attach(called, optimizer=optimizer)  # type: ignore[arg-type]
    amaxes = {f"{name}:weight": float(full(model)[f"{name}.weight"].abs().max()) for name in fp8_linears(model)}
    x, y = batch(dist.get_rank(), 0)
    nn.functional.mse_loss(called(x), y).backward()  # type: ignore[operator]
    optimizer.step()
    dist.barrier()
    lines = [json.loads(line) for line in Path(path).read_text().splitlines()]
    assert {line["slot"]: line["amax"] for line in lines if line["slot"] in amaxes} == amaxes


def _two_optimizers(parallel: str) -> tuple[list[float], list[int]]:
    run = Running(replace(CURRENT, model="net", parallel=parallel))
    groups = ([], [])
    for name, parameter in run.model.named_parameters():
        groups[name.startswith("branch")].append(parameter)
    optimizers = [torch.optim.AdamW(groups[0], lr=0.01), torch.optim.SGD(groups[1], lr=0.05)]
    run.manager.attach(run.called, optimizer=optimizers)
    losses, reduced = [], []
    for _ in range(4):
        loss = run.loss()
        loss.backward()
        with counted_collectives() as calls:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        reduced.append(calls.names.count("all_reduce"))
        losses.append(float(loss.detach()))
    return losses, reduced


def test_two_optimizers_are_bitwise_as_under_ddp(two_ranks: RankPool) -> None:
    ours, theirs = (two_ranks.run(_two_optimizers, parallel) for parallel in ("fsdp2", "ddp"))
    assert [losses for losses, _ in ours] == [losses for losses, _ in theirs]
    assert [reduced for _, reduced in ours] == [[2] * 4] * 2
    assert [reduced for _, reduced in theirs] == [[0] * 4] * 2


def _scaled(parallel: str, optimizer: str) -> tuple[list[float], float, int]:
    """One step of five overflows on all ranks and is skipped."""
    run = Running(replace(CURRENT, model="net", parallel=parallel, optimizer=optimizer))
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    run.manager.attach(run.called, optimizer=run.optimizer, scaler=scaler)
    losses = []
    for step in range(5):
        loss = run.loss()
        scaler.scale(loss * (float("inf") if step == 2 else 1.0)).backward()
        scaler.step(run.optimizer)
        scaler.update()
        run.optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, scaler.get_scale(), run.manager.steps


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_fused"])
def test_a_step_that_the_loss_scaler_skips(two_ranks: RankPool, optimizer: str) -> None:
    ours, theirs = (two_ranks.run(_scaled, parallel, optimizer) for parallel in ("fsdp2", "ddp"))
    assert ours == theirs
    assert [(scale, steps) for _, scale, steps in ours] == [(128.0, 4)] * 2


def _checkpointed(run: Running) -> dict[str, Any]:
    model, optimizer = get_state_dict(run.called, run.optimizer)
    return {"model": model, "optimizer": optimizer, "fp8": run.manager}


@pytest.mark.parametrize(
    "job",
    [
        pytest.param(BLOCK, id="block"),
        pytest.param(replace(CURRENT, overrides={"last": DelayedScaling()}, optimizer="adamw_fused"), id="mixed"),
    ],
)
@on_ranks(2)
def test_a_resume_through_dcp_is_bitwise(job: Job, tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    run = Running(job)
    for _ in range(2):
        run.step()
    parts = _checkpointed(run)
    dcp.save(parts, checkpoint_id=folder)
    on = [run.step() for _ in range(2)]
    other = Running(job)
    state = _checkpointed(other)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(other.called, other.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    other.index = 2
    assert on == [other.step() for _ in range(2)]


@on_ranks(2)
def test_bytes_and_scales_of_blocks_are_gathered() -> None:
    model = nn.Sequential(nn.Linear(512, 1024, bias=False))
    manager = fp8dist.prepare(model, BlockScaling(), group=dist.group.WORLD, fp8_all_gather=True)
    shard(model)
    manager.attach(model)
    log: list[int] = []
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(CountingAllGather(log))  # type: ignore[arg-type]
    with torch.no_grad(), counted_collectives() as calls:
        model(torch.randn(4, 512))
    elements = 1024 * 512
    assert (sum(log), calls.names.count("all_reduce")) == (elements + elements * 4 // 16384, 0)


def _attached(out_features: int, dim: int, recipe: Recipe, gather: bool) -> str:
    model = nn.Sequential(nn.Linear(256, out_features))
    manager = fp8dist.prepare(model, recipe, group=dist.group.WORLD, fp8_all_gather=gather)
    fully_shard(model, shard_placement_fn=lambda parameter: Shard(dim if parameter.ndim > 1 else 0))
    try:
        manager.attach(model)
    except ConfigurationError as error:
        assert not manager._job.attached
        return str(error)
    model(torch.randn(16, 256)).sum().backward()
    return ""


@pytest.mark.parametrize(("rows", "dim"), [(384, 0), (240, 0), (256, 1)])
def test_shards_that_cut_blocks_are_refused_by_all_ranks(two_ranks: RankPool, rows: int, dim: int) -> None:
    first, *others = two_ranks.run(_attached, rows, dim, BlockScaling(), True)
    assert others == [first]
    for part in (f"0: its weight ({rows}, 256)", f"along dim {dim} over 2 ranks", "overrides", "fp8_all_gather"):
        assert part in first
    assert (f"{rows // 2} rows each" in first) == (dim == 0)


@pytest.mark.parametrize(
    ("rows", "recipe", "gather"),
    [(256, BlockScaling(), True), (384, BlockScaling(), False), (384, CurrentScaling(), True)],
)
def test_shards_that_cut_no_block_are_taken(two_ranks: RankPool, rows: int, recipe: Recipe, gather: bool) -> None:
    assert two_ranks.run(_attached, rows, 0, recipe, gather) == [""] * 2


@pytest.mark.parametrize(
    ("ranks", "rows", "dim", "refused"),
    [(17, 2160, 0, "128 rows each, but 112 for the last"), (1, 2160, 0, ""), (1, 256, 1, "")],
    ids=["uneven", "one rank", "one rank along dim 1"],
)
def test_uneven_shards_are_refused_and_one_rank_cuts_nothing(ranks: int, rows: int, dim: int, refused: str) -> None:
    """FSDP2 pads the data of short parts, but not their scales: 2160 rows on 17 ranks are 128 each, and 112 on the
    last. One process acts as the first rank."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        text = _attached(rows, dim, BlockScaling(), True)
        assert refused in text
        assert bool(refused) == bool(text)
    finally:
        dist.destroy_process_group()

"""Regressions of the FP8 all-gather: undetected writes, collectives on one rank only, weights that stay gathered."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fp8dist
from fp8dist import DelayedScaling
from fp8dist.errors import ConfigurationError
from fp8dist.modules.fp8_weight import FP8Weight
from tests.support.meshes import mesh_of
from tests.support.ranks import RankPool, on_ranks
from tests.support.running import Running
from tests.support.sharded import Job, fp8_linears, seeded, shard
from tests.support.training import batch

pytestmark = pytest.mark.slow


class Experts(nn.Module):
    """A model with one expert per rank."""

    def __init__(self) -> None:
        super().__init__()
        self.expert = nn.Linear(32, 32)
        self.head = nn.Linear(32, 16)

    def forward(self, x: Any) -> Any:
        return self.head(self.expert(x))


@pytest.mark.parametrize("trouble", ["cold", "written"])
@on_ranks(2, timeout=40.0)
def test_an_expert_of_one_rank_leaves_no_rank_alone(trouble: str) -> None:
    """Rank 0's expert is cold or was written to; rank 1's is not."""
    mesh = mesh_of((2, 1), ("ep", "edp"))
    torch.manual_seed(0)
    model = Experts()
    if trouble == "cold" and dist.get_rank() == 0:
        nn.init.zeros_(model.expert.weight)
    groups = {"expert": mesh["edp"]}
    manager = fp8dist.prepare(
        model, DelayedScaling(history_len=4), group=dist.group.WORLD, groups=groups, fp8_all_gather=True
    )
    fully_shard(model.expert, mesh=mesh["edp"])
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    manager.attach(model, optimizer=optimizer)
    losses = []
    for step in range(3):
        if trouble == "written" and step == 1 and dist.get_rank() == 0:
            with torch.no_grad():
                model.expert.weight.mul_(8)
        x, y = batch(dist.get_rank(), step)
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert all(map(torch.isfinite, torch.tensor(losses)))


@pytest.mark.parametrize("wraps", [True, False])
@on_ranks(2)
def test_a_gather_needs_fsdp2(wraps: bool) -> None:
    model: Any = nn.Sequential(nn.Linear(32, 32))
    manager = fp8dist.prepare(model, group=dist.group.WORLD, fp8_all_gather=True)
    with pytest.raises(ConfigurationError) as caught:
        manager.attach(nn.parallel.DistributedDataParallel(model) if wraps else model)
    assert str(caught.value).startswith(
        "fp8_all_gather=True needs FSDP2, but this model is not sharded by it: call fully_shard()"
    )


@on_ranks(2)
def test_a_forward_before_attach_is_refused() -> None:
    model = seeded("net")
    manager = fp8dist.prepare(model, group=dist.group.WORLD, fp8_all_gather=True)
    shard(model)
    with pytest.raises(ConfigurationError, match=r"attach\(\) must come before the first forward"):
        model(batch(0, 0)[0])
    assert manager.steps == 0


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)

    def forward(self, x: Any) -> Any:
        return self.down(torch.relu(self.up(x)))


@pytest.mark.parametrize("tensor_parallel", [False, True])
@on_ranks(2)
def test_gathered_bytes_keep_their_meaning_under_tensor_parallelism(tensor_parallel: bool) -> None:
    """Scaling by a power of two changes bytes only where subnormals are rounded."""
    mesh = mesh_of((2, 1), ("dp", "tp"))
    gradients = []
    for change in (False, True):
        torch.manual_seed(0)
        model = Two()
        manager = fp8dist.prepare(model, DelayedScaling(history_len=4), group=mesh, fp8_all_gather=True)
        if tensor_parallel:
            parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        for part in (model.up, model.down, model):
            fully_shard(part, mesh=mesh["dp"])
        manager.attach(model)
        x = batch(dist.get_rank(), 0)[0].requires_grad_()
        loss = model(x).square().mean()
        if change:
            manager.slot("up", "weight").set_scale(float(manager.slot("up", "weight").scale) / 4)
        loss.backward()
        assert x.grad is not None
        gradients.append(x.grad)
    assert float((gradients[1] - gradients[0]).norm() / gradients[0].norm()) < 0.02


class Around(nn.Module):
    """A module that contains the prepared model."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.head = nn.Linear(16, 16)

    def forward(self, x: Any) -> Any:
        return self.head(self.inner(x))


def _outside(named: bool) -> Any:
    model = seeded("net")
    whole = Around(model)
    manager = fp8dist.prepare(model, DelayedScaling(history_len=4), group=dist.group.WORLD, fp8_all_gather=True)
    fully_shard(model.first)
    fully_shard(whole)
    try:
        manager.attach(whole if named else None)
    except ConfigurationError as error:
        return str(error)
    whole(batch(dist.get_rank(), 0)[0]).sum().backward()
    return [linear.fp8_slots.note.resharded for linear in fp8_linears(model).values()]


def test_a_root_outside_of_the_model_must_be_named(two_ranks: RankPool) -> None:
    for text in two_ranks.run(_outside, False):
        assert "pass it as attach(module=…)" in text
    assert two_ranks.run(_outside, True) == [[True] * 3] * 2


class TiedOutside(nn.Module):
    """The prepared part shares a weight with an embedding outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 32))
        self.embedding = nn.Embedding(48, 32)
        self.embedding.weight = self.body[0].weight

    def forward(self, x: Any) -> Any:
        return self.body(x + self.embedding(torch.arange(8)))


@on_ranks(2)
def test_a_weight_that_is_tied_outside_of_the_model_stays_in_high_precision() -> None:
    model = TiedOutside()
    manager = fp8dist.prepare(model.body, DelayedScaling(history_len=4), group=dist.group.WORLD, fp8_all_gather=True)
    fully_shard(model)
    manager.attach(model)
    seen: list[bool] = []
    for module in (model.body[0], model.body[1], model.embedding):
        module.register_forward_pre_hook(lambda module, args: seen.append(isinstance(module.weight, FP8Weight)))
    model(batch(0, 0)[0]).sum().backward()
    assert seen == [False, False, True]  # The embedding runs first.


@on_ranks(2)
def test_no_mode_keeps_whole_weights_until_backward() -> None:
    run = Running(Job())
    shapes = {tuple(linear.weight.shape) for linear in fp8_linears(run.model).values()}
    kept = {}
    for mode in ("fp8", "high"):
        count = 0

        def pack(tensor: Any) -> Any:
            nonlocal count
            count += type(tensor) is torch.Tensor and tuple(tensor.shape) in shapes
            return tensor

        context = run.manager.no_fp8() if mode == "high" else contextlib.nullcontext()
        with context, torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            loss = run.called(batch(0, 0)[0]).sum()
        kept[mode] = count
        loss.backward()
    assert kept == {"fp8": 0, "high": 0}


@on_ranks(2)
def test_gradients_in_high_precision_are_right() -> None:
    """Compare gradients in no_fp8() with plain products of the dequantised weights."""
    run = Running(Job(model="mlp"))
    weights = {}

    def note(name: str) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            weights[name] = module.weight.high_precision().requires_grad_()

        return hook

    for name, linear in fp8_linears(run.model).items():
        linear.register_forward_pre_hook(note(name))
    x, y = batch(dist.get_rank(), 0)
    with run.manager.no_fp8():
        nn.functional.mse_loss(run.called(x), y).backward()
    biases = {name: linear.bias.full_tensor().detach() for name, linear in fp8_linears(run.model).items()}
    h = x
    for i, name in enumerate(weights):
        h = nn.functional.linear(h, weights[name], biases[name])
        h = torch.relu(h) if i < len(weights) - 1 else h
    nn.functional.mse_loss(h, y).backward()
    worst = 0.0
    for name, linear in fp8_linears(run.model).items():
        expected = weights[name].grad
        dist.all_reduce(expected)
        worst = max(worst, float((linear.weight.grad.full_tensor() - expected / 2).abs().max() / expected.abs().max()))
    assert worst < 1e-6


@on_ranks(2)
def test_casts_are_reused_under_tensor_parallelism() -> None:
    counts = []
    for tensor_parallel in (True, False):
        mesh = mesh_of((2,), ("tp",))
        torch.manual_seed(0)
        model = Two()
        manager = fp8dist.prepare(model, DelayedScaling(history_len=4), group=mesh)
        if tensor_parallel:
            parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        manager.attach(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        casts = 0
        for linear in fp8_linears(model).values():
            slots, caster = linear.fp8_slots, linear.fp8_slots.caster

            def counting(x: Any, request: Any, of: Any = slots, original: Any = caster.cast) -> Any:
                nonlocal casts
                casts += request.state is of._states[1]
                return original(x, request)

            caster.cast = counting  # type: ignore[method-assign]
        for index in range(3):
            model(batch(0, index)[0]).sum().backward()
        counts.append(casts)
    assert (counts[0], counts[1]) == (2, 2)


@on_ranks(2)
def test_writes_to_a_gathered_weight_are_refused() -> None:
    run = Running(Job())
    told: list[str] = []

    def hook(module: nn.Module, args: Any) -> None:
        weight, other = module.weight, torch.ones(())
        for write in (
            lambda: weight.mul_(3.0),
            lambda: torch._foreach_mul_([weight], 3.0),
            lambda: torch.mul(other, 3.0, out=weight),
        ):
            try:
                with torch.no_grad():
                    write()
                told.append("written")
            except ConfigurationError as error:
                told.append("refused" if "cannot be written to" in str(error) else str(error))

    run.model.first.register_forward_pre_hook(hook)  # type: ignore[union-attr]
    run.loss()
    assert told == ["refused"] * 3

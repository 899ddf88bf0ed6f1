"""Models and options of FSDP2 users: skipped, tied and frozen modules, prefetching, checkpointing, one rank."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fp8dist
from fp8dist import BlockScaling, CurrentScaling, DelayedScaling, Recipe
from fp8dist.modules.fp8_weight import FP8Weight
from tests.support.ranks import RankPool, on_ranks
from tests.support.sharded import HISTORY, OPTIMIZERS, Deep, arena_bits, full, shard
from tests.support.training import batch, bits

pytestmark = pytest.mark.slow


class TiedLinears(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 48)
        self.a = nn.Linear(48, 48)
        self.b = nn.Linear(48, 48)
        self.b.weight = self.a.weight
        self.last = nn.Linear(48, 16)

    def forward(self, x: Tensor, skip: bool = False) -> Tensor:
        h = torch.relu(self.first(x))
        if not skip:
            h = h + self.a(h)
        return self.last(h + torch.relu(self.b(h)))


class TiedEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.inner = nn.Linear(32, 32)
        self.lm_head = nn.Linear(32, 64, bias=False)
        self.lm_head.weight = self.embedding.weight

    def forward(self, x: Tensor, skip: bool = False) -> Tensor:
        tokens = (x[:, :16].abs() * 10).long() % 64
        logits = self.lm_head(torch.relu(self.inner(self.embedding(tokens))))
        return logits.mean(1)[:, :16]


class Frozen(Deep):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].up.weight.requires_grad_(False)
        for parameter in self.blocks[1].parameters():
            parameter.requires_grad_(False)


MODELS = {
    "tied linears": TiedLinears,
    "tied embedding": TiedEmbedding,
    "frozen": Frozen,
    "checkpoint_wrapper": Deep,  # One wrapper inside FSDP's module, one outside.
    "prefetch": Deep,
    "kept after backward": Deep,
    "dim 1": Deep,
}


def _run(kind: str, parallel: str, precision: str = "fp8") -> tuple[Any, ...]:
    torch.manual_seed(0)
    model = MODELS[kind]()
    manager = None
    if precision == "fp8":
        manager = fp8dist.prepare(
            model,
            DelayedScaling(history_len=HISTORY),
            group=dist.group.WORLD,
            skip=None,
            fp8_all_gather=parallel == "fsdp2",
        )
    wrap = partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
    if kind == "checkpoint_wrapper":
        model.blocks[0] = wrap(model.blocks[0])
    if parallel == "ddp":
        called: Any = DistributedDataParallel(model)
    elif kind in ("tied linears", "tied embedding"):
        fully_shard(model.last if kind == "tied linears" else model.inner)
        called = fully_shard(model)
    elif kind == "dim 1":
        called = shard(model, shard_placement_fn=lambda p: torch.distributed.tensor.Shard(p.ndim - 1))
    else:
        called = shard(model)
    if kind == "checkpoint_wrapper":
        model.blocks[1] = wrap(model.blocks[1])
    if parallel == "fsdp2" and kind == "prefetch":
        parts = [model.first, *model.blocks, model.last]
        for one, other in itertools.pairwise(parts):
            one.set_modules_to_forward_prefetch([other])
            other.set_modules_to_backward_prefetch([one])
    optimizer = OPTIMIZERS["adamw"]([p for p in called.parameters() if p.requires_grad])
    if manager is not None:
        manager.attach(called, optimizer=optimizer)
    losses, kinds = [], set()
    for index in range(2):
        if parallel == "fsdp2" and kind == "kept after backward":
            called.set_reshard_after_backward(False)
        for micro in range(2):
            if micro == 1 and parallel == "fsdp2" and kind == "kept after backward":
                called.set_reshard_after_backward(True)
            last = micro == 1
            if parallel == "fsdp2":
                called.set_requires_gradient_sync(last)
            with called.no_sync() if parallel == "ddp" and not last else torch.enable_grad():
                x, y = batch(dist.get_rank(), 2 * index + micro)
                handle = next(m for m in model.modules() if isinstance(m, nn.Linear)).register_forward_pre_hook(
                    lambda m, a: kinds.add(type(m.weight).__name__)
                )
                loss = nn.functional.mse_loss(called(x), y) / 2
                handle.remove()
                loss.backward()
            losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    names = {name.replace("_checkpoint_wrapped_module.", ""): bits(value) for name, value in full(model).items()}
    slots = tuple(manager.slots) if manager else ()
    return losses, arena_bits(manager) if manager else {}, names, slots, kinds, _lm_kind(model)


def _lm_kind(model: nn.Module) -> str:
    """Return the kind of weight that the tied head multiplies with."""
    if not isinstance(model, TiedEmbedding):
        return ""
    seen: list[str] = []
    model.lm_head.register_forward_pre_hook(lambda m, a: seen.append(type(m.weight).__name__))
    model(batch(0, 0)[0])
    return seen[0]


@pytest.fixture(scope="module")
def under_ddp(two_ranks: RankPool) -> Callable[[str], list[tuple[Any, ...]]]:
    """Return DDP's results for a kind. Options that only FSDP2 has share a run."""
    return cache(lambda kind: two_ranks.run(_run, kind, "ddp"))


@pytest.mark.parametrize("kind", MODELS)
def test_models_and_options_are_as_under_ddp(
    two_ranks: RankPool, under_ddp: Callable[[str], list[tuple[Any, ...]]], kind: str
) -> None:
    ours = two_ranks.run(_run, kind, "fsdp2")
    theirs = under_ddp("dim 1" if kind in ("prefetch", "kept after backward") else kind)
    for mine, other in zip(ours, theirs):
        assert mine[0] == other[0]
        assert mine[1] == other[1]
        assert mine[2] == other[2]
        assert mine[3] == other[3]
        if kind == "tied embedding":
            assert mine[5] == "Parameter"  # An Embedding also uses it, so it is gathered in high precision.
        assert "FP8Weight" in mine[4]


@pytest.mark.parametrize(
    "recipe",
    [DelayedScaling(history_len=4), CurrentScaling(), BlockScaling()],
    ids=lambda recipe: type(recipe).__name__,
)
def test_one_rank_is_as_without_fsdp2(recipe: Recipe) -> None:
    """Includes blocks, also some that extend beyond the weight: no other rank holds the rest of them."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    runs = []
    for parallel in ("fsdp2", "none"):
        if parallel == "fsdp2":
            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
        try:
            torch.manual_seed(0)
            model = Deep(width=144, inner=272)
            manager = fp8dist.prepare(model, recipe, fp8_all_gather=parallel == "fsdp2")
            if parallel == "fsdp2":
                shard(model)
            optimizer = OPTIMIZERS["adamw"](model.parameters())
            manager.attach(model, optimizer=optimizer)
            losses = []
            for index in range(4):
                x, y = batch(0, index)
                loss = nn.functional.mse_loss(model(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(float(loss.detach()))
            with torch.no_grad():
                model.last.weight.mul_(8)
            if parallel == "none":
                manager.refresh_weights()
                # Only the changed scale is derived again under FSDP2.
            losses.append(float(nn.functional.mse_loss(model(x), y).detach()))
            runs.append((losses[:4], {name: bits(value) for name, value in full(model).items()}, losses[4]))
        finally:
            if parallel == "fsdp2":
                dist.destroy_process_group()
    assert runs[0][:2] == runs[1][:2]
    assert runs[0][2] == pytest.approx(runs[1][2], rel=0.02)


@pytest.mark.parametrize("fp8_all_gather", [True, False])
@on_ranks(2)
def test_no_cast_of_a_weight_is_kept_for_backward(fp8_all_gather: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 192, bias=False), nn.ReLU(), nn.Linear(192, 64, bias=False))
    manager = fp8dist.prepare(
        model, DelayedScaling(history_len=2), group=dist.group.WORLD, fp8_all_gather=fp8_all_gather
    )
    called = shard(model, True)
    manager.attach(called, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    sizes: dict[str, int] = {"weight": 0, "other": 0}

    def pack(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, FP8Weight) and tensor.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            sizes["weight" if tensor.numel() == 64 * 192 else "other"] += tensor.numel()
        return tensor

    x = torch.randn(16, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = called(x)
    output.sum().backward()
    assert sizes["weight"] == 0
    assert sizes["other"] == 16 * (64 + 192)  # The inputs.


def _compiled(compiled: bool) -> list[float] | str:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Deep()
    manager = fp8dist.prepare(model, DelayedScaling(history_len=HISTORY), group=dist.group.WORLD, fp8_all_gather=True)
    called = shard(model)
    if compiled:
        model.blocks[0].compile(backend="aot_eager")
    optimizer = OPTIMIZERS["adamw"](called.parameters())
    manager.attach(called, optimizer=optimizer)
    losses = []
    for index in range(2):
        x, y = batch(dist.get_rank(), index)
        loss = nn.functional.mse_loss(called(x), y)
        try:
            loss.backward()
        except RuntimeError as error:
            return str(error)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.long
def test_a_compiled_block_is_as_an_eager_one(two_ranks: RankPool) -> None:
    assert two_ranks.run(_compiled, True) == two_ranks.run(_compiled, False)

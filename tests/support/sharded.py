"""Models under FSDP2 and DDP, trained on the same data, and their results for bitwise comparison."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fp8dist
from fp8dist import DelayedScaling, Recipe, StateManager
from fp8dist.modules.fp8_linear import FP8Linear
from fp8dist.modules.overrides import High
from fp8dist_kernels.header import WORD_MANIFEST
from tests.support.collectives import counted_collectives
from tests.support.quiet import silence
from tests.support.reference_nets import Block
from tests.support.training import Amaxes, AmaxRecorder, Net, SlotName, batch, bits, histories

HISTORY = 4


class Deep(nn.Module):
    """Two blocks of two Linears, one without bias, each with a LayerNorm; shapes as in ``training.batch``.

    ``reentrant``: if not None, blocks run in activation checkpoints of this kind.
    """

    reentrant: bool | None = None

    def __init__(self, width: int = 32, inner: int = 64) -> None:
        super().__init__()
        self.first = nn.Linear(32, width)
        self.blocks = nn.ModuleList(Block(width, inner) for _ in range(2))
        self.last = nn.Linear(width, 16)

    def forward(self, x: Tensor, skip: bool = False) -> Tensor:
        h = self.first(x)
        for block in self.blocks:
            h = block(h) if self.reentrant is None else checkpoint(block, h, use_reentrant=self.reentrant)
        return self.last(h)


class Mlp(nn.Module):
    """Three Linears with given output widths: shards of 16, 48 and 80 rows are uneven on three ranks."""

    def __init__(self, widths: tuple[int, ...] = (48, 80, 16), bias: bool = True) -> None:
        super().__init__()
        sizes = (32, *widths)
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=bias) for a, b in itertools.pairwise(sizes))

    def forward(self, x: Tensor, skip: bool = False) -> Tensor:
        for layer in self.layers[:-1]:
            x = torch.relu(layer(x))
        return self.layers[-1](x)


class TiedLinears(nn.Module):
    """Two of its four Linears share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 48)
        self.a = nn.Linear(48, 48)
        self.b = nn.Linear(48, 48)
        self.b.weight = self.a.weight
        self.last = nn.Linear(48, 16)

    def forward(self, x: Tensor, skip: bool = False) -> Tensor:
        h = torch.relu(self.first(x))
        return self.last(h + self.a(h) + torch.relu(self.b(h)))


class TiedEmbedding(nn.Module):
    """Its head shares a weight with its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.inner = nn.Linear(32, 32)
        self.lm_head = nn.Linear(32, 64, bias=False)
        self.lm_head.weight = self.embedding.weight

    def forward(self, x: Tensor, skip: bool = False) -> Tensor:
        tokens = (x[:, :16].abs() * 10).long() % 64
        return self.lm_head(torch.relu(self.inner(self.embedding(tokens)))).mean(1)[:, :16]


def frozen() -> Deep:
    """A whole block is frozen, and a weight of the other."""
    model = Deep()
    model.blocks[0].up.weight.requires_grad_(False)  # type: ignore[union-attr]
    model.blocks[1].requires_grad_(False)
    return model


def wide() -> Mlp:
    """Shards of two ranks are whole blocks of 128 x 128, except in the last layer."""
    return Mlp((256, 512, 256, 16))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "net": Net,
    "batchnorm": partial(Net, batchnorm=True),
    "deep": Deep,
    "deeper": partial(Deep, 64, 128),  # Shards of two ranks are multiples of 32 rows.
    "mlp": Mlp,
    "wide": wide,
    "tied linears": TiedLinears,
    "tied embedding": TiedEmbedding,
    "frozen": frozen,
}


def seeded(name: str, seed: int = 0) -> nn.Module:
    """Return the model of this seed."""
    torch.manual_seed(seed)
    return MODELS[name]()


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "plain sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}


@dataclass(frozen=True)
class Job:
    """One training run; the same on all ranks."""

    parallel: str = "fsdp2"  # or "ddp"
    precision: str = "fp8"  # or "fp32"
    fp8_all_gather: bool = True
    model: str = "net"
    update: str = "same_step"
    optimizer: str = "adamw"
    steps: int = 5
    accumulate: int = 1
    no_sync: bool = False
    reshard: bool | str = True  # "mixed": True for the first child, False for others
    per_module: bool = True
    skip: tuple[tuple[int, int], ...] = ()  # (rank, step) where ``Net.branch`` is skipped
    shard: dict[str, Any] = field(default_factory=dict)  # more arguments of fully_shard
    ddp: dict[str, Any] = field(default_factory=dict)
    autocast: bool = False  # forward under torch.autocast, in BF16
    hook: Callable[[Any, StateManager], None] | None = None  # called after attach: registers DDP's hook, sets options
    reduce_unused: bool = False  # FSDP2: zero gradients for modules that only other ranks ran
    recipe: Recipe | None = None  # None: delayed scaling, with ``update``
    overrides: dict[str, Recipe | High] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)  # more arguments of prepare


@dataclass
class Outcome:
    """The results of one rank."""

    losses: list[float]
    parameters: dict[str, Tensor]
    state: dict[str, bytes]
    fp8_collectives: list[int]
    steps: int
    histories: dict[SlotName, list[float]] = field(default_factory=dict)
    amaxes: list[Amaxes] = field(default_factory=list)  # Those of this rank, under DDP.

    @property
    def parameter_bits(self) -> dict[str, bytes]:
        return {name: bits(value) for name, value in self.parameters.items()}


def shard(model: nn.Module, reshard: bool | str = True, per_module: bool = True, **options: Any) -> FSDPModule:
    """Apply fully_shard to each Linear or block, and to the root."""
    if per_module:
        parts = [m for m in model.modules() if isinstance(m, Block)]
        inside = {m for part in parts for m in part.modules()}
        parts += [m for m in model.modules() if isinstance(m, nn.Linear) and m not in inside]
        for i, part in enumerate(parts):
            each = i % 2 == 0 if reshard == "mixed" else reshard
            fully_shard(part, reshard_after_forward=each, **options)
    root = True if reshard == "mixed" else reshard
    return fully_shard(model, reshard_after_forward=root, **options)


def full(model: nn.Module) -> dict[str, Tensor]:
    """Return all parameters, unsharded. COLLECTIVE under FSDP2."""
    whole = {}
    for name, parameter in model.named_parameters():
        value = parameter.detach()
        whole[name] = (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()
    return whole


def arena_bits(manager: StateManager) -> dict[str, bytes]:
    """Return the complete FP8 state, except the word that encodes the job's setup. Commits a pending sync."""
    manager._cycle.state.settle()
    found = {}
    for i, sync in enumerate(manager._syncs):
        words = sync.arena.words.clone()
        words[WORD_MANIFEST] = 0
        arrays = {"words": words, "window": sync.arena.ordered_history()}
        for name in ("scales", "amax", "cold", "counters"):
            arrays[name] = getattr(sync.arena, name)
        found.update({f"{i}.{name}": bits(value) for name, value in arrays.items()})
    return found


def build(job: Job) -> tuple[nn.Module, nn.Module, StateManager | None, torch.optim.Optimizer]:
    """Return (model, the object that the loop calls, manager, optimizer), attached."""
    model = seeded(job.model)
    manager = None
    if job.precision == "fp8":
        delayed = DelayedScaling(history_len=HISTORY, update=job.update)  # type: ignore[arg-type]
        recipe = delayed if job.recipe is None else job.recipe
        gathers = job.fp8_all_gather and job.parallel == "fsdp2"
        settings = {"fp8_all_gather": gathers, "overrides": job.overrides, **job.settings}
        manager = fp8dist.prepare(model, recipe, group=dist.group.WORLD, **settings)
    if job.parallel == "ddp":
        called: nn.Module = DistributedDataParallel(model, **job.ddp)
    else:
        called = shard(model, job.reshard, job.per_module, **job.shard)  # type: ignore[assignment]
        if job.reduce_unused:
            called.set_reduce_scatter_unused_params(True)  # type: ignore[operator]
    optimizer = OPTIMIZERS[job.optimizer](called.parameters())
    if manager is not None:
        manager.attach(called, optimizer=optimizer)
        if job.hook is not None:
            job.hook(called, manager)
    return model, called, manager, optimizer


@contextlib.contextmanager
def gradients_stay(called: nn.Module, silent: bool) -> Iterator[None]:
    """Skip gradient reduction inside, in the way of DDP or FSDP2."""
    if not silent:
        yield
    elif isinstance(called, DistributedDataParallel):
        with called.no_sync():
            yield
    else:
        called.set_requires_gradient_sync(False)
        yield
        called.set_requires_gradient_sync(True)


def train(job: Job) -> Outcome:
    """Train on each rank."""
    rank = dist.get_rank()
    model, called, manager, optimizer = build(job)
    recorder = AmaxRecorder(model if job.parallel == "ddp" else nn.Module())
    losses, per_step, index = [], [], 0
    with silence(), counted_collectives() as calls:
        for step in range(job.steps):
            before = len(calls.syncs(manager)) if manager else 0
            for micro in range(job.accumulate):
                with gradients_stay(called, job.no_sync and micro < job.accumulate - 1):
                    x, y = batch(rank, index)
                    with torch.autocast("cpu", torch.bfloat16, enabled=job.autocast):
                        out = called(x, skip=(rank, step) in job.skip)
                    loss = nn.functional.mse_loss(out.float(), y) / job.accumulate
                    loss.backward()
                losses.append(float(loss.detach()))
                index += 1
            optimizer.step()
            optimizer.zero_grad()
            recorder.end_step()
            per_step.append(len(calls.syncs(manager)) - before if manager else 0)
        if manager is None:
            return Outcome(losses, full(model), {}, per_step, job.steps)
        windows = histories(manager)
        assert len(calls.syncs(manager)) == sum(per_step), "reading the state is local"
    return Outcome(losses, full(model), arena_bits(manager), per_step, manager.steps, windows, recorder.steps)


def fp8_linears(model: nn.Module) -> dict[str, FP8Linear]:
    """Return the FP8Linears by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, FP8Linear)}

"""Two blocks in every wrapper: DDP, FSDP1, and on four ranks HSDP and tensor parallelism × FSDP2."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.algorithms._comm_hooks.default_hooks import DefaultState, allreduce_hook, reduce_scatter_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import fp8dist
from fp8dist import DelayedScaling, Recipe, StateManager
from tests.support.collectives import counted_collectives
from tests.support.parallel import Block, Blocks, loss_of, make_blocks, mesh_of, tokens, whole
from tests.support.quiet import silence
from tests.support.training import Amaxes, AmaxRecorder, SlotName, bits, expected_histories, histories, state_bits

WORLD = (0, 1, 2, 3)
HISTORY = 8
OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=1e-3),
    "momentum": partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
    "foreach": partial(torch.optim.AdamW, lr=1e-3, foreach=True),
    "fused": partial(torch.optim.AdamW, lr=1e-3, fused=True),
}


@dataclass(frozen=True)
class Job:
    """One training run."""

    layout: str = "tp"  # "tp": dp × tp; "hsdp": replicate × shard; "ddp"; "fsdp1".
    fp8_all_gather: bool = True  # of FSDP2
    optimizer: str = "foreach"
    update: str = "same_step"
    warmup: str = "current"
    steps: int = 4
    accumulate: int = 1
    no_sync: bool = False
    clip: float = 0.0
    checkpointing: str = ""
    policy: str = "raise"
    recipe: Recipe | None = None  # None: delayed scaling, with ``update`` and ``warmup``
    frozen: tuple[str, ...] = ()
    hook: str = ""  # "ours", or "inner": with a hook of the user's inside
    # Of FSDP1. HYBRID_SHARD needs four ranks.
    strategy: str = "FULL_SHARD"
    per_block: bool = True
    precision: MixedPrecision | None = None
    buffer: bool = False  # Also of DDP.


class Buffered(Blocks):
    """The blocks plus a buffer."""

    shift: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.shift)


def parallelize_blocks(model: nn.Module, tp: DeviceMesh) -> None:
    parallelize_module(
        model,
        tp,
        {
            **{f"blocks.{i}.norm": SequenceParallel() for i in range(2)},
            **{f"blocks.{i}.up": ColwiseParallel(input_layouts=Shard(1)) for i in range(2)},
            **{f"blocks.{i}.down": RowwiseParallel(output_layouts=Shard(1)) for i in range(2)},
        },
    )


def clean_fqn(name: str) -> str:
    """Return a name without the prefixes of wrappers."""
    for prefix in ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "module."):
        name = name.replace(prefix, "")
    return name


@dataclass
class Built:
    """A model in its layout. ``inner``: calls of the user's hook."""

    module: Any
    manager: StateManager
    optimizer: torch.optim.Optimizer
    job: Job
    inner: list[str] = field(default_factory=list)

    @property
    def replica(self) -> int:
        """Index of the batches that this rank gets."""
        return dist.get_rank() // 2 if self.job.layout == "tp" else dist.get_rank()

    def backward(self, index: int) -> float:
        """Return the loss of this replica's batch."""
        x, target = tokens(self.replica, index)
        x.requires_grad_(self.job.checkpointing == "reentrant")  # Reentrant checkpointing needs an input with grad.
        if self.job.layout == "tp":  # Each rank has a part of the sequence; the loss is a mean over the whole.
            x, target = (t.chunk(2, 1)[dist.get_rank() % 2] for t in (x, target))
            loss = loss_of(self.module(x), target) / 2
            loss.backward()
            total = loss.detach().clone()
            dist.all_reduce(total, group=mesh_of((2, 2), ("dp", "tp")).get_group("tp"))
            return float(total)
        loss = loss_of(self.module(x), target)
        loss.backward()
        return float(loss.detach())

    def step(self, index: int, before: Callable[[], Any] = lambda: None) -> list[float]:
        """Take one optimizer step. ``before``: is called between the backwards and the optimizer."""
        every, losses = self.job.accumulate, []
        for micro in range(every):
            silent = self.job.no_sync and micro < every - 1
            with self.module.no_sync() if silent else contextlib.nullcontext():
                losses.append(self.backward(every * index + micro))
        if self.job.clip and isinstance(self.module, FullyShardedDataParallel):
            self.module.clip_grad_norm_(self.job.clip)
        elif self.job.clip:
            nn.utils.clip_grad_norm_(self.module.parameters(), self.job.clip)
        before()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return losses

    def parameters(self) -> dict[str, Tensor]:
        """Return the whole parameters, by the plain model's names. COLLECTIVE."""
        summon: Any = contextlib.nullcontext()
        if isinstance(self.module, FullyShardedDataParallel):
            summon = FullyShardedDataParallel.summon_full_params(self.module, writeback=False)
        with summon:
            return {clean_fqn(name): whole(p).clone() for name, p in self.named()}

    def parameter_bits(self) -> dict[str, bytes]:
        return {name: bits(p) for name, p in self.parameters().items()}

    def named(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.module.named_parameters())


def _wrapped(job: Job, model: nn.Module) -> nn.Module:
    if job.layout == "ddp":
        return DistributedDataParallel(model)
    if job.layout == "fsdp1":
        return FullyShardedDataParallel(
            model,
            sharding_strategy=ShardingStrategy[job.strategy],
            auto_wrap_policy=ModuleWrapPolicy({Block}) if job.per_block else None,
            mixed_precision=job.precision,
            use_orig_params=True,
            device_id=torch.device("cpu"),
            device_mesh=mesh_of((2, 2), ("replicate", "shard")) if job.strategy == "HYBRID_SHARD" else None,
        )
    over = mesh_of((2, 2), ("dp", "tp"))["dp"] if job.layout == "tp" else mesh_of((2, 2), ("replicate", "shard"))
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=over)
    return fully_shard(model, mesh=over)


def _register_hook(job: Job, built: Built) -> None:
    def counting(state: Any, gradient: Tensor, *output: Tensor) -> None:
        built.inner.append("sharded" if output else "whole")
        (reduce_scatter_hook if output else allreduce_hook)(state, gradient, *output)

    if job.layout == "ddp":
        built.module.register_comm_hook(None, fp8dist.ddp.comm_hook(built.manager))
    else:
        hook = fp8dist.fsdp.comm_hook(built.manager, counting if job.hook == "inner" else None)
        built.module.register_comm_hook(DefaultState(dist.group.WORLD), hook)


def build(job: Job) -> Built:
    model: nn.Module = make_blocks()
    if job.buffer:
        model.__class__ = Buffered
        model.register_buffer("shift", torch.full((32,), 0.125))
    for name in job.frozen:
        model.get_parameter(name).requires_grad_(False)
    delayed = DelayedScaling(history_len=HISTORY, update=job.update, warmup=job.warmup)  # type: ignore[arg-type]
    options: dict[str, Any] = {"group": dist.group.WORLD}
    if job.layout in ("tp", "hsdp"):
        mesh = mesh_of((2, 2), ("replicate", "shard") if job.layout == "hsdp" else ("dp", "tp"))
        options = {"group": mesh, "fp8_all_gather": job.fp8_all_gather}
    manager = fp8dist.prepare(model, job.recipe or delayed, check_policy=job.policy, **options)
    if job.layout == "tp":
        parallelize_blocks(model, mesh["tp"])
    if job.checkpointing:
        impl = CheckpointImpl.REENTRANT if job.checkpointing == "reentrant" else CheckpointImpl.NO_REENTRANT
        apply_activation_checkpointing(
            model, partial(checkpoint_wrapper, checkpoint_impl=impl), check_fn=lambda m: isinstance(m, Block)
        )
    with quiet():
        module = _wrapped(job, model)
    if job.layout in ("tp", "hsdp"):
        assert {p.device_mesh.ndim for p in module.parameters() if isinstance(p, DTensor)} == {2}
    optimizer = OPTIMIZERS[job.optimizer]([p for p in module.parameters() if p.requires_grad])
    built = Built(module, manager.attach(module, optimizer=optimizer), optimizer, job)
    if job.hook:
        _register_hook(job, built)
    return built


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress FSDP's deprecation warning of NO_SHARD."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@dataclass
class Outcome:
    """The results of one rank.

    ``reductions``: the ranks of the syncs of each step. ``early``: how many of them began before the optimizer's step.
    """

    losses: list[float]
    parameters: dict[str, Tensor]
    state: dict[str, bytes]
    histories: dict[SlotName, list[float]]
    amaxes: list[Amaxes]
    reductions: list[list[tuple[int, ...]]]
    early: list[int]
    inner_calls: int

    @property
    def syncs(self) -> list[int]:
        return [len(step) for step in self.reductions]


def train(job: Job) -> Outcome:
    built = build(job)
    gathers = job.layout in ("tp", "hsdp")  # Their weights cannot be recorded, and their scales need other reductions.
    recorder = AmaxRecorder(nn.Module() if gathers else built.module)
    losses, of_steps, early = [], [], []
    with silence(), counted_collectives() as calls:
        for index in range(job.steps):
            losses += built.step(index, lambda: early.append(len(calls.syncs(built.manager))))
            recorder.end_step()
            of_steps.append(calls.syncs(built.manager))
            assert gathers or len(calls.reductions) == len(of_steps[-1])
            calls.reductions.clear()
        state = state_bits(built.manager)
    arena = built.manager._syncs[0].arena
    assert {t.dtype for t in (arena.scales, arena.history, arena.amax, arena.pending)} == {torch.float32}
    report = built.manager.check(parameters=True, policy="warn")
    assert not report.diverged, str(report)
    amaxes = [{(clean_fqn(name), role): amax for (name, role), amax in step.items()} for step in recorder.steps]
    windows = histories(built.manager)
    return Outcome(losses, built.parameters(), state, windows, amaxes, of_steps, early, len(built.inner))


def assert_bitwise(mine: Outcome, theirs: Outcome) -> None:
    assert mine.losses == theirs.losses
    assert mine.state == theirs.state
    assert mine.parameters.keys() == theirs.parameters.keys()
    assert all(torch.equal(p, theirs.parameters[name]) for name, p in mine.parameters.items())


def assert_agree(outcomes: Sequence[Any]) -> None:
    """All ranks hold the same parameters and state."""
    for outcome in outcomes[1:]:
        assert outcome.state == outcomes[0].state
        assert all(torch.equal(p, outcomes[0].parameters[name]) for name, p in outcome.parameters.items())


def assert_synced(outcomes: Sequence[Any]) -> None:
    """They agree, and the histories follow from all ranks' amaxes."""
    assert_agree(outcomes)
    first = outcomes[0].histories
    expected = expected_histories(list(first), [o.amaxes for o in outcomes], len(next(iter(first.values()))))
    for outcome in outcomes:
        assert outcome.histories == expected

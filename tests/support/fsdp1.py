"""Two blocks in FullyShardedDataParallel, or in DDP for comparison."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
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
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

import fp8dist
from fp8dist import DelayedScaling, Recipe, StateManager
from tests.support.logs import captured_log
from tests.support.parallel import Block, loss_of, make_blocks, tokens, watched_reductions
from tests.support.quiet import silence
from tests.support.training import Amaxes, AmaxRecorder, SlotName, bits, expected_histories, histories, state_bits

HISTORY = 8
SGD: dict[str, Any] = {"kind": torch.optim.SGD, "lr": 1e-3, "momentum": 0.9}
FOREACH: dict[str, Any] = {"kind": torch.optim.AdamW, "lr": 1e-3, "foreach": True}
FUSED: dict[str, Any] = {"kind": torch.optim.AdamW, "lr": 1e-3, "fused": True}
BF16 = MixedPrecision(torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.bfloat16)


@dataclass(frozen=True)
class Job:
    """One training run; ``strategy`` "" is DDP."""

    strategy: str = "FULL_SHARD"
    per_block: bool = True
    precision: MixedPrecision | None = None
    optimizer: dict[str, Any] = field(default_factory=lambda: SGD)
    steps: int = 4
    accumulate: int = 1
    no_sync: bool = False
    clip: float = 0.0
    frozen: tuple[str, ...] = ()
    update: str = "same_step"
    hook: str = ""
    checkpointing: CheckpointImpl | None = None
    recipe: Recipe | None = None  # None: delayed scaling, with ``update``


@dataclass
class Outcome:
    """The results of one rank."""

    losses: list[float]
    parameters: dict[str, bytes]
    state: dict[str, bytes]
    histories: dict[SlotName, list[float]]
    amaxes: list[Amaxes]
    syncs: list[int]
    inner_calls: int


class Buffered(nn.Module):
    """The blocks plus a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.model = make_blocks()
        self.register_buffer("shift", torch.full((32,), 0.125))

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x + self.shift)


def clean_fqn(name: str) -> str:
    """Return a name without the prefixes of wrappers."""
    return name.replace("_fsdp_wrapped_module.", "").replace("_checkpoint_wrapped_module.", "")


@dataclass
class Built:
    """A model in its wrapper."""

    net: nn.Module
    module: nn.Module
    manager: StateManager
    optimizer: torch.optim.Optimizer
    inner: list[str]

    def backward(self, index: int) -> float:
        x, target = tokens(dist.get_rank(), index)
        x.requires_grad_()  # Reentrant checkpointing needs an input with grad.
        loss = loss_of(self.module(x), target)
        loss.backward()
        return float(loss.detach())

    def full(self) -> dict[str, bytes]:
        """Return all parameters, unsharded. COLLECTIVE."""
        summon = (
            FullyShardedDataParallel.summon_full_params(self.module, writeback=False)
            if isinstance(self.module, FullyShardedDataParallel)
            else contextlib.nullcontext()
        )
        with summon:
            return {clean_fqn(n): bits(p.detach().clone()) for n, p in self.net.named_parameters()}


def build(job: Job) -> Built:
    net = Buffered()
    for name in job.frozen:
        net.get_parameter(name).requires_grad_(False)
    delayed = DelayedScaling(history_len=HISTORY, update=job.update)  # type: ignore[arg-type]
    recipe = delayed if job.recipe is None else job.recipe
    manager = fp8dist.prepare(net, recipe, group=dist.group.WORLD)
    if job.checkpointing is not None:
        wrapper = partial(checkpoint_wrapper, checkpoint_impl=job.checkpointing)
        apply_activation_checkpointing(net, wrapper, check_fn=lambda module: isinstance(module, Block))
    if not job.strategy:
        module: nn.Module = DistributedDataParallel(net)
    else:
        module = FullyShardedDataParallel(
            net,
            sharding_strategy=ShardingStrategy[job.strategy],
            auto_wrap_policy=ModuleWrapPolicy({Block}) if job.per_block else None,
            mixed_precision=job.precision,
            use_orig_params=True,
            device_id=torch.device("cpu"),
        )
    options = dict(job.optimizer)
    kind = options.pop("kind")
    optimizer = kind([p for p in module.parameters() if p.requires_grad], **options)
    manager.attach(module, optimizer=optimizer)
    inner: list[str] = []
    if job.hook:
        assert isinstance(module, FullyShardedDataParallel)

        def counting(state: Any, gradient: Tensor, *output: Tensor) -> None:
            inner.append("sharded" if output else "whole")
            (reduce_scatter_hook if output else allreduce_hook)(state, gradient, *output)

        hook = fp8dist.fsdp.comm_hook(manager, counting if job.hook == "inner" else None)
        module.register_comm_hook(DefaultState(dist.group.WORLD), hook)
    return Built(net, module, manager, optimizer, inner)


def train(job: Job) -> Outcome:
    with quiet():
        built = build(job)
    recorder = AmaxRecorder(built.net)
    losses, syncs = [], []
    with silence(), watched_reductions() as reductions:
        for step in range(job.steps):
            before = len(reductions.of(built.manager))
            for micro in range(job.accumulate):
                silent = job.no_sync and micro < job.accumulate - 1
                with built.module.no_sync() if silent else contextlib.nullcontext():
                    launched = len(reductions.seen)
                    losses.append(built.backward(job.accumulate * step + micro))
                    if silent:
                        assert len(reductions.seen) == launched
            if job.hook:
                assert len(reductions.of(built.manager)) > before
            if isinstance(built.module, FullyShardedDataParallel) and job.clip:
                built.module.clip_grad_norm_(job.clip)
            elif job.clip:
                nn.utils.clip_grad_norm_(built.module.parameters(), job.clip)
            built.optimizer.step()
            built.optimizer.zero_grad()
            recorder.end_step()
            syncs.append(len(reductions.of(built.manager)) - before)
        assert len(reductions.seen) == sum(syncs)
        state = state_bits(built.manager)
    arena = built.manager._syncs[0].arena
    assert {t.dtype for t in (arena.scales, arena.history, arena.amax, arena.pending)} == {torch.float32}
    with captured_log() as log:
        report = built.manager.check(parameters=True, policy="warn")
    assert not report.diverged, str(report)
    assert not [text for level, text in log if level >= 40]
    return Outcome(losses, built.full(), state, histories(built.manager), recorder.steps, syncs, len(built.inner))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress FSDP's deprecation warning of NO_SHARD."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def assert_bitwise(mine: Outcome, theirs: Outcome) -> None:
    assert mine.losses == theirs.losses
    assert mine.state == theirs.state
    assert mine.parameters == theirs.parameters


def assert_synced(outcomes: list[Outcome]) -> None:
    first = outcomes[0]
    expected = expected_histories(list(first.histories), [clean_names(o.amaxes) for o in outcomes], HISTORY)
    for outcome in outcomes:
        assert outcome.state == first.state
        assert outcome.parameters == first.parameters
        assert outcome.histories == expected


def clean_names(steps: list[Amaxes]) -> list[Amaxes]:
    return [{(clean_fqn(n), r): a for (n, r), a in step.items()} for step in steps]

"""The cost and savings of FSDP2's FP8 all-gather: sync of the weights' amaxes, bytes gathered, peak memory.

``scripts/benchmark`` starts it under torchrun on two ranks. Rank 0 prints a table.

    -m scripts.benchmarks.fsdp sync           amaxes of 224 sharded weights in the step's sync, against one all-reduce
                                              for each weight
    -m scripts.benchmarks.fsdp train MODE     bytes gathered and peak memory of a rank. MODE is bf16, fp8-cast-after
                                              (gathered in bf16) or fp8-gather; each needs a new process
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import fp8dist
from scripts.benchmarks.markdown import table
from scripts.benchmarks.timing import in_turn, medians, run_rank
from tests.support.lab.gathering import GatheredBytes

LAYERS = 224
PAIRS = 15
TOKENS = 1024


def sharded(layers: int, width: int, gather: bool, history_len: int = 1024) -> tuple[nn.Module, fp8dist.StateManager]:
    """Return a model of ``layers`` Linears, each its own FSDP2 module, and its manager."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    recipe = fp8dist.DelayedScaling(history_len=history_len)
    manager = fp8dist.prepare(model, recipe, group=dist.group.WORLD, backend="torch", fp8_all_gather=gather)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model:
        fully_shard(layer, mp_policy=policy)
    return fully_shard(model, mp_policy=policy), manager


def sync() -> str:
    """Compare one collective for all amaxes of a step with one collective per weight."""
    model, manager = sharded(LAYERS, 32, gather=True)
    manager.attach(model)
    (arena_sync,) = manager._syncs
    scalars = [torch.ones(1) for _ in range(LAYERS)]

    def one_step() -> None:
        arena_sync.arena.pending.fill_(0.1)  # Below the weights' own amaxes: the weights have not changed.
        arena_sync.arena.shards.fill_(0.1)
        manager.step()

    def one_each() -> None:
        for scalar in scalars:
            dist.all_reduce(scalar, dist.ReduceOp.MAX)

    for run in (one_step, one_each):
        run()
    ms = medians(in_turn({"step": one_step, "each": one_each}, PAIRS, dist.barrier))
    before = arena_sync.counters.collectives
    one_step()
    collectives = str(arena_sync.counters.collectives - before)
    step = [f"fp8dist, whole step ({len(manager.slots)} slots)", collectives, f"{ms['step']:.2f}"]
    times = f"{ms['each']:.1f} ({ms['each'] / ms['step']:.0f} times)"
    each = ["one all-reduce per weight, nothing else", str(LAYERS), times]
    return table([f"amaxes of {LAYERS} sharded weights, and all other slots", "collectives", "ms"], [step, each])


def train(mode: str) -> str:
    """Train three steps of a model whose weights take most of the memory."""
    layers, width = 12, 2048
    if mode == "bf16":
        os.environ["FP8DIST_ENABLED"] = "0"
    model, manager = sharded(layers, width, gather=mode == "fp8-gather", history_len=16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    manager.attach(model, optimizer=optimizer)
    gathered = GatheredBytes()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            gathered.watch(module)

    def step() -> None:
        x = torch.randn(TOKENS, width)
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # Creates optimizer state and buffers.
    Path("/proc/self/clear_refs").write_text("5")  # Resets the peak of the process, VmHWM.
    with gathered.counting():
        step()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    peak = int(status["VmHWM"].split()[0]) / 1024
    tracker = MemTracker()
    tracker.track_external(model, optimizer)
    with tracker:
        step()
    tensors = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"] / 2**20
    head = ["FSDP2", "gathered per step, MB", "peak of a rank's tensors, MiB", "peak of its process, MiB"]
    return table(head, [[mode, f"{gathered.total / 1e6:.1f}", f"{tensors:.1f}", f"{peak:.0f}"]])


if __name__ == "__main__":
    run_rank(sync if sys.argv[1] == "sync" else lambda: train(sys.argv[2]))

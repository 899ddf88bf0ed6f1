"""The cost and savings of FSDP2's FP8 all-gather: sync of the weights' amaxes, bytes gathered, peak memory.

``scripts/benchmark`` starts it under torchrun on two ranks. Rank 0 prints one JSON object.

    -m scripts.benchmarks.fsdp sync           amaxes of 224 sharded weights in the step's sync, against one all-reduce
                                              for each weight
    -m scripts.benchmarks.fsdp train MODE     bytes gathered and peak memory of a rank. MODE is bf16, fp8-cast-after
                                              (gathered in bf16) or fp8-gather; each needs a new process
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_map_only

import fp8dist
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


def sync() -> dict[str, Any]:
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
    times = medians(in_turn({"step_ms": one_step, "one_each_ms": one_each}, PAIRS, dist.barrier))
    before = arena_sync.counters.collectives
    one_step()
    return {
        "layers": LAYERS,
        "slots": len(manager.slots),
        "collectives": arena_sync.counters.collectives - before,
        **times,
    }


def train(mode: str) -> dict[str, Any]:
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
    reset_peak()
    with gathered.counting():
        step()
    peak = resident("VmHWM")
    with LiveTensors(everything(model, optimizer)) as live:
        step()
    parameters = sum(p.numel() for p in model.parameters())
    return {
        "mode": mode,
        "parameters": parameters,
        "gathered_bytes": gathered.total,
        "tensors_mib": live.peak / 2**20,
        "process_mib": peak,
    }


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterable[Tensor]:
    """Yield this rank's parameters and their optimizer state."""
    state = [tensor for of in optimizer.state.values() for tensor in of.values() if isinstance(tensor, Tensor)]
    for tensor in [*model.parameters(), *state]:
        yield tensor.to_local() if isinstance(tensor, DTensor) else tensor


class LiveTensors(TorchDispatchMode):
    """Peak bytes of all tensors, sampled after each op. Temporaries inside an op are not counted."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.peak = 0
        self._storages: dict[int, StorageWeakRef] = {}
        for tensor in known:
            self._see(tensor)

    def _see(self, tensor: Tensor) -> Tensor:
        if not is_traceable_wrapper_subclass(tensor):  # A wrapper subclass owns no memory; its inner tensors do.
            storage = tensor.untyped_storage()
            if storage._cdata not in self._storages:
                self._storages[storage._cdata] = StorageWeakRef(storage)
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tree_map_only(Tensor, self._see, (args, kwargs, result))
        now = 0
        for key, reference in list(self._storages.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None:
                del self._storages[key]
            else:
                now += storage.nbytes()
        self.peak = max(self.peak, now)
        return result


def resident(what: str) -> float:
    """VmRSS or VmHWM of this process in MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{what}:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/self/status has no {what}")


def reset_peak() -> None:
    """Reset VmHWM to the current value."""
    Path("/proc/self/clear_refs").write_text("5")


if __name__ == "__main__":
    run_rank(sync if sys.argv[1] == "sync" else lambda: train(sys.argv[2]))

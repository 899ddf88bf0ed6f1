"""The cost of one step's sync and scale update, against a bare all-reduce of the same bytes.

``scripts/benchmark`` starts it under torchrun. Figures are medians over interleaved pairs, so that a busy machine
disturbs both sides alike. Rank 0 prints one JSON object.
"""

from __future__ import annotations

import json
import logging
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import fp8dist
from fp8dist.manager import StateManager
from fp8dist.state.slots import Slot, SlotSpec
from fp8dist_kernels.formats import E4M3

HISTORY = 1024
PAIRS, PAIRS_COLD = 200, 60
RUN = 20
"""Consecutive steps in the back-to-back measurement."""


class CountOps(TorchDispatchMode):
    """Counts torch ops. On a GPU, each op is at least one kernel launch."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += 1
        return func(*args, **(kwargs or {}))


def manager_of(slots: int, amax_sync: bool = True) -> StateManager:
    """Return a manager with this many slots and no modules."""
    model = torch.nn.Identity()
    manager = fp8dist.prepare(
        model, fp8dist.DelayedScaling(history_len=HISTORY), group=dist.group.WORLD, amax_sync=amax_sync
    )
    manager._kept = model  # type: ignore[attr-defined]  # a manager knows its model only weakly
    roles = ("input", "weight", "grad_output")
    sync = manager._syncs[0]
    sync.arena = sync.arena.extended([SlotSpec(Slot(f"layers.{i // 3:06d}", roles[i % 3]), E4M3) for i in range(slots)])
    manager.attach()
    return manager


def one_step(manager: StateManager) -> None:
    """Run a step in which every slot has recorded an amax."""
    manager._syncs[0].arena.pending.fill_(1.0)
    manager.step()


def timed(action: Callable[[], object]) -> float:
    """Return the time of one call in ms."""
    start = time.perf_counter()
    action()
    return 1e3 * (time.perf_counter() - start)


def average(action: Callable[[], object]) -> float:
    """Return the mean time of one call in ms, over ``RUN`` consecutive calls."""
    return timed(lambda: [action() for _ in range(RUN)]) / RUN


def backward() -> Callable[[], object]:
    """Return a backward over weights of 32 MiB and as much gradient, which replaces what is in the caches."""
    layer, x = torch.nn.Linear(4096, 2048), torch.randn(8, 4096)
    return lambda: layer(x).sum().backward()


def starts() -> dict[str, Callable[[], object]]:
    """Return what runs before each timed call, by name: how the ranks get to the end of a step."""
    train = backward()
    return {
        "barrier": dist.barrier,
        "backward, barrier": lambda: (train(), dist.barrier()),  # Cold caches, and ranks that start together.
        "barrier, backward": lambda: (dist.barrier(), train()),  # Cold caches, and ranks that start when they can.
    }


def pairs(before: Callable[[], object], manager: StateManager, bare: Callable[[], object]) -> dict[str, float]:
    """Return the medians of interleaved pairs in ms, and their ratio."""
    ours, theirs = [], []
    for _ in range(PAIRS if before is dist.barrier else PAIRS_COLD):
        before()
        theirs.append(timed(bare))
        manager._syncs[0].arena.pending.fill_(1.0)
        before()
        ours.append(timed(manager.step))
    step_ms, bare_ms = statistics.median(ours), statistics.median(theirs)
    return {"bare_ms": bare_ms, "step_ms": step_ms, "ratio": step_ms / bare_ms}


def measure(slots: int) -> dict[str, Any]:
    """Return the times of both sides and their ratio, from each start and back to back, and the ops of one step."""
    manager = manager_of(slots)
    message = torch.zeros_like(manager._syncs[0].arena.send)

    def bare() -> None:
        dist.all_reduce(message, dist.ReduceOp.MAX)

    for _ in range(20):
        one_step(manager)
        bare()
    back_to_back = [(average(bare), average(lambda: one_step(manager))) for _ in range(PAIRS // RUN)]
    from_starts = {name: pairs(before, manager, bare) for name, before in starts().items()}
    # Without the collective, which would keep the process group alive forever under a dispatch mode.
    unsynced = manager_of(slots, amax_sync=False)
    with CountOps() as counter:
        unsynced.step()
    return {
        "slots": slots,
        "history": HISTORY,
        "bytes": message.numel() * message.element_size(),
        "starts": from_starts,
        "back_to_back_ratio": statistics.median(step / bare_ms for bare_ms, step in back_to_back),
        "torch_ops": counter.count,
    }


def main() -> None:
    torch.set_num_threads(1)
    logging.getLogger("fp8dist").setLevel(logging.ERROR)  # The model has no Linear, on purpose.
    dist.init_process_group("gloo")
    rows = [measure(slots) for slots in (672, 100_000)]
    if dist.get_rank() == 0:
        print(json.dumps(rows))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

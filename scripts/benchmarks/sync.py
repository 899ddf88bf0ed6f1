"""The cost of one step's sync and scale update, against a bare all-reduce of the same bytes.

``scripts/benchmark`` starts it under torchrun. Rank 0 prints two tables. The first, alone with the argument "model", is
of a model of 224 small Linears, whose weights each step must look at: lower quartiles, as wall time and as CPU time of
the calling thread. The second is of managers without modules, so that slots can be many: medians of interleaved pairs,
so that a busy machine disturbs both sides alike.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fp8dist
from fp8dist.job.manager import StateManager
from fp8dist.state.slots import Slot, SlotSpec
from fp8dist_kernels.formats import E4M3
from fp8dist_kernels.header import HEADER
from scripts.benchmarks.gpu import environment
from scripts.benchmarks.markdown import table
from scripts.benchmarks.timing import in_turn, medians, run_rank

HISTORY = 1024
PAIRS, STEPS = 200, 60
LINEARS, WIDTH = 224, 16
"""The real model: as many Linears as a Llama of 32 blocks has, and so small that the time is not that of memory."""


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


def row_of(slots: int) -> list[str]:
    """Return the medians of interleaved pairs of a whole step and a bare all-reduce, and the ops of one step."""
    manager = manager_of(slots)
    arena = manager._syncs[0].arena
    message = torch.zeros_like(arena.send)

    def ready() -> None:
        arena.pending.fill_(1.0)  # Every slot has recorded an amax.
        dist.barrier()

    sides = {"bare": lambda: dist.all_reduce(message, dist.ReduceOp.MAX), "step": manager.step}
    in_turn(sides, 20, ready)
    ms = medians(in_turn(sides, PAIRS, ready))
    # Without the collective, which would keep the process group alive forever under a dispatch mode.
    unsynced = manager_of(slots, amax_sync=False)
    with CountOps() as counter:
        unsynced.step()
    ratio = ms["step"] / ms["bare"]
    name = f"fp8dist, {slots:,} slots"
    return [name, str(HISTORY), f"{ms['step']:.2f}", f"{ms['bare']:.2f}", f"{ratio:.2f}", str(counter.count)]


def ends_of_step(model: nn.Sequential) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield (name, call) for a bare all-reduce, and for each way to end a step of ``model``. The caller is done with a
    call before it takes the next one: a manager's hooks see the steps of all optimizers of the process."""
    message = torch.zeros(HEADER + 3 * LINEARS, dtype=torch.int32)
    yield "bare all-reduce", lambda: dist.all_reduce(message, dist.ReduceOp.MAX)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    yield "SGD", optimizer.step
    manager = fp8dist.prepare(model, fp8dist.DelayedScaling(history_len=HISTORY), group=dist.group.WORLD)
    manager.attach()
    yield "manager.step()", manager.step
    manager.detach()
    manager.attach(optimizer=optimizer)
    yield "SGD, attached", optimizer.step


def measure_model() -> list[list[str]]:
    """Return a row for the bare all-reduce and for each end of a step: the lower quartiles in µs of the CPU time of
    this thread, and of the wall time, after a backward and a barrier."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LINEARS)))
    for parameter in model.parameters():
        nn.init.orthogonal_(parameter)  # Otherwise the gradients vanish, and most slots stay cold.
    x = torch.ones(16, WIDTH)

    def train() -> None:
        model.zero_grad()
        model(x).sum().backward()

    def times_of(call: Callable[[], object]) -> tuple[float, float]:
        wall, cpu = time.perf_counter(), time.thread_time()
        call()
        return 1e6 * (time.thread_time() - cpu), 1e6 * (time.perf_counter() - wall)

    rows = []
    for name, call in ends_of_step(model):
        times = []
        for _ in range(20 + STEPS):
            train()  # Replaces what is in the caches, as in a job.
            dist.barrier()
            times.append(times_of(call))
        rows.append([name, *(f"{statistics.quantiles(each, n=4)[0]:.0f}" for each in zip(*times[20:]))])
    return rows


def tables() -> str:
    """Return the machine and both tables; only the first with the argument "model". COLLECTIVE."""
    machine = environment.facts(torch.device("cpu"))["device"]["name"]
    text = f"Machine: {machine}, torch {torch.__version__}, gloo, 2 ranks, one thread each.\n\n"
    text += table([f"{LINEARS} Linears", "CPU, µs", "wall, µs"], measure_model())
    if sys.argv[1:] == ["model"]:
        return text
    head = ["whole step: launch, sync, commit", "history", "ms", "bare all-reduce, ms", "ratio", "torch ops"]
    return f"{text}\n{table(head, [row_of(slots) for slots in (672, 100_000)])}"


if __name__ == "__main__":
    run_rank(tables)

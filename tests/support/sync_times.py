"""A rank whose syncs are timed, in groups of growing size.

    RANK=… WORLD_SIZE=… MASTER_ADDR=… MASTER_PORT=… python sync_times.py LINEARS

Rank 0 prints "ready", and reads the number of steps from stdin. Then it prints, as JSON, the time in ms that each rank
waited in the sync of each step under ``same_step``, for the groups of ranks 0 and 1, 0 to 2, and so on. 0 steps end the
program.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import fp8dist

WARM_UP = 5


def manage(linears: int, group: Any) -> tuple[nn.Module, fp8dist.StateManager]:
    """Return a prepared model with this many Linears. COLLECTIVE."""
    torch.manual_seed(0)  # attach compares the weights of the ranks.
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(linears)))
    manager = fp8dist.prepare(model, fp8dist.DelayedScaling(), group=group)
    manager.attach(model)
    return model, manager


def wait_of_a_step(model: nn.Module, manager: fp8dist.StateManager, group: Any) -> float:
    """Return the ms of a step's sync. All ranks reach the sync together, as after a gradient reduction. COLLECTIVE."""
    model(torch.ones(16, 16)).sum().backward()
    dist.all_reduce(torch.zeros(32), group=group)
    before = manager.metrics()["fp8/sync_wait_ms"]
    manager.step()
    return manager.metrics()["fp8/sync_wait_ms"] - before


def orders() -> Iterator[int]:
    """Yield the numbers of steps that rank 0 reads. COLLECTIVE."""
    while True:
        order = [0]
        if dist.get_rank() == 0:
            print("ready", flush=True)
            order = [int(sys.stdin.readline() or 0)]  # End of stdin: the parent is gone.
        dist.broadcast_object_list(order, src=0)
        if order[0] == 0:
            return
        yield order[0]


def main() -> None:
    torch.set_num_threads(1)
    with contextlib.suppress(OSError):  # Set before gloo starts threads, to hide other work on the machine.
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    groups = {size: dist.new_group(list(range(size))) for size in range(2, world + 1)}
    models = {size: (*manage(int(sys.argv[1]), groups[size]), groups[size]) for size in groups if rank < size}
    for steps in orders():
        waits: dict[int, list[float]] = {size: [] for size in models}
        for step in range(WARM_UP + steps):
            for size, parts in models.items():
                wait = wait_of_a_step(*parts)
                if step >= WARM_UP:
                    waits[size].append(wait)
        everyones: list[Any] = [None] * world
        dist.all_gather_object(everyones, waits)
        if rank == 0:
            print(json.dumps({size: [of[size] for of in everyones if size in of] for size in groups}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

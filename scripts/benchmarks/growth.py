"""How the host time of each call grows with the number of Linears: ``scripts/benchmark growth``.

Prints the CPU time of this process, and the exponent between neighbouring sizes: 1 if the time is proportional. The
weights are tiny, so the time is that of Python and of the calls of torch.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fp8dist
from fp8dist import DelayedScaling
from scripts.benchmarks.markdown import table
from scripts.benchmarks.timing import timed

LAYOUTS = ("plain", "ddp", "fsdp2", "fsdp2-gather", "tensor-parallel")
BLOCK = 7
"""Linears per block, as in a Llama. FSDP2 shards block by block."""

WIDTH = 32


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCK))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for linear in self.linears:
            x = x + linear(x)
        result: Tensor = self.norm(x)
        return result


def calls(linears: int, layout: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield (name, call) for each call that is measured, in the order of a job. The caller calls each once.

    Args:
        linears: number of Linears, a multiple of ``BLOCK``.
        layout: one of ``LAYOUTS``, over all ranks of the default process group.
    """
    torch.manual_seed(0)
    model = nn.Sequential(*(_Block() for _ in range(linears // BLOCK)))
    gathers, everyone = layout == "fsdp2-gather", dist.group.WORLD
    made: list[fp8dist.StateManager] = []
    recipe = DelayedScaling(history_len=4)
    prepare = partial(fp8dist.prepare, model, recipe, group=everyone, check_every=2, fp8_all_gather=gathers)
    yield "prepare", lambda: made.append(prepare())
    manager, whole = made[0], _wrapped(model, layout)
    optimizer = torch.optim.SGD(whole.parameters(), lr=1e-3)
    yield "attach", lambda: manager.attach(whole, optimizer=optimizer)
    if layout != "tensor-parallel":  # Its activations would need collectives of their own.
        outputs: list[Tensor] = []
        yield "forward", lambda: outputs.append(whole(torch.ones(16, WIDTH)))
        yield "backward", lambda: outputs.pop().sum().backward()
    yield "optimizer.step", optimizer.step
    states: list[dict[str, Any]] = []
    yield "state_dict", lambda: states.append(manager.state_dict())
    yield "load_state_dict", lambda: manager.load_state_dict(states[0])
    yield "check", manager.check
    yield "coverage", manager.coverage
    yield "set_precision", lambda: manager.set_precision("*.0", "high", steps=1)
    yield "refresh_weights", manager.refresh_weights
    yield "exported", lambda: sum(1 for _ in fp8dist.exported(manager, model))
    yield "attach again", lambda: manager.attach(whole, optimizer=optimizer)
    if not gathers:
        yield "detach", manager.detach
        yield "restore", lambda: fp8dist.restore(model)


def _wrapped(model: nn.Sequential, layout: str) -> nn.Module:
    if layout == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if layout.startswith("fsdp2"):
        from torch.distributed.fsdp import fully_shard

        for block in model:
            fully_shard(block)
        return fully_shard(model)
    if layout == "tensor-parallel":
        from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model:
            for linear in block.linears:  # type: ignore[union-attr]
                linear.weight = nn.Parameter(distribute_tensor(linear.weight.detach(), mesh, [Shard(0)]))
    return model


def main() -> None:
    """Print a table for each layout."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--linears", type=int, nargs="+", default=[1001, 4004, 16002], help="multiples of 7")
    parser.add_argument("--layouts", nargs="+", default=["plain"], choices=LAYOUTS)
    options = parser.parse_args()
    logging.getLogger("fp8dist").setLevel(logging.ERROR)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    gc.disable()  # Its pauses come at other times in each run.
    for layout in options.layouts:
        _times(10 * BLOCK, layout)  # Imports, caches.
        measured = [(linears, _times(linears, layout)) for linears in options.linears]
        names = list(measured[0][1])
        print(f"\n{layout}\n")
        print(table(["call", *(f"{linears:,} Linears" for linears in options.linears), "exponents"], [
            [name, *(f"{times[name]:,.1f} ms" for _, times in measured), _exponents(name, measured)]
            for name in names
        ]))  # fmt: skip
    dist.destroy_process_group()


def _times(linears: int, layout: str) -> dict[str, float]:
    gc.collect()
    return {name: timed(call, time.process_time) for name, call in calls(linears, layout)}


def _exponents(name: str, measured: list[tuple[int, dict[str, float]]]) -> str:
    pairs = itertools.pairwise(measured)
    return ", ".join(f"{math.log(b[name] / a[name]) / math.log(n / m):.2f}" for (m, a), (n, b) in pairs)


if __name__ == "__main__":
    main()

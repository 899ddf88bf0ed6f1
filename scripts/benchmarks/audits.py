"""What an audit costs against the step of the example job, and which faults it finds.

    python -m scripts.benchmarks.audits cost     two ranks, the example job's default size
    python -m scripts.benchmarks.audits faults   three ranks, runs of the fault lab with ``--inject``

Writes its part of ``scripts/results/audits.json``; ``python -m scripts.pages`` then fills the pages. ``cost`` trains
two equal models in turns of some steps, one of them with an audit in every step, so that all sites are visited. Times
are CPU times of one process and thread, because other work on the machine disturbs them less.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import statistics
import sys
import time
import timeit
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import fp8dist
from fp8dist.consistency.audit import Audits
from fp8dist.modules.linear_slots import SITES
from fp8dist.settings import AUDIT_BYTES
from fp8dist_kernels.taps import tell
from launch.train_gpt.model import GPT, VOCABULARY
from launch.train_gpt.options import Options, parse
from scripts.benchmarks.audit_faults import faults, run_ranks
from scripts.benchmarks.gpu import environment
from scripts.pages.audits import read_results, write_results

EVERY = 100
"""The interval of audits for which the share of a step is told."""

TURN = 8
"""Steps of a turn."""


class Job:
    """A model of the example job's default size in DDP, and its optimizer. COLLECTIVE."""

    def __init__(self, audit_every: int) -> None:
        options = parse(["--precision", "fp8"], Options)
        torch.manual_seed(0)
        model = GPT(options.layers, options.width, options.heads, options.context)
        self.manager = fp8dist.prepare(model, group=dist.group.WORLD, skip=("lm_head",), audit_every=audit_every)
        self.model = DistributedDataParallel(model)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.manager.attach(self.model, optimizer=self.optimizer)
        self.tokens = torch.randint(VOCABULARY, (options.batch_size, options.context + 1))
        self.linears = len(self.manager.slots) // 3

    def turn(self) -> float:
        """Run some steps, and return the CPU seconds that they took. COLLECTIVE."""
        dist.barrier()
        start = time.process_time()
        for _ in range(TURN):
            self.model(self.tokens[:, :-1], self.tokens[:, 1:]).backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return time.process_time() - start


@contextmanager
def watched(spent: dict[str, list[float]]) -> Iterator[None]:
    """Collect the CPU seconds inside an audit, and the bytes of its collectives."""

    def timing(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            start = time.process_time()
            try:
                return function(*arguments, **options)
            finally:
                spent.setdefault(name, []).append(time.process_time() - start)

        return call

    def counting(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(out: Tensor, given: Tensor, *arguments: Any, **options: Any) -> Any:
            spent.setdefault("bytes", []).append(given.nbytes)
            return function(out, given, *arguments, **options)

        return call

    with ExitStack() as stack:
        for name in ("hear", "settle"):
            stack.enter_context(mock.patch.object(Audits, name, timing(name, getattr(Audits, name))))
        for name in ("all_gather_into_tensor", "all_gather_single", "all_to_all_single"):
            if hasattr(dist, name):
                stack.enter_context(mock.patch.object(dist, name, counting(getattr(dist, name))))
        yield


def cost(rank: int) -> None:
    """Measure on this rank. Rank 0 writes the results. COLLECTIVE."""
    torch.set_num_threads(1)
    logging.getLogger("fp8dist").setLevel(logging.ERROR)
    dist.init_process_group("gloo")
    spent: dict[str, list[float]] = {}
    with watched(spent):  # Before `attach`, which keeps the listener.
        plain, audited = Job(0), Job(1)
        ratios, seconds = [], []
        sites = audited.linears * len(SITES)
        for pair in range(-1, sites // TURN):  # The first pair warms up.
            first, second = (plain, audited) if pair % 2 else (audited, plain)
            times = {id(first): first.turn(), id(second): second.turn()}
            if pair < 0:
                spent.clear()
                continue
            ratios.append(times[id(audited)] / times[id(plain)])
            seconds.append(times[id(plain)] / TURN)
    audits = len(spent["settle"])
    calls = len(spent["hear"]) / audits
    listening = timeit.timeit(_told, number=10_000) / 10_000 * calls
    step = statistics.median(seconds)
    each = (sum(spent["hear"]) + sum(spent["settle"])) / audits
    if rank == 0:
        found = {
            "machine": environment.facts(torch.device("cpu"))["device"]["name"],
            "torch": torch.__version__,
            "linears": audited.linears,
            "audits": audits,
            "step_ms": 1e3 * step,
            "audit_ms": 1e3 * each,
            "listening_ms": 1e3 * listening,
            "ratio_every_step": statistics.median(ratios),
            "quartiles": statistics.quantiles(ratios, n=4),
            "every": EVERY,
            "share": (each / EVERY + listening) / step,
            "bytes_mean": sum(spent["bytes"]) / audits,
            "calls": len(spent["bytes"]) / audits,
        }
        write_results({**read_results(), "cost": found})
        print(json.dumps(found, indent=1))
    dist.barrier()


def _told() -> None:
    """Tell a listener that wants nothing of a call."""
    tell(_TAP, "matmul", 0, (), {}, _TAP)


_TAP = torch.empty(0)
_TAP.listener = Audits({0: [("", 0)]}, EVERY, AUDIT_BYTES).hear  # type: ignore[attr-defined]


def main(words: list[str]) -> None:
    """Run the parts that are named."""
    for word in words or ["cost", "faults"]:
        if word == "cost":
            run_ranks(2, cost)
        else:
            rows: list[dict[str, Any]] = []
            for row in faults():
                rows.append(row)
                write_results({**read_results(), "faults": rows})


if __name__ == "__main__":
    multiprocessing.set_start_method("fork")
    main(sys.argv[1:])

"""What an audit costs against the step of the example job, and which faults it finds.

    python -m scripts.benchmarks.audits cost     two ranks, the example job's default size
    python -m scripts.benchmarks.audits faults   three ranks, runs of the fault lab with ``--inject``

Writes its part of ``scripts/results/audits.json``; ``python -m scripts.pages`` then fills the pages. ``cost`` trains
two equal models in turns of some steps, one of them with an audit in every step, so that all sites are visited.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
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

from fp8dist.checks.audit import Audits
from fp8dist.modules.linear_slots import SITES
from fp8dist.state.settings import AUDIT_BYTES
from fp8dist_kernels.taps import notify
from scripts import results_files
from scripts.benchmarks.audit_faults import faults, run_ranks
from scripts.benchmarks.example_job import Job, in_turns
from scripts.benchmarks.gpu import environment
from scripts.benchmarks.timing import timed_inside

EVERY = 100
"""The interval of audits for which the share of a step is told."""

TURN = 8
"""Steps of a turn."""


@contextmanager
def gathered() -> Iterator[list[int]]:
    """Yield a list that gets the bytes of each collective of an audit."""
    sizes: list[int] = []

    def counting(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(out: Tensor, given: Tensor, *arguments: Any, **options: Any) -> Any:
            sizes.append(given.nbytes)
            return function(out, given, *arguments, **options)

        return call

    with ExitStack() as stack:
        for name in ("all_gather_into_tensor", "all_gather_single", "all_to_all_single"):
            if hasattr(dist, name):
                stack.enter_context(mock.patch.object(dist, name, counting(getattr(dist, name))))
        yield sizes


def cost(rank: int) -> None:
    """Measure on this rank. Rank 0 writes the results. COLLECTIVE."""
    torch.set_num_threads(1)
    logging.getLogger("fp8dist").setLevel(logging.ERROR)
    dist.init_process_group("gloo")
    # Before `attach`, which keeps the listener.
    with timed_inside(((Audits, "take_down"), (Audits, "settle")), time.process_time) as spent, gathered() as sizes:
        plain, audited = (Job(group=dist.group.WORLD, audit_every=every) for every in (0, 1))
        linears = len(audited.manager.slots) // 3
        for job in (plain, audited):
            job.train(TURN)  # Warms up.
        for noted in (*spent.values(), sizes):
            noted.clear()
        found = in_turns(plain, audited, linears * len(SITES) // TURN, TURN)
    taken, settles = spent["Audits.take_down"], spent["Audits.settle"]
    audits = len(settles)
    calls = len(taken) / audits
    listening = 1e3 * timeit.timeit(_told, number=10_000) / 10_000 * calls
    each = (sum(taken) + sum(settles)) / audits
    if rank == 0:
        results = {
            "machine": environment.facts(torch.device("cpu"))["device"]["name"],
            "torch": torch.__version__,
            "linears": linears,
            "audits": audits,
            "step_ms": found.step_ms,
            "audit_ms": each,
            "listening_ms": listening,
            "ratio_every_step": found.ratio,
            "quartiles": found.quartiles,
            "every": EVERY,
            "share": (each / EVERY + listening) / found.step_ms,
            "bytes_mean": sum(sizes) / audits,
            "calls": len(sizes) / audits,
        }
        _keep("cost", results)
        print(json.dumps(results, indent=1))
    dist.barrier()


def _keep(part: str, found: Any) -> None:
    results_files.write(results_files.path_of("audits"), {**(results_files.load("audits") or {}), part: found})


def _told() -> None:
    """Tell a listener that wants nothing of a call."""
    notify(_TAP, "matmul", 0, (), {}, _TAP)


_TAP = torch.empty(0)
_TAP.listener = Audits({0: [("", 0)]}, EVERY, AUDIT_BYTES).take_down  # type: ignore[attr-defined]


def main(words: list[str]) -> None:
    """Run the parts that are named."""
    for word in words or ["cost", "faults"]:
        if word == "cost":
            run_ranks(2, cost)
        else:
            rows: list[dict[str, Any]] = []
            for row in faults():
                rows.append(row)
                _keep("faults", rows)


if __name__ == "__main__":
    multiprocessing.set_start_method("fork")
    main(sys.argv[1:])

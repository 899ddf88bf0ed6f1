"""Times of calls that take turns, so that a busy machine disturbs all of them alike; programs that torchrun starts.

Needs torch only: ``torchao_sync`` runs without fp8dist.
"""

from __future__ import annotations

import logging
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn
from unittest import mock

import torch
import torch.distributed as dist

Action = Callable[[], object]


def timed(action: Action, clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the ms of one call."""
    start = clock()
    action()
    return 1e3 * (clock() - start)


def in_turn(
    sides: Mapping[str, Action],
    rounds: int,
    before: Action = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Return the ms of each side's call in each round. ``before`` runs before each call."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for round in range(rounds):
        for name in list(sides)[:: -1 if round % 2 else 1]:  # No side is always the first.
            before()
            times[name].append(timed(sides[name], clock))
    return times


def medians(times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the median of each side."""
    return {name: statistics.median(each) for name, each in times.items()}


@contextmanager
def timed_inside(functions: Sequence[tuple[type, str]], clock: Callable[[], float]) -> Iterator[dict[str, list[float]]]:
    """Yield a table that gets the ms of each call of these methods inside the context, by ``Class.method``."""
    spent: dict[str, list[float]] = {}

    def timing(times: list[float], function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            start = clock()
            try:
                return function(*arguments, **options)
            finally:
                times.append(1e3 * (clock() - start))

        return call

    with ExitStack() as stack:
        for owner, name in functions:
            times = spent[f"{owner.__name__}.{name}"] = []
            stack.enter_context(mock.patch.object(owner, name, timing(times, getattr(owner, name))))
        yield spent


def run_rank(measure: Callable[[], str]) -> NoReturn:
    """Measure on all ranks that torchrun has started, with one thread each. Rank 0 prints what it returns."""
    torch.set_num_threads(1)
    logging.getLogger("fp8dist").setLevel(logging.ERROR)  # Some managers have no Linear, on purpose.
    dist.init_process_group("gloo")
    result = measure()
    if dist.get_rank() == 0:
        print(result, flush=True)
    dist.barrier()
    os._exit(0)  # gloo may abort the interpreter's shutdown (torch 2.13).

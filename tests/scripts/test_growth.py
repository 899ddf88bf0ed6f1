"""The host time of each call is proportional to the number of Linears. Counted as calls of functions, which a busy
machine does not change."""

from __future__ import annotations

from unittest import mock

import pytest
from torch import nn

import fp8dist
from fp8dist.checks.computations import casts_and_products
from scripts.benchmarks.growth import BLOCK, LAYOUTS, calls
from tests.support.counted import counted_calls
from tests.support.ranks import on_ranks
from tests.support.suite import few

FEW, TIMES = 4 * BLOCK, 4


def _counts(linears: int, layout: str) -> dict[str, int]:
    return {name: counted_calls(call).total() for name, call in calls(linears, layout)}


@pytest.mark.slow
@pytest.mark.parametrize("layout", few(LAYOUTS, "ddp"))
@on_ranks(2)
def test_calls_are_proportional(layout: str) -> None:
    """At most n ** 1.1. A walk over all modules for each weight would be n ** 2."""
    _counts(BLOCK, layout)  # Imports, caches.
    few, many = _counts(FEW, layout), _counts(FEW * TIMES, layout)
    counts = {name: (few[name], many[name]) for name in few}
    assert len(counts) >= 11
    steep = {name: (few, many) for name, (few, many) in counts.items() if many > few * TIMES**1.1}
    assert not steep


def test_the_trial_of_products_looks_at_each_kind_of_linear_once() -> None:
    counts = []
    for linears in (1, 40):
        model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(linears)), nn.Linear(32, 64, bias=False))
        manager = fp8dist.prepare(model, skip=None)
        with mock.patch("fp8dist.job.trial.casts_and_products", side_effect=casts_and_products) as computations:
            manager.attach(model)
        counts.append(computations.call_count)
    assert counts[0] == counts[1] > 0

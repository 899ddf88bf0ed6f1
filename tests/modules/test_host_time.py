"""What FP8Linear costs the host: counts per forward and backward, which no busy machine changes.

``scripts/benchmark host`` prints the times.
"""

from __future__ import annotations

import cProfile
import threading
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import fp8dist
from fp8dist_kernels.triton import casts, magnitude, matmuls, strips
from scripts.benchmarks.host import LAYERS, Chain, without_launches
from tests.support import interpreter  # noqa: F401 - Triton's interpreter stands for a GPU's kernels.
from tests.support.counted import no_garbage
from tests.support.experts import Experts, Mixture
from tests.support.linear import RECIPES


def calls_per_layer(chain: Chain) -> Counter[str]:
    """Run forward and backward. Return calls per layer, rounded, by name of the function.

    Of the profiler's own entries: pstats keeps one of two functions that have file, line and name alike, as the
    constructors of named tuples do, and which one depends on addresses."""
    profile = cProfile.Profile()
    with no_garbage():
        profile.enable()
        chain.forward_backward()
        profile.disable()
    found: Counter[str] = Counter()
    for entry in profile.getstats():
        found[entry.code if isinstance(entry.code, str) else entry.code.co_name] += entry.callcount
        found["all"] += entry.callcount
    return Counter({name: round(calls / LAYERS) for name, calls in found.items()})


@pytest.mark.slow
def test_counts_per_forward_and_backward() -> None:
    """Bounds a little above what was measured: 392 calls, 15 allocations. It was about 811 calls and 6 dispatches.

    Two of the allocations are those of a bias's gradient, which torch allocated itself when it was torch's sum."""
    with without_launches() as launched:
        plain, ours = Chain(None), Chain(fp8dist.DelayedScaling())
        ours.forward_backward()
        launched.names.clear()
        calls = calls_per_layer(ours)
        linear = calls_per_layer(plain)
    each = {"_cast_kernel": 3, "_amax_kernel": 1, "_scaled_mm": 3, "_add_up_kernel": 1}
    assert Counter(launched.names) == {name: count * LAYERS for name, count in each.items()}
    dispatched = sum(calls[name] for name in calls if "torch._ops.fp8dist" in name)
    assert dispatched == 0
    allocations = sum(calls[name] for name in calls if "torch.empty" in name or "new_empty" in name)
    assert 0 < allocations <= 16
    assert linear["all"] < calls["all"] <= 395


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)
def test_the_first_launch_of_a_thread_encodes_no_descriptor(recipe: fp8dist.Recipe) -> None:
    """Triton 3.6 encodes descriptors before it makes sure that the thread has a CUDA context. Products take
    descriptors, casts do not and come first, in forward and in an autograd thread's backward."""
    with without_launches("triton") as launched:
        chain = Chain(recipe)
        launched.names.clear()
        y = chain.model(chain.x)
        assert "scaled" not in launched.names[0]
        assert any("scaled" in name for name in launched.names)
        launched.names.clear()
        thread = threading.Thread(target=y.backward, args=(chain.gradient,))
        thread.start()
        thread.join()
        assert "scaled" not in launched.names[0]
        assert sum("scaled" in name for name in launched.names) == 2 * LAYERS


def test_plans_of_many_batch_sizes_are_forgotten() -> None:
    """A plan depends on the number of tokens."""
    for cache in (casts.plan_of, magnitude.reading_of, matmuls._plan_for, strips.page_of):
        most = cache.cache_info().maxsize
        assert most is not None
        assert most < 1000


def flops(model: nn.Module, *inputs: Any) -> int:
    with FlopCounterMode(display=False) as counter:
        model(*inputs).sum().backward()
    return int(counter.get_total_flops())


def test_flops_are_counted_as_those_of_linear() -> None:
    """Of experts as those of their rows, in forward and dgrad; wgrad rounds the rows to a multiple of 16."""
    model, x = nn.Sequential(nn.Linear(48, 32), nn.Linear(32, 16)), torch.randn(64, 48, requires_grad=True)
    expected = flops(model, x)
    fp8dist.prepare(model)
    assert flops(model, x) == expected == 3 * 2 * 64 * (48 * 32 + 32 * 16)
    hidden, inner = 32, 48
    mixture = Mixture(Experts(5, hidden, inner))
    fp8dist.prepare(mixture)
    per_row = 2 * (hidden * 2 * inner + inner * hidden)
    for tokens in (16, 96, 23):
        rows = 2 * tokens
        chosen = torch.zeros(tokens, 2, dtype=torch.int64)
        found = flops(mixture, torch.randn(tokens, hidden, requires_grad=True), chosen, torch.ones(tokens, 2))
        of_wgrad = found - 2 * rows * per_row
        assert of_wgrad % per_row == 0
        assert abs(of_wgrad // per_row - rows) <= (0 if rows % 16 == 0 else 15)

"""A check of parameters looks for values that are not finite, which ranks may hold alike."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fp8dist
from fp8dist.checks.finite import not_finite
from tests.support.logs import captured_log
from tests.support.ranks import RankPool, on_ranks
from tests.support.training import SmallJob, batch, make_net

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("value", "as_parameter", "as_buffer"),
    [
        (math.nan, True, True),
        (math.inf, True, False),
        (-math.inf, True, False),
        (6e4, False, False),
        (-0.0, False, False),
    ],
)
def test_one_value_is_found(dtype: torch.dtype, value: float, as_parameter: bool, as_buffer: bool) -> None:
    tensor = torch.full((3, 700), -6e4, dtype=dtype)
    tensor[2, 699] = value
    for view in (tensor, tensor.t(), tensor[:, 350:]):
        named = [("ones", torch.ones(3), True), ("mask", view, False), ("weight", view, True)]
        assert ("weight" in not_finite(named), "mask" in not_finite(named)) == (as_parameter, as_buffer)
        assert "ones" not in not_finite(named)


def test_large_numbers_of_float64_are_finite() -> None:
    assert not_finite([("a", torch.tensor([1e300, -1e300], dtype=torch.float64), True)]) == ()


def test_what_has_no_such_values_is_left_out() -> None:
    others = (torch.ones(0), torch.ones(3, device="meta"), torch.ones(3, dtype=torch.int8), torch.ones(3).to_sparse())
    floats = (torch.full((3,), math.nan).to(torch.float8_e4m3fn), torch.ones(3, dtype=torch.complex64))
    assert not_finite([(str(i), one, True) for i, one in enumerate((*others, *floats))]) == ()


@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
@on_ranks(2)
def test_weights_that_are_nan_on_all_ranks_are_told_once(parallel: str) -> None:
    """Let all weights become NaN in step 3, and check after each of four steps."""
    job = SmallJob(wrap=DistributedDataParallel if parallel == "ddp" else fully_shard)
    with captured_log() as log:
        for step in range(1, 5):
            x, _ = batch(dist.get_rank(), step)
            (job.called(x).sum() * (math.nan if step == 3 and dist.get_rank() == 1 else 1.0)).backward()
            job.optimizer.step()
            job.optimizer.zero_grad()
            report = job.manager.check()
            counted = min(step, 2) if parallel == "ddp" else None
            expected = (False, 6 if step > 2 else 0, counted)
            assert (report.diverged, len(report.nonfinite), job.manager.verified.checked_step) == expected
    assert sum("NaN or infinity in " in text for _, text in log) == (dist.get_rank() == 0)


@on_ranks(2)
def test_a_shard_of_one_rank_is_told_on_all_and_named_by_the_rank() -> None:
    net: Any = make_net()
    manager = fp8dist.prepare(net, group=dist.group.WORLD)
    manager.attach(fully_shard(net))
    if dist.get_rank() == 1:
        with torch.no_grad():
            net.first.bias.to_local()[0] = math.inf
    with captured_log() as log:
        assert manager.check().nonfinite == (("first.bias",) if dist.get_rank() else ("tensors of rank 1",))
        with torch.no_grad():
            net.first.bias.zero_()
        assert manager.check().nonfinite == ()
    text = "fp8dist: NaN or infinity in first.bias of rank 1: a checkpoint that is saved"[:58]
    assert [text[:58] for _, text in log if "NaN" in text] == [text] * dist.get_rank()


def _what_counts(ranks: int) -> Any:
    """A cache that is in no checkpoint may hold anything; what training continues with may not."""
    found = []
    for where in ("cache", "statistics", "state", "bound", "weight"):
        net = make_net()
        net.register_buffer("cache", torch.full((3,), math.nan if where == "cache" else 0.0), persistent=False)
        net.register_buffer("mean", torch.full((3,), math.nan if where == "statistics" else -math.inf))
        manager = fp8dist.prepare(net, group=dist.group.WORLD if ranks > 1 else None)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        called = DistributedDataParallel(net) if ranks > 1 else net
        manager.attach(called, optimizer=optimizer)
        called(torch.ones(16, 32)).sum().backward()
        optimizer.step()
        with torch.no_grad(), captured_log() as log:
            value = {"state": math.nan, "bound": math.inf}.get(where)
            if value is not None:
                optimizer.state[net.first.bias]["momentum_buffer"][0] = value
            if where == "weight":
                net.first.bias[0] = math.inf
            reports = [manager.check(optimizer=optimizer), manager.check(optimizer=optimizer)]
            reports.append(fp8dist.check(called, optimizer=optimizer))
        found.append(([report.nonfinite for report in reports], len([text for _, text in log if "NaN" in text])))
    return found


COUNTS: list[tuple[Any, int]] = [((), 0), (("mean",), 2), (("first.bias.momentum_buffer",), 2), ((), 0)]


@pytest.mark.slow
def test_what_training_continues_with_counts(two_ranks: RankPool) -> None:
    expected = [([names] * 3, told) for names, told in [*COUNTS, (("first.bias",), 2)]]
    assert _what_counts(1) == expected
    first, second = two_ranks.run(_what_counts, 2)
    # The manager and fp8dist.check tell it once each, on one rank.
    assert [names for names, _ in first] == [names for names, _ in second] == [names for names, _ in expected]
    assert [told for _, told in second] == [0] * 5


@on_ranks(2)
def test_a_step_with_nan_is_no_last_good_step() -> None:
    model = DistributedDataParallel(make_net())
    reports = [fp8dist.check(model, step=1)]
    with torch.no_grad(), captured_log():
        model.module.first.weight[0, 0] = math.nan
        reports.append(fp8dist.check(model, step=2))
        model.module.first.weight[0, 0] = dist.get_rank()
        reports.append(fp8dist.check(model, step=3, policy="warn"))
    assert [(report.consistent, report.nonfinite) for report in reports] == [
        (True, ()),
        (True, ("first.weight",)),
        (False, ()),
    ]
    assert reports[-1].findings[0].last_good_step == 1

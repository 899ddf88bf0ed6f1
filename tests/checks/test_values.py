"""check_values: values beside the model that must be equal on all ranks, or of which each rank must have its own."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DistributedSampler

import fp8dist
from fp8dist.errors import ConfigurationError, DivergenceError
from tests.support.collectives import counted_collectives
from tests.support.logs import captured_log
from tests.support.ranks import RankPool, on_ranks


def _batch(rank: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))


def _sampler(epoch: int, rank: int) -> DistributedSampler[int]:
    sampler: DistributedSampler[int] = DistributedSampler(range(9), 3, rank, seed=7)
    sampler.set_epoch(epoch)
    return sampler


def _generators(seed: int) -> Any:
    torch.manual_seed(seed)
    random.seed(3)
    np.random.seed(3)
    return fp8dist.random_state()


def _values(what: str, rank: int) -> dict[str, Any]:
    """Return values of which those of rank 1 are wrong."""
    wrong = rank == 1
    if what == "healthy":
        nan = {"nan": math.nan, "zero": -0.0, "none": None, "bytes": b"\x00", "sampler": _sampler(4, rank)}
        return {"nested": [nan, (1, True)], "random": _generators(5), "batch": _batch(0), "array": np.arange(3)}
    return {
        "lr": {"lr": [0.1, math.nextafter(0.3, 1) if wrong else 0.3]},
        "epoch": {"sampler": _sampler(3 if wrong else 4, rank)},
        "seed": {"random": _generators(6 if wrong else 5)},
        "generator": {"g": torch.Generator().manual_seed(rank % 2)},
        "text": {"tokens": "the same begin" * 10 + ("ning" if wrong else "")},
        "dtype": {"x": torch.zeros(3, dtype=torch.float16 if wrong else torch.bfloat16)},
        "array": {"x": np.array([1.0, 2.0 + wrong])},
        "missing": {"a": 1} if wrong else {"a": 1, "b": 2},
        "integer": {"a": 1.0 if wrong else 1},
        "empty": {"a": 1} if wrong else {"a": 1, "b": []},
        "twice": {"a.b": 1 + wrong, "a": {"b": 2}},
        "view": {"x": np.arange(3 + wrong)[::-1]},
    }[what]


@pytest.mark.parametrize(
    ("what", "name", "detail"),
    [
        ("lr", "lr.1", "rank 1: 0.30000000000000004; rank 0: 0.3"),
        ("epoch", "sampler.epoch", "rank 1: 3; rank 0: 4"),
        ("seed", "random.torch", "rank 1: uint8[5056] of digest "),
        ("generator", "g.seed", "rank 1: 1; rank 0: 0"),
        ("text", "tokens", "rank 1: 'the same beginthe"),
        ("dtype", "x", "rank 1: float16[3] of digest "),
        ("array", "x", "rank 1: float64[2] of digest "),
        ("missing", "b", "rank 1: absent; rank 0: 2"),
        ("integer", "a", "rank 1: 1.0; rank 0: 1"),
        ("empty", "b", "rank 1: absent; rank 0: empty"),
        ("twice", "a.b", "rank 1: 2, 2; rank 0: 1, 2"),
        ("view", "x", "rank 1: int64[4] of digest "),
    ],
)
@on_ranks(3)
def test_a_value_of_one_rank_is_named(what: str, name: str, detail: str) -> None:
    with captured_log(), pytest.raises(DivergenceError) as caught:
        fp8dist.check_values(_values(what, dist.get_rank()), step=3)
    first, *more = caught.value.report.findings
    assert (first.kind, first.name, first.ranks, first.reference_rank, first.step) == ("value", name, (1,), 0, 3)
    assert first.detail.startswith(detail)
    assert len(more) == (what == "generator")  # The seed, and the state.


@on_ranks(3)
def test_equal_values_are_consistent() -> None:
    report = fp8dist.check_values(_values("healthy", dist.get_rank()))
    assert (report.consistent, report.compared) == (True, {"value": 13})


def _distinct(same: tuple[int, ...]) -> Any:
    rank = dist.get_rank()
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(rank)
    values = {"batch": _batch(same[0] if rank in same else rank), "seed": 100 + rank, "random": fp8dist.random_state()}
    with counted_collectives() as calls, captured_log() as log:
        report = fp8dist.check_values(values, distinct=True, policy="warn", step=2)
    return [(f.kind, f.name, f.ranks) for f in report.findings], calls.names, [text for _, text in log]


def test_ranks_that_read_the_same_batch_are_named(three_ranks: RankPool) -> None:
    results = three_ranks.run(_distinct, (0, 2))
    assert [found for found, *_ in results] == [[("duplicate", "batch", (0, 2))]] * 3
    (text,) = [text for *_, texts in results for text in texts]
    assert text.startswith("values that each rank must have for itself are equal on several\n")
    assert "no majority" not in text
    assert "float32[4, 8] of digest" in text
    assert three_ranks.run(_distinct, (0,)) == [([], ["all_gather_object"], [])] * 3


@pytest.mark.parametrize(("policy", "times"), [("warn", 2), ("raise", 1)])
@on_ranks(2)
def test_periodic_checks_compare_what_a_function_returns(policy: str, times: int) -> None:
    """Train with a learning rate that rank 1 has otherwise from step 4 on, and checks after every second step."""
    torch.manual_seed(0)
    random.seed(3)
    model, rates = nn.Sequential(nn.Linear(16, 16)), [0.1]
    options: Any = {"group": dist.group.WORLD, "check_every": 2, "check_policy": policy}
    options["values"] = lambda: {"lr": rates, "random": fp8dist.random_state().python}
    manager = fp8dist.prepare(model, **options)
    manager.attach(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), boundary="manual")
    seen: list[Any] = []
    manager.on_event(lambda event: seen.append((event.kind, [f.name for f in event.report.findings])))
    raised = []
    with captured_log():
        try:
            for step in range(1, 8):
                rates = [0.1 + (step > 3 and dist.get_rank() == 1)]
                model(torch.ones(4, 16)).sum().backward()
                manager.step()
        except DivergenceError as error:
            raised = [(f.name, f.step, f.detail) for f in error.report.findings]
    assert seen == [("diverged", ["lr.0"])] * times
    assert raised == ([("lr.0", 4, "rank 1: 1.1; rank 0: 0.1")] if policy == "raise" else [])


@on_ranks(2)
def test_a_function_that_raises_is_named_on_all_ranks() -> None:
    def values() -> dict[str, Any]:
        raise RuntimeError("stop") if dist.get_rank() else KeyError("epoch")

    model = nn.Sequential(nn.Linear(16, 16))
    manager = fp8dist.prepare(model, group=dist.group.WORLD, check_every=1, values=values)
    nn.init.ones_(model[0].weight), nn.init.ones_(model[0].bias)
    manager.attach(model)
    model(torch.ones(4, 16)).sum().backward()
    manager.step()
    with pytest.raises(ConfigurationError, match=r"^check_values\(\) on rank 0: KeyError: 'epoch'$"):
        manager.step()


@on_ranks(2)
def test_what_cannot_be_compared_is_refused_on_all_ranks() -> None:
    refused: list[tuple[Any, str]] = [
        ({"model": {"of": object}}, "check_values() on rank 0: model.of: cannot compare type: pass numbers"),
        (3, "check_values() on rank 0: values must map names to values, got int"),
        ({"x": torch.empty(3, device="meta")}, "check_values() on rank 0: x: cannot read this tensor"),
    ]
    for values, text in refused:
        with pytest.raises(ConfigurationError) as caught:
            fp8dist.check_values({"lr": 0.1} if dist.get_rank() else values)
        assert str(caught.value).startswith(text)


def test_one_rank_alone_is_refused_what_cannot_be_compared_too() -> None:
    with pytest.raises(ConfigurationError, match="cannot compare"):
        fp8dist.check_values({"lr": object()})
    with pytest.raises(ConfigurationError, match="values must be a function that returns a mapping, got dict"):
        fp8dist.prepare(nn.Sequential(nn.Linear(16, 16)), values={"lr": 0.1})  # type: ignore[arg-type]

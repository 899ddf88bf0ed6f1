"""What one rank finds in its own tensors: changes between two steps without a write that torch counts, and values that
are not finite."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fp8dist
from fp8dist.checks.contents import TensorContent
from fp8dist.checks.finite import not_finite
from tests.support.collectives import counted_collectives
from tests.support.logs import captured_log
from tests.support.ranks import RankPool, on_ranks
from tests.support.training import SmallJob, batch, make_net


def _flip(tensor: Tensor, place: int = 5) -> None:
    """Flip one bit, as a faulty memory would: no version counter moves."""
    tensor.detach().data.view(torch.int32).view(-1)[place] ^= 1 << 3


def _train(
    between: Callable[[int, nn.Module, torch.optim.Optimizer], None],
    every: int | None = 1,
    enabled: bool = True,
    level: int = logging.WARNING,
    shard: bool = False,
    gather: bool = False,
) -> list[str]:
    """Train six steps, and call ``between(step, model, optimizer)`` after each. Return what is logged."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 32))
    model[2].bias.requires_grad_(False)
    group = dist.group.WORLD if dist.is_initialized() else None
    options: Any = {"group": group, "at_rest_every": every, "enabled": enabled, "fp8_all_gather": gather}
    manager = fp8dist.prepare(model, fp8dist.CurrentScaling(), **options)
    if shard:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    manager.attach(model, optimizer=optimizer)
    with captured_log(level) as log:
        for step in range(1, 7):
            model(torch.randn(16, 32)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            between(step, model, optimizer)
    return [text.removeprefix("fp8dist: ") for _, text in log if "between steps" in text]


FLIPPED: dict[str, tuple[str, Callable[[Any, Any], Tensor]]] = {
    "parameter": ("0.weight", lambda model, optimizer: model[0].weight),
    "frozen": ("2.bias", lambda model, optimizer: model[2].bias),
    "moment": ("1.weight.exp_avg_sq", lambda model, optimizer: optimizer.state[model[1].weight]["exp_avg_sq"]),
}


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("what", FLIPPED)
def test_a_flipped_bit_is_named_with_rank_tensor_and_step(what: str, enabled: bool) -> None:
    name, tensor_of = FLIPPED[what]
    texts = _train(lambda step, *of: _flip(tensor_of(*of)) if step == 3 else None, enabled=enabled)
    assert texts == [
        f"rank 0: changed between steps 3 and 4, and torch counted no write: {name}. Other code has written through "
        ".data, an address or a collective, or the memory is faulty. What changes so between all steps is reported once"
    ]


@pytest.mark.parametrize(("every", "found"), [(0, []), (2, [4]), (3, [3]), (None, [])])
def test_intervals_are_compared_every_so_many_steps(every: int | None, found: list[int]) -> None:
    texts = _train(lambda step, model, _: _flip(model[0].weight, step) if step in (1, 3, 4, 5) else None, every)
    assert [f"between steps {step} and" in text for text, step in zip(texts, found, strict=True)] == [True] * len(found)


@pytest.mark.parametrize(
    ("what", "name"), [("shard", "0.weight"), ("gathered in FP8", "0.weight"), ("moment", "0.weight.exp_avg")]
)
@on_ranks(2)
def test_a_bit_of_a_shard_that_exists_once_is_named_on_its_rank(what: str, name: str) -> None:
    def flip(step: int, model: Any, optimizer: Any) -> None:
        weight = model[0].weight
        if step == 4 and what != "gathered in FP8":  # Ranks agree on writes to those.
            with torch.no_grad():  # Counted in the DTensor, or in its local part.
                (weight if dist.get_rank() else weight.to_local()).mul_(0.9)
        if step == 2 and dist.get_rank() == 1:
            _flip(
                (optimizer.state[weight]["exp_avg"] if what == "moment" else weight)._local_tensor.as_subclass(Tensor)
            )

    texts = _train(flip, shard=True, gather=what == "gathered in FP8")
    assert len(texts) == dist.get_rank()
    begin = f"rank 1: changed between steps 2 and 3, and torch counted no write: {name}. "
    assert all(text.startswith(begin) for text in texts)


def test_an_error_ends_the_comparisons_and_not_the_training() -> None:
    with captured_log() as log, mock.patch.object(TensorContent, "digests", side_effect=RuntimeError("out of memory")):
        assert _train(lambda step, model, _: _flip(model[0].weight)) == []
        (text,) = [text for _, text in log]
    assert (
        text == "fp8dist: rank 0: at_rest_every: cannot read the tensors, so they are compared no more: out of memory"
    )


# What is no fault --------------------------------------------------------------------------------------


def _clip(step: int, model: Any, optimizer: Any) -> None:
    with torch.no_grad():
        model[0].weight.clamp_(-0.1, 0.1)


def _load(step: int, model: Any, optimizer: Any) -> None:
    if step == 3:
        model.load_state_dict({name: 0.9 * value for name, value in model.state_dict().items()})


def _replace(step: int, model: Any, optimizer: Any) -> None:
    if step == 3:
        model[0].weight.data = model[0].weight.data * 2


def _offload(step: int, model: Any, optimizer: Any) -> None:
    """Move the state away and back, as jobs do that generate between steps."""
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].clone()


@pytest.mark.parametrize(
    ("write", "expected"),
    [
        (_clip, ["written to between steps 1 and 2: 0.weight"]),  # The same in each interval: once.
        (_load, ["written to between steps 3 and 4: 0.bias, 0.weight, 1.bias, 1.weight and 2 more"]),
        (_replace, ["written to between steps 3 and 4: 0.weight"]),
        (_offload, []),
    ],
)
def test_writes_that_torch_counts_are_information(write: Any, expected: list[str]) -> None:
    assert _train(write, level=logging.INFO) == [f"rank 0: {text}" for text in expected]


def test_a_habit_is_reported_once() -> None:
    def write(step: int, model: Any, optimizer: Any) -> None:
        model[0].weight.data.mul_(0.99)
        if step > 2:  # From then on.
            model[0].bias.data.mul_(0.99)
        if step in (2, 5):
            _flip(model[2].weight)

    texts = _train(write)
    assert [text.split(". Other")[0].split("between ")[1] for text in texts] == [
        f"steps {step} and {step + 1}, and torch counted no write: {name}"
        for step, name in [(1, "0.weight"), (2, "2.weight"), (3, "0.bias"), (5, "2.weight")]
    ]


@on_ranks(2)
def test_it_needs_no_collective() -> None:
    names = []
    for every in (1, 0):
        with counted_collectives() as calls:
            _train(lambda *_: None, every)
        names.append(calls.names)
    assert names[0] == names[1]


# Values that are not finite -----------------------------------------------------------------------------

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64)


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
    for view in (tensor, tensor.t(), tensor[:, 350:], tensor.conj()):
        named = [("ones", torch.ones(3), True), ("mask", view, False), ("weight", view, True)]
        assert ("weight" in not_finite(named), "mask" in not_finite(named)) == (as_parameter, as_buffer)
        assert "ones" not in not_finite(named)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_what_is_finite_or_cannot_be_otherwise_is_left_out() -> None:
    others = (torch.ones(0), torch.ones(3, device="meta"), torch.ones(3, dtype=torch.int8), torch.ones(3).to_sparse())
    floats = (torch.full((3,), math.nan).to(torch.float8_e4m3fn), torch.ones(3, dtype=torch.complex64))
    sparse = torch.ones(2, 3, dtype=torch.complex64).to_sparse_csr()
    large = torch.tensor([1e300, -1e300], dtype=torch.float64)
    assert not_finite([(str(i), one, True) for i, one in enumerate((*others, *floats, sparse, large))]) == ()


@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
@on_ranks(2)
def test_weights_that_are_nan_on_all_ranks_are_told_once_and_are_not_good(parallel: str) -> None:
    """Let all weights become NaN in step 3, and check after each of four steps. Then ranks differ."""
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
    if parallel == "ddp":
        with torch.no_grad(), captured_log():
            job.net.first.weight[0, 0] = dist.get_rank()
            (finding,) = job.manager.check(policy="warn").findings
        assert (finding.name, finding.last_good_step) == ("first.weight", 2)


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


FOUND = {
    "cache": (),
    "statistics": ("mean",),
    "state": ("first.bias.momentum_buffer",),
    "bound": (),
    "weight": ("first.bias",),
}
"""Where something is not finite, and what is found. A cache that is in no checkpoint may hold anything; what training
continues with may not."""


def _what_counts() -> dict[str, tuple[Any, int]]:
    """Return what is found by three checks, and how often it is told, by where it is."""
    found, ranks = {}, dist.is_initialized()
    for where in FOUND:
        net = make_net()
        net.register_buffer("cache", torch.full((3,), math.nan if where == "cache" else 0.0), persistent=False)
        net.register_buffer("mean", torch.full((3,), math.nan if where == "statistics" else -math.inf))
        manager = fp8dist.prepare(net, group=dist.group.WORLD if ranks else None)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        called = DistributedDataParallel(net) if ranks else net
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
        found[where] = [report.nonfinite for report in reports], len([text for _, text in log if "NaN" in text])
    return found


@pytest.mark.slow
def test_what_training_continues_with_counts(two_ranks: RankPool) -> None:
    alone, (first, second) = _what_counts(), two_ranks.run(_what_counts)
    # Alone, the manager and fp8dist.check tell it once each.
    for found, told in ((alone, 2), (first, 1), (second, 0)):
        assert found == {where: ([names] * 3, told if names else 0) for where, names in FOUND.items()}
